// The four ways through the queries of an attention operator. A Rule<T> says what an operator does with a location:
//
//   CORNERS                                          rows of value a sample reads
//   rows(reader, i)                                  what samples i..i+LANES-1 read, a SampledRows
//   gradients(reader, dot, i, grad_xy, grad_weight)  from the products with those rows to the samples' gradients
#pragma once

#include "queries.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// Where the rows of value of (batch, head) lie: in the tensor, or in the copy of some levels.
inline void find_rows(const Call &call, const Sizes &n, int64_t b, int64_t h, RowAddresses &rows) {
    const int64_t size = element_size(call.value.dtype);
    const char *head = at(call.value, offset3(call.value, b, 0, h));
    for (int64_t l = 0; l < n.levels; ++l) {
        const int64_t first = l * n.points, last = first + n.points;
        if (call.copy && call.copy_offset[l] >= 0) {
            const int64_t bytes = n.channels * size;
            rows.set(first, last, call.copy + call.copy_offset[l] - call.levels[l].start * bytes, bytes);
        } else {
            rows.set(first, last, head, call.value.strides[1] * size);
        }
    }
    rows.set(n.levels * n.points, n.room(), head, 0); // padding, never on the map
}

// Copies part `chunk` of every level that is copied.
inline void copy_rows(const Call &call, const Sizes &n, int64_t b, int64_t h, int64_t chunk) {
    const size_t bytes = size_t(n.channels * element_size(call.value.dtype));
    for (int64_t l = 0; l < n.levels; ++l) {
        if (call.copy_offset[l] < 0) continue;
        const int64_t rows = call.levels[l].height * call.levels[l].width;
        char *to = call.copy + call.copy_offset[l];
        for (int64_t r = rows * chunk / STAGE_CHUNKS; r < rows * (chunk + 1) / STAGE_CHUNKS; ++r)
            memcpy(to + r * int64_t(bytes), at(call.value, offset3(call.value, b, call.levels[l].start + r, h)), bytes);
    }
}

// A query between prepare and finish: its inputs and the rows they lead to.
template <class T> struct Slot {
    QueryReader<T> reader;
    int64_t *value, *grad; // addresses of rows of value, and of the gradient of value
    T *share;

    static int64_t bytes(const Sizes &n) {
        return QueryReader<T>::bytes(n) + 2 * Arena::bytes<int64_t>(4 * n.room()) + Arena::bytes<T>(4 * n.room());
    }
    Slot(const Call &c, const Sizes &n, Arena &arena)
        : reader(c, n, arena), value(arena.take<int64_t>(4 * n.room())), grad(arena.take<int64_t>(4 * n.room())),
          share(arena.take<T>(4 * n.room())) {
        // the rows asked for ahead before there are any
        memset(value, 0, size_t(4 * n.room()) * sizeof(int64_t));
        memset(grad, 0, size_t(4 * n.room()) * sizeof(int64_t));
    }
};

// What every worker that goes query by query has at hand.
template <class V, class T, template <class> class Rule> struct QueryWorker {
    static constexpr int CORNERS = Rule<T>::CORNERS;
    const Call &call;
    Sizes n;
    Slot<T> slots[SLOTS];
    V *zeros; // the row of value that is not on the map
    T *row;
    RowAddresses value;
    int64_t num_rows; // of a query, padded

    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return SLOTS * Slot<T>::bytes(n) + Arena::bytes<V>(n.channels) + Arena::bytes<T>(n.channels) +
               RowAddresses::bytes(n.room());
    }
    QueryWorker(const Call &c, Arena &arena)
        : call(c), n(c), slots{{c, n, arena}, {c, n, arena}, {c, n, arena}, {c, n, arena}},
          zeros(arena.take<V>(n.channels)), row(arena.take<T>(n.channels)), value(arena, n.room(), zeros),
          num_rows(round_up(n.levels * n.points, ROWS) * CORNERS) {
        memset(zeros, 0, size_t(n.channels) * sizeof(V));
    }
    const T *grad_output(int64_t b, int64_t h, int64_t q) const {
        if (q + PREFETCH_QUERIES < n.queries)
            prefetch(call.output, offset3(call.output, b, q + PREFETCH_QUERIES, h), n.channels);
        return row_as(call.output, offset3(call.output, b, q, h), call.output.strides[3], n.channels, row);
    }
};

// Items: QueryBlocks.
template <class V, class T, template <class> class Rule> class Forward : QueryWorker<V, T, Rule> {
    typedef QueryWorker<V, T, Rule> Base;

  public:
    using Base::scratch_bytes;
    Forward(const Call &c, Arena arena) : Base(c, arena), blocks(c) {}
    void operator()(int64_t item) {
        const int64_t b = blocks.batch(item), h = blocks.head(item);
        find_rows(this->call, this->n, b, h, this->value);
        ahead(
            blocks.begin(item), blocks.end(item), [&](int64_t q, int slot) { prepare(b, h, q, this->slots[slot]); },
            [&](int64_t q, int slot, int next) { finish(b, h, q, this->slots[slot], this->slots[next]); });
    }

  private:
    QueryBlocks blocks;

    void prepare(int64_t b, int64_t h, int64_t q, Slot<T> &slot) {
        slot.reader.read(b, h, q);
        for (int64_t i = 0; i < slot.reader.padded; i += LANES) {
            const auto rows = Rule<T>::rows(slot.reader, i);
            MXD_UNROLL
            for (int k = 0; k < Base::CORNERS; ++k) {
                put_entries<Base::CORNERS>(slot.value, i, k, this->value.of(i, rows.inside[k], rows.pixel[k]));
                put_entries<Base::CORNERS>(slot.share, i, k, rows.share[k]);
            }
        }
    }

    void finish(int64_t b, int64_t h, int64_t q, const Slot<T> &slot, const Slot<T> &next) {
        const mxd_tensor &output = this->call.output;
        char *out = at(output, offset3(output, b, q, h));
        if constexpr (same_type<V, T>)
            if (output.strides[3] == 1)
                return weighted_sum<V, T>(slot.value, slot.share, next.value, this->num_rows, this->n.channels,
                                          reinterpret_cast<T *>(out));
        weighted_sum<V, T>(slot.value, slot.share, next.value, this->num_rows, this->n.channels, this->row);
        write_elements(this->row, out, output.dtype, output.strides[3], this->n.channels);
    }
};

// Gradients of locations and weights, and of value where it is added up in place and a worker has a whole head to
// itself. Items: QueryBlocks; with WITH_VALUE (batch, head), because queries share the rows they add to.
template <class V, class T, template <class> class Rule, bool WITH_VALUE>
class SampleGradients : QueryWorker<V, T, Rule> {
    typedef QueryWorker<V, T, Rule> Base;

  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return RowAddresses::bytes(n.room()) + Base::scratch_bytes(call) + Arena::bytes<T>(4 * n.room()) +
               Arena::bytes<T>(2 * n.room()) + Arena::bytes<T>(n.room()) + Arena::bytes<T>(n.channels);
    }
    SampleGradients(const Call &c, Arena arena)
        : Base(c, arena), blocks(c), dot(arena.take<T>(4 * this->n.room())), grad_xy(arena.take<T>(2 * this->n.room())),
          grad_weight(arena.take<T>(this->n.room())), sink(arena.take<T>(this->n.channels)),
          locations_out(c.grad_locations, 3), weights_out(c.grad_weights, 3),
          with_samples(c.grad_locations.data || c.grad_weights.data), grad(arena, this->n.room(), sink) {
        memset(dot, 0, size_t(4 * this->n.room()) * sizeof(T));
        memset(sink, 0, size_t(this->n.channels) * sizeof(T));
    }
    void operator()(int64_t item) {
        if constexpr (WITH_VALUE) {
            const int64_t b = item / this->n.heads, h = item % this->n.heads;
            const mxd_tensor &to = this->call.grad_value;
            for (int64_t i = 0; i < this->n.keys; ++i)
                memset(at(to, offset3(to, b, i, h)), 0, size_t(this->n.channels) * sizeof(T));
            grad.set(0, this->n.room(), at(to, offset3(to, b, 0, h)), to.strides[1] * int64_t(sizeof(T)));
            queries(b, h, 0, this->n.queries);
        } else {
            queries(blocks.batch(item), blocks.head(item), blocks.begin(item), blocks.end(item));
        }
    }

  private:
    QueryBlocks blocks;
    T *dot, *grad_xy, *grad_weight;
    T *sink; // takes the gradient of what is not on the map; never read
    Block<3> locations_out;
    Block<2> weights_out;
    bool with_samples;
    RowAddresses grad;

    void queries(int64_t b, int64_t h, int64_t begin, int64_t end) {
        find_rows(this->call, this->n, b, h, this->value);
        ahead(
            begin, end, [&](int64_t q, int slot) { prepare(b, h, q, this->slots[slot]); },
            [&](int64_t q, int slot, int next) { finish(b, h, q, this->slots[slot], this->slots[next]); });
    }

    void prepare(int64_t b, int64_t h, int64_t q, Slot<T> &slot) {
        slot.reader.read(b, h, q);
        for (int64_t i = 0; i < slot.reader.padded; i += LANES) {
            const auto rows = Rule<T>::rows(slot.reader, i);
            MXD_UNROLL
            for (int k = 0; k < Base::CORNERS; ++k) {
                put_entries<Base::CORNERS>(slot.value, i, k, this->value.of(i, rows.inside[k], rows.pixel[k]));
                if constexpr (WITH_VALUE) {
                    put_entries<Base::CORNERS>(slot.grad, i, k, grad.of(i, rows.inside[k], rows.pixel[k]));
                    put_entries<Base::CORNERS>(slot.share, i, k, rows.share[k]);
                }
            }
        }
    }

    void finish(int64_t b, int64_t h, int64_t q, const Slot<T> &slot, const Slot<T> &next) {
        const Call &call = this->call;
        const T *g = this->grad_output(b, h, q);
        if (with_samples) {
            dots<V, T>(slot.value, next.value, this->num_rows, this->n.channels, g, dot);
            for (int64_t i = 0; i < slot.reader.padded; i += LANES)
                Rule<T>::gradients(slot.reader, dot, i, grad_xy, grad_weight);
            if (call.grad_locations.data) locations_out.write(offset3(call.grad_locations, b, q, h), grad_xy);
            if (call.grad_weights.data) weights_out.write(offset3(call.grad_weights, b, q, h), grad_weight);
        }
        if constexpr (WITH_VALUE)
            scatter_add<T>(slot.grad, slot.share, this->num_rows, this->n.channels, g, 0, next.grad, this->num_rows);
    }
};

// The gradient of value by bands, for more threads than heads and for what is not added up in place. Items (batch,
// head, band).
template <class T, template <class> class Rule> class ValueGradient {
  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return QueryReader<T>::bytes(n) + SLOTS * ScatterList<T>::bytes(n.room()) + Arena::bytes<T>(n.channels) +
               Band<T>::bytes(call, n.channels);
    }
    ValueGradient(const Call &c, Arena arena)
        : call(c), n(c), reader(c, n, arena),
          lists{{arena, n.room()}, {arena, n.room()}, {arena, n.room()}, {arena, n.room()}},
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
            while (first * n.points % ROWS != 0) --first; // lists are in the order of groups of ROWS samples
            reader.use_levels(first, last);
            ahead(
                0, n.queries,
                [&](int64_t q, int slot) {
                    reader.read(b, h, q);
                    lists[slot].count = 0;
                    for (int64_t i = 0; i < reader.padded; i += LANES)
                        lists[slot].template add<ROWS>(Rule<T>::rows(reader, i), band);
                },
                [&](int64_t q, int slot, int next) { add(b, h, q, lists[slot], lists[next]); });
        }
        band.close();
    }

  private:
    const Call &call;
    Sizes n;
    QueryReader<T> reader;
    ScatterList<T> lists[SLOTS];
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

// Worker over QueryBlocks; with a copy of levels head by head.
template <class Worker> inline bool over_queries(const Call &call) {
    const Sizes n(call);
    const int64_t items = QueryBlocks(call).count();
    if (!call.copy) return parallel<Worker>(call.num_threads, items, call);
    return parallel_stages<Worker>(call.num_threads, n.batch * n.heads, items, call, [&](int64_t head, int64_t chunk) {
        copy_rows(call, n, head / n.heads, head % n.heads, chunk);
    });
}

template <template <class> class Rule> inline bool attention(const Call &call) {
    return with_types(
        call, [&](auto *v, auto *t) { return over_queries<Forward<__typeof__(*v), __typeof__(*t), Rule>>(call); });
}

template <template <class> class Rule> inline bool attention_backward(const Call &call) {
    const Sizes n(call);
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        bool enough = true;
        if (call.grad_locations.data || call.grad_weights.data)
            enough = over_queries<SampleGradients<V, T, Rule, false>>(call);
        if (!enough || !call.grad_value.data) return enough;
        if (call.num_bands == 1 && call.grad_value_in_place) {
            Call value_only = call;
            value_only.grad_locations.data = value_only.grad_weights.data = nullptr;
            value_only.copy = nullptr;
            return parallel<SampleGradients<V, T, Rule, true>>(call.num_threads, n.batch * n.heads, value_only);
        }
        return parallel<ValueGradient<T, Rule>>(call.num_threads, n.batch * n.heads * call.num_bands, call);
    });
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
