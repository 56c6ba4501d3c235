// Packing: copies levels of one head to contiguous memory, and copies the gradient back.
#pragma once

#include "kernels/attention/queries.h"

namespace mxd::MXD_ISA {
namespace {

// The rows of a head in a tensor: the address of the first row, and the number of bytes from row to row.
struct HeadRows {
    char *first;
    int64_t step;

    HeadRows(const Tensor &t, int64_t b, int64_t h)
        : first(at(t, offset_of(t, b, 0, h))), step(t.strides[KEY] * element_size(t.dtype)) {}
};

inline int64_t row_bytes_of(const PackedLevels &levels, int64_t level) {
    return level >= levels.far_begin && level < levels.far_end ? levels.far_row_bytes : levels.near_row_bytes;
}

// Sets the addresses of the rows of n.levels levels of one head, from first_level on. Rows of packed levels are in `packed`.
inline void find_levels(const Call &call, const Sizes &n, int64_t first_level, HeadRows head, const PackedLevels &levels,
                        const char *packed, RowAddresses &rows) {
    for (int64_t l = 0; l < n.levels; ++l) {
        const int64_t level = first_level + l, first = l * n.points, last = first + n.points, width = call.levels[level].width,
                      row_bytes = row_bytes_of(levels, level);
        if (packed && levels.offset[level] >= 0)
            rows.set(first, last, packed + levels.offset[level] - call.levels[level].start * row_bytes, row_bytes, width);
        else
            rows.set(first, last, head.first, head.step, width);
    }
    rows.set(n.levels * n.points, padded_samples(n), reinterpret_cast<const void *>(rows.zero_row), 0); // padding samples
}

// Returns the range of a query's list of rows that contains all rows of far levels.
template <int CORNERS> inline FarRows far_rows(const Sizes &n, const PackedLevels &levels) {
    const int64_t first = levels.far_begin * n.points / ROWS * ROWS, end = round_up(levels.far_end * n.points, ROWS);
    return {first * CORNERS, end > first ? (end - first) * CORNERS : 0};
}

// Calls fn(row, address, bytes) for each packed row in chunk `chunk` of `chunks`. `row` is the number of the row in value;
// `address` and `bytes` are those of the packed row.
template <class Byte, class Fn>
inline void packed_rows(const Call &call, const PackedLevels &levels, Byte *packed, int64_t chunk, int64_t chunks, Fn &&fn) {
    if (levels.bytes == 0) return;
    for (int64_t l = 0; l < call.sizes.levels; ++l) {
        if (levels.offset[l] < 0) continue;
        const Level level = call.levels[l];
        const int64_t rows = level.height * level.width, end = rows * (chunk + 1) / chunks;
        Byte *first = packed + levels.offset[l];
        const int64_t row_bytes = row_bytes_of(levels, l);
        for (int64_t r = rows * chunk / chunks; r < end; ++r) fn(level.start + r, first + r * row_bytes, row_bytes);
    }
}

// Copies a row without memcpy: for a row of 128 bytes, the call of memcpy takes as long as the copy itself.
MXD_INLINE void copy_row(const char *from, char *to, int64_t bytes) {
    int64_t i = 0;
    for (; i + VECTOR_BYTES <= bytes; i += VECTOR_BYTES) {
        const auto vector = raw_load<int64_t, VECTOR_BYTES / 8>(from + i);
        memcpy(to + i, &vector, sizeof vector);
    }
    if (i < bytes) memcpy(to + i, from + i, size_t(bytes - i));
}

// Packs the rows of chunk `chunk` of `chunks`. Converts the rows of a level to Near if the level's packed rows have the size of
// Near rows.
template <class V, class Near>
inline void pack(const Call &call, const PackedLevels &levels, int64_t b, int64_t h, char *packed, int64_t chunk,
                 int64_t chunks) {
    const HeadRows rows(call.value, b, h);
    const int64_t channels = call.sizes.channels;
    packed_rows(call, levels, packed, chunk, chunks, [&](int64_t row, char *to, int64_t row_bytes) {
        const char *from = rows.first + row * rows.step;
        if constexpr (!same_type<V, Near>) {
            if (row_bytes == channels * int64_t(sizeof(Near)))
                return widen_row<V, Near>(reinterpret_cast<const V *>(from), reinterpret_cast<Near *>(to), channels);
        }
        copy_row(from, to, channels * int64_t(sizeof(V)));
    });
}

// Copies packed rows of the gradient to grad_value, which may have any dtype and strides.
template <class T> inline void unpack(const Call &call, const PackedLevels &levels, const char *packed, int64_t b, int64_t h) {
    const Tensor &t = call.grad_value;
    const HeadRows rows(t, b, h);
    const int64_t channels = call.sizes.channels, row_bytes = channels * int64_t(sizeof(T));
    const bool as_it_is = t.dtype == OWN<T> && t.strides[CHANNEL] == 1;
    packed_rows(call, levels, packed, 0, 1, [&](int64_t i, const char *from, int64_t) {
        char *const to = rows.first + i * rows.step;
        if (as_it_is) return copy_row(from, to, row_bytes);
        write_elements(reinterpret_cast<const T *>(from), to, t.dtype, t.strides[CHANNEL], channels);
    });
}

} // namespace
} // namespace mxd::MXD_ISA
