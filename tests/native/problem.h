// One call with its nine tensors in memory of exactly their size, so that a sanitizer sees every step outside, and its
// gradients by the equations of the specification.
#pragma once

#include "check.h"
#include "mx_driving.h"

#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

// Evenly between two bounds. The same numbers with every C++ library: each has its own std::uniform_real_distribution,
// and gradients of locations are compared with a tolerance that not every number meets (problem.cpp says why).
inline double between(double from, double to, std::mt19937 &random) {
    return from + (to - from) * (double(random()) + 0.5) / 4294967296.0;
}

struct Sizes {
    int64_t bs, queries, heads, channels, points;
    std::vector<std::pair<int64_t, int64_t>> levels; // H, W
};

// A view with its storage: contiguous, or with permuted axes, perhaps every other element left out, and an offset.
class View {
  public:
    View(std::vector<int64_t> shape, aclDataType dtype, std::mt19937 *layout);
    ~View();
    View(const View &) = delete;

    const std::vector<int64_t> shape;
    aclTensor *handle = nullptr;

    int64_t count() const;
    double get(int64_t flat) const; // flat: place in a contiguous view
    void set(int64_t flat, double number);
    mxd_tensor described() const; // for the functions of mx_driving.h
    // Elements of the storage that are not the view's still hold what they were filled with.
    bool gaps_intact() const;

  private:
    const aclDataType dtype;
    std::vector<int64_t> strides;
    int64_t offset = 0, elements = 1;
    std::unique_ptr<char[]> memory;

    int64_t size() const;
    char *at(int64_t flat) const;
};

std::vector<double> numbers(const View &view);
// Each number is as it should be, up to the tolerance times the greatest; the gaps hold what they held.
void compare_by_greatest(const View &got, const std::vector<double> &want, double tolerance);

// Function `call` of the tensors of `views`; a null pointer for one that is null.
template <class Call, size_t... I> int with_tensors(Call call, View *const *views, std::index_sequence<I...>, int num_threads) {
    const mxd_tensor tensors[] = {(views[I] ? views[I]->described() : mxd_tensor{})...};
    return call((views[I] ? &tensors[I] : nullptr)..., num_threads);
}
template <class Call, size_t N> int with_tensors(Call call, View *const (&views)[N], int num_threads) {
    return with_tensors(call, views, std::make_index_sequence<N>(), num_threads);
}

struct Workspace {
    explicit Workspace(uint64_t announced);
    bool canary_intact() const;
    char *data() { return memory.data() + ROOM; }

  private:
    static constexpr size_t ROOM = 64;
    std::vector<char> memory;
};

struct Problem {
    // strided: not contiguous; dtypes: of the seven floating tensors in turn; flat_rows: grad_output has three axes
    Problem(const Sizes &sizes, unsigned seed, bool strided, std::vector<aclDataType> dtypes = {ACL_FLOAT},
            bool flat_rows = false);

    Sizes n;
    std::mt19937 random;
    View value, shapes, starts, location, weight, grad_output, grad_value, grad_location, grad_weight, output;

    aclnnStatus plan(uint64_t *bytes, aclOpExecutor **executor);
    aclnnStatus plan_forward(uint64_t *bytes, aclOpExecutor **executor);
    // Both operators through both phases on a stream, with a workspace of exactly the announced size.
    void run(aclrtStream stream);
    // Against the equations in double. Results may lose this share when they are rounded to their dtype.
    void verify(double share) const;
    // Both operators are queued, fail at synchronise with this sentence (or its beginning), and have written nothing.
    void expect_refusal_by_kernel(const char *sentence);

  private:
    static int64_t keys(const Sizes &n);
    std::mt19937 *layout(bool strided) { return strided ? &random : nullptr; }
};
