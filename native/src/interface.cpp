// The C interface: checks everything memory safety needs and hands the call to the kernels of the best instruction set
// this machine has.
#include "interface.h"

#include <atomic>
#include <cstring>
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
    bool gather_floor(const Call &);                                                                                   \
    }
#define MXD_KERNELS(isa)                                                                                               \
    {isa::multi_scale_deformable_attn,                                                                                 \
     isa::deformable_aggregation,                                                                                      \
     isa::geometric_kernel_attention,                                                                                  \
     isa::multi_scale_deformable_attn_backward,                                                                        \
     isa::deformable_aggregation_backward,                                                                             \
     isa::geometric_kernel_attention_backward,                                                                         \
     isa::gather_floor}

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
    bool (*kernels[7])(const Call &); // forward by Operator, then backward, then the gather floor
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

int run(Operator op, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts) {
    Layout layout;
    const int status = layout.prepare(call, op, backward, shapes, starts);
    if (status != MXD_OK) return status;
    return chosen_isa().load()->kernels[op + 3 * backward](call) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

bool floating(const mxd_tensor &t) {
    return t.dtype == MXD_FLOAT32 || t.dtype == MXD_FLOAT64 || t.dtype == MXD_FLOAT16 || t.dtype == MXD_BFLOAT16;
}
bool integer(const mxd_tensor &t) { return t.dtype == MXD_INT32 || t.dtype == MXD_INT64; }

// The forward kernels write rows of value's dtype; a gradient of the output is read as whatever it is.
bool output_dtype(bool backward, const Call &call) {
    return backward ? floating(call.output) : call.output.dtype == call.value.dtype;
}

bool has_shape(const mxd_tensor &t, std::initializer_list<int64_t> shape) {
    int axis = 0;
    for (int64_t size : shape)
        if (t.shape[axis++] != size || size < 0) return false;
    return true;
}

} // namespace

int attention(bool geometric, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts) {
    const int64_t *v = call.value.shape, *l = call.locations.shape;
    const int64_t bs = v[0], keys = v[1], heads = v[2], channels = v[3], queries = l[1], levels = starts.shape[0],
                  points = l[4];
    if (!has_shape(call.value, {bs, keys, heads, channels}) || keys >= INT32_MAX || !has_shape(shapes, {levels, 2}) ||
        !has_shape(starts, {levels}) || !has_shape(call.locations, {bs, queries, heads, levels, points, 2}) ||
        !has_shape(call.weights, {bs, queries, heads, levels, points}) ||
        !has_shape(call.output, {bs, queries, heads, channels}))
        return MXD_BAD_SHAPE;
    if (!floating(call.value) || !floating(call.weights) || !output_dtype(backward, call) || !integer(shapes) ||
        !integer(starts) || !(floating(call.locations) || (geometric && integer(call.locations))))
        return MXD_BAD_DTYPE;
    if (call.grad_value.data && !(has_shape(call.grad_value, {bs, keys, heads, channels}) && floating(call.grad_value)))
        return MXD_BAD_SHAPE;
    if (call.grad_locations.data &&
        !(has_shape(call.grad_locations, {bs, queries, heads, levels, points, 2}) && floating(call.grad_locations)))
        return MXD_BAD_SHAPE;
    if (call.grad_weights.data &&
        !(has_shape(call.grad_weights, {bs, queries, heads, levels, points}) && floating(call.grad_weights)))
        return MXD_BAD_SHAPE;
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
        !has_shape(call.output, {bs, anchors, channels}))
        return MXD_BAD_SHAPE;
    if (!floating(call.value) || !floating(call.weights) || !output_dtype(backward, call) || !integer(shapes) ||
        !integer(starts) || !floating(call.locations))
        return MXD_BAD_DTYPE;
    if (call.grad_value.data && !(has_shape(call.grad_value, {bs, rows, channels}) && floating(call.grad_value)))
        return MXD_BAD_SHAPE;
    if (call.grad_locations.data &&
        !(has_shape(call.grad_locations, {bs, anchors, points, cams, 2}) && floating(call.grad_locations)))
        return MXD_BAD_SHAPE;
    if (call.grad_weights.data &&
        !(has_shape(call.grad_weights, {bs, anchors, points, cams, scales, groups}) && floating(call.grad_weights)))
        return MXD_BAD_SHAPE;
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

int mxd_gather_floor(const mxd_tensor *value, const mxd_tensor *rows, const mxd_tensor *output,
                     const mxd_tensor *grad_value, int num_threads) {
    mxd::Call call = call_of(value, rows, value, output, num_threads);
    want(call.grad_value, grad_value);
    if (rows->dtype != MXD_INT32 || rows->shape[3] % 4 != 0) return MXD_BAD_SHAPE;
    return mxd::chosen_isa().load()->kernels[6](call) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

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
