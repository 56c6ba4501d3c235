/* Multi-scale deformable attention in CANN's two phases, on the host: the forward of
 * aclnnMultiScaleDeformableAttentionGrad.
 *
 *     output[b, q, h] = sum over levels l and points p of
 *         attnWeight[b, q, h, l, p] * sample(level l of value[b, :, h], location[b, q, h, l, p])
 *
 * Samples, limits, dtypes, views, ownership and errors are those of aclnn_multi_scale_deformable_attention_grad.h.
 * CANN's document also requires num_queries >= 32. Here this holds only if MX_DRIVING_CANN_PRODUCT names a product.
 */
#ifndef MX_DRIVING_ACLNN_MULTI_SCALE_DEFORMABLE_ATTN_FUNCTION_H
#define MX_DRIVING_ACLNN_MULTI_SCALE_DEFORMABLE_ATTN_FUNCTION_H

#include "acl/acl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one.
 *
 * value            in   [bs, num_keys, num_heads, channels]; channels % 8 == 0, <= 256; num_heads <= 16
 * spatialShape     in   [num_levels, 2], (H, W); num_levels <= 16
 * levelStartIndex  in   [num_levels], the first row of each level in num_keys
 * location         in   [bs, num_queries, num_heads, num_levels, num_points, 2], (x, y), 0..1 is the map;
 *                       num_queries < 500000, num_points <= 16
 * attnWeight       in   [bs, num_queries, num_heads, num_levels, num_points]
 * output           out  [bs, num_queries, num_heads * channels], three axes; overwritten
 * workspaceSize    out  bytes that phase two needs; 0 for an empty input
 * executor         out  the prepared call; phase two or aclDestroyAclOpExecutor frees it */
ACL_FUNC_VISIBILITY aclnnStatus aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(
    const aclTensor *value, const aclTensor *spatialShape, const aclTensor *levelStartIndex, const aclTensor *location,
    const aclTensor *attnWeight, aclTensor *output, uint64_t *workspaceSize, aclOpExecutor **executor);

/* Phase two. */
ACL_FUNC_VISIBILITY aclnnStatus aclnnMultiScaleDeformableAttnFunction(void *workspace, uint64_t workspaceSize,
                                                                      aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif
#endif
