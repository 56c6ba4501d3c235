// aclnnMultiScaleDeformableAttentionGrad and its forward, aclnnMultiScaleDeformableAttnFunction: phase one checks and
// plans, phase two queues the plan on a stream.
#include "acl_handles.h"
#include "acl_stream.h"
#include "aclnn_check.h"
#include "interface.h"
#include "prepare.h"

#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"

#ifdef _OPENMP
#include <omp.h>
#endif

struct aclOpExecutor {
    bool backward;
    bool nothing_to_do; // an empty input
    bool repeatable;
    uint64_t workspace_bytes;
    mxd::Call call;
    mxd_tensor shapes, starts;
};

namespace acl {
namespace {

constexpr int VALUE_AXES = 4;
constexpr uint64_t WORKSPACE_ALIGNMENT = alignof(mxd::Level);

Handles<aclOpExecutor> &executors() {
    static Handles<aclOpExecutor> handles;
    return handles;
}

// The caller's number: a stream's own thread would only know the machine's.
int threads_of_caller() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// The workspace holds the levels as they were when the task began, so that what was checked is what is used, and a
// packed copy of value where its channels are not adjacent.
int64_t bytes_of_levels(const mxd_tensor &shapes) { return shapes.shape[0] * int64_t(sizeof(mxd::Level)); }

void check_level(const mxd::Level &level, int64_t index, int64_t keys) {
    const std::string at = "[" + std::to_string(index) + "]";
    const int64_t size[] = {level.height, level.width};
    if (level.height <= 0 || level.width <= 0)
        throw Refusal(ACL_ERROR_RT_AICORE_EXCEPTION, "spatialShape" + at, "be positive (H, W)", list(size, 2));
    const int64_t room = level.start < 0 || level.start > keys ? 0 : keys - level.start;
    if (level.width > room || level.height > room / level.width)
        throw Refusal(ACL_ERROR_RT_AICORE_EXCEPTION, "levelStartIndex" + at,
                      "leave room for " + std::to_string(level.height) + " x " + std::to_string(level.width) +
                          " rows among " + std::to_string(keys),
                      std::to_string(level.start));
}

mxd::Level *read_levels(const aclOpExecutor &plan, void *workspace) {
    mxd::Level *levels = static_cast<mxd::Level *>(workspace);
    const int64_t *stride = plan.shapes.strides;
    for (int64_t l = 0; l < plan.shapes.shape[0]; ++l) {
        levels[l] = {mxd::element(plan.shapes, l * stride[0]), mxd::element(plan.shapes, l * stride[0] + stride[1]),
                     mxd::element(plan.starts, l * plan.starts.strides[0])};
        check_level(levels[l], l, plan.call.value.shape[1]);
    }
    return levels;
}

// A field of every level as an index tensor.
mxd_tensor column(int64_t *first, int64_t levels, int64_t fields) {
    return {first, MXD_INT64, {levels, fields}, {sizeof(mxd::Level) / sizeof(int64_t), 1}};
}

void run(aclOpExecutor plan, void *workspace) {
    mxd::Level *levels = read_levels(plan, workspace);
    if (mxd::channels_lie_apart(plan.call.value, VALUE_AXES))
        mxd::make_contiguous(plan.call.value, VALUE_AXES, static_cast<char *>(workspace) + bytes_of_levels(plan.shapes));
    const int64_t count = plan.shapes.shape[0];
    plan.call.shapes = column(&levels->height, count, 2);
    plan.call.starts = column(&levels->start, count, 0);
    const int status = mxd::run(plan.call);
    if (status == MXD_OUT_OF_MEMORY) throw std::bad_alloc();
    if (status != MXD_OK)
        throw Refusal(ACL_ERROR_INTERNAL_ERROR, "executor", "hold what the kernels take",
                      "mxd_status " + std::to_string(status));
}

// gradOutput or output: [bs, num_queries, num_heads * channels], seen as four axes.
mxd_tensor with_heads(const aclTensor &t, const AttentionSizes &n) {
    mxd_tensor to = native(t);
    if (t.axes == 4) return to;
    to.shape[2] = n.heads;
    to.shape[3] = n.channels;
    to.strides[2] = n.channels * t.strides[2];
    to.strides[3] = t.strides[2];
    return to;
}

void check_row_output(const Argument &argument, const AttentionSizes &n) {
    check_shape(argument,
                {{"bs", n.batch}, {"num_queries", n.queries}, {"num_heads * channels", n.heads * n.channels}});
}

void check_gradients(const Argument *a, const AttentionSizes &n) {
    const Argument &grad_output = a[5], &grad_value = a[6], &grad_location = a[7], &grad_weight = a[8];
    for (int i = 5; i < 9; ++i) check_floating(a[i]);
    if (grad_output.tensor.axes == 3)
        check_row_output(grad_output, n);
    else
        check_shape(grad_output,
                    {{"bs", n.batch}, {"num_queries", n.queries}, {"num_heads", n.heads}, {"channels", n.channels}});
    check_shape(grad_value, {{"bs", n.batch}, {"num_keys", n.keys}, {"num_heads", n.heads}, {"channels", n.channels}});
    check_shape(grad_location, {{"bs", n.batch},
                                {"num_queries", n.queries},
                                {"num_heads", n.heads},
                                {"num_levels", n.levels},
                                {"num_points", n.points},
                                {nullptr, 2}});
    check_shape(grad_weight, {{"bs", n.batch},
                              {"num_queries", n.queries},
                              {"num_heads", n.heads},
                              {"num_levels", n.levels},
                              {"num_points", n.points}});
}

void check_output(const Argument &value, const Argument &output, const AttentionSizes &n) {
    check_floating(output);
    if (output.tensor.dtype != value.tensor.dtype)
        throw Refusal(ACLNN_ERR_PARAM_INVALID, output.name, "have value's dtype " + dtype_name(value.tensor.dtype),
                      dtype_name(output.tensor.dtype));
    check_row_output(output, n);
}

aclOpExecutor plan_of(const Argument *a, int count, const AttentionSizes &n) {
    aclOpExecutor plan{};
    plan.backward = count == 9;
    for (int i = 0; i < count; ++i) plan.nothing_to_do = plan.nothing_to_do || empty(a[i].tensor);
    if (plan.nothing_to_do) return plan; // strides and offsets of empty tensors mean nothing and were not checked
    plan.shapes = native(a[1].tensor);
    plan.starts = native(a[2].tensor);
    plan.call.op = mxd::MULTI_SCALE;
    plan.call.backward = plan.backward;
    plan.call.value = native(a[0].tensor);
    plan.call.locations = native(a[3].tensor);
    plan.call.weights = native(a[4].tensor);
    (plan.backward ? plan.call.grad_output : plan.call.output) = with_heads(a[5].tensor, n);
    plan.call.num_threads = threads_of_caller();
    if (plan.backward) {
        plan.call.grad_value = native(a[6].tensor);
        plan.call.grad_locations = native(a[7].tensor);
        plan.call.grad_weights = native(a[8].tensor);
    }
    plan.workspace_bytes = uint64_t(bytes_of_levels(plan.shapes));
    if (mxd::channels_lie_apart(plan.call.value, VALUE_AXES))
        plan.workspace_bytes += uint64_t(mxd::contiguous_bytes(plan.call.value, VALUE_AXES));
    return plan;
}

aclnnStatus phase_one(Argument *arguments, int count, uint64_t *workspace_size, aclOpExecutor **executor) {
    return guarded([&] {
        check_handles(arguments, count);
        if (!workspace_size) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "workspaceSize", "point to a number", "NULL");
        if (!executor) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "point to an executor", "NULL");
        const AttentionSizes n = check_attention(arguments);
        if (count == 9)
            check_gradients(arguments, n);
        else
            check_output(arguments[0], arguments[5], n);
        for (int i = 0; i < count; ++i) check_memory(arguments[i]);
        auto plan = std::make_unique<aclOpExecutor>(plan_of(arguments, count, n));
        *workspace_size = plan->workspace_bytes;
        *executor = executors().add(std::move(plan));
    });
}

aclOpExecutor take(aclOpExecutor *executor) {
    if (!executor) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "come from phase one", "NULL");
    aclOpExecutor plan;
    if (!executors().copy(executor, plan) || (!plan.repeatable && !executors().remove(executor)))
        throw Refusal(ACLNN_ERR_PARAM_INVALID, "executor", "come from phase one and be run once",
                      "a pointer that is no executor");
    return plan;
}

aclnnStatus phase_two(bool backward, void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    const aclnnStatus status = guarded([&] {
        const aclOpExecutor plan = take(executor);
        if (plan.backward != backward)
            throw Refusal(ACLNN_ERR_PARAM_INVALID, "executor", "come from this operator's phase one",
                          "another operator's");
        const std::shared_ptr<Stream> queue = stream_of(stream);
        if (plan.nothing_to_do) return;
        if (!workspace) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "workspace", "be memory", "NULL");
        if (size < plan.workspace_bytes)
            throw Refusal(ACLNN_ERR_PARAM_INVALID, "workspaceSize",
                          "be at least " + std::to_string(plan.workspace_bytes), std::to_string(size));
        if (reinterpret_cast<uintptr_t>(workspace) % WORKSPACE_ALIGNMENT)
            throw Refusal(ACLNN_ERR_PARAM_INVALID, "workspace", "be aligned to 8 bytes", "an address that is not");
        queue->push([plan, workspace] { run(plan, workspace); });
    });
    return status == ACL_ERROR_INVALID_PARAM ? ACLNN_ERR_PARAM_INVALID : status; // a stream that is none
}

} // namespace
} // namespace acl

extern "C" {

aclnnStatus aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
    const aclTensor *value, const aclTensor *spatialShape, const aclTensor *levelStartIndex, const aclTensor *location,
    const aclTensor *attnWeight, const aclTensor *gradOutput, aclTensor *gradValue, aclTensor *gradLocation,
    aclTensor *gradAttnWeight, uint64_t *workspaceSize, aclOpExecutor **executor) {
    acl::Argument arguments[] = {{"value", value, {}, false},
                                 {"spatialShape", spatialShape, {}, false},
                                 {"levelStartIndex", levelStartIndex, {}, false},
                                 {"location", location, {}, false},
                                 {"attnWeight", attnWeight, {}, false},
                                 {"gradOutput", gradOutput, {}, false},
                                 {"gradValue", gradValue, {}, true},
                                 {"gradLocation", gradLocation, {}, true},
                                 {"gradAttnWeight", gradAttnWeight, {}, true}};
    return acl::phase_one(arguments, 9, workspaceSize, executor);
}

aclnnStatus aclnnMultiScaleDeformableAttentionGrad(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                                   aclrtStream stream) {
    return acl::phase_two(true, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(const aclTensor *value, const aclTensor *spatialShape,
                                                                  const aclTensor *levelStartIndex,
                                                                  const aclTensor *location,
                                                                  const aclTensor *attnWeight, aclTensor *output,
                                                                  uint64_t *workspaceSize, aclOpExecutor **executor) {
    acl::Argument arguments[] = {{"value", value, {}, false},
                                 {"spatialShape", spatialShape, {}, false},
                                 {"levelStartIndex", levelStartIndex, {}, false},
                                 {"location", location, {}, false},
                                 {"attnWeight", attnWeight, {}, false},
                                 {"output", output, {}, true}};
    return acl::phase_one(arguments, 6, workspaceSize, executor);
}

aclnnStatus aclnnMultiScaleDeformableAttnFunction(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                                  aclrtStream stream) {
    return acl::phase_two(false, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor) {
    return acl::guarded([&] {
        if (!executor) throw acl::Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "come from phase one", "NULL");
        if (!acl::executors().remove(executor))
            throw acl::Refusal(ACLNN_ERR_PARAM_INVALID, "executor", "be alive", "a pointer that is no executor");
    });
}

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor) {
    return acl::guarded([&] {
        if (!executor) throw acl::Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "come from phase one", "NULL");
        if (!acl::executors().change(executor, [](aclOpExecutor &plan) { plan.repeatable = true; }))
            throw acl::Refusal(ACLNN_ERR_PARAM_INVALID, "executor", "be alive", "a pointer that is no executor");
    });
}
}
