// Reads and writes runs of elements of any dtype and stride.
#pragma once

#include "call/call.h"
#include "kernels/shared/rows.h"

namespace mxd::MXD_ISA {
namespace {

inline int64_t element_size(int64_t dtype) {
    switch (dtype) {
    case MXD_FLOAT64:
    case MXD_INT64: return 8;
    case MXD_FLOAT16:
    case MXD_BFLOAT16: return 2;
    default: return 4;
    }
}

// The mxd_dtype of T.
template <class T> constexpr int64_t OWN = sizeof(T) == 8 ? MXD_FLOAT64 : MXD_FLOAT32;
template <> constexpr int64_t OWN<int64_t> = MXD_INT64;

inline char *at(const Tensor &t, int64_t offset) { return static_cast<char *>(t.data) + offset * element_size(t.dtype); }

// Returns the element offset of a query, key or head in a tensor whose first axes are BATCH, QUERY or KEY, and HEAD.
inline int64_t offset_of(const Tensor &t, int64_t b, int64_t i) { return b * t.strides[BATCH] + i * t.strides[QUERY]; }
inline int64_t offset_of(const Tensor &t, int64_t b, int64_t i, int64_t h) { return offset_of(t, b, i) + h * t.strides[HEAD]; }

template <class T> inline void read_elements(const char *from, int64_t dtype, int64_t stride, int64_t n, T *to) {
    switch (dtype) {
    case MXD_FLOAT32: return convert_run<T>(reinterpret_cast<const float *>(from), stride, to, 1, n);
    case MXD_FLOAT64: return convert_run<T>(reinterpret_cast<const double *>(from), stride, to, 1, n);
    case MXD_FLOAT16: return convert_run<T>(reinterpret_cast<const Half *>(from), stride, to, 1, n);
    case MXD_BFLOAT16: return convert_run<T>(reinterpret_cast<const BFloat16 *>(from), stride, to, 1, n);
    case MXD_INT32: return convert_run<T>(reinterpret_cast<const int32_t *>(from), stride, to, 1, n);
    case MXD_INT64: return convert_run<T>(reinterpret_cast<const int64_t *>(from), stride, to, 1, n);
    }
}

template <class T> inline void write_elements(const T *from, char *to, int64_t dtype, int64_t stride, int64_t n) {
    switch (dtype) {
    case MXD_FLOAT32: return convert_run<T>(from, 1, reinterpret_cast<float *>(to), stride, n);
    case MXD_FLOAT64: return convert_run<T>(from, 1, reinterpret_cast<double *>(to), stride, n);
    case MXD_FLOAT16: return convert_run<T>(from, 1, reinterpret_cast<Half *>(to), stride, n);
    case MXD_BFLOAT16: return convert_run<T>(from, 1, reinterpret_cast<BFloat16 *>(to), stride, n);
    }
}

// Some axes of a tensor. Their elements are read as one run if they are contiguous, else as one run for each index of the outer
// axes.
template <int AXES> struct SomeAxes {
    const Tensor &tensor;
    int64_t shape[AXES], strides[AXES];
    bool contiguous;

    SomeAxes(const Tensor &t, const Axis (&axes)[AXES]) : tensor(t), contiguous(true) {
        int64_t expected = 1;
        for (int a = AXES - 1; a >= 0; --a) {
            shape[a] = t.shape[axes[a]];
            strides[a] = t.strides[axes[a]];
            contiguous = contiguous && (shape[a] == 1 || strides[a] == expected);
            expected *= shape[a];
        }
    }

    // Limits the first of these axes to `size` entries.
    void shorten(int64_t size) { *shape = size; }

    MXD_INLINE int64_t count() const {
        int64_t product = 1;
        for (int a = 0; a < AXES; ++a) product *= shape[a];
        return product;
    }

    // Calls fn(element offset of a run, its stride, its length, its position in a contiguous copy) for each run.
    template <class Fn> void runs(int64_t offset, Fn &&fn) const {
        if (contiguous) {
            fn(offset, 1, count(), 0);
        } else {
            int64_t done = 0;
            walk<0>(offset, done, fn);
        }
    }

    template <class T> void read(int64_t offset, T *to) const { read_at(at(tensor, offset), to); }
    // Reads from the element at this address on. Calls widen_run directly, because one more call takes as long as 48 elements.
    template <class T> MXD_INLINE void read_at(const char *from, T *to) const {
        if constexpr (same_type<T, float>) {
            if (contiguous && tensor.dtype == MXD_BFLOAT16)
                return widen_run(reinterpret_cast<const BFloat16 *>(from), to, count());
            if (contiguous && tensor.dtype == MXD_FLOAT16) return widen_run(reinterpret_cast<const Half *>(from), to, count());
        }
        read_runs(from, to);
    }
    template <class T> void read_runs(const char *from, T *to) const {
        const int64_t size = element_size(tensor.dtype);
        runs(0, [&](int64_t o, int64_t stride, int64_t n, int64_t position) {
            read_elements(from + o * size, tensor.dtype, stride, n, to + position);
        });
    }
    template <class T> void write(int64_t offset, const T *from) const { write_at(at(tensor, offset), from); }
    template <class T> void write_at(char *to, const T *from) const {
        const int64_t size = element_size(tensor.dtype);
        runs(0, [&](int64_t o, int64_t stride, int64_t n, int64_t position) {
            write_elements(from + position, to + o * size, tensor.dtype, stride, n);
        });
    }

  private:
    template <int AXIS, class Fn> void walk(int64_t offset, int64_t &done, Fn &fn) const {
        if constexpr (AXIS == AXES - 1) {
            fn(offset, strides[AXIS], shape[AXIS], done);
            done += shape[AXIS];
        } else {
            for (int64_t i = 0; i < shape[AXIS]; ++i) walk<AXIS + 1>(offset + i * strides[AXIS], done, fn);
        }
    }
};

// Prefetches `count` elements from `offset` on. It must be inlined: GCC removes calls of a function that only prefetches.
MXD_INLINE void prefetch(const Tensor &t, int64_t offset, int64_t count) {
    const char *from = at(t, offset);
    const int64_t bytes = count * element_size(t.dtype);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Returns a row of channels as T: the tensor's own memory if dtype and stride allow it, else a copy in `scratch`.
template <class T> MXD_INLINE const T *row_as(const char *from, int64_t dtype, int64_t stride, int64_t n, T *scratch) {
    if (dtype == OWN<T> && stride == 1) return reinterpret_cast<const T *>(from);
    read_elements(from, dtype, stride, n, scratch);
    return scratch;
}

} // namespace
} // namespace mxd::MXD_ISA
