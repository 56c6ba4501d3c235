// Levels from their tables, and value as kernels can read it.
#include "call/prepare.h"

#include <cmath>
#include <cstring>
#include <new>

#include "call/ranks.h"
#include "call/tensor.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mxd {
namespace {

// copy(from, to) for each element of value; those that are written lie side by side and have `size` bytes.
template <class Copy> void copy_in_order(const Tensor &t, char *to, int64_t size, Copy &&copy) {
    const int64_t *shape = t.shape, *strides = t.strides, read = floating_size(t.dtype);
    if (is_empty(t)) return;
    for (int64_t b = 0; b < shape[BATCH]; ++b)
        for (int64_t i = 0; i < shape[KEY]; ++i)
            for (int64_t h = 0; h < shape[HEAD]; ++h) {
                const int64_t run = b * strides[BATCH] + i * strides[KEY] + h * strides[HEAD];
                const char *from = static_cast<const char *>(t.data) + run * read;
                for (int64_t c = 0; c < shape[CHANNEL]; ++c, to += size) copy(from + c * strides[CHANNEL] * read, to);
            }
}

Tensor contiguous(Tensor t, int64_t dtype) {
    t.dtype = dtype;
    for (int64_t a = t.axes - 1, expected = 1; a >= 0; expected *= t.shape[a--]) t.strides[a] = expected;
    return t;
}

void copy_elements(const Tensor &t, char *to) {
    const int64_t size = floating_size(t.dtype);
    copy_in_order(t, to, size, [&](const char *from, char *at) { std::memcpy(at, from, size_t(size)); });
}

template <class T> T loaded(const char *from) {
    T element;
    std::memcpy(&element, from, sizeof element);
    return element;
}

double half_as_double(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return fraction ? std::nan("") : sign * HUGE_VAL;
    return sign * std::ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
}

double as_double(const char *from, int64_t dtype) {
    switch (dtype) {
    case MXD_FLOAT64: return loaded<double>(from);
    case MXD_FLOAT16: return half_as_double(loaded<uint16_t>(from));
    case MXD_BFLOAT16: {
        const uint32_t bits = uint32_t(loaded<uint16_t>(from)) << 16;
        return loaded<float>(reinterpret_cast<const char *>(&bits));
    }
    default: return loaded<float>(from);
    }
}

void copy_as_doubles(const Tensor &t, char *to) {
    copy_in_order(t, to, 8, [&](const char *from, char *at) {
        const double element = as_double(from, t.dtype);
        std::memcpy(at, &element, sizeof element);
    });
}

// Requests huge pages for a large result that is about to be written. With small pages every 4 KB costs a page fault,
// and each head misses the TLB again on the same pages. The request is a hint, and covers only whole huge pages inside
// the tensor.
void prefer_huge_pages(const Tensor &t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    if (!t.data || is_empty(t)) return;
    int64_t last = 0;
    for (int a = 0; a < t.axes; ++a) last += (t.shape[a] - 1) * t.strides[a];
    const int64_t size = floating_size(t.dtype);
    const uintptr_t data = reinterpret_cast<uintptr_t>(t.data);
    const uintptr_t begin = (data + PAGE - 1) / PAGE * PAGE, end = (data + uintptr_t((last + 1) * size)) / PAGE * PAGE;
    if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)t;
#endif
}

} // namespace

bool nothing_to_do(const Call &call) {
    for (const Tensor *result : {&call.output, &call.grad_value, &call.grad_locations, &call.grad_weights, &call.grad_reference,
                                 &call.grad_projection, &call.grad_depth})
        if (result->data && !is_empty(*result)) return false;
    return true;
}

Level read_level(const Call &call, int64_t camera, int64_t scale) {
    const auto element = [&](const Tensor &table, int64_t which) {
        const int64_t place =
            camera * table.strides[MAP_CAMERA] + scale * table.strides[MAP_SCALE] + which * table.strides[HEIGHT_WIDTH];
        return table.dtype == MXD_INT32 ? static_cast<const int32_t *>(table.data)[place]
                                        : static_cast<const int64_t *>(table.data)[place];
    };
    return {element(call.shapes, 0), element(call.shapes, 1), element(call.starts, 0)};
}

bool level_fits(const Level &level, int64_t keys) {
    if (level.height <= 0 || level.width <= 0 || level.start < 0 || level.start > keys) return false;
    return level.width <= keys && level.height <= (keys - level.start) / level.width;
}

namespace {

int read_levels(Call &call, Prepared &prepared) {
    const Sizes &n = call.sizes;
    if (n.levels > prepared.FEW) prepared.more_levels.resize(size_t(n.levels));
    Level *next = n.levels > prepared.FEW ? prepared.more_levels.data() : prepared.few_levels;
    call.levels = next;
    for (int64_t camera = 0; camera < n.cameras; ++camera)
        for (int64_t scale = 0; scale < n.scales; ++scale) {
            *next = read_level(call, camera, scale);
            if (!level_fits(*next++, n.keys)) return MXD_BAD_LEVEL;
        }
    return MXD_OK;
}

Tensor readable_value(const Call &call) {
    const Tensor &value = call.value;
    bool wide = false;
    for (const Tensor *t : {&value, &call.locations, &call.weights, &call.reference, &call.projection, &call.image_size,
                            &call.pair_scale, &call.depth})
        wide = wide || t->dtype == MXD_FLOAT64;
    const int64_t dtype = wide ? int64_t(MXD_FLOAT64) : value.dtype;
    return channels_lie_apart(value) || dtype != value.dtype ? contiguous(value, dtype) : value;
}

int copy_value(Call &call, Tensor readable, Prepared &prepared) {
    const bool widened = readable.dtype != call.value.dtype;
    if (!widened && !channels_lie_apart(call.value)) return MXD_OK;
    prepared.value.reset(new (std::nothrow) char[size_t(contiguous_bytes(readable))]);
    if (!prepared.value) return MXD_OUT_OF_MEMORY;
    readable.data = prepared.value.get();
    (widened ? copy_as_doubles : copy_elements)(call.value, prepared.value.get());
    call.value = readable;
    return MXD_OK;
}

} // namespace

int prepare(Call &call, Prepared &prepared, bool reads_value) {
    const int status = read_levels(call, prepared);
    if (status != MXD_OK) return status;
    const Tensor readable = readable_value(call);
    if (!reads_value) return call.value = readable, MXD_OK;
    if (nothing_to_do(call)) return MXD_OK;
    if (!ranks_fit(call)) return MXD_BAD_RANK;
    for (const Tensor *t : {&call.output, &call.grad_value, &call.grad_locations, &call.grad_weights}) prefer_huge_pages(*t);
    return copy_value(call, readable, prepared);
}

bool channels_lie_apart(const Tensor &value) {
    return value.shape[CHANNEL] > 1 && value.strides[CHANNEL] != 1 && !is_empty(value);
}

int64_t contiguous_bytes(const Tensor &t) {
    int64_t bytes = floating_size(t.dtype);
    for (int a = 0; a < t.axes; ++a) bytes *= t.shape[a];
    return bytes;
}

void make_contiguous(Tensor &value, char *memory) {
    copy_elements(value, memory);
    value = contiguous(value, value.dtype);
    value.data = memory;
}

} // namespace mxd
