// What multi_scale_deformable_attn and geometric_kernel_attention share: value [bs, num_keys, num_heads, embed_dims]
// read by queries [bs, num_queries, num_heads, num_levels, num_points]. Each operator brings its own way from a
// location to rows.
#pragma once

#include "bands.h"
#include "kernels.h"
#include "sampling.h"

namespace mxd {
namespace MXD_ISA {
namespace {

struct Sizes {
    int64_t batch, keys, heads, channels, queries, levels, points;

    explicit Sizes(const Call &call)
        : batch(call.value.shape[0]), keys(call.value.shape[1]), heads(call.value.shape[2]),
          channels(call.value.shape[3]), queries(call.locations.shape[1]), levels(call.num_levels),
          points(call.locations.shape[4]) {}
    int64_t room() const { return round_up(levels * points, LANES); }
};

inline int64_t offset3(const mxd_tensor &t, int64_t i, int64_t j, int64_t k) {
    return i * t.strides[0] + j * t.strides[1] + k * t.strides[2];
}

// Long items prefetch best: 256 queries instead of 64 make the encoder of Deformable-DETR 9 % faster.
constexpr int64_t QUERIES_PER_ITEM = 256;

// How many queries ahead inputs are asked for. A head's share of a query is a few cache lines a kilobyte apart, which
// hardware does not foresee.
constexpr int64_t PREFETCH_QUERIES = 8;

// Positions are worked out one query ahead of their use, so that the rows of the next query are known and can be asked
// for while this one's are added up. By itself, without that prefetch, it gained nothing measurable.
template <class Prepare, class Finish>
inline void one_ahead(int64_t begin, int64_t end, Prepare &&prepare, Finish &&finish) {
    if (begin >= end) return;
    prepare(begin, 0);
    for (int64_t q = begin; q < end; ++q) {
        if (q + 1 < end) prepare(q + 1, int(q + 1 - begin) & 1);
        finish(q, int(q - begin) & 1);
    }
}

// Items (batch, head, block of queries): consecutive items share a head's rows of value in the cache.
struct QueryBlocks {
    Sizes n;
    int64_t per_head;

    explicit QueryBlocks(const Sizes &sizes)
        : n(sizes), per_head((sizes.queries + QUERIES_PER_ITEM - 1) / QUERIES_PER_ITEM) {}
    int64_t count() const { return n.batch * n.heads * per_head; }
    // prepare(batch, head, query, slot), and a query later finish(batch, head, query, slot), slot 0 or 1.
    template <class Prepare, class Finish> void each(int64_t item, Prepare &&prepare, Finish &&finish) const {
        const int64_t batch = item / per_head / n.heads, head = item / per_head % n.heads;
        const int64_t begin = item % per_head * QUERIES_PER_ITEM;
        const int64_t end = begin + QUERIES_PER_ITEM < n.queries ? begin + QUERIES_PER_ITEM : n.queries;
        one_ahead(
            begin, end, [&](int64_t q, int slot) { prepare(batch, head, q, slot); },
            [&](int64_t q, int slot) { finish(batch, head, q, slot); });
    }
};

// Locations and weights of one query and head on levels first..last-1, as T, padded to LANES samples on empty maps.
template <class T> class QueryReader {
  public:
    int64_t samples = 0, padded = 0;

    static int64_t bytes(const Sizes &n) {
        return Maps<T>::bytes(n.room()) + Arena::bytes<T>(2 * n.room()) + Arena::bytes<T>(n.room());
    }
    QueryReader(const Call &c, const Sizes &n, Arena &arena)
        : call(c), queries(n.queries), points(n.points), locations(c.locations, 3), weights(c.weights, 3),
          maps_(arena, n.room()), xy(arena.take<T>(2 * n.room())), weight_(arena.take<T>(n.room())) {
        use_levels(0, n.levels);
    }

    void use_levels(int64_t first, int64_t last) {
        first_level = first;
        samples = (last - first) * points;
        padded = round_up(samples, LANES);
        locations.shape[0] = weights.shape[0] = last - first;
        maps_.set_levels(call.levels, first, last, points, padded);
        for (int64_t i = 0; i < 2 * padded; ++i) xy[i] = T(__builtin_nan(""));
        for (int64_t i = 0; i < padded; ++i) weight_[i] = 0;
    }
    const Maps<T> &maps() const { return maps_; }

    void read(int64_t b, int64_t h, int64_t q) {
        if (q + PREFETCH_QUERIES < queries) {
            prefetch(call.locations, offset(call.locations, b, h, q + PREFETCH_QUERIES), 2 * samples);
            prefetch(call.weights, offset(call.weights, b, h, q + PREFETCH_QUERIES), samples);
        }
        locations.read(offset(call.locations, b, h, q), xy);
        weights.read(offset(call.weights, b, h, q), weight_);
    }
    RealLanes<T> weight(int64_t sample) const { return raw_load<T, LANES>(weight_ + sample); }
    void location(int64_t sample, RealLanes<T> &x, RealLanes<T> &y) const { load_pairs<T>(xy + 2 * sample, x, y); }

  private:
    const Call &call;
    int64_t queries, points, first_level = 0;
    Block<3> locations;
    Block<2> weights;
    Maps<T> maps_;
    T *xy, *weight_;

    int64_t offset(const mxd_tensor &t, int64_t b, int64_t h, int64_t q) const {
        return b * t.strides[0] + q * t.strides[1] + h * t.strides[2] + first_level * t.strides[3];
    }
};

template <class V> inline RowAddresses value_rows(const mxd_tensor &value, int64_t b, int64_t h, const void *zeros) {
    return {reinterpret_cast<int64_t>(at(value, offset3(value, b, 0, h))), value.strides[1] * int64_t(sizeof(V)),
            reinterpret_cast<int64_t>(zeros)};
}

// What every worker that goes query by query has at hand.
template <class V, class T> struct QueryWorker {
    const Call &call;
    Sizes n;
    QueryBlocks blocks;
    QueryReader<T> readers[2]; // of this query and the next one, in turn
    SampleBuffer<T> buffers[2];
    V *zeros;
    T *row;

    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return 2 * QueryReader<T>::bytes(n) + 2 * SampleBuffer<T>::bytes(n.room()) + Arena::bytes<V>(n.channels) +
               Arena::bytes<T>(n.channels);
    }
    QueryWorker(const Call &c, Arena &arena)
        : call(c), n(c), blocks(n), readers{{c, n, arena}, {c, n, arena}},
          buffers{{arena, n.room()}, {arena, n.room()}}, zeros(arena.take<V>(n.channels)),
          row(arena.take<T>(n.channels)) {
        memset(zeros, 0, size_t(n.channels) * sizeof(V));
    }
    RowAddresses rows(int64_t b, int64_t h) const { return value_rows<V>(call.value, b, h, zeros); }
    const T *grad_output(int64_t b, int64_t h, int64_t q) const {
        if (q + PREFETCH_QUERIES < n.queries)
            prefetch(call.output, offset3(call.output, b, q + PREFETCH_QUERIES, h), n.channels);
        return row_as(call.output, offset3(call.output, b, q, h), call.output.strides[3], n.channels, row);
    }
};

// Rule<T>::CORNERS rows a sample; Rule<T>::prepare(reader, rows, buffer) fills the buffer for one query.
template <class V, class T, template <class> class Rule> class Forward : QueryWorker<V, T> {
    typedef QueryWorker<V, T> Base;

  public:
    using Base::scratch_bytes;
    Forward(const Call &c, Arena arena) : Base(c, arena) {}
    void operator()(int64_t item) {
        this->blocks.each(
            item,
            [&](int64_t b, int64_t h, int64_t q, int slot) {
                this->readers[slot].read(b, h, q);
                Rule<T>::prepare(this->readers[slot], this->rows(b, h), this->buffers[slot]);
            },
            [&](int64_t b, int64_t h, int64_t q, int slot) {
                finish(b, h, q, this->buffers[slot].rows(), this->buffers[1 - slot].address);
            });
    }

  private:
    void finish(int64_t b, int64_t h, int64_t q, const CornerRows<T> &rows, const int64_t *next) {
        constexpr int CORNERS = Rule<T>::CORNERS;
        const mxd_tensor &output = this->call.output;
        char *out = at(output, offset3(output, b, q, h));
        if constexpr (same_type<V, T>)
            if (output.strides[3] == 1)
                return weighted_sum<V, T, CORNERS>(rows, next, this->readers[0].samples, this->n.channels,
                                                   reinterpret_cast<T *>(out));
        weighted_sum<V, T, CORNERS>(rows, next, this->readers[0].samples, this->n.channels, this->row);
        write_elements(this->row, out, output.dtype, output.strides[3], this->n.channels);
    }
};

// Rule<T>::scatter(reader, band, list) lists the gradient rows of one query. Items (batch, head, band).
template <class T, template <class> class Rule> class ValueGradient {
  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return QueryReader<T>::bytes(n) + 2 * ScatterList<T>::bytes(n.room()) + Arena::bytes<T>(n.channels) +
               Band<T>::bytes(call, n.channels);
    }
    ValueGradient(const Call &c, Arena arena)
        : call(c), n(c), reader(c, n, arena), lists{{arena, n.room()}, {arena, n.room()}},
          row(arena.take<T>(n.channels)), band(c, n.channels, arena) {}

    void operator()(int64_t item) {
        const int64_t h = item / call.num_bands % n.heads, b = item / call.num_bands / n.heads;
        band.open(item % call.num_bands, offset3(call.grad_value, b, 0, h), call.grad_value.strides[1],
                  call.grad_value.strides[3]);
        int64_t first = n.levels, last = 0; // the smallest range of levels with all that reach into the band
        for (int64_t l = 0; l < n.levels; ++l)
            if (band.touches(call.levels[l])) {
                first = first < l ? first : l;
                last = l + 1;
            }
        if (first < last) {
            reader.use_levels(first, last);
            one_ahead(
                0, n.queries,
                [&](int64_t q, int slot) {
                    reader.read(b, h, q);
                    lists[slot].count = 0;
                    Rule<T>::scatter(reader, band, lists[slot]);
                },
                [&](int64_t q, int slot) { add(b, h, q, lists[slot], lists[1 - slot]); });
        }
        band.close();
    }

  private:
    const Call &call;
    Sizes n;
    QueryReader<T> reader;
    ScatterList<T> lists[2];
    T *row;
    Band<T> band;

    void add(int64_t b, int64_t h, int64_t q, const ScatterList<T> &list, const ScatterList<T> &next) {
        if (list.count == 0) return;
        if (q + PREFETCH_QUERIES < n.queries)
            prefetch(call.output, offset3(call.output, b, q + PREFETCH_QUERIES, h), n.channels);
        const T *g = row_as(call.output, offset3(call.output, b, q, h), call.output.strides[3], n.channels, row);
        scatter_add<T>(list.address, list.share, list.count, n.channels, g, 0, next.address, next.count);
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
