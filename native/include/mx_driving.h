/* The deformable sampling operators of mx_driving on the host, as plain C.
 *
 * Tensors are described, never owned: `data` points at element [0, 0, ...] and strides count elements, so any view of
 * any buffer will do. Every function checks what memory safety needs before it touches anything, returns MXD_OK or says
 * what is wrong, and writes nothing in the second case. Functions may be called from several threads at once.
 *
 * A tensor that is written, an output or a gradient, has memory of its own: strides that step over the elements before
 * (those of any slice or permutation of a contiguous tensor do, expanded ones do not), and no element where another
 * tensor of the call has one. Inputs may be expanded, and may share memory with each other.
 *
 * An output has value's dtype. The output of 16-bit value may be float32; it is not rounded to 16 bits then.
 */
#ifndef MX_DRIVING_H
#define MX_DRIVING_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32) && defined(mx_driving_EXPORTS) /* while the library itself is built */
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
    MXD_BAD_SHAPE = 1, /* shapes do not agree, a size is negative, num_keys >= 2^31 - 1, or a tensor of 2^48 elements */
    MXD_BAD_DTYPE = 2, /* a dtype that the argument cannot have */
    MXD_BAD_LEVEL = 3, /* a level with H, W <= 0, a negative start, or one that does not fit in num_keys */
    MXD_OUT_OF_MEMORY = 4,
    MXD_BAD_NAME = 5,  /* mxd_run, mxd_describe_plan: no function has this name */
    MXD_BAD_RANK = 7,  /* a rank that is negative, or past the end of its table */
    MXD_BAD_MEMORY = 6 /* a NULL where a tensor, memory for its elements or for text must be; addresses beyond 64 bits; or
                        * memory that is written and not the tensor's own */
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
 * embed_dims]. Gradients have the shape of their inputs and are overwritten; a null pointer, to the tensor or in it,
 * means: not wanted. */
MXD_API int mxd_multi_scale_deformable_attn(const mxd_tensor *value, const mxd_tensor *spatial_shapes,
                                            const mxd_tensor *level_start_index, const mxd_tensor *sampling_locations,
                                            const mxd_tensor *attention_weights, const mxd_tensor *output, int num_threads);
MXD_API int mxd_multi_scale_deformable_attn_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                                     const mxd_tensor *spatial_shapes, const mxd_tensor *level_start_index,
                                                     const mxd_tensor *sampling_locations, const mxd_tensor *attention_weights,
                                                     const mxd_tensor *grad_value, const mxd_tensor *grad_sampling_locations,
                                                     const mxd_tensor *grad_attention_weights, int num_threads);

/* The same from where a model's linear layers end. sampling_offsets and attention_logits have the shapes of
 * sampling_locations and attention_weights; reference_points [bs, num_queries, R, 2] (x, y) of points, or
 * [bs, num_queries, R, 4] (x, y, w, h) of boxes. Points: location = reference + offset / (W, H); boxes: location =
 * (x, y) + offset * (w, h) / (2 * num_points). Weights are the softmax of a head's logits. reference_axis 0: sample
 * (level, point) belongs to reference point `level`, R = num_levels, or R = 1; 1: to `point % R`, where R divides
 * num_points. A gradient of reference points takes memory of num_heads times its own size. */
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

/* The same from where a model's linear layers end: key_points [bs, anchor, pts, 3]; projection [bs, cam, 4, 4], of
 * which the last row is not read; logits [bs, anchor, cam, scale, pts, group]; image_size [bs, cam, 2] (width, height),
 * or a null pointer if the projection gives 0..1; pair_scale [bs, anchor, cam, pts], or a null pointer. (u, v, d) =
 * projection (point, 1); location = (u, v) / max(d, 1e-5) / image_size. Weights are the softmax of a group's logits of
 * all cameras, scales and points, times pair_scale. */
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

/* Shapes as in mxd_multi_scale_deformable_attn; sampling_locations are pixels, floating or integer. */
MXD_API int mxd_geometric_kernel_attention(const mxd_tensor *value, const mxd_tensor *spatial_shapes,
                                           const mxd_tensor *level_start_index, const mxd_tensor *sampling_locations,
                                           const mxd_tensor *attention_weights, const mxd_tensor *output, int num_threads);
MXD_API int mxd_geometric_kernel_attention_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                                    const mxd_tensor *spatial_shapes, const mxd_tensor *level_start_index,
                                                    const mxd_tensor *sampling_locations, const mxd_tensor *attention_weights,
                                                    const mxd_tensor *grad_value, const mxd_tensor *grad_attention_weights,
                                                    int num_threads);

/* The same from where a model's linear layers end: reference_points [bs, num_queries, num_heads, 2] normalised; window
 * [num_points, 2] whole pixels (x, y), integer; attention_logits have the shape of attention_weights, which are their
 * softmax for each head. Pixel = reference * (W, H) + window, rounded, half to even. */
MXD_API int mxd_geometric_kernel_attention_with_logits(const mxd_tensor *value, const mxd_tensor *spatial_shapes,
                                                       const mxd_tensor *level_start_index, const mxd_tensor *reference_points,
                                                       const mxd_tensor *window, const mxd_tensor *attention_logits,
                                                       const mxd_tensor *output, int num_threads);
MXD_API int mxd_geometric_kernel_attention_with_logits_backward(
    const mxd_tensor *grad_output, const mxd_tensor *value, const mxd_tensor *spatial_shapes,
    const mxd_tensor *level_start_index, const mxd_tensor *reference_points, const mxd_tensor *window,
    const mxd_tensor *attention_logits, const mxd_tensor *grad_value, const mxd_tensor *grad_attention_logits, int num_threads);

/* Lifting by depth: output[ranks_bev[i]] += depth[ranks_depth[i]] * feat[ranks_feat[i]], where output's cells count d, h
 * and w inside a batch. feat [num_feat, c]; depth [num_depth]; ranks [n]; output [bs, c, d, h, w]. All ranks are looked
 * at before anything is written. */
MXD_API int mxd_bev_pool_v3(const mxd_tensor *feat, const mxd_tensor *depth, const mxd_tensor *ranks_feat,
                            const mxd_tensor *ranks_depth, const mxd_tensor *ranks_bev, const mxd_tensor *output,
                            int num_threads);
MXD_API int mxd_bev_pool_v3_backward(const mxd_tensor *grad_output, const mxd_tensor *feat, const mxd_tensor *depth,
                                     const mxd_tensor *ranks_feat, const mxd_tensor *ranks_depth, const mxd_tensor *ranks_bev,
                                     const mxd_tensor *grad_feat, const mxd_tensor *grad_depth, int num_threads);

/* Runs the function of this name, without "mxd_": "multi_scale_deformable_attn_backward". tensors: its tensors, in
 * order, `count` of them; one that is not given or not wanted has the dtype MXD_NOT_GIVEN. options: the function's
 * numbers between its tensors and num_threads, such as reference_axis, or NULL: each is 0. Unlike the function itself,
 * it uses as many threads as pay, num_threads at most. */
MXD_API int mxd_run(const char *name, const mxd_tensor *tensors, int count, const int64_t *options, int num_threads);

/* The sentence about the last call on this thread that was refused: "value must have shape (bs=2, num_keys,
 * num_heads=8, embed_dims); got (2, 8, 900, 32)". Empty before the first. It stays until the next one. */
MXD_API const char *mxd_last_error(void);

/* Writes to `text` how a function would do its work: a line "name: what" for each decision, at most size - 1
 * characters. Nothing is computed, and no data is read but the index tables. name: the function's, without "mxd_";
 * arguments: its tensors, in order. num_threads: as many; -n: as many of n as pay, as mxd_run uses. Returns the status
 * of the function's own checks, or MXD_BAD_NAME. */
MXD_API int mxd_describe_plan(const char *name, const mxd_tensor *const *arguments, int num_threads, char *text, int64_t size);

/* The version of the package that the library was built for, "0.3.0". */
MXD_API const char *mxd_version(void);
/* The instruction set in use: "baseline", "avx2" or "avx512". The best one this machine has is chosen at the first
 * call. */
MXD_API const char *mxd_isa(void);
/* Chooses another one (for tests); returns 0, or -1 when this library or machine does not have it, or for NULL. Process-wide.
 */
MXD_API int mxd_use_isa(const char *name);
/* Whose threads a call with num_threads > 1 runs on now: "threads of libgomp.so.1", the file of the OpenMP runtime that
 * the process has, which torch's operators use, too; or "threads of its own", where it has none and in a forked child.
 * Starts no thread. The text stays as it is. */
MXD_API const char *mxd_threads(void);
/* 1: from now on calls run on the library's own threads; 0: on what the process has. For a child that was forked before
 * it loaded the library, and for tests. Process-wide. */
MXD_API void mxd_use_own_threads(int own);

/* Elements of rows that a thread must have to do before mxd_run wakes another; 0: as many as pay. For tests.
 * Process-wide. */
MXD_API void mxd_set_work_of_a_thread(int64_t elements);

#ifdef __cplusplus
}
#endif
#endif
