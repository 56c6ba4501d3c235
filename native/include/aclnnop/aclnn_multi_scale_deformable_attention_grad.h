/* The gradients of multi-scale deformable attention in CANN's two phases, on the host.
 *
 *     gradValue[corner ij, h] += share_ij * attnWeight * gradOutput
 *     gradAttnWeight           = sum over channels of gradOutput * sample
 *     gradLocation             = (W * attnWeight * sum g dSample/dx, H * attnWeight * sum g dSample/dy)
 *
 * share_ij is the bilinear coefficient of corner ij, and g is gradOutput. A sample is bilinear at x = location0 * W - 0.5,
 * y = location1 * H - 0.5. Corners off the map are zero. A sample with x <= -1, y <= -1, x >= W, y >= H or a NaN contributes
 * exactly 0 to every gradient. Locations are (x, y), as in CANN's code; CANN's document says (y, x).
 */
#ifndef MX_DRIVING_ACLNN_MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD_H
#define MX_DRIVING_ACLNN_MULTI_SCALE_DEFORMABLE_ATTENTION_GRAD_H

#include "acl/acl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one: checks the nine tensors and prepares the call. Reads no tensor data, and writes only its two results.
 *
 * All floating tensors, inputs and outputs, have one dtype: ACL_FLOAT, ACL_FLOAT16 or ACL_BF16. Everything is computed
 * in float32 and rounded once. Each index tensor is ACL_INT32 or ACL_INT64. The format is ACL_FORMAT_ND. Strides and offset
 * are free, but elements of an output must not share memory with each other or with another tensor. The program owns the
 * tensors and their memory. It may destroy the descriptors after this call, but must keep the memory until phase two returns.
 *
 * value            in   [bs, num_keys, num_heads, channels]; channels % 8 == 0, <= 256; num_heads <= 16
 * spatialShape     in   [num_levels, 2], (H, W); num_levels <= 16
 * levelStartIndex  in   [num_levels], the first row of each level in num_keys
 * location         in   [bs, num_queries, num_heads, num_levels, num_points, 2], (x, y), 0..1 is the map;
 *                       num_queries < 500000, num_points <= 16
 * attnWeight       in   [bs, num_queries, num_heads, num_levels, num_points]
 * gradOutput       in   [bs, num_queries, num_heads, channels] or [bs, num_queries, num_heads * channels]
 * gradValue        out  value's shape; all three outputs are overwritten
 * gradLocation     out  location's shape
 * gradAttnWeight   out  attnWeight's shape
 * workspaceSize    out  bytes that phase two needs; 0 for an empty input
 * executor         out  the prepared call; phase two or aclDestroyAclOpExecutor frees it
 *
 * Returns 0; ACLNN_ERR_PARAM_NULLPTR (161001) if a pointer, or the memory of a tensor with elements, is NULL;
 * ACLNN_ERR_PARAM_INVALID (161002) for a wrong dtype, format or shape, a broken limit, shapes that disagree, a view that
 * leaves its storage or is not aligned to its elements, or a destroyed tensor. aclGetRecentErrMsg has the sentence. */
ACL_FUNC_VISIBILITY aclnnStatus aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
    const aclTensor *value, const aclTensor *spatialShape, const aclTensor *levelStartIndex, const aclTensor *location,
    const aclTensor *attnWeight, const aclTensor *gradOutput, aclTensor *gradValue, aclTensor *gradLocation,
    aclTensor *gradAttnWeight, uint64_t *workspaceSize, aclOpExecutor **executor);

/* Phase two: runs the call.
 *
 * workspace      workspaceSize bytes, aligned to 8
 * workspaceSize  what phase one announced, or more
 * executor       from phase one; destroyed, also after a failed check, unless it is repeatable
 * stream         from aclrtCreateStream; NULL: the default stream
 *
 * Returns 0; ACLNN_ERR_PARAM_NULLPTR for a NULL executor or workspace, ACLNN_ERR_PARAM_INVALID for a workspace that is
 * too small or not aligned, an executor that was run before or belongs to another operator, or a destroyed stream.
 * aclrtSynchronizeStream returns the errors of the computation: ACL_ERROR_RT_AICORE_EXCEPTION (507015) if a level does
 * not fit in num_keys, in which case no output was written; ACL_ERROR_BAD_ALLOC if memory ran out. With an empty input
 * the outputs are unchanged. */
ACL_FUNC_VISIBILITY aclnnStatus aclnnMultiScaleDeformableAttentionGrad(void *workspace, uint64_t workspaceSize,
                                                                       aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif
#endif
