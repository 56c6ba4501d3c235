// Reads the queries of the attention operators. A query has samples [num_heads, num_levels, num_points].
#pragma once

#include "kernels/attention/logits.h"
#include "kernels/attention/window.h"
#include "kernels/shared/job.h"

namespace mxd::MXD_ISA {
namespace {

// Software pipelining: while the rows of query q are summed, the addresses of the rows of q + PIPELINE_DEPTH are computed and
// the rows of q + PIPELINE_DEPTH - 1 are prefetched. With a depth below three, queries with few rows wait for memory.
constexpr int PIPELINE_DEPTH = 3;
constexpr int IN_FLIGHT = 4; // slots for prepared queries, a power of two above PIPELINE_DEPTH

// Calls prepare(query, slot) for each query, and PIPELINE_DEPTH queries later finish(query, slot, next_slot). finish should
// prefetch the rows of the query in next_slot. This is the last query but one that was prepared: the addresses of the last one
// are still being computed. Slots are 0..IN_FLIGHT-1.
template <class Prepare, class Finish> MXD_INLINE void ahead(int64_t begin, int64_t end, Prepare &&prepare, Finish &&finish) {
    const auto slot = [&](int64_t q) __attribute__((always_inline)) { return (q - begin) & (IN_FLIGHT - 1); };
    for (int64_t q = begin; q < end + PIPELINE_DEPTH; ++q) {
        if (q < end) prepare(q, slot(q));
        if (q >= begin + PIPELINE_DEPTH) finish(q - PIPELINE_DEPTH, slot(q - PIPELINE_DEPTH), slot(q - 1));
    }
}

// Cuts queries into blocks. Consecutive items read the rows of one head, which stay in the cache. Prefetching is best in long
// blocks, but each thread should get several items of a stage. A stage is one head if levels are packed, else all heads.
inline Blocks query_blocks(const Call &call, bool head_by_head) {
    const Sizes &n = call.sizes;
    const int64_t together = (head_by_head ? 1 : n.batch * n.heads) * n.queries;
    const int64_t size = together / (8 * (call.num_threads > 1 ? call.num_threads : 1));
    return {n.queries, round_up(between(32, size, 1024), COMPUTED_TOGETHER)};
}

// The locations and weights of one query and head as T, padded to a multiple of LANES samples. They are read in place if dtype
// and strides allow it. Then the padding is whatever follows in memory, which does no harm, because padding samples have empty
// maps.
template <class T> class Query {
  public:
    template <class Reader>
    Query(const Sizes &n, const Reader &reader, Arena &arena)
        : maps_(reader.maps()), window(reader.window()), xy_copy(arena.take<int64_t>(2 * padded_samples(n))),
          weight_copy(arena.take<T>(padded_samples(n))) {}

    const Maps<T> &maps() const { return maps_; }
    MXD_INLINE RealLanes<T> weight(int64_t sample) const { return raw_load<T, LANES>(weights + sample); }
    MXD_INLINE void location(int64_t sample, RealLanes<T> &x, RealLanes<T> &y) const {
        load_pairs<T>(reinterpret_cast<const T *>(xy) + 2 * sample, x, y);
    }
    // sixteen_weights and sixteen_locations read samples sample..sample+15, whose elements may have 16 bits. A pair of bfloat16
    // is read as one 32-bit word. The upper half of a word is already a float; the lower half becomes a float by a shift.
    MXD_INLINE Vec<T, 16> sixteen_weights(int64_t sample) const {
        if (stored == MXD_BFLOAT16) return load<T, 16>(reinterpret_cast<const BFloat16 *>(weights) + sample);
        if (stored == MXD_FLOAT16) return load<T, 16>(reinterpret_cast<const Half *>(weights) + sample);
        return raw_load<T, 16>(weights + sample);
    }
    MXD_INLINE void sixteen_locations(int64_t sample, Vec<T, 16> &x, Vec<T, 16> &y) const {
        const auto read_pairs = [&](auto *pairs) __attribute__((always_inline)) {
            separate<T, 16>(load<T, 16>(pairs + 2 * sample), load<T, 16>(pairs + 2 * sample + 16), x, y);
        };
        if (stored == MXD_FLOAT16) return read_pairs(static_cast<const Half *>(xy));
        if (stored != MXD_BFLOAT16) return read_pairs(static_cast<const T *>(xy));
        const auto words = raw_load<uint32_t, 16>(static_cast<const uint32_t *>(xy) + sample);
        x = bits_as<Vec<T, 16>>(Vec<uint32_t, 16>(words << 16));
        y = bits_as<Vec<T, 16>>(Vec<uint32_t, 16>(words & 0xffff0000u));
    }
    // Integer locations stay integers, because T cannot represent all integers. whole_location() reads these locations.
    bool in_whole_numbers() const { return whole; }
    MXD_INLINE void whole_location(int64_t sample, IntLanes<T> &x, IntLanes<T> &y) const {
        whole_pairs<Int<T>, LANES>(reinterpret_cast<const int64_t *>(xy) + 2 * sample, x, y);
    }
    // A call with a window has reference points and no locations. window_pixel() reads the query's reference point.
    bool has_window() const { return window.exists(); }
    MXD_INLINE void window_pixel(int64_t sample, RealLanes<T> &x, RealLanes<T> &y) const {
        window.pixel(reference, maps_.at(sample), sample, x, y);
    }

  private:
    template <class> friend class QueryReader;
    Maps<T> maps_;
    Window<T> window;
    const T *reference = nullptr; // a pair (x, y)
    T reference_copy[2];
    const void *xy = nullptr; // T, or int64_t if locations are integers
    const T *weights = nullptr;
    int64_t stored = OWN<T>; // the dtype of weights, and of locations that are not integers
    bool whole = false;
    void *xy_copy; // memory for elements of T or int64_t
    T *weight_copy;
};

// Reads the queries of one (batch, head) in order, on some or all levels.
template <class T> class QueryReader {
  public:
    int64_t padded = 0;         // samples of a query, rounded up to a multiple of LANES
    bool reads_16_bits = false; // true: only put_sixteen reads the queries, so 16-bit elements are not widened

    QueryReader(const Call &c, Arena &arena)
        : call(c), n(c.sizes), locations(c.locations, {LEVEL, POINT, XY}), weights(c.weights, {LEVEL, POINT}),
          maps_(arena, padded_samples(n)), logits(c, arena), window_(c, arena) {
        if (!arena.counts) use_levels(0, n.levels);
    }

    void use_levels(int64_t first, int64_t last) {
        first_level = first;
        samples = (last - first) * n.points;
        padded = round_up(samples, LANES);
        // With logits the weights of all levels are computed, because the softmax covers all levels.
        weight_samples = call.with_logits ? n.levels * n.points : samples;
        weights_padded = call.with_logits ? round_up(weight_samples, SOFTMAX_LANES<T>) : padded;
        locations.shorten(last - first);
        weights.shorten(call.with_logits ? n.levels : last - first);
        logits.use_levels(first, last);
        if (call.has_window) window_.set(call.window, samples);
        maps_.set_levels(call.levels, first, last, n.points, padded);
    }
    const Maps<T> &maps() const { return maps_; }
    const Window<T> &window() const { return window_; }

    // Selects the (batch, head) whose queries read() reads.
    void open(int64_t b, int64_t h) {
        const int64_t location_skip = first_level * call.locations.strides[LEVEL];
        const int64_t weight_skip = call.with_logits ? 0 : first_level * call.weights.strides[LEVEL];
        // Loads read `padded` samples of a query. Therefore `padded` samples are prefetched.
        location_rows =
            call.has_window ? QueryRows(call.reference, b, h, 2) : QueryRows(call.locations, b, h, 2 * padded, location_skip);
        weight_rows = QueryRows(call.weights, b, h, weights_padded, weight_skip);
        locations_until =
            locations.contiguous ? last_in_vectors(call.locations, b, h, location_skip, 2 * samples, 2 * padded, 6) : -1;
        if (call.has_window) locations_until = INT64_MAX;
        references_in_place = call.reference.dtype == OWN<T> && call.reference.strides[COORDINATE] == 1;
        weights_until =
            weights.contiguous ? last_in_vectors(call.weights, b, h, weight_skip, weight_samples, weights_padded, 5) : -1;
        whole = call.locations.dtype == MXD_INT32 || call.locations.dtype == MXD_INT64;
        const bool own_locations = call.has_window || call.locations.dtype == (whole ? int64_t(MXD_INT64) : OWN<T>);
        const bool own = own_locations && call.weights.dtype == OWN<T>;
        const bool own16 = reads_16_bits && padded % 16 == 0 && !call.with_logits && element_size(call.weights.dtype) == 2 &&
                           call.locations.dtype == call.weights.dtype;
        stored_in_place = own16 ? call.weights.dtype : OWN<T>;
        const int64_t until = !own && !own16 ? -1 : locations_until < weights_until ? locations_until : weights_until;
        in_place_until = call.with_logits ? -1 : until;
        logits.open(b, location_rows, weight_rows, until);
    }
    MXD_INLINE void read(int64_t q, Query<T> &query) {
        const char *location = location_rows.at_in_turn(q), *weight = weight_rows.at_in_turn(q);
        query.whole = whole;
        query.xy = location;
        query.stored = stored_in_place;
        if (q <= in_place_until) { // the usual case; one test covers locations and weights
            query.weights = reinterpret_cast<const T *>(weight);
            return;
        }
        query.stored = OWN<T>;
        if (call.with_logits) return read_computed(q, location, query);
        if (whole)
            query.xy = values(locations, location, q <= locations_until, 2 * samples, 2 * padded, int64_t(0),
                              static_cast<int64_t *>(query.xy_copy));
        else
            query.xy = values(locations, location, q <= locations_until, 2 * samples, 2 * padded, T(__builtin_nan("")),
                              static_cast<T *>(query.xy_copy));
        query.weights = values(weights, weight, q <= weights_until, samples, padded, T(0), query.weight_copy);
    }
    const Logits<T> &with_logits() const { return logits; }

  private:
    const Call &call;
    Sizes n;
    SomeAxes<3> locations;
    SomeAxes<2> weights;
    Maps<T> maps_;
    Logits<T> logits;
    Window<T> window_;
    bool references_in_place = false; // with a window: true if reference points are read without a copy
    int64_t first_level = 0, samples = 0;
    int64_t weight_samples = 0, weights_padded = 0; // the number of weights or logits of a query: without and with padding
    QueryRows location_rows, weight_rows;
    int64_t locations_until = -1, weights_until = -1; // the last queries whose elements may be read in whole vectors
    int64_t in_place_until = -1;                      // the last query that is read without a copy
    int64_t stored_in_place = OWN<T>;                 // the dtype of queries that are read without a copy
    bool whole = false;                               // true if locations are integers

    MXD_INLINE void read_computed(int64_t q, const char *location, Query<T> &query) {
        if (q >= logits.computed_until())
            logits.compute(q, [&](int64_t begin, int64_t end, const PlainRows<T> &offsets, const PlainRows<T> &logit_rows) {
                copy_inputs(begin, end, offsets, logit_rows);
            });
        if (call.has_window) {
            query.reference = references_in_place ? reinterpret_cast<const T *>(location)
                                                  : row_as(location, call.reference.dtype, call.reference.strides[COORDINATE],
                                                           2, query.reference_copy);
        } else {
            query.xy = logits.locations(q);
        }
        query.weights = logits.weights(q);
    }
    __attribute__((noinline)) void copy_inputs(int64_t begin, int64_t end, const PlainRows<T> &offsets,
                                               const PlainRows<T> &logit_rows) {
        if (!call.has_window)
            copy_queries(locations, location_rows, begin, end, locations_until, 2 * samples, 2 * padded, T(__builtin_nan("")),
                         offsets);
        copy_queries(weights, weight_rows, begin, end, weights_until, weight_samples, weights_padded, T(0), logit_rows);
    }
    template <class Input>
    MXD_INLINE void copy_queries(const Input &input, const QueryRows &rows, int64_t begin, int64_t end, int64_t until,
                                 int64_t count, int64_t room, T pad, const PlainRows<T> &to) const {
        constexpr int N = WIDTH<T>; // `room` is a multiple of N
        const auto widen = [&](auto *first) __attribute__((always_inline)) {
            for (int64_t q = begin; q < end; ++q, first = next_query(first, rows))
                for (int64_t i = 0; i < room; i += N) store<T, N>(to[q] + i, load<T, N>(first + i));
        };
        const bool in_vectors = end - 1 <= until;
        if (in_vectors && input.tensor.dtype == MXD_BFLOAT16) return widen(reinterpret_cast<const BFloat16 *>(rows.at(begin)));
        if (in_vectors && input.tensor.dtype == MXD_FLOAT16) return widen(reinterpret_cast<const Half *>(rows.at(begin)));
        for (int64_t q = begin; q < end; ++q) widen_or_copy(input, rows.at(q), q <= until, count, room, pad, to[q]);
    }
    template <class V> static MXD_INLINE const V *next_query(const V *query, const QueryRows &rows) {
        return reinterpret_cast<const V *>(reinterpret_cast<const char *>(query) + rows.bytes_of_query());
    }

    // Converts int32 elements if E is int64, else 16-bit floats. `count` is a multiple of LANES. Returns false for other
    // dtypes.
    template <class E> static MXD_INLINE bool widened(const char *from, int64_t dtype, int64_t count, E *to) {
        const auto widen = [&](auto *elements) {
            for (int64_t i = 0; i < count; i += LANES) store<E, LANES>(to + i, load<E, LANES>(elements + i));
            return true;
        };
        if constexpr (same_type<E, int64_t>) {
            if (dtype == MXD_INT32) return widen(reinterpret_cast<const int32_t *>(from));
        } else {
            if (dtype == MXD_FLOAT16) return widen(reinterpret_cast<const Half *>(from));
            if (dtype == MXD_BFLOAT16) return widen(reinterpret_cast<const BFloat16 *>(from));
        }
        return false;
    }
    // Returns `count` elements of a query's locations or weights, padded to `room`: in place, or a copy in `memory`.
    template <class E, class Input>
    MXD_INLINE const E *values(const Input &input, const char *from, bool in_vectors, int64_t count, int64_t room, E pad,
                               E *memory) const {
        if (in_vectors && input.tensor.dtype == OWN<E>) return reinterpret_cast<const E *>(from);
        widen_or_copy(input, from, in_vectors, count, room, pad, memory);
        return memory;
    }
    template <class E, class Input>
    MXD_INLINE void widen_or_copy(const Input &input, const char *from, bool in_vectors, int64_t count, int64_t room, E pad,
                                  E *memory) const {
        if (!in_vectors || !widened(from, input.tensor.dtype, room, memory)) copy(input, from, count, room, pad, memory);
    }
    template <class E, class Input>
    __attribute__((noinline)) void copy(const Input &input, const char *from, int64_t count, int64_t room, E pad,
                                        E *memory) const {
        input.read_at(from, memory);
        for (int64_t i = count; i < room; ++i) memory[i] = pad;
    }

    // Returns the last query of a (batch, head) that can be read in whole vectors: `padded` elements from the query's first
    // element on are all inside the tensor, though the query has only `count`. RT-DETR's decoder (12 samples per query) takes
    // 0.225 ms; if each query were copied, it would take 0.252 (2026-11-22, Zen 5).
    static int64_t last_in_vectors(const Tensor &t, int64_t b, int64_t h, int64_t skipped, int64_t count, int64_t padded,
                                   int axes) {
        if (count == padded) return INT64_MAX;
        int64_t last = 0, elements = 1;
        bool forwards = t.strides[QUERY] > 0;
        for (int a = 0; a < axes; ++a) {
            last += (t.shape[a] - 1) * t.strides[a];
            elements *= t.shape[a];
            forwards = forwards && t.strides[a] >= 0;
        }
        const int64_t offset = offset_of(t, b, 0, h) + skipped;
        if (!forwards || last + 1 != elements || offset + padded > elements) return -1;
        return (elements - padded - offset) / t.strides[QUERY];
    }
};

// Reads grad_output of one (batch, head) as T, query by query.
template <class T> class OutputGradient {
  public:
    OutputGradient(const Call &call, int64_t b, int64_t h, T *memory)
        : tensor(call.grad_output), channels(call.sizes.channels), rows(tensor, b, h, channels), row(memory),
          in_place(tensor.dtype == OWN<T> && tensor.strides[CHANNEL] == 1) {}
    MXD_INLINE const T *of(int64_t query) const {
        const char *from = rows.at_in_turn(query);
        return in_place ? reinterpret_cast<const T *>(from)
                        : row_as(from, tensor.dtype, tensor.strides[CHANNEL], channels, row);
    }

  private:
    const Tensor &tensor;
    int64_t channels;
    QueryRows rows;
    T *row; // memory for a copy, if the tensor has another dtype or stride
    bool in_place;
};

} // namespace
} // namespace mxd::MXD_ISA
