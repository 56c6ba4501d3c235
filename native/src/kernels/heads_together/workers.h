// Attention around a window, several heads of a query together: the forward direction, and all gradients in one pass.
#pragma once

#include "kernels/attention/packing.h"
#include "kernels/heads_together/queries.h"

namespace mxd::MXD_ISA {
namespace {

// Items: (batch, block of queries). V: the type of value. Rows are read as T: if V is another type, from
// job.packed_value, which has all rows of the batch as T.
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
    const char *widened; // rows of the batch that is worked on
    Sizes n;
    T *zero_row; // a row of zeros
    T *sums;     // where output has another dtype or stride
    WindowQueries<T, true> queries;

    // Bytes from a head's row to its next.
    int64_t step_of_rows() const {
        return (same_type<V, T> ? call.value.strides[KEY] : n.heads * n.channels) * int64_t(sizeof(T));
    }
    static int64_t blocks(const Call &call) {
        const Sizes &n = call.sizes;
        const int64_t wanted = n.queries / 64;
        return wanted < 1 ? 1 : wanted;
    }

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

// A batch is a stage: all threads widen its rows, then work on its items.
template <class V, class T> inline bool forward_of_heads_together(const Call &call, const Plan &plan) {
    typedef WindowForward<V, T> Worker;
    if constexpr (same_type<V, T>) {
        return over_items<Worker>({call, plan, nullptr, nullptr});
    } else {
        const Sizes &n = call.sizes;
        const int64_t row_bytes = n.channels * int64_t(sizeof(T));
        const Memory widened(n.keys * n.heads * row_bytes);
        if (!widened.begin()) return false;
        const Job job{call, plan, widened.begin(), nullptr};
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

// Items: (batch, heads that go together). The worker packs their value and its gradient, head by head. One zero row
// follows in both, which padding points to.
template <class V, class T> class WindowGradients {
  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * (job.call.sizes.heads / job.plan.heads_together); }
    WindowGradients(const Job &j, Arena &arena)
        : job(j), call(j.call), n(call.sizes), heads(j.plan.heads_together), packed_value(arena.take<char>(bytes(j))),
          packed_gradient(arena.take<char>(bytes(j))), row(arena.take<T>(n.channels)),
          dots(arena.take<T>(heads * dots_of_head(n))), of_logits(arena.take<T>(heads * samples() + LANES)),
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
    int64_t heads; // that go together
    char *packed_value, *packed_gradient;
    T *row;       // of grad_output, where it has another dtype or stride
    T *dots;      // of grad_output with rows, head by head
    T *of_logits; // where the tensor cannot be written in whole vectors
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
        for (int64_t i = 0; i < heads; ++i) pack_as<V, T>(call, levels(), b, h + i, packed_value + i * levels().bytes);
        memset(packed_value + heads * levels().bytes, 0, size_t(row_bytes()));
        memset(packed_gradient, 0, size_t(bytes(job)));
        queries.open(b, h, [&](int64_t i) { return packed_value + i * levels().bytes; });
    }
    void close(int64_t b, int64_t h) {
        for (int64_t i = 0; i < heads; ++i) unpack_as<T>(call, levels(), packed_gradient + i * levels().bytes, b, h + i);
    }

    // Both for all rows of a query: the products with grad_output, and what is added to the gradient.
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
        T *const out = in_place ? reinterpret_cast<T *>(to) : of_logits;
        for (int64_t h = 0; h < heads; ++h)
            softmax_gradient<T>(prepared.weights + h * queries.weight_step, samples(), dots + h * dots_of_head(n), samples(),
                                out + h * samples());
        if (!in_place) axes.write_at(to, of_logits);
    }
};

inline bool gradients_of_heads_together(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        return over_items<WindowGradients<__typeof__(*v), __typeof__(*t)>>({call, plan, nullptr, nullptr});
    });
}

} // namespace
} // namespace mxd::MXD_ISA
