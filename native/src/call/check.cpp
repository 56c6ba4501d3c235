#include "call/check.h"

#include <initializer_list>

#include "call/axes.h"

namespace mxd {
namespace {

// More elements than any memory has, with room to spare for bytes and for sums of offsets.
constexpr int64_t TOO_MANY = int64_t(1) << 48;

bool has_shape(const mxd_tensor &t, std::initializer_list<int64_t> shape) {
    int axis = 0;
    for (int64_t size : shape)
        if (t.shape[axis++] != size || size < 0) return false;
    if (is_empty(t, axis)) return true;
    int64_t elements = 1;
    for (int64_t size : shape)
        if (__builtin_mul_overflow(elements, size, &elements) || elements >= TOO_MANY) return false;
    return true;
}

bool is_floating(const mxd_tensor &t) {
    return t.dtype == MXD_FLOAT32 || t.dtype == MXD_FLOAT64 || t.dtype == MXD_FLOAT16 || t.dtype == MXD_BFLOAT16;
}
bool is_integer(const mxd_tensor &t) { return t.dtype == MXD_INT32 || t.dtype == MXD_INT64; }

// Boxes have a width and a height, too.
bool reference_fits(const Call &call) {
    const int64_t *r = call.reference.shape, *l = call.weights.shape, levels = l[3], points = l[4];
    const bool serves = call.reference_by_point ? r[2] > 0 && points % r[2] == 0 : r[2] == levels || r[2] == 1;
    return has_shape(call.reference, {l[0], l[1], r[2], r[3] == 4 ? 4 : 2}) && serves;
}

bool attention_shapes_agree(const Call &call) {
    const int64_t *v = call.value.shape, *w = call.weights.shape;
    const int64_t bs = v[0], keys = v[1], heads = v[2], channels = v[3], queries = w[1], levels = call.starts.shape[0],
                  points = w[4];
    const bool located = call.op == GEOMETRIC && call.with_logits
                             ? has_shape(call.reference, {bs, queries, heads, 2}) && has_shape(call.window, {points, 2})
                             : has_shape(call.locations, {bs, queries, heads, levels, points, 2}) &&
                                   (!call.with_logits || reference_fits(call));
    return has_shape(call.value, {bs, keys, heads, channels}) && has_shape(call.shapes, {levels, 2}) &&
           has_shape(call.starts, {levels}) && located &&
           has_shape(call.weights, {bs, queries, heads, levels, points}) &&
           has_shape(call.backward ? call.grad_output : call.output, {bs, queries, heads, channels});
}

bool cameras_agree(const Call &call) {
    const int64_t *l = call.weights.shape;
    const int64_t bs = l[0], anchors = l[1], cams = l[2], scales = l[3], points = l[4];
    const mxd_tensor &size = call.image_size, &scale = call.pair_scale;
    return has_shape(call.locations, {bs, anchors, points, 3}) && has_shape(call.projection, {bs, cams, 4, 4}) &&
           has_shape(call.weights, {bs, anchors, cams, scales, points, l[5]}) &&
           (!size.data || has_shape(size, {bs, cams, 2})) &&
           (!scale.data || has_shape(scale, {bs, anchors, cams, points}));
}

bool aggregation_shapes_agree(const Call &call) {
    const int64_t *v = call.value.shape, *w = call.weights.shape, *s = call.starts.shape;
    const int64_t bs = v[0], channels = v[2], anchors = w[1], cams = s[0], scales = s[1], groups = w[5],
                  points = w[call.with_logits ? 4 : 2];
    const bool groups_fit = groups > 0 ? channels % groups == 0 : groups == 0 && channels == 0;
    const bool located = call.with_logits ? w[0] == bs && w[2] == cams && w[3] == scales && cameras_agree(call)
                                          : has_shape(call.locations, {bs, anchors, points, cams, 2}) &&
                                                has_shape(call.weights, {bs, anchors, points, cams, scales, groups});
    return has_shape(call.value, {bs, v[1], channels}) && groups_fit && has_shape(call.shapes, {cams, scales, 2}) &&
           has_shape(call.starts, {cams, scales}) && located &&
           has_shape(call.backward ? call.grad_output : call.output, {bs, anchors, channels});
}

// A gradient that is wanted has the shape of its input.
bool gradient_fits(const mxd_tensor &gradient, const mxd_tensor &input, int axes) {
    return !gradient.data || std::equal(input.shape, input.shape + axes, gradient.shape);
}
bool gradients_fit(const Call &call) {
    const Axes axes = axes_of(call);
    return gradient_fits(call.grad_value, call.value, axes.value) &&
           gradient_fits(call.grad_locations, call.locations, axes.locations) &&
           gradient_fits(call.grad_weights, call.weights, axes.weights) &&
           gradient_fits(call.grad_reference, call.reference, axes.reference) &&
           gradient_fits(call.grad_projection, call.projection, axes.projection);
}

bool dtypes_fit(const Call &call) {
    for (const mxd_tensor *t : {&call.grad_value, &call.grad_locations, &call.grad_weights, &call.grad_reference,
                                &call.grad_projection, &call.image_size, &call.pair_scale})
        if (t->data && !is_floating(*t)) return false;
    // The forward kernels write rows of value's dtype; a gradient of the output is read as whatever it is.
    if (call.backward ? !is_floating(call.grad_output) : call.output.dtype != call.value.dtype) return false;
    if (call.with_logits && !is_floating(call.op == AGGREGATION ? call.projection : call.reference)) return false;
    if (call.with_logits && call.op == GEOMETRIC && !is_integer(call.window)) return false;
    return is_floating(call.value) && is_floating(call.weights) && is_integer(call.shapes) && is_integer(call.starts) &&
           (is_floating(call.locations) || (call.op == GEOMETRIC && is_integer(call.locations)));
}

// Kernels have scratch memory for all that a query reads, some 300 bytes a sample.
constexpr int64_t MOST_SAMPLES = int64_t(1) << 32;

bool too_many_samples(const mxd_tensor &t, int axes, int first) {
    if (is_empty(t, axes)) return false;
    int64_t samples = 1;
    for (int a = first; a < axes; ++a) samples *= t.shape[a];
    return samples > MOST_SAMPLES;
}

// With logits, no tensor has the pairs (point, camera) of an anchor where there is no scale.
bool too_many_pairs(const Call &call) {
    int64_t pairs;
    return call.op == AGGREGATION && call.with_logits &&
           (__builtin_mul_overflow(call.weights.shape[2], call.weights.shape[4], &pairs) || pairs > MOST_SAMPLES);
}

} // namespace

int check(const Call &call) {
    const bool agree = call.op == AGGREGATION ? aggregation_shapes_agree(call) : attention_shapes_agree(call);
    if (!agree || call.value.shape[1] >= INT32_MAX || !gradients_fit(call)) return MXD_BAD_SHAPE;
    return dtypes_fit(call) ? MXD_OK : MXD_BAD_DTYPE;
}

bool query_is_too_large(const Call &call) {
    const Axes axes = axes_of(call);
    return too_many_samples(call.locations, axes.locations, axes.per_query) ||
           too_many_samples(call.weights, axes.weights, axes.per_query) || too_many_pairs(call);
}

} // namespace mxd
