/* The deformable sampling operators of mx_driving on the host, as plain C.
 *
 * An mxd_tensor describes a view of any buffer: `data` points to element [0, 0, ...], and strides count elements. Every
 * function returns MXD_OK or an error, whose sentence mxd_last_error() returns. It checks all tensors first, and writes
 * nothing if a check fails. Functions may be called from several threads at once.
 *
 * Outputs and gradients must not share memory with another tensor of the call. Their own elements must not share memory
 * either: any slice or permutation of a contiguous tensor is allowed, an expanded tensor is not. Inputs may be expanded,
 * and may share memory with each other.
 *
 * An output has value's dtype, or float32 if value has 16 bits. A float32 output is not rounded to 16 bits.
 */
#ifndef MX_DRIVING_H
#define MX_DRIVING_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32) && defined(mx_driving_EXPORTS) /* the library itself is being built */
#define MXD_API __declspec(dllexport)
#elif defined(__GNUC__)
#define MXD_API __attribute__((visibility("default")))
#else
#define MXD_API
#endif

enum mxd_dtype {
    MXD_FLOAT32 = 0,
    MXD_FLOAT16 = 1,
    MXD_INT32 = 3,
    MXD_INT64 = 9,
    MXD_FLOAT64 = 11,
    MXD_BFLOAT16 = 27,
    MXD_NOT_GIVEN = -1
};

enum mxd_status {
    MXD_OK = 0,
    MXD_BAD_SHAPE = 1, /* shapes disagree, a size is negative, num_keys >= 2^31 - 1, or a tensor has >= 2^48 elements */
    MXD_BAD_DTYPE = 2, /* an argument has a dtype that its function does not accept */
    MXD_BAD_LEVEL = 3, /* a level has H <= 0, W <= 0 or a negative start, or ends past num_keys */
    MXD_OUT_OF_MEMORY = 4,
    MXD_BAD_NAME = 5,  /* mxd_run, mxd_describe_plan: no function has this name */
    MXD_BAD_RANK = 7,  /* a rank is negative, or past the end of its table */
    MXD_BAD_MEMORY = 6 /* a required pointer is NULL, addresses do not fit in 64 bits, or an element of a result
                        * shares memory with another element or another tensor */
};

typedef struct mxd_tensor {
    void *data;
    int64_t dtype; /* enum mxd_dtype */
    int64_t shape[6];
    int64_t strides[6]; /* in elements */
} mxd_tensor;

/* value [bs, num_keys, num_heads, embed_dims]; spatial_shapes [num_levels, 2] (H, W); level_start_index [num_levels];
 * sampling_locations [bs, num_queries, num_heads, num_levels, num_points, 2] (x, y);
 * attention_weights [bs, num_queries, num_heads, num_levels, num_points]; output [bs, num_queries, num_heads,
 * embed_dims]. Gradients have the shape of their inputs and are overwritten. To skip a gradient, pass NULL for its
 * tensor or for the tensor's `data`. */
MXD_API int mxd_multi_scale_deformable_attn(const mxd_tensor *value, const mxd_tensor *spatial_shapes,
                                            const mxd_tensor *level_start_index, const mxd_tensor *sampling_locations,
                                            const mxd_tensor *attention_weights, const mxd_tensor *output, int num_threads);
MXD_API int mxd_multi_scale_deformable_attn_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                                     const mxd_tensor *spatial_shapes, const mxd_tensor *level_start_index,
                                                     const mxd_tensor *sampling_locations, const mxd_tensor *attention_weights,
                                                     const mxd_tensor *grad_value, const mxd_tensor *grad_sampling_locations,
                                                     const mxd_tensor *grad_attention_weights, int num_threads);

/* mxd_multi_scale_deformable_attn, with locations and weights computed from the outputs of a model's linear layers.
 * sampling_offsets and attention_logits have the shapes of sampling_locations and attention_weights. reference_points are
 * points [bs, num_queries, R, 2] (x, y) or boxes [bs, num_queries, R, 4] (x, y, w, h). Points: location = reference +
 * offset / (W, H). Boxes: location = (x, y) + offset * (w, h) / (2 * num_points). Weights are the softmax of a head's
 * logits. reference_axis 0: R is num_levels or 1, and sample (level, point) reads reference point `level`, or the only
 * reference point. reference_axis 1: R divides num_points, and the sample reads reference point `point % R`. The gradient of
 * reference points needs scratch memory of num_heads times its size. */
MXD_API int mxd_multi_scale_deformable_attn_with_logits(const mxd_tensor *value, const mxd_tensor *spatial_shapes,
                                                        const mxd_tensor *level_start_index, const mxd_tensor *reference_points,
                                                        const mxd_tensor *sampling_offsets, const mxd_tensor *attention_logits,
                                                        const mxd_tensor *output, int reference_axis, int num_threads);
MXD_API int mxd_multi_scale_deformable_attn_with_logits_backward(
    const mxd_tensor *grad_output, const mxd_tensor *value, const mxd_tensor *spatial_shapes,
    const mxd_tensor *level_start_index, const mxd_tensor *reference_points, const mxd_tensor *sampling_offsets,
    const mxd_tensor *attention_logits, const mxd_tensor *grad_value, const mxd_tensor *grad_reference_points,
    const mxd_tensor *grad_sampling_offsets, const mxd_tensor *grad_attention_logits, int reference_axis, int num_threads);

/* feature_maps [bs, num_feat, c]; spatial_shape [cam, scale, 2] (H, W); scale_start_index [cam, scale];
 * sample_locations [bs, anchor, pts, cam, 2] (x, y); weight [bs, anchor, pts, cam, scale, group]; output [bs, anchor,
 * c]. */
MXD_API int mxd_deformable_aggregation(const mxd_tensor *feature_maps, const mxd_tensor *spatial_shape,
                                       const mxd_tensor *scale_start_index, const mxd_tensor *sample_locations,
                                       const mxd_tensor *weight, const mxd_tensor *output, int num_threads);
MXD_API int mxd_deformable_aggregation_backward(const mxd_tensor *grad_output, const mxd_tensor *feature_maps,
                                                const mxd_tensor *spatial_shape, const mxd_tensor *scale_start_index,
                                                const mxd_tensor *sample_locations, const mxd_tensor *weight,
                                                const mxd_tensor *grad_feature_maps, const mxd_tensor *grad_sample_locations,
                                                const mxd_tensor *grad_weight, int num_threads);

/* mxd_deformable_aggregation, with locations and weights computed from the outputs of a model's linear layers: key_points
 * [bs, anchor, pts, 3]; projection [bs, cam, 4, 4], whose last row is not read; logits [bs, anchor, cam, scale, pts, group];
 * image_size [bs, cam, 2] (width, height), or NULL if the projection gives locations in 0..1; pair_scale [bs, anchor, cam,
 * pts], or NULL. (u, v, d) = projection (point, 1); location = (u, v) / max(d, 1e-5) / image_size. Weights are the softmax of
 * a group's logits over all cameras, scales and points, times pair_scale. */
MXD_API int mxd_deformable_aggregation_with_logits(const mxd_tensor *feature_maps, const mxd_tensor *spatial_shape,
                                                   const mxd_tensor *scale_start_index, const mxd_tensor *key_points,
                                                   const mxd_tensor *projection, const mxd_tensor *logits,
                                                   const mxd_tensor *image_size, const mxd_tensor *pair_scale,
                                                   const mxd_tensor *output, int num_threads);
MXD_API int mxd_deformable_aggregation_with_logits_backward(
    const mxd_tensor *grad_output, const mxd_tensor *feature_maps, const mxd_tensor *spatial_shape,
    const mxd_tensor *scale_start_index, const mxd_tensor *key_points, const mxd_tensor *projection, const mxd_tensor *logits,
    const mxd_tensor *image_size, const mxd_tensor *pair_scale, const mxd_tensor *grad_feature_maps,
    const mxd_tensor *grad_key_points, const mxd_tensor *grad_projection, const mxd_tensor *grad_logits, int num_threads);

/* Shapes are as in mxd_multi_scale_deformable_attn. sampling_locations are pixels, of a floating or integer dtype. */
MXD_API int mxd_geometric_kernel_attention(const mxd_tensor *value, const mxd_tensor *spatial_shapes,
                                           const mxd_tensor *level_start_index, const mxd_tensor *sampling_locations,
                                           const mxd_tensor *attention_weights, const mxd_tensor *output, int num_threads);
MXD_API int mxd_geometric_kernel_attention_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                                    const mxd_tensor *spatial_shapes, const mxd_tensor *level_start_index,
                                                    const mxd_tensor *sampling_locations, const mxd_tensor *attention_weights,
                                                    const mxd_tensor *grad_value, const mxd_tensor *grad_attention_weights,
                                                    int num_threads);

/* mxd_geometric_kernel_attention, with pixels and weights computed from the outputs of a model's linear layers:
 * reference_points [bs, num_queries, num_heads, 2] normalised; window [num_points, 2] integer pixels (x, y);
 * attention_logits have the shape of attention_weights. Weights are the softmax of a head's logits. Pixel =
 * reference * (W, H) + window, rounded half to even. */
MXD_API int mxd_geometric_kernel_attention_with_logits(const mxd_tensor *value, const mxd_tensor *spatial_shapes,
                                                       const mxd_tensor *level_start_index, const mxd_tensor *reference_points,
                                                       const mxd_tensor *window, const mxd_tensor *attention_logits,
                                                       const mxd_tensor *output, int num_threads);
MXD_API int mxd_geometric_kernel_attention_with_logits_backward(
    const mxd_tensor *grad_output, const mxd_tensor *value, const mxd_tensor *spatial_shapes,
    const mxd_tensor *level_start_index, const mxd_tensor *reference_points, const mxd_tensor *window,
    const mxd_tensor *attention_logits, const mxd_tensor *grad_value, const mxd_tensor *grad_attention_logits, int num_threads);

/* Lifting by depth: output[ranks_bev[i]] += depth[ranks_depth[i]] * feat[ranks_feat[i]], where ranks_bev numbers the
 * cells [bs, d, h, w]. feat [num_feat, c]; depth [num_depth]; ranks [n]; output [bs, c, d, h, w]. All ranks are checked
 * before anything is written. */
MXD_API int mxd_bev_pool_v3(const mxd_tensor *feat, const mxd_tensor *depth, const mxd_tensor *ranks_feat,
                            const mxd_tensor *ranks_depth, const mxd_tensor *ranks_bev, const mxd_tensor *output,
                            int num_threads);
MXD_API int mxd_bev_pool_v3_backward(const mxd_tensor *grad_output, const mxd_tensor *feat, const mxd_tensor *depth,
                                     const mxd_tensor *ranks_feat, const mxd_tensor *ranks_depth, const mxd_tensor *ranks_bev,
                                     const mxd_tensor *grad_feat, const mxd_tensor *grad_depth, int num_threads);

/* Runs a function by its name without "mxd_", such as "multi_scale_deformable_attn_backward". tensors: the function's
 * `count` tensors, in order. A tensor that is not given or not wanted has the dtype MXD_NOT_GIVEN. options: the
 * function's numbers between its tensors and num_threads, such as reference_axis; NULL means that all are 0. mxd_run uses
 * fewer than num_threads threads if more would not make the call faster. The C function of this name always requests
 * num_threads threads. */
MXD_API int mxd_run(const char *name, const mxd_tensor *tensors, int count, const int64_t *options, int num_threads);

/* Returns the error sentence of the last call on this thread that failed: "value must have shape (bs=2, num_keys,
 * num_heads=8, embed_dims); got (2, 8, 900, 32)". Returns "" before the first failure. The text is valid until the next
 * failure. */
MXD_API const char *mxd_last_error(void);

/* Writes the plan of a call to `text`: a line "name: decision" for each decision, cut after size - 1 characters. Computes
 * nothing, and reads only the index tables. name: as in mxd_run. arguments: pointers to the function's tensors, in order.
 * num_threads: the number of threads; -n: as many as mxd_run would use of n threads. Returns the status of
 * the function's checks, or MXD_BAD_NAME. */
MXD_API int mxd_describe_plan(const char *name, const mxd_tensor *const *arguments, int num_threads, char *text, int64_t size);

/* Returns the version of the package for which the library was built, such as "0.4.0". */
MXD_API const char *mxd_version(void);
/* Returns the instruction set in use: "baseline", "avx2" or "avx512". The first call chooses the best that this machine
 * has. */
MXD_API const char *mxd_isa(void);
/* Sets the instruction set of the process, for tests. Returns 0, or -1 if this library or machine does not have it. */
MXD_API int mxd_use_isa(const char *name);
/* Returns who owns the threads of a call with num_threads > 1. "threads of libgomp.so.1" names the file of the process's
 * OpenMP runtime, which torch's operators use, too. "threads of its own" means the library's pool, which serves processes
 * without such a runtime and forked children. Starts no thread. The text is always valid. */
MXD_API const char *mxd_threads(void);
/* 1: all calls of the process use the library's own threads. 0: they use the OpenMP runtime if the process has one. Needed
 * by a child that was forked before it loaded the library, and by tests. */
MXD_API void mxd_use_own_threads(int own);

/* Sets, for the whole process, the least work for which mxd_run uses one more thread, in elements of rows. 0 restores the
 * default. For tests. */
MXD_API void mxd_set_work_of_a_thread(int64_t elements);

#ifdef __cplusplus
}
#endif
#endif
