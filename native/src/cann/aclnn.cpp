// aclnnMultiScaleDeformableAttentionGrad and its forward, aclnnMultiScaleDeformableAttnFunction. Phase one checks the call and
// makes an executor. Phase two runs the executor.
#include "call/make_plan.h"
#include "call/prepare.h"
#include "call/tables.h"
#include "cann/runtime.h"
#include "cann/tensor.h"
#include "run.h"

#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"

#include <algorithm>

struct aclOpExecutor {
    bool backward;
    bool nothing_to_do; // an argument has no elements, so phase two computes nothing
    bool repeatable;
    uint64_t workspace_bytes;
    mxd::Call call;
};

namespace acl {
namespace {

// Phase one reads no data, because on a device the index tables may not be computed yet. Phase two copies the levels to the
// workspace, then checks and uses the copy. So no level is used unchecked, even if the program writes to its tables meanwhile.
int64_t bytes_of_levels(const mxd::Call &call) { return call.sizes.levels * int64_t(sizeof(mxd::Level)); }

// Makes an index table point into an array of levels. `first` is the table's first element, a member of the first level.
void point_to(mxd::Tensor &table, int64_t *first) {
    table.data = first;
    table.dtype = MXD_INT64;
    table.strides[mxd::MAP_SCALE] = sizeof(mxd::Level) / sizeof(int64_t);
    table.strides[mxd::HEIGHT_WIDTH] = 1;
}

void run(aclOpExecutor task, void *workspace) {
    mxd::Call &call = task.call;
    mxd::Level *levels = static_cast<mxd::Level *>(workspace);
    for (int64_t l = 0; l < call.sizes.levels; ++l) levels[l] = mxd::read_level(call, 0, l);
    point_to(call.shapes, &levels->height);
    point_to(call.starts, &levels->start);
    call.num_threads = mxd::threads_that_pay(call, mxd::usable_threads());
    const int status = mxd::run(call);
    if (status == MXD_OUT_OF_MEMORY) throw std::bad_alloc();
    if (status == MXD_BAD_LEVEL)
        throw Outcome{ACL_ERROR_RT_AICORE_EXCEPTION, mxd::fault_of_levels(call, "spatialShape", "levelStartIndex")};
    require(status == MXD_OK, ACL_ERROR_INTERNAL_ERROR, "executor", "hold what the kernels take",
            "mxd_status " + std::to_string(status));
}

aclnnStatus phase_one(bool backward, const std::vector<const aclTensor *> &handles, uint64_t *workspace_size,
                      aclOpExecutor **executor) {
    return guarded([&] {
        const Arguments arguments = check_phase_one(backward, handles, workspace_size, executor);
        const auto &tensors = arguments.tensors;
        auto task = std::make_unique<aclOpExecutor>();
        task->backward = backward;
        task->nothing_to_do = std::any_of(tensors.begin(), tensors.end(), is_empty);
        if (!task->nothing_to_do) {
            task->call = mxd::make_call(arguments.function, arguments.infos, arguments.sizes, 0, 1);
            task->workspace_bytes = uint64_t(bytes_of_levels(task->call));
        }
        *workspace_size = task->workspace_bytes;
        *executor = registry<aclOpExecutor>().add(std::move(task));
    });
}

void check_executor(const aclOpExecutor *executor, bool is_alive) {
    require(executor, ACLNN_ERR_PARAM_NULLPTR, "executor", "come from phase one", "NULL");
    require(is_alive, ACLNN_ERR_PARAM_INVALID, "executor", "come from phase one and be run once",
            "a pointer that is no executor");
}

aclnnStatus phase_two(bool backward, void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream handle) {
    const aclnnStatus status = guarded([&] {
        // Like CANN's runtime (opbase, CommonOpExecutorRun, 2025), destroy an executor that is not repeatable even if a check
        // below refuses the call. Programs do not destroy such an executor.
        aclOpExecutor task;
        check_executor(executor, registry<aclOpExecutor>().copy(executor, task) &&
                                     (task.repeatable || registry<aclOpExecutor>().remove(executor)));
        require(task.backward == backward, ACLNN_ERR_PARAM_INVALID, "executor", "come from this operator's phase one",
                "another operator's");
        const std::shared_ptr<Stream> stream = find_stream(handle);
        if (task.nothing_to_do) return;
        require(workspace, ACLNN_ERR_PARAM_NULLPTR, "workspace", "be memory", "NULL");
        require(size >= task.workspace_bytes, ACLNN_ERR_PARAM_INVALID, "workspaceSize",
                "be at least " + std::to_string(task.workspace_bytes), std::to_string(size));
        require(reinterpret_cast<uintptr_t>(workspace) % alignof(mxd::Level) == 0, ACLNN_ERR_PARAM_INVALID, "workspace",
                "be aligned to 8 bytes", "an address that is not");
        stream->run([&] { run(task, workspace); });
    });
    // find_stream throws the runtime's status for a bad argument. Operators return ACLNN_ERR_PARAM_INVALID in its place.
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
    return acl::phase_one(
        true, {value, spatialShape, levelStartIndex, location, attnWeight, gradOutput, gradValue, gradLocation, gradAttnWeight},
        workspaceSize, executor);
}

aclnnStatus aclnnMultiScaleDeformableAttentionGrad(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                                   aclrtStream stream) {
    return acl::phase_two(true, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(const aclTensor *value, const aclTensor *spatialShape,
                                                                  const aclTensor *levelStartIndex, const aclTensor *location,
                                                                  const aclTensor *attnWeight, aclTensor *output,
                                                                  uint64_t *workspaceSize, aclOpExecutor **executor) {
    return acl::phase_one(false, {value, spatialShape, levelStartIndex, location, attnWeight, output}, workspaceSize, executor);
}

aclnnStatus aclnnMultiScaleDeformableAttnFunction(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
                                                  aclrtStream stream) {
    return acl::phase_two(false, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor) {
    return acl::guarded([&] { acl::check_executor(executor, bool(acl::registry<aclOpExecutor>().remove(executor))); });
}

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor) {
    return acl::guarded([&] {
        acl::check_executor(
            executor, acl::registry<aclOpExecutor>().change(executor, [](aclOpExecutor &task) { task.repeatable = true; }));
    });
}
}
