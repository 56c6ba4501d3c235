// One call with its tensors in memory of exactly their size, so that a sanitizer sees every step outside.
#pragma once

#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"
#include "check.h"
#include "mx_driving.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

struct Sizes {
    int64_t bs, queries, heads, channels, points;
    std::vector<std::pair<int64_t, int64_t>> levels; // H, W

    int64_t keys() const {
        int64_t rows = 0;
        for (const auto &level : levels) rows += level.first * level.second;
        return rows;
    }
};

// A contiguous tensor of T: float, or int64_t.
template <class T> struct View {
    const std::vector<int64_t> shape;
    const int64_t count;
    const std::unique_ptr<T[]> data;
    aclTensor *handle;

    explicit View(std::vector<int64_t> sizes)
        : shape(std::move(sizes)), count(std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>())),
          data(new T[size_t(count)]()) {
        const aclDataType dtype = std::is_same<T, float>::value ? ACL_FLOAT : ACL_INT64;
        handle = aclCreateTensor(shape.data(), shape.size(), dtype, nullptr, 0, ACL_FORMAT_ND, shape.data(), shape.size(),
                                 data.get());
        CHECK(handle);
    }
    ~View() { CHECK(aclDestroyTensor(handle) == ACL_SUCCESS); }
    View(const View &) = delete;

    void fill(T number) { std::fill_n(data.get(), count, number); }
    void fill(T from, T to, std::mt19937 &random) {
        for (int64_t i = 0; i < count; ++i) data[i] = from + (to - from) * T(random()) / T(4294967296.0);
    }
    bool all_are(T number) const { return std::count(data.get(), data.get() + count, number) == count; }
    // For the functions of mx_driving.h.
    mxd_tensor described() const {
        mxd_tensor t{data.get(), std::is_same<T, float>::value ? MXD_FLOAT32 : MXD_INT64, {}, {}};
        std::copy(shape.begin(), shape.end(), t.shape);
        int64_t stride = 1;
        for (size_t a = shape.size(); a-- > 0; stride *= shape[a]) t.strides[a] = stride;
        return t;
    }
    std::vector<T> numbers() const { return {data.get(), data.get() + count}; }
};

struct Workspace {
    explicit Workspace(uint64_t announced) : memory(announced + 2 * ROOM, CANARY) {}
    bool canary_intact() const {
        const auto whole = [](char c) { return c == CANARY; };
        return std::all_of(memory.begin(), memory.begin() + ROOM, whole) &&
               std::all_of(memory.end() - ROOM, memory.end(), whole);
    }
    char *data() { return memory.data() + ROOM; }

  private:
    static constexpr size_t ROOM = 64;
    static constexpr char CANARY = 0x5a;
    std::vector<char> memory;
};

struct Problem {

    const Sizes n;
    View<float> value;
    View<int64_t> shapes, starts;
    View<float> location, weight, grad_output, grad_value, grad_location, grad_weight, output;

    Problem(const Sizes &s, unsigned seed)
        : n(s), value({n.bs, n.keys(), n.heads, n.channels}), shapes({int64_t(n.levels.size()), 2}),
          starts({int64_t(n.levels.size())}), location({n.bs, n.queries, n.heads, int64_t(n.levels.size()), n.points, 2}),
          weight({n.bs, n.queries, n.heads, int64_t(n.levels.size()), n.points}),
          grad_output({n.bs, n.queries, n.heads, n.channels}), grad_value(value.shape), grad_location(location.shape),
          grad_weight(weight.shape), output({n.bs, n.queries, n.heads * n.channels}) {
        std::mt19937 random(seed);
        int64_t row = 0;
        for (size_t l = 0; l < n.levels.size(); ++l) {
            shapes.data[2 * l] = n.levels[l].first;
            shapes.data[2 * l + 1] = n.levels[l].second;
            starts.data[l] = row;
            row += n.levels[l].first * n.levels[l].second;
        }
        for (View<float> *view : {&value, &weight, &grad_output}) view->fill(-1, 1, random);
        location.fill(-0.2f, 1.2f, random);
    }

    aclnnStatus plan(uint64_t *bytes, aclOpExecutor **executor) {
        return aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
            value.handle, shapes.handle, starts.handle, location.handle, weight.handle, grad_output.handle, grad_value.handle,
            grad_location.handle, grad_weight.handle, bytes, executor);
    }
    aclnnStatus plan_forward(uint64_t *bytes, aclOpExecutor **executor) {
        return aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(
            value.handle, shapes.handle, starts.handle, location.handle, weight.handle, output.handle, bytes, executor);
    }
    // Both operators through both phases on a stream, with a workspace of exactly the announced size.
    void run(aclrtStream stream) {
        uint64_t bytes[2];
        aclOpExecutor *executors[2];
        CHECK(plan_forward(&bytes[0], &executors[0]) == ACLNN_SUCCESS);
        CHECK(plan(&bytes[1], &executors[1]) == ACLNN_SUCCESS);
        Workspace forward(bytes[0]), backward(bytes[1]);
        CHECK(aclnnMultiScaleDeformableAttnFunction(forward.data(), bytes[0], executors[0], stream) == ACLNN_SUCCESS);
        CHECK(aclnnMultiScaleDeformableAttentionGrad(backward.data(), bytes[1], executors[1], stream) == ACLNN_SUCCESS);
        CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
        CHECK(forward.canary_intact());
        CHECK(backward.canary_intact());
    }
    std::vector<float> results() const {
        std::vector<float> all;
        for (const View<float> *view : {&output, &grad_value, &grad_location, &grad_weight})
            for (float number : view->numbers()) all.push_back(number);
        return all;
    }
};
