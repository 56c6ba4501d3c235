// The forward direction of geometric_kernel_attention_with_logits: the heads of a query one after the other.
#pragma once

#include "kernels/heads_together/queries.h"
#include "kernels/shared/job.h"

namespace mxd::MXD_ISA {
namespace {

// Items: (batch, block of queries). V: the type of value. Rows are read as T; if V is another type, all rows of the batch
// were widened, to job.packed_value.
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

} // namespace
} // namespace mxd::MXD_ISA
