// The addresses of a query's elements in inputs, outputs and copies.
#pragma once

#include "kernels/shared/sampling.h"

namespace mxd::MXD_ISA {
namespace {

// How many queries ahead to prefetch. The hardware does not prefetch the elements of one head, because they are only a few
// cache lines of each kilobyte.
constexpr int64_t PREFETCH_QUERIES = 8;

// The elements of a tensor for one (batch, head), query by query. Addresses are integers, because prefetches go past the
// tensor.
class QueryRows {
  public:
    QueryRows() {}
    // A query has `count` contiguous elements, from element `skipped` on. This constructor is always inlined: a call would take
    // the object's address, and loops would reload its members (on Zen 4, BEVFormer temporal's gradient of value would take
    // 1.06 times as long).
    MXD_INLINE QueryRows(const Tensor &t, int64_t b, int64_t h, int64_t count, int64_t skipped = 0)
        : first(reinterpret_cast<int64_t>(mxd::MXD_ISA::at(t, offset_of(t, b, 0, h) + skipped))),
          step(t.strides[QUERY] * element_size(t.dtype)) {
        // Find last_line, the offset of the last cache line that a query can touch. Each query begins at a multiple of `unit`.
        const int64_t bits = first | step | 64, unit = bits & -bits;
        const int64_t begin = step % 64 == 0 ? first & 63 : 64 - unit; // largest offset of a query in its first cache line
        last_line = (begin + count * element_size(t.dtype) + 63) / 64 * 64 - 64;
        ahead = PREFETCH_QUERIES * step;
    }
    int64_t bytes_of_query() const { return step; }
    MXD_INLINE char *at(int64_t query) const { return reinterpret_cast<char *>(first + query * step); }
    // Returns at(query), for queries in ascending order. Also prefetches the elements of a later query. Prefetching helps
    // writes, too, because a write fetches its cache line.
    template <bool TO_WRITE = false> MXD_INLINE char *at_in_turn(int64_t query) const {
        const int64_t address = first + query * step, from = address + ahead;
        __builtin_prefetch(reinterpret_cast<const void *>(from), TO_WRITE);
        __builtin_prefetch(reinterpret_cast<const void *>(from + last_line), TO_WRITE);
        for (int64_t line = 64; line < last_line; line += 64)
            __builtin_prefetch(reinterpret_cast<const void *>(from + line), TO_WRITE);
        return reinterpret_cast<char *>(address);
    }

  private:
    int64_t first = 0, step = 0, last_line = 0, ahead = 0;
};

// The elements of queries as contiguous T: those of QueryRows in place, or a ring of copies.
template <class T> class PlainRows {
  public:
    PlainRows() {}
    static PlainRows in_place(const QueryRows &rows) { return {rows.at(0), rows.bytes_of_query(), -1}; }
    // count is a power of two. The copy of query q + count overwrites the copy of query q.
    static PlainRows ring(int64_t count, int64_t elements, Arena &arena) {
        const int64_t step = Arena::bytes<T>(elements);
        // zeros, because whole vectors are read and only a part is written
        return {arena.zeros<char>(count * step), step, count - 1};
    }
    MXD_INLINE char *at(int64_t query) const { return reinterpret_cast<char *>(first + (query & mask) * step); }
    MXD_INLINE T *operator[](int64_t query) const { return reinterpret_cast<T *>(at(query)); }

    int64_t step = 0; // bytes between queries

  private:
    int64_t first = 0, mask = 0;

    PlainRows(char *at, int64_t bytes, int64_t wrap) : step(bytes), first(reinterpret_cast<int64_t>(at)), mask(wrap) {}
};

} // namespace
} // namespace mxd::MXD_ISA
