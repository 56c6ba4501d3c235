#include "problem.h"

#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>

namespace {

constexpr char CANARY = 0x5a;

int64_t keys(const Sizes &n) {
    int64_t rows = 0;
    for (const auto &level : n.levels) rows += level.first * level.second;
    return rows;
}

} // namespace

template <class T>
View<T>::View(std::vector<int64_t> sizes)
    : shape(std::move(sizes)), count(std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>())),
      data(new T[size_t(count)]()) {
    const aclDataType dtype = std::is_same<T, float>::value ? ACL_FLOAT : ACL_INT64;
    handle =
        aclCreateTensor(shape.data(), shape.size(), dtype, nullptr, 0, ACL_FORMAT_ND, shape.data(), shape.size(), data.get());
    CHECK(handle);
}

template <class T> mxd_tensor View<T>::described() const {
    mxd_tensor t{data.get(), std::is_same<T, float>::value ? MXD_FLOAT32 : MXD_INT64, {}, {}};
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t stride = 1;
    for (size_t a = shape.size(); a-- > 0; stride *= shape[a]) t.strides[a] = stride;
    return t;
}

template struct View<float>;
template struct View<int64_t>;

Workspace::Workspace(uint64_t announced) : memory(announced + 2 * ROOM, CANARY) {}

bool Workspace::canary_intact() const {
    const auto whole = [](char c) { return c == CANARY; };
    return std::all_of(memory.begin(), memory.begin() + ROOM, whole) && std::all_of(memory.end() - ROOM, memory.end(), whole);
}

Problem::Problem(const Sizes &s, unsigned seed)
    : n(s), value({n.bs, keys(n), n.heads, n.channels}), shapes({int64_t(n.levels.size()), 2}),
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

aclnnStatus Problem::plan(uint64_t *bytes, aclOpExecutor **executor) {
    return aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(value.handle, shapes.handle, starts.handle, location.handle,
                                                                  weight.handle, grad_output.handle, grad_value.handle,
                                                                  grad_location.handle, grad_weight.handle, bytes, executor);
}

aclnnStatus Problem::plan_forward(uint64_t *bytes, aclOpExecutor **executor) {
    return aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(value.handle, shapes.handle, starts.handle, location.handle,
                                                                 weight.handle, output.handle, bytes, executor);
}

void Problem::run(aclrtStream stream) {
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

std::vector<float> Problem::results() const {
    std::vector<float> all;
    for (const View<float> *view : {&output, &grad_value, &grad_location, &grad_weight})
        for (float number : view->numbers()) all.push_back(number);
    return all;
}
