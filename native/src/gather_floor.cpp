// What memory and load ports allow: with the rows known beforehand only reads them in the order of the queries and adds
// them up, and for the backward direction also adds the gradient of the output to the same rows of a buffer. For
// `mx-driving bench`, which measures the operators' distance from it.
#include "queries.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// call.locations: rows, int32 [batch, heads, queries, count]; num_keys is a row of zeros, -1 ends a list.
// Items: (batch, head) and a slice of channels (backward) or a block of queries (forward).
template <class V, class T, bool BACKWARD> class GatherFloor {
  public:
    static constexpr int64_t QUERIES = 256;
    static int64_t slices(const Call &call) {
        const int64_t heads = call.value.shape[0] * call.value.shape[2];
        if (!BACKWARD) return (call.locations.shape[2] + QUERIES - 1) / QUERIES;
        return heads < call.num_threads && call.value.shape[3] % (16 * call.num_threads) == 0 ? call.num_threads : 1;
    }
    static int64_t items(const Call &call) { return call.value.shape[0] * call.value.shape[2] * slices(call); }
    static int64_t scratch_bytes(const Call &call) {
        return Arena::bytes<V>(call.value.shape[3]) + 2 * Arena::bytes<T>(call.value.shape[3]);
    }

    GatherFloor(const Call &c, Arena arena)
        : call(c), channels(c.value.shape[3]), zeros(arena.take<V>(channels)), sink(arena.take<T>(channels)),
          sums(arena.take<T>(channels)) {
        memset(zeros, 0, size_t(channels) * sizeof(V));
        memset(sink, 0, size_t(channels) * sizeof(T));
    }

    void operator()(int64_t item) {
        const int64_t parts = slices(call), part = item % parts, head = item / parts % call.value.shape[2],
                      batch = item / parts / call.value.shape[2], queries = call.locations.shape[2];
        const int64_t begin = BACKWARD ? 0 : part * QUERIES;
        const int64_t end = BACKWARD || begin + QUERIES > queries ? queries : begin + QUERIES;
        const int64_t width = BACKWARD ? channels / parts : channels, first = BACKWARD ? part * width : 0;
        const int64_t count = call.locations.shape[3];
        const int32_t *list = reinterpret_cast<const int32_t *>(call.locations.data) +
                              ((batch * call.value.shape[2] + head) * queries + begin) * count;
        const V *value = row<V>(call.value, batch, 0, head) + first;
        T *grad = BACKWARD ? row<T>(call.grad_value, batch, 0, head) + first : nullptr;
        const QueryRows outputs(call.output, batch, head, width, first);
        for (int64_t q = begin; q < end; ++q, list += count) {
            char *out = BACKWARD ? outputs.at_in_turn(q) : outputs.at(q);
            const int32_t *next = q + 2 < end ? list + 2 * count : nullptr;
            for_pieces<T>(width, [&](auto lanes, auto vectors, int64_t c) {
                if constexpr (BACKWARD)
                    piece<lanes.value, vectors.value>(list, next, count, value + c, grad + c, sums,
                                                      reinterpret_cast<const T *>(out) + c);
                else
                    piece<lanes.value, vectors.value>(list, next, count, value + c, grad,
                                                      reinterpret_cast<V *>(out) + c, nullptr);
            });
        }
    }

  private:
    const Call &call;
    int64_t channels;
    V *zeros;
    T *sink, *sums;

    template <class E> static E *row(const mxd_tensor &t, int64_t batch, int64_t key, int64_t head) {
        return reinterpret_cast<E *>(t.data) + batch * t.strides[0] + key * t.strides[1] + head * t.strides[2];
    }

    template <int N, int K, class Out>
    void piece(const int32_t *list, const int32_t *next, int64_t count, const V *value, T *grad, Out *out, const T *g) {
        constexpr int SETS = K >= 8 ? 1 : K == 4 ? 2 : 4;
        const int64_t keys = call.value.shape[1], pitch = call.value.strides[1];
        Vec<T, N> total[SETS][K] = {}, factor[K] = {};
        if (BACKWARD) MXD_UNROLL
        for (int k = 0; k < K; ++k) factor[k] = load<T, N>(g + k * N);
        for (int64_t i = 0; i < count && list[i] >= 0; i += ROWS) MXD_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            const int64_t at = list[i + r];
            const V *from = at == keys ? zeros : value + at * pitch;
            if (next && next[i + r] >= 0) {
                ask_for<K * N *int(sizeof(V))>(reinterpret_cast<int64_t>(value + next[i + r] * pitch));
                if (BACKWARD)
                    ask_for<K * N *int(sizeof(T))>(
                        reinterpret_cast<int64_t>(grad + next[i + r] * call.grad_value.strides[1]));
            }
            MXD_UNROLL
            for (int k = 0; k < K; ++k) total[r % SETS][k] += load<T, N>(from + k * N);
            if constexpr (BACKWARD) {
                T *to = at == keys ? sink : grad + at * call.grad_value.strides[1];
                MXD_UNROLL
                for (int k = 0; k < K; ++k) store<T, N>(to + k * N, load<T, N>(to + k * N) + factor[k]);
            }
        }
        MXD_UNROLL
        for (int k = 0; k < K; ++k) {
            for (int s = 1; s < SETS; ++s) total[0][k] += total[s][k];
            store<T, N>(out + k * N, total[0][k]);
        }
    }
};

} // namespace

bool gather_floor(const Call &call) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if (!call.grad_value.data)
            return parallel<GatherFloor<V, T, false>>(call.num_threads, GatherFloor<V, T, false>::items(call), call);
        return parallel<GatherFloor<V, T, true>>(call.num_threads, GatherFloor<V, T, true>::items(call), call);
    });
}

} // namespace MXD_ISA
} // namespace mxd
