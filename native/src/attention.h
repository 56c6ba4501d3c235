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

// Where the rows of each level of one head lie: in a tensor from `head` on, `step` bytes apart, or in `packed` memory
// of some levels, where there is any.
inline void find_levels(const Call &call, const Sizes &n, const char *head, int64_t step, const PackedLevels &levels,
                        const char *packed, int64_t row_bytes, RowAddresses &rows) {
    for (int64_t l = 0; l < n.levels; ++l) {
        const int64_t first = l * n.points, last = first + n.points;
        if (packed && levels.offset[l] >= 0)
            rows.set(first, last, packed + levels.offset[l] - call.levels[l].start * row_bytes, row_bytes);
        else
            rows.set(first, last, head, step);
    }
    rows.set(n.levels * n.points, n.room(), head, 0); // padding, never on the map
}

// fn(row, its place in packed memory) for rows of a packed level: part `chunk` of `chunks`.
template <class Fn>
inline void packed_rows(const Call &call, const PackedLevels &levels, char *packed, int64_t row_bytes, int64_t chunk,
                        int64_t chunks, Fn &&fn) {
    if (levels.bytes == 0) return;
    for (int64_t l = 0; l < call.num_levels; ++l) {
        if (levels.offset[l] < 0) continue;
        const int64_t rows = call.levels[l].height * call.levels[l].width;
        for (int64_t r = rows * chunk / chunks; r < rows * (chunk + 1) / chunks; ++r)
            fn(call.levels[l].start + r, packed + levels.offset[l] + r * row_bytes);
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
    void find_value(int64_t b, int64_t h) {
        const mxd_tensor &from = call.value;
        find_levels(call, n, at(from, offset3(from, b, 0, h)), from.strides[1] * int64_t(sizeof(V)), call.copied,
                    call.copy, n.channels * int64_t(sizeof(V)), value);
    }
    // For each query prepare(slot, first of LANES samples) and, AHEAD queries later, finish(query, slot, slot prepared
    // last).
    template <class Prepare, class Finish>
    MXD_INLINE void queries(int64_t b, int64_t h, int64_t begin, int64_t end, Prepare &&prepare, Finish &&finish) {
        for (Slot<T> &slot : slots) slot.reader.open(b, h);
        ahead(
            begin, end,
            [&](int64_t q, int slot) {
                slots[slot].reader.read(q);
                for (int64_t i = 0; i < slots[slot].reader.padded; i += LANES) prepare(slots[slot], i);
            },
            [&](int64_t q, int slot, int next) { finish(q, slots[slot], slots[next]); });
    }
    template <class Rows> MXD_INLINE void put_value(Slot<T> &slot, const Rows &rows, int64_t i) const {
        MXD_UNROLL
        for (int k = 0; k < CORNERS; ++k)
            put_entries<CORNERS>(slot.value, i, k, value.of(i, rows.inside[k], rows.pixel[k]));
    }
    template <class Rows> MXD_INLINE void put_shares(Slot<T> &slot, const Rows &rows, int64_t i) const {
        MXD_UNROLL
        for (int k = 0; k < CORNERS; ++k) put_entries<CORNERS>(slot.share, i, k, rows.share[k]);
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
        const mxd_tensor &output = this->call.output;
        const bool in_place = same_type<V, T> && output.dtype == this->call.value.dtype && output.strides[3] == 1;
        this->find_value(b, h);
        this->queries(
            b, h, blocks.begin(item), blocks.end(item),
            [&](Slot<T> &slot, int64_t i) {
                const auto rows = Rule<T>::rows(slot.reader, i);
                this->put_value(slot, rows, i);
                this->put_shares(slot, rows, i);
            },
            [&](int64_t q, const Slot<T> &slot, const Slot<T> &next) {
                char *out = at(output, offset3(output, b, q, h));
                weighted_sum<V, T>(slot.value, slot.share, next.value, this->num_rows, this->n.channels,
                                   in_place ? reinterpret_cast<T *>(out) : this->row);
                if (!in_place) write_elements(this->row, out, output.dtype, output.strides[3], this->n.channels);
            });
    }

  private:
    QueryBlocks blocks;
};

// Gradients of locations and weights; or of value, where it is added up in place and a worker has a whole head to
// itself: V is T then, for value is not read. Items: QueryBlocks; for value (batch, head), because queries share the
// rows they add to.
template <class V, class T, template <class> class Rule, bool VALUE> class Gradients : QueryWorker<V, T, Rule> {
    typedef QueryWorker<V, T, Rule> Base;

  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return RowAddresses::bytes(n.room()) + Base::scratch_bytes(call) + Arena::bytes<T>(4 * n.room()) +
               Arena::bytes<T>(2 * n.room()) + Arena::bytes<T>(n.room()) + Arena::bytes<T>(n.channels) +
               (VALUE ? Arena::bytes<char>(call.summed.bytes) : 0);
    }
    Gradients(const Call &c, Arena arena)
        : Base(c, arena), blocks(c), dot(arena.take<T>(4 * this->n.room())), sink(arena.take<T>(this->n.channels)),
          grad(arena, this->n.room(), sink), sums(VALUE ? arena.take<char>(c.summed.bytes) : nullptr),
          xy(c.grad_locations, this->n, 2, arena.take<T>(2 * this->n.room())),
          weights(c.grad_weights, this->n, 1, arena.take<T>(this->n.room())) {
        memset(dot, 0, size_t(4 * this->n.room()) * sizeof(T));
        memset(sink, 0, size_t(this->n.channels) * sizeof(T));
    }
    void operator()(int64_t item) {
        if constexpr (VALUE) {
            const int64_t b = item / this->n.heads, h = item % this->n.heads;
            open_value(b, h);
            head(b, h, 0, this->n.queries);
            close_value(b, h);
        } else {
            head(blocks.batch(item), blocks.head(item), blocks.begin(item), blocks.end(item));
        }
    }

  private:
    QueryBlocks blocks;
    T *dot;
    T *sink; // takes the gradient of what is not on the map; never read
    RowAddresses grad;
    char *sums; // of call.summed levels

    // Rows of the gradient of value lie where they belong, set to zero before; those of some levels in memory of their
    // own.
    void open_value(int64_t b, int64_t h) {
        const Call &call = this->call;
        const int64_t bytes = this->n.channels * int64_t(sizeof(T));
        char *head = at(call.grad_value, offset3(call.grad_value, b, 0, h));
        const int64_t step = call.grad_value.strides[1] * int64_t(sizeof(T));
        memset(sums, 0, size_t(call.summed.bytes));
        find_levels(call, this->n, head, step, call.summed, call.summed.bytes > 0 ? sums : nullptr, bytes, grad);
    }
    void close_value(int64_t b, int64_t h) {
        const Call &call = this->call;
        const int64_t bytes = this->n.channels * int64_t(sizeof(T));
        packed_rows(call, call.summed, sums, bytes, 0, 1, [&](int64_t row, const char *from) {
            memcpy(at(call.grad_value, offset3(call.grad_value, b, row, h)), from, size_t(bytes));
        });
    }

    // A gradient of samples: where it belongs, when it can be written there as it is worked out, else scratch.
    template <int AXES> struct Results {
        const mxd_tensor &tensor;
        Block<AXES> block;
        int64_t queries, count;
        bool direct;
        T *scratch;

        Results(const mxd_tensor &t, const Sizes &n, int64_t of_each, T *memory)
            : tensor(t), block(t, 3), queries(n.queries), count(n.levels * n.points * of_each),
              direct(t.data && n.levels * n.points == n.room() && block.packed &&
                     t.dtype == (sizeof(T) == 8 ? MXD_FLOAT64 : MXD_FLOAT32)),
              scratch(memory) {}
        // What queries to come will write is asked for: the first write to a line fetches it.
        MXD_INLINE T *begin(int64_t b, int64_t h, int64_t q) const {
            if (tensor.data && q + PREFETCH_QUERIES < queries)
                prefetch<true>(tensor, offset3(tensor, b, q + PREFETCH_QUERIES, h), count);
            return direct ? reinterpret_cast<T *>(at(tensor, offset3(tensor, b, q, h))) : scratch;
        }
        MXD_INLINE void end(int64_t b, int64_t h, int64_t q) const {
            if (tensor.data && !direct) block.write(offset3(tensor, b, q, h), scratch);
        }
    };
    Results<3> xy;
    Results<2> weights;

    void head(int64_t b, int64_t h, int64_t begin, int64_t end) {
        if constexpr (!VALUE) this->find_value(b, h);
        this->queries(
            b, h, begin, end,
            [&](Slot<T> &slot, int64_t i) {
                const auto rows = Rule<T>::rows(slot.reader, i);
                if constexpr (!VALUE) {
                    this->put_value(slot, rows, i);
                } else {
                    this->put_shares(slot, rows, i);
                    MXD_UNROLL
                    for (int k = 0; k < Base::CORNERS; ++k)
                        put_entries<Base::CORNERS>(slot.grad, i, k, grad.of(i, rows.inside[k], rows.pixel[k]));
                }
            },
            [&](int64_t q, const Slot<T> &slot, const Slot<T> &next) {
                const T *g = this->grad_output(b, h, q);
                if constexpr (!VALUE) {
                    dots<V, T>(slot.value, next.value, this->num_rows, this->n.channels, g, dot);
                    T *grad_xy = xy.begin(b, h, q), *grad_weight = weights.begin(b, h, q);
                    for (int64_t i = 0; i < slot.reader.padded; i += LANES)
                        Rule<T>::gradients(slot.reader, dot, i, grad_xy, grad_weight);
                    xy.end(b, h, q);
                    weights.end(b, h, q);
                } else {
                    scatter_add<T>(slot.grad, slot.share, this->num_rows, this->n.channels, g, 0, next.grad,
                                   this->num_rows);
                }
            });
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
            reader.open(b, h);
            ahead(
                0, n.queries,
                [&](int64_t q, int slot) {
                    reader.read(q);
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
template <class Worker> inline bool over_queries(Call call) {
    const Sizes n(call);
    char *memory = call.copied.bytes > 0 ? static_cast<char *>(malloc(size_t(call.copied.bytes) + 64)) : nullptr;
    if (!memory) return parallel<Worker>(call.num_threads, QueryBlocks(call).count(), call);
    call.copy = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64);
    const int64_t bytes = n.channels * element_size(call.value.dtype);
    const bool done = parallel_stages<Worker>(
        call.num_threads, n.batch * n.heads, QueryBlocks(call).count(), call, [&](int64_t head, int64_t chunk) {
            packed_rows(call, call.copied, call.copy, bytes, chunk, STAGE_CHUNKS, [&](int64_t row, char *to) {
                memcpy(to, at(call.value, offset3(call.value, head / n.heads, row, head % n.heads)), size_t(bytes));
            });
        });
    free(memory);
    return done;
}

template <template <class> class Rule> inline bool attention(const Call &call) {
    return with_types(
        call, [&](auto *v, auto *t) { return over_queries<Forward<__typeof__(*v), __typeof__(*t), Rule>>(call); });
}

// Part `chunk` of the gradient of value, in the order of memory: head by head takes longer.
template <class T> inline void set_to_zero(const Call &call, const Sizes &n, int64_t chunk) {
    const mxd_tensor &grad = call.grad_value;
    const int64_t begin = n.keys * chunk / STAGE_CHUNKS, end = n.keys * (chunk + 1) / STAGE_CHUNKS;
    const bool packed = grad.strides[2] == n.channels && grad.strides[1] == n.heads * n.channels;
    for (int64_t b = 0; b < n.batch; ++b) {
        if (packed) {
            memset(at(grad, offset3(grad, b, begin, 0)), 0, size_t((end - begin) * grad.strides[1]) * sizeof(T));
            continue;
        }
        for (int64_t i = begin; i < end; ++i)
            for (int64_t h = 0; h < n.heads; ++h)
                memset(at(grad, offset3(grad, b, i, h)), 0, size_t(n.channels) * sizeof(T));
    }
}

template <template <class> class Rule> inline bool attention_backward(const Call &call) {
    const Sizes n(call);
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if (call.grad_locations.data || call.grad_weights.data)
            if (!over_queries<Gradients<V, T, Rule, false>>(call)) return false;
        if (!call.grad_value.data) return true;
        const int64_t heads = n.batch * n.heads;
        if (call.num_bands > 1 || !call.grad_value_in_place)
            return parallel<ValueGradient<T, Rule>>(call.num_threads, heads * call.num_bands, call);
        return parallel_stages<Gradients<T, T, Rule, true>>(
            call.num_threads, 1, heads, call, [&](int64_t, int64_t chunk) { set_to_zero<T>(call, n, chunk); });
    });
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
