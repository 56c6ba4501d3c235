// One call with its tensors in memory of exactly their size, so that a sanitizer sees every step outside.
#pragma once

#include "check.h"
#include "mx_driving.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

struct Sizes {
    int64_t bs, queries, heads, channels, points;
    std::vector<std::pair<int64_t, int64_t>> levels; // H, W
};

// A contiguous tensor of T: float, or int64_t.
template <class T> struct View {
    const std::vector<int64_t> shape;
    const int64_t count;
    const std::unique_ptr<T[]> data;
    aclTensor *handle;

    explicit View(std::vector<int64_t> sizes);
    ~View() { CHECK(aclDestroyTensor(handle) == ACL_SUCCESS); }
    View(const View &) = delete;

    void fill(T number) { std::fill_n(data.get(), count, number); }
    void fill(T from, T to, std::mt19937 &random) {
        for (int64_t i = 0; i < count; ++i) data[i] = from + (to - from) * T(random()) / T(4294967296.0);
    }
    bool all_are(T number) const { return std::count(data.get(), data.get() + count, number) == count; }
    mxd_tensor described() const; // for the functions of mx_driving.h
    std::vector<T> numbers() const { return {data.get(), data.get() + count}; }
};

struct Workspace {
    explicit Workspace(uint64_t announced);
    bool canary_intact() const;
    char *data() { return memory.data() + ROOM; }

  private:
    static constexpr size_t ROOM = 64;
    std::vector<char> memory;
};

struct Problem {
    Problem(const Sizes &sizes, unsigned seed);

    const Sizes n;
    View<float> value;
    View<int64_t> shapes, starts;
    View<float> location, weight, grad_output, grad_value, grad_location, grad_weight, output;

    aclnnStatus plan(uint64_t *bytes, aclOpExecutor **executor);
    aclnnStatus plan_forward(uint64_t *bytes, aclOpExecutor **executor);
    // Both operators through both phases on a stream, with a workspace of exactly the announced size.
    void run(aclrtStream stream);
    std::vector<float> results() const;
};
