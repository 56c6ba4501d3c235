// The C interface: checks everything memory safety needs and hands the call to the kernels of the best instruction set
// this machine has.
#include "interface.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <initializer_list>

#ifdef MXD_HAVE_AVX2
#include <cpuid.h>
#endif

#include "layout.h"

namespace mxd {

#define MXD_DECLARE(isa)                                                                                               \
    namespace isa {                                                                                                    \
    bool multi_scale_deformable_attn(const Call &);                                                                    \
    bool multi_scale_deformable_attn_backward(const Call &);                                                           \
    bool deformable_aggregation(const Call &);                                                                         \
    bool deformable_aggregation_backward(const Call &);                                                                \
    bool geometric_kernel_attention(const Call &);                                                                     \
    bool geometric_kernel_attention_backward(const Call &);                                                            \
    }
#define MXD_KERNELS(isa)                                                                                               \
    {isa::multi_scale_deformable_attn,     isa::deformable_aggregation,                                                \
     isa::geometric_kernel_attention,      isa::multi_scale_deformable_attn_backward,                                  \
     isa::deformable_aggregation_backward, isa::geometric_kernel_attention_backward}

MXD_DECLARE(baseline)
#ifdef MXD_HAVE_AVX2
MXD_DECLARE(avx2)
#endif
#ifdef MXD_HAVE_AVX512
MXD_DECLARE(avx512)
#endif

namespace {

struct Isa {
    const char *name;
    bool (*supported)();
    bool (*kernels[6])(const Call &); // forward by Operator, then backward
};

#ifdef MXD_HAVE_AVX2
// Clang 14's __builtin_cpu_supports does not know this one.
bool has_f16c() {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Best last.
const Isa ISAS[] = {
    {"baseline", [] { return true; }, MXD_KERNELS(baseline)},
#ifdef MXD_HAVE_AVX2
    {"avx2",
     [] {
         __builtin_cpu_init();
         return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
     },
     MXD_KERNELS(avx2)},
#endif
#ifdef MXD_HAVE_AVX512
    {"avx512",
     [] {
         __builtin_cpu_init();
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("fma") && has_f16c();
     },
     MXD_KERNELS(avx512)},
#endif
};

const Isa *best_isa() {
    const Isa *best = &ISAS[0];
    for (const Isa &isa : ISAS)
        if (isa.supported()) best = &isa;
    return best;
}

std::atomic<const Isa *> &chosen_isa() {
    static std::atomic<const Isa *> isa(best_isa());
    return isa;
}

bool empty(const mxd_tensor &t, int axes) { return std::count(t.shape, t.shape + axes, 0) > 0; }

// How many axes value, locations and weights have; which axis of the latter two are points, and where a query's begin.
struct Axes {
    int value, locations, weights, points, query;
};

// Whether nothing is to be written. Inputs without memory of their own may go on for more queries than anyone can wait
// for, so no kernel may go through them for nothing.
bool nothing_to_do(bool backward, const Call &call, const Axes &axes) {
    if (!backward) return empty(call.output, axes.value);
    const auto nothing = [](const mxd_tensor &t, int n) { return !t.data || empty(t, n); };
    return nothing(call.grad_value, axes.value) && nothing(call.grad_locations, axes.locations) &&
           nothing(call.grad_weights, axes.weights);
}

// Backward without samples: value's gradient is zero whatever the number of queries, so that there need be none.
void forget_queries(Call &call, const Axes &axes) {
    call.output.shape[1] = 0;
    for (mxd_tensor *t : {&call.locations, &call.weights}) t->shape[1] = t->shape[axes.points] = 0;
}

// Kernels have scratch memory for all that a query reads, some 300 bytes a sample.
constexpr int64_t MOST_SAMPLES = int64_t(1) << 32;

bool query_is_too_large(const mxd_tensor &t, int axes, int first) {
    if (empty(t, axes)) return false;
    int64_t samples = 1;
    for (int a = first; a < axes; ++a) samples *= t.shape[a];
    return samples > MOST_SAMPLES;
}

int checked_run(Operator op, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts) {
    const Axes axes = op == AGGREGATION ? Axes{3, 5, 6, 2, 2} : Axes{4, 6, 5, 4, 3};
    if (backward && empty(call.weights, axes.weights) &&
        (!call.grad_locations.data || empty(call.grad_locations, axes.locations)))
        forget_queries(call, axes);
    if (query_is_too_large(call.locations, axes.locations, axes.query) ||
        query_is_too_large(call.weights, axes.weights, axes.query))
        return MXD_OUT_OF_MEMORY;
    Layout layout;
    const int status = layout.prepare(call, op, backward, shapes, starts);
    if (status != MXD_OK || nothing_to_do(backward, call, axes)) return status;
    return chosen_isa().load()->kernels[op + 3 * backward](call) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

int run(Operator op, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts) {
    try {
        return checked_run(op, backward, call, shapes, starts);
    } catch (const std::exception &) { // a list of levels that is too long
        return MXD_OUT_OF_MEMORY;
    }
}

bool floating(const mxd_tensor &t) {
    return t.dtype == MXD_FLOAT32 || t.dtype == MXD_FLOAT64 || t.dtype == MXD_FLOAT16 || t.dtype == MXD_BFLOAT16;
}
bool integer(const mxd_tensor &t) { return t.dtype == MXD_INT32 || t.dtype == MXD_INT64; }

// The forward kernels write rows of value's dtype; a gradient of the output is read as whatever it is.
bool output_dtype(bool backward, const Call &call) {
    return backward ? floating(call.output) : call.output.dtype == call.value.dtype;
}

// More elements than any memory has, with room to spare for bytes and for sums of offsets.
constexpr int64_t TOO_MANY = int64_t(1) << 48;

bool has_shape(const mxd_tensor &t, std::initializer_list<int64_t> shape) {
    int axis = 0;
    for (int64_t size : shape)
        if (t.shape[axis++] != size || size < 0) return false;
    if (empty(t, axis)) return true;
    int64_t elements = 1;
    for (int64_t size : shape)
        if (__builtin_mul_overflow(elements, size, &elements) || elements >= TOO_MANY) return false;
    return true;
}

// A gradient that is not wanted, or one of this shape.
bool fits(const mxd_tensor &gradient, std::initializer_list<int64_t> shape) {
    return !gradient.data || has_shape(gradient, shape);
}
bool gradients_floating(const Call &call) {
    const auto fine = [](const mxd_tensor &gradient) { return !gradient.data || floating(gradient); };
    return fine(call.grad_value) && fine(call.grad_locations) && fine(call.grad_weights);
}

} // namespace

int attention(bool geometric, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts) {
    const int64_t *v = call.value.shape, *l = call.locations.shape;
    const int64_t bs = v[0], keys = v[1], heads = v[2], channels = v[3], queries = l[1], levels = starts.shape[0],
                  points = l[4];
    if (!has_shape(call.value, {bs, keys, heads, channels}) || keys >= INT32_MAX || !has_shape(shapes, {levels, 2}) ||
        !has_shape(starts, {levels}) || !has_shape(call.locations, {bs, queries, heads, levels, points, 2}) ||
        !has_shape(call.weights, {bs, queries, heads, levels, points}) ||
        !has_shape(call.output, {bs, queries, heads, channels}) ||
        !fits(call.grad_value, {bs, keys, heads, channels}) ||
        !fits(call.grad_locations, {bs, queries, heads, levels, points, 2}) ||
        !fits(call.grad_weights, {bs, queries, heads, levels, points}))
        return MXD_BAD_SHAPE;
    if (!floating(call.value) || !floating(call.weights) || !output_dtype(backward, call) || !integer(shapes) ||
        !integer(starts) || !(floating(call.locations) || (geometric && integer(call.locations))) ||
        !gradients_floating(call))
        return MXD_BAD_DTYPE;
    return run(geometric ? GEOMETRIC : MULTI_SCALE, backward, call, shapes, starts);
}

int aggregation(bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts) {
    const int64_t *v = call.value.shape, *l = call.locations.shape;
    const int64_t bs = v[0], rows = v[1], channels = v[2], anchors = l[1], points = l[2], cams = l[3],
                  scales = starts.shape[1], groups = call.weights.shape[5];
    if (!has_shape(call.value, {bs, rows, channels}) || rows >= INT32_MAX || groups < 0 ||
        (groups == 0 ? channels != 0 : channels % groups != 0) || !has_shape(shapes, {cams, scales, 2}) ||
        !has_shape(starts, {cams, scales}) || !has_shape(call.locations, {bs, anchors, points, cams, 2}) ||
        !has_shape(call.weights, {bs, anchors, points, cams, scales, groups}) ||
        !has_shape(call.output, {bs, anchors, channels}) || !fits(call.grad_value, {bs, rows, channels}) ||
        !fits(call.grad_locations, {bs, anchors, points, cams, 2}) ||
        !fits(call.grad_weights, {bs, anchors, points, cams, scales, groups}))
        return MXD_BAD_SHAPE;
    if (!floating(call.value) || !floating(call.weights) || !output_dtype(backward, call) || !integer(shapes) ||
        !integer(starts) || !floating(call.locations) || !gradients_floating(call))
        return MXD_BAD_DTYPE;
    return run(AGGREGATION, backward, call, shapes, starts);
}

} // namespace mxd

namespace {

mxd::Call call_of(const mxd_tensor *value, const mxd_tensor *locations, const mxd_tensor *weights,
                  const mxd_tensor *output, int num_threads) {
    mxd::Call call{};
    call.value = *value;
    call.locations = *locations;
    call.weights = *weights;
    call.output = *output;
    call.num_threads = num_threads;
    return call;
}

void want(mxd_tensor &slot, const mxd_tensor *tensor) {
    if (tensor) slot = *tensor;
}

} // namespace

extern "C" {

int mxd_multi_scale_deformable_attn(const mxd_tensor *value, const mxd_tensor *shapes, const mxd_tensor *starts,
                                    const mxd_tensor *locations, const mxd_tensor *weights, const mxd_tensor *output,
                                    int num_threads) {
    mxd::Call call = call_of(value, locations, weights, output, num_threads);
    return mxd::attention(false, false, call, *shapes, *starts);
}

int mxd_multi_scale_deformable_attn_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                             const mxd_tensor *shapes, const mxd_tensor *starts,
                                             const mxd_tensor *locations, const mxd_tensor *weights,
                                             const mxd_tensor *grad_value, const mxd_tensor *grad_locations,
                                             const mxd_tensor *grad_weights, int num_threads) {
    mxd::Call call = call_of(value, locations, weights, grad_output, num_threads);
    want(call.grad_value, grad_value);
    want(call.grad_locations, grad_locations);
    want(call.grad_weights, grad_weights);
    return mxd::attention(false, true, call, *shapes, *starts);
}

int mxd_deformable_aggregation(const mxd_tensor *features, const mxd_tensor *shapes, const mxd_tensor *starts,
                               const mxd_tensor *locations, const mxd_tensor *weights, const mxd_tensor *output,
                               int num_threads) {
    mxd::Call call = call_of(features, locations, weights, output, num_threads);
    return mxd::aggregation(false, call, *shapes, *starts);
}

int mxd_deformable_aggregation_backward(const mxd_tensor *grad_output, const mxd_tensor *features,
                                        const mxd_tensor *shapes, const mxd_tensor *starts, const mxd_tensor *locations,
                                        const mxd_tensor *weights, const mxd_tensor *grad_features,
                                        const mxd_tensor *grad_locations, const mxd_tensor *grad_weights,
                                        int num_threads) {
    mxd::Call call = call_of(features, locations, weights, grad_output, num_threads);
    want(call.grad_value, grad_features);
    want(call.grad_locations, grad_locations);
    want(call.grad_weights, grad_weights);
    return mxd::aggregation(true, call, *shapes, *starts);
}

int mxd_geometric_kernel_attention(const mxd_tensor *value, const mxd_tensor *shapes, const mxd_tensor *starts,
                                   const mxd_tensor *locations, const mxd_tensor *weights, const mxd_tensor *output,
                                   int num_threads) {
    mxd::Call call = call_of(value, locations, weights, output, num_threads);
    return mxd::attention(true, false, call, *shapes, *starts);
}

int mxd_geometric_kernel_attention_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                            const mxd_tensor *shapes, const mxd_tensor *starts,
                                            const mxd_tensor *locations, const mxd_tensor *weights,
                                            const mxd_tensor *grad_value, const mxd_tensor *grad_weights,
                                            int num_threads) {
    mxd::Call call = call_of(value, locations, weights, grad_output, num_threads);
    want(call.grad_value, grad_value);
    want(call.grad_weights, grad_weights);
    return mxd::attention(true, true, call, *shapes, *starts);
}

const char *mxd_version(void) { return MXD_VERSION; }

const char *mxd_isa(void) { return mxd::chosen_isa().load()->name; }

int mxd_use_isa(const char *name) {
    for (const mxd::Isa &isa : mxd::ISAS)
        if (std::strcmp(isa.name, name) == 0 && isa.supported()) {
            mxd::chosen_isa() = &isa;
            return 0;
        }
    return -1;
}

int mxd_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
}
