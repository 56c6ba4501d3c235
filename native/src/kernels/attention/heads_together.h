// geometric_kernel_attention_with_logits with several heads of a query together: the forward, and one pass for all gradients.
//
// This pays because the reference points, logits and results of a query are contiguous, and all heads read the same window.
#pragma once

#include "kernels/attention/packing.h"

namespace mxd::MXD_ISA {
namespace {

// The number of samples whose pixels are found at once.
template <class T> constexpr int PIXELS = VECTOR_BYTES / int(sizeof(T)) >= 8 ? 8 : 4;

// Constants of PIXELS samples. They are the same for all reference points. x and y are the window's offsets, in pixels. The
// other members describe the samples' maps. `start` is the number of bytes from a head's first row to the map's first row.
template <class T> struct WindowLanes {
    T width[PIXELS<T>], height[PIXELS<T>], x[PIXELS<T>], y[PIXELS<T>];
    Int<T> last_x[PIXELS<T>], last_y[PIXELS<T>], bytes_of_row[PIXELS<T>], bytes_of_pixel[PIXELS<T>], start[PIXELS<T>];
};

template <class T> struct PreparedHeads {
    int64_t *address; // addresses of rows, [head, sample], padded
    T *weights;       // softmax of the logits, [head, sample], padded
};

// Finds the rows and computes the weights of queries, for some heads of a batch or for ALL_HEADS. With ALL_HEADS this code does
// not prefetch, because the hardware's prefetcher recognises the accesses. All rows of a batch must lie within 2 GB, because
// byte offsets may have 32 bits.
template <class T, bool ALL_HEADS> class WindowQueries {
    static constexpr int N = PIXELS<T>;
    static constexpr int SOFTMAX_ROWS = 4; // rows of one call of softmax()
    typedef Vec<T, N> Lanes;
    typedef Vec<Int<T>, N> Ints;

  public:
    int64_t num_rows;     // the number of rows of a query and head, padded with the zero row
    int64_t address_step; // the number of addresses from one head of a prepared query to the next
    int64_t weight_step;  // the number of weights from one head of a prepared query to the next

    // num_heads: how many heads are processed together. first_row(level): bytes from a head's first row to the level's first
    // row. step: bytes from one row to the next.
    template <class FirstRow>
    WindowQueries(const Call &c, const Sizes &sizes, int64_t num_heads, FirstRow &&first_row, int64_t step,
                  const void *row_of_zeros, Arena &arena)
        : num_rows(round_up(sizes.levels * sizes.points, ROWS)), address_step(vectors(sizes) * N),
          weight_step(padded_weights(sizes)), call(c), n(sizes), heads(num_heads), together(computed_together(num_heads)),
          samples(n.levels * n.points), zero_row(reinterpret_cast<int64_t>(row_of_zeros)),
          lanes(arena.take<WindowLanes<T>>(vectors(n))), base(arena.take<int64_t>(heads * address_step)),
          references(c.reference, {HEAD, COORDINATE}), logits(c.weights, {HEAD, LEVEL, POINT}),
          reference_copy(arena.take<T>(2 * heads)) {
        references.shorten(heads);
        logits.shorten(heads);
        for (int64_t i = 0; i < SOFTMAX_ROWS; ++i) {
            query_of_row[i] = heads < SOFTMAX_ROWS && i / heads < together ? i / heads : 0;
            head_of_row[i] = i - query_of_row[i] * heads;
        }
        for (int64_t i = 0; i < 2 * together; ++i)
            prepared_queries[i] = {arena.zeros<int64_t>(heads * address_step), arena.take<T>(num_weights(n, heads))};
        for (int64_t i = 0; i < together; ++i) // zeros, because whole vectors are read and only a part is written
            logit_copies[i] = arena.zeros<T>(num_logits(n, heads));
        for (int64_t i = 0; i < (arena.counts ? 0 : address_step); ++i) set_lane(i, first_row, step);
        references_in_place = c.reference.dtype == OWN<T> && references.contiguous;
        last_in_place = c.weights.dtype == OWN<T> && logits.contiguous ? last_in_vectors() : -1;
    }
    MXD_INLINE const PreparedHeads<T> &prepared(int64_t q) const {
        return prepared_queries[q & (ALL_HEADS ? 1 : 2 * together - 1)];
    }

    // Selects a batch and the `heads` heads from h on. rows_of(i): the address of the first row of head h + i.
    template <class RowsOf> void open(int64_t b, int64_t h, RowsOf &&rows_of) {
        for (int64_t i = 0; i < heads; ++i)
            for (int64_t s = 0; s < address_step; ++s)
                base[i * address_step + s] = s < samples ? reinterpret_cast<int64_t>(rows_of(i)) : zero_row;
        reference_rows = QueryRows(call.reference, b, h, 2 * heads);
        logit_rows = QueryRows(call.weights, b, h, heads * samples);
    }
    // Calls finish(query, prepared query) for queries begin..end-1. Prepares a query before it finishes the previous query.
    template <class Finish> MXD_INLINE void go_through(int64_t begin, int64_t end, Finish &&finish) {
        int64_t ready = begin;
        for (int64_t q = begin; q < end; ++q) {
            if (q == begin) ready = prepare(ready, end);
            if (q + 1 == ready && ready < end) ready = prepare(ready, end);
            finish(q, prepared(q));
        }
    }

  private:
    const Call &call;
    Sizes n;
    int64_t heads;
    int64_t together; // the number of queries that are prepared together; a power of two
    int64_t samples;  // the number of samples of a query and head
    int64_t zero_row; // the address of a row of zeros
    WindowLanes<T> *lanes;
    int64_t *base; // [head, sample]: the address of the head's first row, or of the zero row for padding
    SomeAxes<2> references;
    SomeAxes<3> logits;
    T *reference_copy, *logit_copies[SOFTMAX_ROWS]; // copies for queries that cannot be read in place
    bool references_in_place = false;
    int64_t last_in_place = -1; // the last query whose logits are read in place
    QueryRows reference_rows, logit_rows;
    int64_t query_of_row[SOFTMAX_ROWS], head_of_row[SOFTMAX_ROWS]; // the query and the head of each row of softmax()
    PreparedHeads<T> prepared_queries[2 * SOFTMAX_ROWS];

    static int64_t computed_together(int64_t heads) { return ALL_HEADS || heads > 2 ? 1 : SOFTMAX_ROWS / heads; }
    static int64_t vectors(const Sizes &n) { return (n.levels * n.points + N - 1) / N; }
    static int64_t padded_weights(const Sizes &n) { return round_up(n.levels * n.points, SOFTMAX_LANES<T>); }
    static int64_t num_weights(const Sizes &n, int64_t heads) {
        return round_up(heads, int64_t(SOFTMAX_ROWS)) * padded_weights(n);
    }
    static int64_t num_logits(const Sizes &n, int64_t heads) { return heads * n.levels * n.points + SOFTMAX_LANES<T>; }

    // Prepares queries from q on. Returns the first query that is not prepared.
    MXD_INLINE int64_t prepare(int64_t q, int64_t end) const {
        const int64_t together = ALL_HEADS ? 1 : this->together, last = q + together < end ? q + together : end;
        for (int64_t i = q; i < last; ++i) find_rows(reference_of(i), prepared(i).address);
        const T *from[SOFTMAX_ROWS];
        for (int64_t i = 0; i < together; ++i) from[i] = logits_of(q + i < last ? q + i : q, logit_copies[i]);
        for (int64_t first = 0; first < heads; first += SOFTMAX_ROWS) {
            const T *row[SOFTMAX_ROWS];
            T *to[SOFTMAX_ROWS];
            for (int64_t i = 0; i < SOFTMAX_ROWS;
                 ++i) { // rows past the last head repeat its logits, and their weights are not read
                const int64_t query = ALL_HEADS ? 0 : query_of_row[i], h = first + (ALL_HEADS ? i : head_of_row[i]);
                row[i] = from[query] + (h < heads ? h : heads - 1) * samples;
                to[i] = prepared(q + query).weights + h * weight_step;
            }
            softmax<T>(row, samples, to);
        }
        return last;
    }

    // Sets the constants of a sample. A sample past the last one is padding, and reads the row of zeros.
    template <class FirstRow> void set_lane(int64_t sample, FirstRow &&first_row, int64_t row_step) {
        WindowLanes<T> &to = lanes[sample / N];
        const int64_t lane = sample % N;
        Level level{1, 1, 0};
        T xy[2] = {0, 0};
        int64_t step = 0, first = 0;
        if (sample < samples) {
            const Tensor &window = call.window;
            level = call.levels[sample / n.points];
            read_elements(at(window, sample % n.points * window.strides[PLACE]), window.dtype, window.strides[PLACE_XY], 2, xy);
            step = row_step;
            first = first_row(sample / n.points);
        }
        to.width[lane] = T(level.width);
        to.height[lane] = T(level.height);
        to.x[lane] = xy[0];
        to.y[lane] = xy[1];
        to.last_x[lane] = Int<T>(level.width - 1);
        to.last_y[lane] = Int<T>(level.height - 1);
        to.bytes_of_row[lane] = Int<T>(level.width * step);
        to.bytes_of_pixel[lane] = Int<T>(step);
        to.start[lane] = Int<T>(first);
    }
    // Returns the last query whose logits can be read in whole vectors. The vectors may also hold logits of the next query.
    int64_t last_in_vectors() const {
        if (samples % SOFTMAX_LANES<T> == 0) return n.queries - 1;
        const int64_t per_query = n.heads * samples;
        return call.weights.strides[QUERY] >= per_query && per_query >= SOFTMAX_LANES<T> ? n.queries - 2 : -1;
    }
    MXD_INLINE const T *reference_of(int64_t q) const {
        const char *from = ALL_HEADS ? reference_rows.at(q) : reference_rows.at_in_turn(q);
        if (references_in_place) return reinterpret_cast<const T *>(from);
        references.read_at(from, reference_copy);
        return reference_copy;
    }
    MXD_INLINE const T *logits_of(int64_t q, T *copy) const {
        const char *from = ALL_HEADS ? logit_rows.at(q) : logit_rows.at_in_turn(q);
        if (q <= last_in_place) return reinterpret_cast<const T *>(from);
        logits.read_at(from, copy);
        return copy;
    }

    MXD_INLINE void find_rows(const T *reference, int64_t *address) const {
        for (int64_t i = 0; i < address_step; i += N) {
            const WindowLanes<T> &of = lanes[i / N];
            const auto bytes_of_row = raw_load<Int<T>, N>(of.bytes_of_row), start = raw_load<Int<T>, N>(of.start),
                       bytes_of_pixel = raw_load<Int<T>, N>(of.bytes_of_pixel);
            for (int64_t h = 0; h < heads; ++h) {
                const Ints x = pixel(reference[2 * h], of.width, of.x, of.last_x);
                const Ints y = pixel(reference[2 * h + 1], of.height, of.y, of.last_y);
                const int64_t index = h * address_step + i;
                put_addresses(y * bytes_of_row + x * bytes_of_pixel + start, base + index, address + index);
            }
        }
    }
    static MXD_INLINE Ints pixel(T reference, const T *size, const T *xy, const Int<T> *last) {
        const Lanes x = around_reference<N>(reference, size, xy);
        return on_map<N>(whole_or_largest<true, N>(x), raw_load<Int<T>, N>(last));
    }
    static MXD_INLINE void put_addresses(Ints bytes, const int64_t *from, int64_t *to) {
        if constexpr (sizeof(Int<T>) == 4 && N == 8 && LANES == 4) { // a vector has four addresses
            store<int64_t, 4>(to, raw_load<int64_t, 4>(from) + convert<int64_t, 4>(four_of<0>(bytes)));
            store<int64_t, 4>(to + 4, raw_load<int64_t, 4>(from + 4) + convert<int64_t, 4>(four_of<4>(bytes)));
        } else {
            store<int64_t, N>(to, raw_load<int64_t, N>(from) + convert<int64_t, N>(bytes));
        }
    }
};

// The forward. An item is (batch, block of queries). V is the type of value. If V is not T, job.packed_value has the rows as T.
template <class V, class T> class WindowForward {
  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * blocks(job.call); }
    WindowForward(const Job &job, Arena &arena)
        : call(job.call), widened(job.packed_value), n(call.sizes), zero_row(arena.zeros<T>(n.channels)),
          sums(arena.take<T>(n.heads * n.channels)),
          queries(
              call, n, n.heads, [&](int64_t l) { return call.levels[l].start * step_of_rows(); }, step_of_rows(), zero_row,
              arena) {}

    void operator()(int64_t item) {
        const int64_t b = item / blocks(call), block = item % blocks(call);
        const int64_t begin = n.queries * block / blocks(call), end = n.queries * (block + 1) / blocks(call);
        const Tensor &output = call.output;
        queries.open(b, 0, [&](int64_t h) -> const char * {
            if constexpr (same_type<V, T>) return at(call.value, offset_of(call.value, b, 0, h));
            return widened + h * n.channels * int64_t(sizeof(T));
        });
        const QueryRows outputs(output, b, 0, n.heads * n.channels);
        queries.go_through(begin, end, [&](int64_t q, const PreparedHeads<T> &prepared) __attribute__((always_inline)) {
            sum_rows(prepared, outputs.at(q));
        });
    }

  private:
    const Call &call;
    const char *widened; // the rows of the current batch as T, or null
    Sizes n;
    T *zero_row;
    T *sums; // the output of a query, if output has another dtype or stride
    WindowQueries<T, true> queries;

    int64_t step_of_rows() const {
        return (same_type<V, T> ? call.value.strides[KEY] : n.heads * n.channels) * int64_t(sizeof(T));
    }
    static int64_t blocks(const Call &call) { return call.sizes.queries < 64 ? 1 : call.sizes.queries / 64; }

    MXD_INLINE void sum_rows(const PreparedHeads<T> &prepared, char *to) {
        const Tensor &output = call.output;
        const bool side_by_side = output.strides[CHANNEL] == 1, as_value = side_by_side && output.dtype == call.value.dtype,
                   as_computed = side_by_side && output.dtype == OWN<T>;
        V *const out = reinterpret_cast<V *>(to);
        T *const computed = as_value ? nullptr : as_computed ? reinterpret_cast<T *>(to) : sums;
        const int64_t step = computed == sums ? n.channels : output.strides[HEAD], heads = n.heads, num_rows = queries.num_rows,
                      address_step = queries.address_step, weight_step = queries.weight_step;
        for_pieces<T>(n.channels, [&](auto lanes, auto vectors, int64_t c) __attribute__((always_inline)) {
            for (int64_t h = 0; h < heads; ++h)
                weighted_sum_piece<V, T, lanes.value, vectors.value, false, T>(
                    prepared.address + h * address_step, prepared.weights + h * weight_step, nullptr, FarRows{}, num_rows, c,
                    out + h * step, computed ? computed + h * step : nullptr);
        });
        if (computed == sums) write_sums(to);
    }
    void write_sums(char *to) const {
        const Tensor &output = call.output;
        const int64_t size = element_size(output.dtype);
        for (int64_t h = 0; h < n.heads; ++h, to += output.strides[HEAD] * size)
            write_elements(sums + h * n.channels, to, output.dtype, output.strides[CHANNEL], n.channels);
    }
};

// Runs the forward. If V is not T, each batch is a stage: all threads widen its rows, and then process its items.
template <class V, class T> inline bool forward_of_heads_together(const Call &call, const Plan &plan) {
    typedef WindowForward<V, T> Worker;
    if constexpr (same_type<V, T>) {
        return over_items<Worker>({call, plan});
    } else {
        const Sizes &n = call.sizes;
        const int64_t row_bytes = n.channels * int64_t(sizeof(T));
        const Memory widened(n.keys * n.heads * row_bytes);
        if (!widened.begin()) return false;
        const Job job{call, plan, widened.begin()};
        return parallel_stages<Worker>(call.num_threads, n.batch, Worker::items(job), job, [&](int64_t b, int64_t chunk) {
            const int64_t end = n.keys * (chunk + 1) / STAGE_CHUNKS;
            for (int64_t i = n.keys * chunk / STAGE_CHUNKS; i < end; ++i)
                for (int64_t h = 0; h < n.heads; ++h)
                    widen_row<V, T>(reinterpret_cast<const V *>(at(call.value, offset_of(call.value, b, i, h))),
                                    reinterpret_cast<T *>(widened.begin() + (i * n.heads + h) * row_bytes), n.channels);
        });
    }
}

inline bool all_heads_together(const Call &call, const Plan &plan) {
    return with_types(call,
                      [&](auto *v, auto *t) { return forward_of_heads_together<__typeof__(*v), __typeof__(*t)>(call, plan); });
}

// Computes all gradients. An item is (batch, heads that are processed together). The worker packs value head by head, and sums
// the gradient of value in packed rows. The packed rows of value end with a zero row. Addresses of padding samples point to
// this row. The packed gradient ends with a row to which only padding samples add.
template <class V, class T> class WindowGradients {
  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * (job.call.sizes.heads / job.plan.heads_together); }
    WindowGradients(const Job &j, Arena &arena)
        : job(j), call(j.call), n(call.sizes), heads(j.plan.heads_together), packed_value(arena.take<char>(bytes(j))),
          packed_gradient(arena.take<char>(bytes(j))), row(arena.take<T>(n.channels)),
          dots(arena.take<T>(heads * dots_of_head(n))), grad_logits(arena.take<T>(heads * samples() + LANES)),
          axes(call.grad_weights, {HEAD, LEVEL, POINT}), queries(
                                                             call, n, heads, [&](int64_t l) { return levels().offset[l]; },
                                                             row_bytes(), packed_value + heads * levels().bytes, arena) {
        axes.shorten(heads);
    }

    void operator()(int64_t item) {
        const int64_t h = item % (n.heads / heads) * heads, b = item / (n.heads / heads);
        open(b, h);
        const QueryRows grad_output(call.grad_output, b, h, heads * n.channels);
        const QueryRows grad_logits(call.grad_weights, b, h, heads * samples());
        queries.go_through(0, n.queries, [&](int64_t q, const PreparedHeads<T> &prepared) __attribute__((always_inline)) {
            add_rows(prepared, grad_output.at_in_turn(q));
            write_logits(prepared, grad_logits.template at_in_turn<true>(q));
        });
        close(b, h);
    }

  private:
    const Job job;
    const Call &call;
    Sizes n;
    int64_t heads; // heads that are processed together
    char *packed_value, *packed_gradient;
    T *row;         // memory for a row of grad_output that needs conversion
    T *dots;        // dot products of grad_output with rows, [head, sample]
    T *grad_logits; // [head, sample]; used if the tensor cannot be written in whole vectors
    SomeAxes<3> axes;
    WindowQueries<T, false> queries;

    const PackedLevels &levels() const { return job.plan.packed_gradient; }
    int64_t row_bytes() const { return n.channels * int64_t(sizeof(T)); }
    int64_t samples() const { return n.levels * n.points; }
    static int64_t dots_of_head(const Sizes &n) { return round_up(n.levels * n.points, LANES); }
    static int64_t bytes(const Job &job) {
        return job.plan.heads_together * job.plan.packed_gradient.bytes + job.call.sizes.channels * int64_t(sizeof(T));
    }

    void open(int64_t b, int64_t h) {
        for (int64_t i = 0; i < heads; ++i) pack<V, T>(call, levels(), b, h + i, packed_value + i * levels().bytes, 0, 1);
        memset(packed_value + heads * levels().bytes, 0, size_t(row_bytes()));
        memset(packed_gradient, 0, size_t(bytes(job)));
        queries.open(b, h, [&](int64_t i) { return packed_value + i * levels().bytes; });
    }
    void close(int64_t b, int64_t h) {
        for (int64_t i = 0; i < heads; ++i) unpack<T>(call, levels(), packed_gradient + i * levels().bytes, b, h + i);
    }

    // Computes the dot products of a query's rows with grad_output, and adds to the same rows of the gradient of value.
    MXD_INLINE void add_rows(const PreparedHeads<T> &prepared, const char *grad_output) {
        const Tensor &t = call.grad_output;
        const int64_t step = t.strides[HEAD] * element_size(t.dtype), address_step = queries.address_step,
                      weight_step = queries.weight_step, dot_step = dots_of_head(n);
        const SameDistance gradient{packed_gradient - packed_value};
        for (int64_t h = 0; h < heads; ++h) {
            const T *g = row_as(grad_output + h * step, t.dtype, t.strides[CHANNEL], n.channels, row);
            const int64_t *address = prepared.address + h * address_step;
            dots_and_scatter_add<T, false>(address, prepared.weights + h * weight_step, address, gradient, queries.num_rows,
                                           n.channels, g, dots + h * dot_step);
        }
    }
    MXD_INLINE void write_logits(const PreparedHeads<T> &prepared, char *to) {
        const bool in_place = axes.contiguous && call.grad_weights.dtype == OWN<T> && samples() % LANES == 0;
        T *const out = in_place ? reinterpret_cast<T *>(to) : grad_logits;
        for (int64_t h = 0; h < heads; ++h)
            softmax_gradient<T>(prepared.weights + h * queries.weight_step, samples(), dots + h * dots_of_head(n), samples(),
                                out + h * samples());
        if (!in_place) axes.write_at(to, grad_logits);
    }
};

inline bool gradients_of_heads_together(const Call &call, const Plan &plan) {
    return with_types(
        call, [&](auto *v, auto *t) { return over_items<WindowGradients<__typeof__(*v), __typeof__(*t)>>({call, plan}); });
}

} // namespace
} // namespace mxd::MXD_ISA
