// aclnnMultiScaleDeformableAttentionGrad and its forward, aclnnMultiScaleDeformableAttnFunction: phase one checks and
// makes a task, phase two queues it on a stream.
#include "call/make_call.h"
#include "call/make_plan.h"
#include "call/prepare.h"
#include "call/words.h"
#include "cann/check.h"
#include "cann/handles.h"
#include "cann/stream.h"
#include "run.h"
#include "threads/threads.h"

#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"

#include <algorithm>

struct aclOpExecutor {
    bool backward;
    bool nothing_to_do; // an argument has no elements
    bool repeatable;
    uint64_t workspace_bytes;
    mxd::Call call; // its index tables are the caller's until the task has copied them
};

namespace acl {
namespace {

constexpr uint64_t WORKSPACE_ALIGNMENT = alignof(mxd::Level);

Handles<aclOpExecutor> &executors() {
    static Handles<aclOpExecutor> handles;
    return handles;
}

// Phase one reads no data, because on a device the index tables may not be there yet. The task reads them: it copies
// the levels to the start of the workspace, checks the copy and uses the copy, so a program that writes to its tables
// meanwhile does no harm. A contiguous copy of value follows, where value's channels are not contiguous.
int64_t bytes_of_levels(const mxd::Call &call) { return call.sizes.levels * int64_t(sizeof(mxd::Level)); }

// From now on an index table is the numbers inside an array of levels, from `first` on.
void read_from(mxd::Tensor &table, int64_t *first) {
    table.data = first;
    table.dtype = MXD_INT64;
    table.strides[mxd::MAP_SCALE] = sizeof(mxd::Level) / sizeof(int64_t);
    table.strides[mxd::HEIGHT_WIDTH] = 1;
}

void run(aclOpExecutor task, void *workspace) {
    mxd::Call &call = task.call;
    mxd::Level *levels = static_cast<mxd::Level *>(workspace);
    for (int64_t l = 0; l < call.sizes.levels; ++l) levels[l] = mxd::read_level(call, 0, l);
    read_from(call.shapes, &levels->height);
    read_from(call.starts, &levels->start);
    if (mxd::channels_lie_apart(call.value))
        mxd::make_contiguous(call.value, static_cast<char *>(workspace) + bytes_of_levels(call));
    const int status = mxd::run(call);
    if (status == MXD_OUT_OF_MEMORY) throw std::bad_alloc();
    if (status == MXD_BAD_LEVEL)
        throw Refusal({ACL_ERROR_RT_AICORE_EXCEPTION, mxd::fault_of_levels(call, "spatialShape", "levelStartIndex")});
    if (status != MXD_OK)
        throw Refusal(ACL_ERROR_INTERNAL_ERROR, "executor", "hold what the kernels take",
                      "mxd_status " + std::to_string(status));
}

// A checked argument with elements, as the kernels want it. An axis of one element may have any stride, even one that
// overflows when it is added up, so it gets stride 0.
mxd_tensor native(const aclTensor &t) {
    mxd_tensor to{};
    to.dtype = t.dtype; // mxd_dtype and aclDataType number their dtypes alike
    to.data = static_cast<char *>(t.data) + t.offset * element_size(t.dtype);
    std::copy_n(t.shape, t.axes, to.shape);
    for (int a = 0; a < t.axes; ++a) to.strides[a] = t.shape[a] > 1 ? t.strides[a] : 0;
    return to;
}

// output or gradOutput as [bs, num_queries, num_heads, channels]: three axes become four.
mxd_tensor with_heads(const aclTensor &t, const aclTensor &value) {
    mxd_tensor to = native(t);
    if (t.axes == 4) return to;
    const int64_t of_channel = t.strides[mxd::HEAD]; // the last axis of three
    to.shape[mxd::HEAD] = value.shape[mxd::HEAD];
    to.shape[mxd::CHANNEL] = value.shape[mxd::CHANNEL];
    to.strides[mxd::HEAD] = value.shape[mxd::CHANNEL] * of_channel;
    to.strides[mxd::CHANNEL] = of_channel;
    return to;
}

mxd::Call call_of(const Arguments &a, const mxd::AxisSizes &sizes) {
    mxd_tensor tensors[mxd::MOST_ARGUMENTS];
    const mxd_tensor *pointers[mxd::MOST_ARGUMENTS];
    int count = 0;
    for (const Argument *each : in_order(a)) {
        const bool has_heads = each == &a.output || each == &a.grad_output;
        tensors[count] = has_heads ? with_heads(each->tensor, a.value.tensor) : native(each->tensor);
        pointers[count] = &tensors[count];
        ++count;
    }
    mxd::Call call = mxd::make_call(function_of(a.backward), pointers, sizes, 0, 1);
    // On the caller's thread: omp_set_num_threads holds for that thread alone, and a stream runs its tasks on another.
    call.num_threads = mxd::threads_that_pay(call, mxd::usable_threads());
    return call;
}

aclOpExecutor executor_of(const Arguments &a, const mxd::AxisSizes &sizes) {
    aclOpExecutor task{};
    task.backward = a.backward;
    for (const Argument *each : in_order(a)) task.nothing_to_do = task.nothing_to_do || empty(each->tensor);
    if (task.nothing_to_do) return task; // no check looked at the strides and offset of an empty tensor
    task.call = call_of(a, sizes);
    task.workspace_bytes = uint64_t(bytes_of_levels(task.call));
    if (mxd::channels_lie_apart(task.call.value)) task.workspace_bytes += uint64_t(mxd::contiguous_bytes(task.call.value));
    return task;
}

aclnnStatus phase_one(Arguments &arguments, uint64_t *workspace_size, aclOpExecutor **executor) {
    return guarded([&] {
        const mxd::AxisSizes sizes = check_phase_one(arguments, workspace_size, executor);
        auto task = std::make_unique<aclOpExecutor>(executor_of(arguments, sizes));
        *workspace_size = task->workspace_bytes;
        *executor = executors().add(std::move(task));
    });
}

aclOpExecutor take(aclOpExecutor *executor) {
    if (!executor) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "come from phase one", "NULL");
    aclOpExecutor task;
    if (!executors().copy(executor, task) || (!task.repeatable && !executors().remove(executor)))
        throw Refusal(ACLNN_ERR_PARAM_INVALID, "executor", "come from phase one and be run once",
                      "a pointer that is no executor");
    return task;
}

aclnnStatus phase_two(bool backward, void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    const aclnnStatus status = guarded([&] {
        const aclOpExecutor task = take(executor);
        if (task.backward != backward)
            throw Refusal(ACLNN_ERR_PARAM_INVALID, "executor", "come from this operator's phase one", "another operator's");
        const std::shared_ptr<Stream> queue = stream_of(stream);
        if (task.nothing_to_do) return;
        if (!workspace) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "workspace", "be memory", "NULL");
        if (size < task.workspace_bytes)
            throw Refusal(ACLNN_ERR_PARAM_INVALID, "workspaceSize", "be at least " + std::to_string(task.workspace_bytes),
                          std::to_string(size));
        if (reinterpret_cast<uintptr_t>(workspace) % WORKSPACE_ALIGNMENT)
            throw Refusal(ACLNN_ERR_PARAM_INVALID, "workspace", "be aligned to 8 bytes", "an address that is not");
        queue->push([task, workspace] { run(task, workspace); });
    });
    // stream_of refuses with a status of the runtime; operators have their own for a bad argument.
    return status == ACL_ERROR_INVALID_PARAM ? ACLNN_ERR_PARAM_INVALID : status;
}

} // namespace
} // namespace acl

extern "C" {

aclnnStatus aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(const aclTensor *value, const aclTensor *spatialShape,
                                                                   const aclTensor *levelStartIndex, const aclTensor *location,
                                                                   const aclTensor *attnWeight, const aclTensor *gradOutput,
                                                                   aclTensor *gradValue, aclTensor *gradLocation,
                                                                   aclTensor *gradAttnWeight, uint64_t *workspaceSize,
                                                                   aclOpExecutor **executor) {
    acl::Arguments arguments(true, {value, spatialShape, levelStartIndex, location, attnWeight, gradOutput, gradValue,
                                    gradLocation, gradAttnWeight});
    return acl::phase_one(arguments, workspaceSize, executor);
}

aclnnStatus aclnnMultiScaleDeformableAttentionGrad(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                                   aclrtStream stream) {
    return acl::phase_two(true, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(const aclTensor *value, const aclTensor *spatialShape,
                                                                  const aclTensor *levelStartIndex, const aclTensor *location,
                                                                  const aclTensor *attnWeight, aclTensor *output,
                                                                  uint64_t *workspaceSize, aclOpExecutor **executor) {
    acl::Arguments arguments(false, {value, spatialShape, levelStartIndex, location, attnWeight, output});
    return acl::phase_one(arguments, workspaceSize, executor);
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
        if (!acl::executors().change(executor, [](aclOpExecutor &task) { task.repeatable = true; }))
            throw acl::Refusal(ACLNN_ERR_PARAM_INVALID, "executor", "be alive", "a pointer that is no executor");
    });
}
}
