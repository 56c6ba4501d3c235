// The C interface: checks everything memory safety needs, reads the levels, and hands the call to the kernels of the
// best instruction set this machine has.
#include "interface.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

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

enum Operator { MULTI_SCALE, AGGREGATION, GEOMETRIC };

struct Isa {
    const char *name;
    bool (*supported)();
    bool (*kernels[7])(const Call &); // forward by Operator, then backward, then the gather floor
};

// Best last.
const Isa ISAS[] = {
    {"baseline", [] { return true; }, MXD_KERNELS(baseline)},
#ifdef MXD_HAVE_AVX2
    {"avx2",
     [] {
         __builtin_cpu_init();
         return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
     },
     MXD_KERNELS(avx2)},
#endif
#ifdef MXD_HAVE_AVX512
    {"avx512",
     [] {
         __builtin_cpu_init();
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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

int run(Operator op, bool backward, const Call &call) {
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

int64_t floating_size(const mxd_tensor &t) { return t.dtype == MXD_FLOAT64 ? 8 : t.dtype == MXD_FLOAT32 ? 4 : 2; }

bool has_shape(const mxd_tensor &t, std::initializer_list<int64_t> shape) {
    int axis = 0;
    for (int64_t size : shape)
        if (t.shape[axis++] != size || size < 0) return false;
    return true;
}

bool empty(const mxd_tensor &t, int axes) {
    for (int a = 0; a < axes; ++a)
        if (t.shape[a] == 0) return true;
    return false;
}

// Levels from shapes [.., 2] and starts [..] of `axes` leading axes; false when one does not fit.
bool read_levels(const mxd_tensor &shapes, const mxd_tensor &starts, int axes, int64_t num_keys,
                 std::vector<Level> &levels) {
    const int64_t outer = axes == 2 ? starts.shape[0] : 1, inner = starts.shape[axes - 1];
    const int64_t *shape_strides = shapes.strides + axes - 1, start_stride = starts.strides[axes - 1];
    for (int64_t i = 0; i < outer; ++i)
        for (int64_t j = 0; j < inner; ++j) {
            const int64_t at = (axes == 2 ? i * shapes.strides[0] : 0) + j * shape_strides[0];
            const int64_t start = element(starts, (axes == 2 ? i * starts.strides[0] : 0) + j * start_stride);
            const int64_t height = element(shapes, at), width = element(shapes, at + shape_strides[1]);
            if (height <= 0 || width <= 0 || start < 0 || start > num_keys) return false;
            if (width > num_keys || height > (num_keys - start) / width) return false;
            levels.push_back({height, width, start});
        }
    return true;
}

// Where bands of rows begin. Every level's rows are cut into the same number of bands because every level is sampled
// equally often; `most_rows` bounds a band where it needs a buffer.
std::vector<int64_t> cut_bands(const std::vector<Level> &levels, int64_t num_keys, int64_t wanted, int64_t most_rows) {
    std::vector<int64_t> cuts{0, num_keys};
    if (wanted > 1 || most_rows < num_keys) {
        const int64_t per_level = levels.empty() ? 1 : (wanted + int64_t(levels.size()) - 1) / int64_t(levels.size());
        for (const Level &level : levels) {
            const int64_t rows = level.height * level.width;
            for (int64_t i = 0; i <= per_level; ++i) cuts.push_back(level.start + rows * i / per_level);
        }
        std::sort(cuts.begin(), cuts.end());
        const size_t known = cuts.size();
        for (size_t i = 0; i + 1 < known; ++i) {
            const int64_t rows = cuts[i + 1] - cuts[i], parts = (rows + most_rows - 1) / most_rows;
            for (int64_t p = 1; p < parts; ++p) cuts.push_back(cuts[i] + rows * p / parts);
        }
        std::sort(cuts.begin(), cuts.end());
    }
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    return cuts;
}

// A packed copy of a [.., channels] tensor of `axes` axes whose channels are not adjacent.
bool pack(mxd_tensor &t, int axes, std::unique_ptr<char[]> &memory) {
    if (!needs_packing(t, axes)) return true;
    memory.reset(new (std::nothrow) char[size_t(packed_bytes(t, axes))]);
    if (memory) pack_into(t, axes, memory.get());
    return bool(memory);
}

// Asks for huge pages under a large result that is about to be written. The heads one after the other touch the same
// small pages one after the other, which costs a fault for every 4 KB and misses the TLB. Only whole huge pages that
// lie inside the tensor, and only a hint.
void prefer_huge_pages(const mxd_tensor &t, int axes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    if (!t.data || empty(t, axes)) return;
    int64_t last = 0;
    for (int a = 0; a < axes; ++a) last += (t.shape[a] - 1) * t.strides[a];
    const int64_t size = floating_size(t);
    const uintptr_t data = reinterpret_cast<uintptr_t>(t.data);
    const uintptr_t begin = (data + PAGE - 1) / PAGE * PAGE, end = (data + uintptr_t((last + 1) * size)) / PAGE * PAGE;
    if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)t, (void)axes;
#endif
}

constexpr int64_t BUFFERED_BAND_BYTES = 192 * 1024; // two threads' buffers stay under 5 % of a 9 MB value

// Which levels of a head are worth a copy of their own: those read at least COPY_READS times a row, the smallest first,
// while all of them take at most COPY_SHARE of value's memory. Threads work on one head at a time then, so there must
// be enough queries for all. Returns the bytes; `offset` gets -1 for the others.
constexpr double COPY_SHARE = 0.049; // 5 % with all other scratch memory
constexpr int64_t COPY_READS = 8;
constexpr int64_t COPY_QUERIES = 512; // for each thread

int64_t choose_copies(const Call &call, const std::vector<Level> &levels, int64_t corners,
                      std::vector<int64_t> &offset) {
    const int64_t *shape = call.value.shape;
    const int64_t size = call.value.dtype == MXD_FLOAT64 ? 8 : call.value.dtype == MXD_FLOAT32 ? 4 : 2;
    const int64_t row = shape[3] * size, reads = call.locations.shape[1] * call.locations.shape[4] * corners;
    const double allowed = COPY_SHARE * double(shape[0] * shape[1]) * double(shape[2] * row);
    offset.assign(levels.size(), -1);
    if (call.value.strides[1] * size <= row) return 0; // rows lie side by side already
    if (call.locations.shape[1] < COPY_QUERIES * std::max(1, call.num_threads)) return 0;
    std::vector<size_t> order;
    for (size_t l = 0; l < levels.size(); ++l) order.push_back(l);
    const auto rows = [&](size_t l) { return levels[l].height * levels[l].width; };
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rows(a) < rows(b); });
    int64_t total = 0;
    for (size_t l : order) {
        const int64_t bytes = (rows(l) * row + 63) / 64 * 64;
        if (double(total + bytes) > allowed || reads < COPY_READS * rows(l)) break;
        offset[l] = total;
        total += bytes;
    }
    return total;
}

struct Geometry {
    int axes;            // leading axes of the two index tensors: 1 or 2
    int value_axes;      // 4: batch, keys, heads, channels; 3: batch, rows, channels
    int64_t work_splits; // items the backward has without bands: batch * heads, or batch
};

int call_kernel(Operator op, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts,
                const Geometry &geometry) {
    const int64_t num_keys = call.value.shape[1], channels = call.value.shape[geometry.value_axes - 1];
    std::vector<Level> levels;
    if (!read_levels(shapes, starts, geometry.axes, num_keys, levels)) return MXD_BAD_LEVEL;
    std::unique_ptr<char[]> packed;
    if (!pack(call.value, geometry.value_axes, packed)) return MXD_OUT_OF_MEMORY;
    call.levels = levels.data();
    call.num_levels = int64_t(levels.size());
    std::vector<int64_t> copy_offset;
    std::unique_ptr<char[]> copy;
    if (op != AGGREGATION) {
        const int64_t bytes = choose_copies(call, levels, op == GEOMETRIC ? 1 : 4, copy_offset);
        if (bytes > 0) copy.reset(new (std::nothrow) char[size_t(bytes) + 64]);
        const size_t misaligned = reinterpret_cast<uintptr_t>(copy.get()) % 64;
        call.copy = copy ? copy.get() + (64 - misaligned) : nullptr; // without memory for it: no copy
        call.copy_offset = copy_offset.data();
    }
    if (!backward) prefer_huge_pages(call.output, geometry.value_axes);
    if (backward) prefer_huge_pages(call.grad_locations, op == AGGREGATION ? 5 : 6);
    if (backward) prefer_huge_pages(call.grad_weights, op == AGGREGATION ? 6 : 5);
    std::vector<int64_t> bands;
    if (backward && call.grad_value.data) {
        prefer_huge_pages(call.grad_value, geometry.value_axes);
        const bool wide =
            call.value.dtype == MXD_FLOAT64 || call.locations.dtype == MXD_FLOAT64 || call.weights.dtype == MXD_FLOAT64;
        call.grad_value_in_place = call.grad_value.dtype == (wide ? MXD_FLOAT64 : MXD_FLOAT32) &&
                                   (channels <= 1 || call.grad_value.strides[geometry.value_axes - 1] == 1);
        const int64_t row_bytes = std::max<int64_t>(1, channels * (wide ? 8 : 4));
        const int64_t most_rows = call.grad_value_in_place ? std::max<int64_t>(1, num_keys)
                                                           : std::max<int64_t>(1, BUFFERED_BAND_BYTES / row_bytes);
        const int64_t splits = std::max<int64_t>(1, geometry.work_splits);
        // whole heads where they keep at least three quarters of the threads busy
        const int64_t threads = std::max(1, call.num_threads), rounds = (splits + threads - 1) / threads;
        const int64_t wanted = 4 * splits >= 3 * threads * rounds ? 1 : (2 * threads + splits - 1) / splits;
        bands = cut_bands(levels, num_keys, wanted, most_rows);
        call.band_starts = bands.data();
        call.num_bands = int64_t(bands.size()) - 1;
    }
    return run(op, backward, call);
}

} // namespace

int64_t element(const mxd_tensor &t, int64_t offset) {
    return t.dtype == MXD_INT32 ? static_cast<const int32_t *>(t.data)[offset]
                                : static_cast<const int64_t *>(t.data)[offset];
}

bool needs_packing(const mxd_tensor &t, int axes) {
    return t.shape[axes - 1] > 1 && t.strides[axes - 1] != 1 && !empty(t, axes);
}

int64_t packed_bytes(const mxd_tensor &t, int axes) {
    int64_t bytes = floating_size(t);
    for (int a = 0; a < axes; ++a) bytes *= t.shape[a];
    return bytes;
}

void pack_into(mxd_tensor &t, int axes, char *memory) {
    const int64_t size = floating_size(t), bytes = packed_bytes(t, axes);
    int64_t index[6] = {};
    for (int64_t to = 0; to < bytes; to += size) {
        int64_t offset = 0;
        for (int a = 0; a < axes; ++a) offset += index[a] * t.strides[a];
        std::memcpy(memory + to, static_cast<char *>(t.data) + offset * size, size_t(size));
        for (int a = axes - 1; a >= 0 && ++index[a] == t.shape[a]; --a) index[a] = 0;
    }
    t.data = memory;
    for (int64_t a = axes - 1, stride = 1; a >= 0; stride *= t.shape[a--]) t.strides[a] = stride;
}

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
    return call_kernel(geometric ? GEOMETRIC : MULTI_SCALE, backward, call, shapes, starts, {1, 4, bs * heads});
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
    return call_kernel(AGGREGATION, backward, call, shapes, starts, {2, 3, bs});
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
