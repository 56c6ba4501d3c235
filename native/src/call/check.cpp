// What memory safety needs of a call, and no more: the sentences are a binding's.
#include "call/check.h"

#include <algorithm>
#include <initializer_list>

#include "call/memory.h"
#include "call/tensor.h"

namespace mxd {
namespace {

// More elements than any memory has, with room to spare for bytes and for sums of offsets.
constexpr int64_t TOO_MANY = int64_t(1) << 48;

bool has_shape(const Tensor &t, std::initializer_list<int64_t> shape) {
    if (!std::equal(shape.begin(), shape.end(), t.shape) || std::min(shape) < 0) return false;
    if (is_empty(t)) return true;
    int64_t elements = 1;
    for (int64_t size : shape)
        if (__builtin_mul_overflow(elements, size, &elements) || elements >= TOO_MANY) return false;
    return true;
}

bool is_floating(const Tensor &t) {
    return t.dtype == MXD_FLOAT32 || t.dtype == MXD_FLOAT64 || t.dtype == MXD_FLOAT16 || t.dtype == MXD_BFLOAT16;
}
bool is_integer(const Tensor &t) { return t.dtype == MXD_INT32 || t.dtype == MXD_INT64; }

bool reference_fits(const Call &call) {
    const Sizes &n = call.sizes;
    const bool serves = call.reference_by_point ? n.references > 0 && n.points % n.references == 0
                                                : n.references == n.levels || n.references == 1;
    return serves && has_shape(call.reference, {n.batch, n.queries, n.references, n.coordinates == 4 ? 4 : 2});
}

bool attention_shapes_agree(const Call &call) {
    const Sizes &n = call.sizes;
    if (!has_shape(call.weights, {n.batch, n.queries, n.heads, n.levels, n.points})) return false;
    if (call.has_window)
        return has_shape(call.reference, {n.batch, n.queries, n.heads, 2}) && has_shape(call.window, {n.points, 2});
    return has_shape(call.locations, {n.batch, n.queries, n.heads, n.levels, n.points, 2}) &&
           (!call.with_logits || reference_fits(call));
}

bool cameras_agree(const Call &call) {
    const Sizes &n = call.sizes;
    const Tensor &size = call.image_size, &scale = call.pair_scale;
    return has_shape(call.locations, {n.batch, n.queries, n.points, 3}) &&
           has_shape(call.projection, {n.batch, n.cameras, 4, 4}) && (!size.data || has_shape(size, {n.batch, n.cameras, 2})) &&
           (!scale.data || has_shape(scale, {n.batch, n.queries, n.points, n.cameras}));
}

bool aggregation_shapes_agree(const Call &call) {
    const Sizes &n = call.sizes;
    const bool groups_fit = n.groups > 0 ? n.channels % n.groups == 0 : n.groups == 0 && n.channels == 0;
    const bool located =
        call.with_logits ? cameras_agree(call) : has_shape(call.locations, {n.batch, n.queries, n.points, n.cameras, 2});
    return groups_fit && located && has_shape(call.weights, {n.batch, n.queries, n.points, n.cameras, n.scales, n.groups});
}

bool shapes_agree(const Call &call) {
    const Sizes &n = call.sizes;
    return has_shape(call.value, {n.batch, n.keys, n.heads, n.channels}) && has_shape(call.shapes, {n.cameras, n.scales, 2}) &&
           has_shape(call.starts, {n.cameras, n.scales}) &&
           has_shape(call.backward ? call.grad_output : call.output, {n.batch, n.queries, n.heads, n.channels}) &&
           (call.op == AGGREGATION ? aggregation_shapes_agree(call) : attention_shapes_agree(call));
}

// A gradient that is wanted has the shape of its input.
bool gradient_fits(const Tensor &gradient, const Tensor &input) {
    return !gradient.data || std::equal(input.shape, input.shape + input.axes, gradient.shape);
}
bool gradients_fit(const Call &call) {
    return gradient_fits(call.grad_value, call.value) && gradient_fits(call.grad_locations, call.locations) &&
           gradient_fits(call.grad_weights, call.weights) && gradient_fits(call.grad_reference, call.reference) &&
           gradient_fits(call.grad_projection, call.projection);
}

bool dtypes_fit(const Call &call) {
    for (const Tensor *t : {&call.grad_value, &call.grad_locations, &call.grad_weights, &call.grad_reference,
                            &call.grad_projection, &call.image_size, &call.pair_scale})
        if (t->data && !is_floating(*t)) return false;
    // The forward kernels write rows of value's dtype; a gradient of the output is read as whatever it is.
    if (call.backward ? !is_floating(call.grad_output) : call.output.dtype != call.value.dtype) return false;
    if (call.with_logits && !is_floating(call.op == AGGREGATION ? call.projection : call.reference)) return false;
    if (call.has_window && !is_integer(call.window)) return false;
    return is_floating(call.value) && is_floating(call.weights) && is_integer(call.shapes) && is_integer(call.starts) &&
           (is_floating(call.locations) || (call.op == GEOMETRIC && is_integer(call.locations)));
}

// A tensor that is given has axes, and memory for its elements.
bool has_memory(const Tensor &t) { return t.axes == 0 || t.data || is_empty(t); }
bool is_there(const Tensor &t) { return t.axes > 0 && has_memory(t); }

bool pointers_fit(const Call &call) {
    for (const Tensor *t : {&call.value, &call.shapes, &call.starts, &call.weights})
        if (!is_there(*t)) return false;
    const bool has_references = call.with_logits && call.op != AGGREGATION;
    return is_there(call.has_window ? call.window : call.locations) && (!has_references || is_there(call.reference)) &&
           (!call.with_logits || call.op != AGGREGATION || is_there(call.projection)) && has_memory(call.image_size) &&
           has_memory(call.pair_scale) && is_there(call.backward ? call.grad_output : call.output);
}

// The tensors of a call that have elements, and where they lie.
struct Views {
    static constexpr int MOST = 16;
    View view[MOST];
    Extent extent[MOST];
    int count = 0;

    // False: memory has no such addresses.
    bool add(const Tensor &t) {
        if (!t.data) return true;
        view[count] = {t.data, is_integer(t) ? index_size(t.dtype) : floating_size(t.dtype), t.axes, t.shape, t.strides};
        return find_extent(view[count], extent[count]) && ++count;
    }
};

// What is written has memory of its own, one place for each element.
bool nothing_is_written_twice(const Call &call) {
    Views all;
    for (const Tensor *t : {&call.output, &call.grad_value, &call.grad_locations, &call.grad_weights, &call.grad_reference,
                            &call.grad_projection})
        if (!all.add(*t)) return false;
    const int written = all.count;
    for (const Tensor *t : {&call.value, &call.shapes, &call.starts, &call.locations, &call.weights, &call.reference,
                            &call.window, &call.projection, &call.image_size, &call.pair_scale, &call.grad_output})
        if (!all.add(*t)) return false;
    for (int i = 0; i < written; ++i) {
        if (all.extent[i].first > all.extent[i].last) continue; // no elements
        if (!has_distinct_elements(all.view[i])) return false;
        for (int j = i + 1; j < all.count; ++j)
            if (all.extent[i].meets(all.extent[j]) && !lie_apart(all.view[i], all.view[j])) return false;
    }
    return true;
}

// Kernels have scratch memory for all that a query reads, some 300 bytes a sample.
constexpr int64_t MOST_SAMPLES = int64_t(1) << 32;

bool too_many_samples(const Call &call, const Tensor &t) {
    if (is_empty(t)) return false;
    int64_t samples = 1;
    for (int a = call.op == AGGREGATION ? KEY_POINT : LEVEL; a < t.axes; ++a) samples *= t.shape[a];
    return samples > MOST_SAMPLES;
}

// With logits, no tensor has the pairs (point, camera) of an anchor where there is no scale.
bool too_many_pairs(const Call &call) {
    int64_t pairs;
    return call.op == AGGREGATION && call.with_logits &&
           (__builtin_mul_overflow(call.sizes.points, call.sizes.cameras, &pairs) || pairs > MOST_SAMPLES);
}

bool query_is_too_large(const Call &call) {
    return too_many_samples(call, call.locations) || too_many_samples(call, call.weights) || too_many_pairs(call);
}

// Backward without samples: value's gradient is zero for any number of queries, so the kernel is given no query.
void forget_queries_without_samples(Call &call) {
    if (!call.backward || !is_empty(call.weights)) return;
    for (const Tensor *wanted : {&call.grad_locations, &call.grad_reference})
        if (wanted->data && !is_empty(*wanted)) return;
    const int point = call.op == AGGREGATION ? KEY_POINT : POINT;
    for (Tensor *t : {&call.locations, &call.weights}) t->shape[QUERY] = t->shape[point] = 0;
    call.sizes.queries = call.sizes.points = 0;
}

} // namespace

int check(Call &call) {
    if (!pointers_fit(call)) return MXD_BAD_MEMORY;
    if (!shapes_agree(call) || call.sizes.keys >= INT32_MAX || !gradients_fit(call)) return MXD_BAD_SHAPE;
    if (!dtypes_fit(call)) return MXD_BAD_DTYPE;
    if (!nothing_is_written_twice(call)) return MXD_BAD_MEMORY;
    forget_queries_without_samples(call);
    return query_is_too_large(call) ? MXD_OUT_OF_MEMORY : MXD_OK;
}

} // namespace mxd
