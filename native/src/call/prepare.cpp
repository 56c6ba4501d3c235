#include "call/prepare.h"

#include <cstring>
#include <new>

#include "call/axes.h"

#define MXD_ISA plain // the readers of tensor.h, for any machine
#include "kernels/shared/tensor.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mxd {
namespace {

// fn(offset of a run of channels, its place in a contiguous tensor) for each run of a [.., channels] tensor.
template <class Fn> void runs_of_channels(const mxd_tensor &t, int axes, Fn &&fn) {
    if (is_empty(t, axes)) return;
    int64_t runs = 1, index[6] = {};
    for (int a = 0; a < axes - 1; ++a) runs *= t.shape[a];
    for (int64_t run = 0; run < runs; ++run) {
        int64_t offset = 0;
        for (int a = 0; a < axes - 1; ++a) offset += index[a] * t.strides[a];
        fn(offset, run * t.shape[axes - 1]);
        for (int a = axes - 2; a >= 0 && ++index[a] == t.shape[a]; --a) index[a] = 0;
    }
}

mxd_tensor contiguous(mxd_tensor t, int axes, int64_t dtype) {
    t.dtype = dtype;
    for (int64_t a = axes - 1, expected = 1; a >= 0; expected *= t.shape[a--]) t.strides[a] = expected;
    return t;
}

void copy_runs(const mxd_tensor &t, int axes, char *to) {
    const int64_t size = floating_size(t.dtype), channels = t.shape[axes - 1], stride = t.strides[axes - 1];
    runs_of_channels(t, axes, [&](int64_t offset, int64_t place) {
        const char *from = plain::at(t, offset);
        for (int64_t c = 0; c < channels; ++c)
            std::memcpy(to + (place + c) * size, from + c * stride * size, size_t(size));
    });
}

void copy_runs_as_doubles(const mxd_tensor &t, int axes, double *to) {
    runs_of_channels(t, axes, [&](int64_t offset, int64_t place) {
        plain::read_elements(plain::at(t, offset), t.dtype, t.strides[axes - 1], t.shape[axes - 1], to + place);
    });
}

int64_t bytes_of(const mxd_tensor &t, int axes) {
    int64_t bytes = floating_size(t.dtype);
    for (int a = 0; a < axes; ++a) bytes *= t.shape[a];
    return bytes;
}

// Requests huge pages for a large result that is about to be written. With small pages every 4 KB costs a page fault,
// and each head misses the TLB again on the same pages. The request is a hint, and covers only whole huge pages inside
// the tensor.
void prefer_huge_pages(const mxd_tensor &t, int axes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    if (!t.data || is_empty(t, axes)) return;
    int64_t last = 0;
    for (int a = 0; a < axes; ++a) last += (t.shape[a] - 1) * t.strides[a];
    const int64_t size = floating_size(t.dtype);
    const uintptr_t data = reinterpret_cast<uintptr_t>(t.data);
    const uintptr_t begin = (data + PAGE - 1) / PAGE * PAGE, end = (data + uintptr_t((last + 1) * size)) / PAGE * PAGE;
    if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)t, (void)axes;
#endif
}

} // namespace

int prepare_levels(Call &call, Prepared &prepared) {
    const mxd_tensor &shapes = call.shapes, &starts = call.starts;
    const int axes = axes_of(call).starts; // [cameras, scales], or [levels]
    const int64_t num_keys = call.value.shape[1];
    const int64_t outer = axes == 2 ? starts.shape[0] : 1, inner = starts.shape[axes - 1];
    const int64_t *shape_strides = shapes.strides + axes - 1, start_stride = starts.strides[axes - 1];
    prepared.levels.reserve(size_t(outer * inner));
    for (int64_t i = 0; i < outer; ++i)
        for (int64_t j = 0; j < inner; ++j) {
            const int64_t at = (axes == 2 ? i * shapes.strides[0] : 0) + j * shape_strides[0];
            const int64_t start = element(starts, (axes == 2 ? i * starts.strides[0] : 0) + j * start_stride);
            const int64_t height = element(shapes, at), width = element(shapes, at + shape_strides[1]);
            if (height <= 0 || width <= 0 || start < 0 || start > num_keys) return MXD_BAD_LEVEL;
            if (width > num_keys || height > (num_keys - start) / width) return MXD_BAD_LEVEL;
            prepared.levels.push_back({height, width, start});
        }
    call.levels = prepared.levels.data();
    call.num_levels = int64_t(prepared.levels.size());
    return MXD_OK;
}

mxd_tensor readable_value(const Call &call) {
    const mxd_tensor &value = call.value;
    const int axes = axes_of(call).value;
    bool wide = false;
    for (const mxd_tensor *t : {&value, &call.locations, &call.weights}) wide = wide || t->dtype == MXD_FLOAT64;
    for (const mxd_tensor *t : {&call.reference, &call.projection, &call.image_size, &call.pair_scale})
        wide = wide || (t->data && t->dtype == MXD_FLOAT64);
    const int64_t dtype = wide ? int64_t(MXD_FLOAT64) : value.dtype;
    return channels_lie_apart(value, axes) || dtype != value.dtype ? contiguous(value, axes, dtype) : value;
}

int prepare_value(Call &call, Prepared &prepared) {
    const int axes = axes_of(call).value;
    mxd_tensor readable = readable_value(call);
    const bool widened = readable.dtype != call.value.dtype;
    if (!widened && !channels_lie_apart(call.value, axes)) return MXD_OK;
    prepared.value.reset(new (std::nothrow) char[size_t(bytes_of(readable, axes))]);
    if (!prepared.value) return MXD_OUT_OF_MEMORY;
    readable.data = prepared.value.get();
    if (widened)
        copy_runs_as_doubles(call.value, axes, static_cast<double *>(readable.data));
    else
        copy_runs(call.value, axes, prepared.value.get());
    call.value = readable;
    return MXD_OK;
}

void prefer_huge_pages(const Call &call) {
    const Axes axes = axes_of(call);
    prefer_huge_pages(call.output, axes.value);
    prefer_huge_pages(call.grad_value, axes.value);
    prefer_huge_pages(call.grad_locations, axes.locations);
    prefer_huge_pages(call.grad_weights, axes.weights);
}

int64_t element(const mxd_tensor &table, int64_t offset) {
    return table.dtype == MXD_INT32 ? static_cast<const int32_t *>(table.data)[offset]
                                    : static_cast<const int64_t *>(table.data)[offset];
}

bool channels_lie_apart(const mxd_tensor &value, int axes) {
    return value.shape[axes - 1] > 1 && value.strides[axes - 1] != 1 && !is_empty(value, axes);
}

int64_t contiguous_bytes(const mxd_tensor &value, int axes) { return bytes_of(value, axes); }

void make_contiguous(mxd_tensor &value, int axes, char *memory) {
    copy_runs(value, axes, memory);
    value = contiguous(value, axes, value.dtype);
    value.data = memory;
}

} // namespace mxd
