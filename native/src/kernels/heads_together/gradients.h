// The gradients of geometric_kernel_attention_with_logits in one pass, a few heads at a time.
#pragma once

#include "kernels/attention/packing.h"
#include "kernels/heads_together/queries.h"

namespace mxd::MXD_ISA {
namespace {

// Items: (batch, heads that go together). Their value and its gradient lie in packed memory of the worker, a head after
// the other, each with a row of zeros at its end for samples that there are not.
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
