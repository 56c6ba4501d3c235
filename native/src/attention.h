// The four ways through the queries of an attention operator. A Rule<T> says what an operator does with a location:
//
//   CORNERS                                         rows of value a sample reads
//   rows(query, i)                                  what samples i..i+LANES-1 read, a SampledRows
//   reach(query, i, band)                           which of them may read a BandRows: the same, but quick
//   gradients(query, dot, i, grad_xy, grad_weight)  from the products with those rows to the samples' gradients
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
    rows.set(n.levels * n.points, n.room(), reinterpret_cast<const void *>(rows.nowhere), 0); // padding
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

// A query between prepare and finish: its inputs, the rows they lead to, and what each row's share is.
template <class T> struct Slot {
    Query<T> query;
    int64_t *address;
    T *share;

    static int64_t bytes(const Sizes &n) {
        return Query<T>::bytes(n) + Arena::bytes<int64_t>(4 * n.room()) + Arena::bytes<T>(4 * n.room());
    }
    Slot(const Sizes &n, const Maps<T> &maps, Arena &arena)
        : query(n, maps, arena), address(arena.take<int64_t>(4 * n.room())), share(arena.take<T>(4 * n.room())) {
        memset(address, 0, size_t(4 * n.room()) * sizeof(int64_t)); // asked for ahead before there are any
    }
};

// What every worker that goes query by query has at hand. V: of the rows it goes to, of value or of its gradient.
template <class V, class T, template <class> class Rule> struct QueryWorker {
    static constexpr int CORNERS = Rule<T>::CORNERS;
    const Call &call;
    Sizes n; // of the part of the call that is worked on
    int64_t first_channel = 0;
    QueryReader<T> reader;
    Slot<T> slots[SLOTS];
    V *nowhere; // the row that is not on the map
    T *row;
    RowAddresses rows;
    QueryRows outputs;
    int64_t num_rows; // of a query, padded

    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return QueryReader<T>::bytes(n) + SLOTS * Slot<T>::bytes(n) + Arena::bytes<V>(n.channels) +
               Arena::bytes<T>(n.channels) + RowAddresses::bytes(n.room());
    }
    QueryWorker(const Call &c, Arena &arena)
        : call(c), n(c), reader(c, n, arena), slots{{n, reader.maps(), arena},
                                                    {n, reader.maps(), arena},
                                                    {n, reader.maps(), arena},
                                                    {n, reader.maps(), arena}},
          nowhere(arena.take<V>(n.channels)), row(arena.take<T>(n.channels)), rows(arena, n.room(), nowhere),
          num_rows(round_up(n.levels * n.points, ROWS) * CORNERS) {
        memset(nowhere, 0, size_t(n.channels) * sizeof(V));
    }
    // From now on some levels, and some of the channels, alone.
    void use_part(int64_t level, int64_t end_level, int64_t channel, int64_t end_channel) {
        n.levels = end_level - level;
        first_channel = channel, n.channels = end_channel - channel;
        num_rows = round_up(n.levels * n.points, ROWS) * CORNERS;
        reader.use_levels(level, end_level);
    }
    void find_value(int64_t b, int64_t h) {
        const mxd_tensor &from = call.value;
        find_levels(call, n, at(from, offset3(from, b, 0, h)), from.strides[1] * int64_t(sizeof(V)), call.copied,
                    call.copy, n.channels * int64_t(sizeof(V)), rows);
    }
    // For each query prepare(slot, first of LANES samples, their rows) and, AHEAD queries later, finish(query, slot,
    // slot prepared last).
    template <class Prepare, class Finish>
    MXD_INLINE void queries(int64_t b, int64_t h, int64_t begin, int64_t end, Prepare &&prepare, Finish &&finish) {
        reader.open(b, h);
        outputs = QueryRows(call.output, b, h, n.channels, first_channel * call.output.strides[3]);
        ahead(
            begin, end,
            [&](int64_t q, int number) {
                Slot<T> &slot = slots[number];
                reader.read(q, slot.query);
                for (int64_t i = 0; i < reader.padded; i += LANES) {
                    const auto sampled = Rule<T>::rows(slot.query, i);
                    rows.put<CORNERS>(slot.address, i, sampled);
                    prepare(slot, i, sampled);
                }
            },
            [&](int64_t q, int number, int next) { finish(q, slots[number], slots[next]); });
    }
    template <class Sampled> MXD_INLINE void put_shares(Slot<T> &slot, int64_t i, const Sampled &sampled) const {
        MXD_UNROLL
        for (int k = 0; k < CORNERS; ++k) put_entries<CORNERS>(slot.share, i, k, sampled.share[k]);
    }
    MXD_INLINE const T *grad_output(int64_t q) const {
        return row_as(outputs.at_in_turn(q), call.output.dtype, call.output.strides[3], n.channels, row);
    }
};

// Items: QueryBlocks. FAR: a head's rows may be in memory, and are asked for ahead.
template <class V, class T, template <class> class Rule, bool FAR> class Forward : QueryWorker<V, T, Rule> {
    typedef QueryWorker<V, T, Rule> Base;

  public:
    static int64_t scratch_bytes(const Call &call) {
        return Base::scratch_bytes(call) + Arena::bytes<V>(Sizes(call).channels);
    }
    Forward(const Call &c, Arena arena) : Base(c, arena), blocks(c), sum(arena.take<V>(this->n.channels)) {}
    void operator()(int64_t item) {
        const int64_t b = blocks.batch(item), h = blocks.head(item);
        // value that was not double may have become so
        const bool in_place = this->call.output.dtype == this->call.value.dtype && this->call.output.strides[3] == 1;
        this->find_value(b, h);
        this->queries(
            b, h, blocks.begin(item), blocks.end(item),
            [&](Slot<T> &slot, int64_t i, const auto &sampled) { this->put_shares(slot, i, sampled); },
            [&](int64_t q, const Slot<T> &slot, const Slot<T> &next) {
                char *out = this->outputs.template at_in_turn<true>(q);
                weighted_sum<V, T, FAR>(slot.address, slot.share, next.address, this->num_rows, this->n.channels,
                                        in_place ? reinterpret_cast<V *>(out) : sum);
                if (!in_place) put(out);
            });
    }

  private:
    QueryBlocks blocks;
    V *sum; // of a query that cannot be written where it belongs

    void put(char *out) const {
        const mxd_tensor &output = this->call.output;
        if constexpr (same_type<V, T>)
            write_elements(sum, out, output.dtype, output.strides[3], this->n.channels);
        else // of the same type, but apart
            for (int64_t c = 0; c < this->n.channels; ++c)
                memcpy(out + c * output.strides[3] * int64_t(sizeof(V)), sum + c, sizeof(V));
    }
};

// Of samples: of their locations and weights.
enum Wanted { OF_SAMPLES, OF_VALUE, OF_BOTH };

// Gradients of samples; or of value, where it is added up in place and a worker has a whole head to itself: V is T
// then, for value is not read; or of both in one pass. Items: QueryBlocks; with value's (batch, head, part of a head),
// because queries share the rows they add to.
template <class V, class T, template <class> class Rule, Wanted WANTED> class Gradients : QueryWorker<V, T, Rule> {
    typedef QueryWorker<V, T, Rule> Base;
    static constexpr bool SAMPLES = WANTED != OF_VALUE, VALUE = WANTED != OF_SAMPLES;
    static_assert(!VALUE || same_type<V, T>, "value's gradient is added up where it lies");

  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return Base::scratch_bytes(call) + Arena::bytes<T>(4 * n.room()) + Arena::bytes<T>(2 * n.room()) +
               Arena::bytes<T>(n.room()) + (VALUE ? Arena::bytes<char>(call.summed.bytes) : 0);
    }
    Gradients(const Call &c, Arena arena)
        : Base(c, arena), blocks(c), dot(arena.take<T>(4 * this->n.room())),
          sums(VALUE ? arena.take<char>(c.summed.bytes) : nullptr),
          gradient{0, reinterpret_cast<int64_t>(this->nowhere)},
          xy(c.grad_locations, this->n, arena.take<T>(2 * this->n.room())),
          weights(c.grad_weights, this->n, arena.take<T>(this->n.room())) {
        memset(dot, 0, size_t(4 * this->n.room()) * sizeof(T));
    }
    void operator()(int64_t item) {
        if constexpr (VALUE) {
            const Call &call = this->call;
            const int64_t parts = call.level_parts * call.channel_parts, part = item % parts;
            const int64_t h = item / parts % this->n.heads, b = item / parts / this->n.heads;
            if constexpr (SAMPLES) {
                gradient.distance = first_row(call.grad_value, b, h) - first_row(call.value, b, h);
            } else {
                open_part(part / call.channel_parts, part % call.channel_parts);
                open_value(b, h);
            }
            head(b, h, 0, this->n.queries);
            if constexpr (!SAMPLES) close_value(b, h);
        } else {
            head(blocks.batch(item), blocks.head(item), blocks.begin(item), blocks.end(item));
        }
    }

  private:
    QueryBlocks blocks;
    T *dot;
    char *sums;         // of call.summed levels
    OtherRows gradient; // of value, seen from rows of value

    static char *first_row(const mxd_tensor &t, int64_t b, int64_t h) { return at(t, offset3(t, b, 0, h)); }

    void open_part(int64_t of_levels, int64_t of_channels) {
        const Call &call = this->call;
        const int64_t channels = call.value.shape[3] / call.channel_parts;
        this->use_part(call.num_levels * of_levels / call.level_parts,
                       call.num_levels * (of_levels + 1) / call.level_parts, channels * of_channels,
                       channels * (of_channels + 1));
    }

    // Rows of the gradient of value lie where they belong, set to zero before; those of some levels in memory of their
    // own.
    void open_value(int64_t b, int64_t h) {
        const Call &call = this->call;
        const int64_t bytes = this->n.channels * int64_t(sizeof(T));
        const int64_t step = call.grad_value.strides[1] * int64_t(sizeof(T));
        memset(sums, 0, size_t(call.summed.bytes));
        const char *head = first_row(call.grad_value, b, h) + this->first_channel * int64_t(sizeof(T));
        find_levels(call, this->n, head, step, call.summed, call.summed.bytes > 0 ? sums : nullptr, bytes, this->rows);
    }
    void close_value(int64_t b, int64_t h) {
        const Call &call = this->call;
        const int64_t bytes = this->n.channels * int64_t(sizeof(T));
        packed_rows(call, call.summed, sums, bytes, 0, 1, [&](int64_t row, const char *from) {
            memcpy(at(call.grad_value, offset3(call.grad_value, b, row, h)), from, size_t(bytes));
        });
    }

    // A gradient of samples, OF_EACH numbers a sample: whole vectors where they belong, when they can be written there
    // as they are worked out; else, and what is left of a vector, by way of scratch.
    template <int AXES, int OF_EACH> struct Results {
        const mxd_tensor &tensor;
        Block<AXES> block;
        int64_t samples, in_vectors;
        bool direct;
        T *scratch;
        QueryRows queries;

        Results(const mxd_tensor &t, const Sizes &n, T *memory)
            : tensor(t), block(t, 3), samples(n.levels * n.points), in_vectors(samples / LANES * LANES),
              direct(t.data && block.packed && t.dtype == OWN<T>), scratch(memory) {}
        void open(int64_t b, int64_t h) {
            if (tensor.data) queries = QueryRows(tensor, b, h, samples * OF_EACH);
        }
        MXD_INLINE T *begin(int64_t q) const {
            char *to = tensor.data ? queries.template at_in_turn<true>(q) : nullptr;
            return direct ? reinterpret_cast<T *>(to) : scratch;
        }
        MXD_INLINE T *of_vector(T *begun, int64_t i) const { return i < in_vectors ? begun : scratch; }
        MXD_INLINE void end(int64_t q, T *begun) const {
            if (tensor.data && !direct) block.write_at(queries.at(q), scratch);
            if (direct && in_vectors < samples)
                memcpy(begun + in_vectors * OF_EACH, scratch + in_vectors * OF_EACH,
                       size_t((samples - in_vectors) * OF_EACH) * sizeof(T));
        }
    };
    Results<3, 2> xy;
    Results<2, 1> weights;

    void head(int64_t b, int64_t h, int64_t begin, int64_t end) {
        if constexpr (SAMPLES) {
            this->find_value(b, h);
            xy.open(b, h);
            weights.open(b, h);
        }
        this->queries(
            b, h, begin, end,
            [&](Slot<T> &slot, int64_t i, const auto &sampled) {
                if constexpr (VALUE) this->put_shares(slot, i, sampled);
            },
            [&](int64_t q, const Slot<T> &slot, const Slot<T> &next) {
                const T *g = this->grad_output(q);
                if constexpr (WANTED == OF_VALUE)
                    scatter_add<T>(slot.address, slot.share, next.address, this->num_rows, this->n.channels, g);
                if constexpr (WANTED == OF_SAMPLES)
                    dots<V, T>(slot.address, next.address, this->num_rows, this->n.channels, g, dot);
                if constexpr (WANTED == OF_BOTH)
                    dots_and_scatter_add<T>(slot.address, slot.share, next.address, gradient, this->num_rows,
                                            this->n.channels, g, dot);
                if constexpr (SAMPLES) {
                    T *grad_xy = xy.begin(q), *grad_weight = weights.begin(q);
                    for (int64_t i = 0; i < this->reader.padded; i += LANES)
                        Rule<T>::gradients(slot.query, dot, i, xy.of_vector(grad_xy, i),
                                           weights.of_vector(grad_weight, i));
                    xy.end(q, grad_xy);
                    weights.end(q, grad_weight);
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
        return QueryReader<T>::bytes(n) + Query<T>::bytes(n) + SLOTS * ScatterList<T>::bytes(n.room()) +
               Arena::bytes<T>(n.channels) + Band<T>::bytes(call, n.channels) + BandRows<T>::bytes(n.room());
    }
    ValueGradient(const Call &c, Arena arena)
        : call(c), n(c), reader(c, n, arena), query(n, reader.maps(), arena),
          lists{{arena, n.room()}, {arena, n.room()}, {arena, n.room()}, {arena, n.room()}},
          row(arena.take<T>(n.channels)), band(c, n.channels, arena), band_rows(arena, n.room()) {}

    void operator()(int64_t item) {
        const int64_t h = item / call.num_bands % n.heads, b = item / call.num_bands / n.heads;
        band.open(item % call.num_bands, offset3(call.grad_value, b, 0, h), call.grad_value.strides[1],
                  call.grad_value.strides[3]);
        int64_t first, last;
        band.levels_touched(first, last);
        if (first < last) {
            while (first * n.points % ROWS != 0) --first; // lists are in the order of groups of ROWS samples
            reader.use_levels(first, last);
            band_rows.set_levels(call.levels, first, last, n.points, reader.padded, band);
            reader.open(b, h);
            outputs = QueryRows(call.output, b, h, n.channels);
            ahead(
                0, n.queries,
                [&](int64_t q, int slot) {
                    reader.read(q, query);
                    lists[slot].count = 0;
                    for (int64_t i = 0; i < reader.padded; i += LANES)
                        if (any(Rule<T>::reach(query, i, band_rows))) // few do: a band is a part of a map
                            lists[slot].add(Rule<T>::rows(query, i), band);
                },
                [&](int64_t q, int slot, int next) { add(q, lists[slot], lists[next]); });
        }
        band.close();
    }

  private:
    const Call &call;
    Sizes n;
    QueryReader<T> reader;
    Query<T> query;
    ScatterList<T> lists[SLOTS];
    T *row;
    Band<T> band;
    BandRows<T> band_rows;
    QueryRows outputs;

    void add(int64_t q, const ScatterList<T> &list, const ScatterList<T> &next) {
        if (list.count == 0) return;
        const mxd_tensor &grad = call.output;
        const T *g = row_as(outputs.at_in_turn(q), grad.dtype, grad.strides[3], n.channels, row);
        scatter_add<T>(list.address, list.share, next.address, list.count, n.channels, g);
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

// Whether all that a head reads of value is a copy that stays in the nearest caches. Where a query reads few rows,
// asking for them costs more than they do.
constexpr int64_t NEAR_BYTES = 64 * 1024;

inline bool rows_are_near(const Call &call) {
    if (call.copied.bytes == 0 || call.copied.bytes > NEAR_BYTES) return false;
    for (int64_t l = 0; l < call.num_levels; ++l)
        if (call.copied.offset[l] < 0) return false;
    return true;
}

template <template <class> class Rule> inline bool attention(const Call &call) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if constexpr (Rule<T>::CORNERS == 1) // elsewhere it gives nothing
            if (rows_are_near(call)) return over_queries<Forward<V, T, Rule, false>>(call);
        return over_queries<Forward<V, T, Rule, true>>(call);
    });
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
        const int64_t heads = n.batch * n.heads;
        const auto zero = [&](int64_t, int64_t chunk) { set_to_zero<T>(call, n, chunk); };
        if constexpr (same_type<V, T>)
            if (call.in_one_pass)
                return parallel_stages<Gradients<T, T, Rule, OF_BOTH>>(call.num_threads, 1, heads, call, zero);
        if (call.grad_locations.data || call.grad_weights.data)
            if (!over_queries<Gradients<V, T, Rule, OF_SAMPLES>>(call)) return false;
        if (!call.grad_value.data) return true;
        if (call.num_bands > 1 || !call.grad_value_in_place)
            return parallel<ValueGradient<T, Rule>>(call.num_threads, heads * call.num_bands, call);
        return parallel_stages<Gradients<T, T, Rule, OF_VALUE>>(
            call.num_threads, 1, heads * call.level_parts * call.channel_parts, call, zero);
    });
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
