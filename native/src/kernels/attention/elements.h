// A query's elements of one input: its locations, weights, offsets or logits. Whole vectors are read, in place where
// dtype and strides allow it.
#pragma once

#include "kernels/attention/query_rows.h"

namespace mxd::MXD_ISA {
namespace {

// Queries that are computed together: two independent softmaxes of four queries are interleaved to hide latency. A
// query is used until PIPELINE_DEPTH more are prepared, so there is room for twice as many.
constexpr int64_t COMPUTED_TOGETHER = 8;

// The end of those that are computed with query q.
inline int64_t end_of_computed(int64_t q, const Sizes &n) {
    const int64_t end = (q & -COMPUTED_TOGETHER) + COMPUTED_TOGETHER;
    return end < n.queries ? end : n.queries;
}

template <int AXES> class QueryElements {
  public:
    // of_query: LEVEL, and the axes behind it.
    QueryElements(const Tensor &t, const Axis (&of_query)[AXES]) : tensor(t), axes(t, of_query) {}

    // Restricts queries to levels first..last-1. A query's elements are padded to a multiple.
    void use_levels(int64_t first, int64_t last, int64_t multiple) {
        axes.shorten(last - first);
        skipped = first * tensor.strides[LEVEL];
        count = axes.count();
        padded = round_up(count, multiple);
    }
    // Selects a (batch, head).
    void open(int64_t b, int64_t h) {
        rows = QueryRows(tensor, b, h, padded, skipped); // the padding is read as well
        until = axes.contiguous ? last_in_vectors(offset_of(tensor, b, 0, h) + skipped) : -1;
    }
    MXD_INLINE char *at_in_turn(int64_t q) const { return rows.at_in_turn(q); }
    // The last query whose elements are read in place, as E.
    template <class E> int64_t in_place_until() const { return tensor.dtype == OWN<E> ? until : -1; }

    // Those of query q, which lie at `from`: in place, or copied to `memory`.
    template <class E> MXD_INLINE const E *values(int64_t q, const char *from, E pad, E *memory) const {
        if (q <= until && tensor.dtype == OWN<E>) return reinterpret_cast<const E *>(from);
        widen_or_copy(q, from, pad, memory);
        return memory;
    }
    template <class E> MXD_INLINE void widen_or_copy(int64_t q, const char *from, E pad, E *memory) const {
        if (q > until || !widened(from, memory)) copy(from, pad, memory);
    }

  protected:
    QueryRows rows;

  private:
    const Tensor &tensor;
    SomeAxes<AXES> axes;
    int64_t skipped = 0, count = 0, padded = 0; // elements: before a query's first, and of a query
    int64_t until = -1;                         // the last query that may be read in whole vectors

    // E: T or int64_t. False: this dtype is read another way.
    template <class E> MXD_INLINE bool widened(const char *from, E *to) const {
        const auto widen = [&](auto *elements) {
            for (int64_t i = 0; i < padded; i += LANES) store<E, LANES>(to + i, load<E, LANES>(elements + i));
            return true;
        };
        if constexpr (same_type<E, int64_t>) {
            if (tensor.dtype == MXD_INT32) return widen(reinterpret_cast<const int32_t *>(from));
        } else {
            if (tensor.dtype == MXD_FLOAT16) return widen(reinterpret_cast<const Half *>(from));
            if (tensor.dtype == MXD_BFLOAT16) return widen(reinterpret_cast<const BFloat16 *>(from));
        }
        return false;
    }
    template <class E> __attribute__((noinline)) void copy(const char *from, E pad, E *memory) const {
        axes.read_at(from, memory);
        for (int64_t i = count; i < padded; ++i) memory[i] = pad;
    }

    // The last query that can be read in whole vectors: `padded` elements from its first on, `count` of its own and
    // what follows in memory, all belong to the tensor. offset: of the first query. With a copy of each query instead,
    // RT-DETR's decoder (12 samples a query) takes 0.252 ms instead of 0.225 (2026-11-22, Zen 5).
    int64_t last_in_vectors(int64_t offset) const {
        if (count == padded) return INT64_MAX;
        int64_t last = 0, elements = 1;
        bool forwards = tensor.strides[QUERY] > 0;
        for (int a = 0; a < tensor.axes; ++a) {
            last += (tensor.shape[a] - 1) * tensor.strides[a];
            elements *= tensor.shape[a];
            forwards = forwards && tensor.strides[a] >= 0;
        }
        if (!forwards || last + 1 != elements || offset + padded > elements) return -1;
        return (elements - padded - offset) / tensor.strides[QUERY];
    }
};

// Elements that others are computed from, as T: in place, or from the first query that cannot be read in place on, in a
// ring of copies.
template <class T, int AXES> class PlainElements : public QueryElements<AXES> {
    typedef PlainRows<T> Rows;

  public:
    // room: for a query's, padded.
    PlainElements(const Tensor &t, const Axis (&of_query)[AXES], T padding, int64_t room, Arena &arena)
        : QueryElements<AXES>(t, of_query), pad(padding), copies(Rows::ring(2 * COMPUTED_TOGETHER, room, arena)) {}

    void open(int64_t b, int64_t h) {
        QueryElements<AXES>::open(b, h);
        in_place = Rows::in_place(this->rows);
        until = this->template in_place_until<T>();
        copied_from = INT64_MAX;
    }
    // The rows from which queries q..last-1 are read.
    MXD_INLINE const Rows &of(int64_t q, int64_t last) {
        if (last - 1 > until) copy(q, last); // nearly never
        return q < copied_from ? in_place : copies;
    }
    // Valid once of() has reached the query.
    const T *operator[](int64_t q) const { return q < copied_from ? in_place[q] : copies[q]; }

  private:
    T pad;
    Rows in_place, copies;
    int64_t until = -1, copied_from = 0; // the last query that can be read in place, the first that was copied

    __attribute__((noinline)) void copy(int64_t q, int64_t last) {
        if (copied_from > q) copied_from = q;
        for (; q < last; ++q) this->widen_or_copy(q, this->rows.at(q), pad, copies[q]);
    }
};

} // namespace
} // namespace mxd::MXD_ISA
