// The gather floor: a loop that is given the rows beforehand, so that memory and load ports alone set its time. It reads
// the rows in the order of the queries and adds them up. Backward, it also adds the gradient of the output to the same
// rows of another tensor.
// benchmarks/bench.py measures the operators' distance from it.
#include "floor.h"
#include "kernels/shared/parallel.h"
#include "kernels/shared/rows.h"

namespace mxd::MXD_ISA {
namespace {

template <class E> inline E *row(const mxd_tensor &t, int64_t i, int64_t j, int64_t k) {
    return static_cast<E *>(t.data) + i * t.strides[0] + j * t.strides[1] + k * t.strides[2];
}

// V: the dtype of value; T: the type computed in. Backward, where sums are made in place, both are the same.
// Items: (batch, head, slice). A slice is a block of queries (forward) or a range of channels (backward).
template <class V, class T, bool BACKWARD> class GatherFloor {
  public:
    static int64_t items(const Floor &floor) { return floor.value.shape[0] * floor.value.shape[2] * slices(floor); }
    GatherFloor(const Floor &f, Arena &arena)
        : floor(f), channels(f.value.shape[3]), zeros(arena.zeros<V>(channels)), sink(arena.zeros<T>(channels)),
          sums(arena.take<T>(channels)) {}

    void operator()(int64_t item) {
        const int64_t count = slices(floor), slice = item % count, heads = floor.value.shape[2], head = item / count % heads,
                      batch = item / count / heads, queries = floor.output.shape[1];
        if constexpr (BACKWARD) {
            width = channels / count;
            first = slice * width;
            go_through(batch, head, 0, queries);
        } else {
            const int64_t begin = slice * QUERIES, end = begin + QUERIES;
            width = channels;
            go_through(batch, head, begin, end < queries ? end : queries);
        }
    }

  private:
    static constexpr int64_t QUERIES = 256;     // of a block
    static constexpr int64_t OUTPUTS_AHEAD = 8; // the backward prefetches output this many queries before its use

    const Floor &floor;
    int64_t channels, width = 0, first = 0; // of the item: `width` channels from `first` on
    V *zeros;
    T *sink, *sums;

    static int64_t slices(const Floor &floor) {
        if (!BACKWARD) return (floor.output.shape[1] + QUERIES - 1) / QUERIES;
        const bool too_few = floor.value.shape[0] * floor.value.shape[2] < floor.num_threads;
        return too_few && floor.value.shape[3] % (16 * floor.num_threads) == 0 ? floor.num_threads : 1;
    }

    void go_through(int64_t batch, int64_t head, int64_t begin, int64_t end) {
        const int64_t count = floor.rows.shape[3], pitch = floor.output.strides[1];
        const int64_t *const starts = static_cast<const int64_t *>(floor.starts.data);
        const int32_t *list = row<const int32_t>(floor.rows, batch, head, starts ? 0 : begin);
        const V *value = row<const V>(floor.value, batch, 0, head) + first;
        V *output = row<V>(floor.output, batch, begin, head) + first;
        T *grad = BACKWARD ? row<T>(floor.grad_value, batch, 0, head) + first : nullptr;
        if (starts) list += starts[begin];
        for (int64_t q = begin, length = count; q < end; ++q, list += length, output += pitch) {
            if (starts) length = starts[q + 1] - starts[q];
            const int32_t *next = !starts && q + 2 < end ? list + 2 * count : nullptr;
            if (BACKWARD) ask_for_output(output, pitch);
            for_pieces<T>(width, [&](auto lanes, auto vectors, int64_t c) {
                if constexpr (BACKWARD)
                    piece<lanes.value, vectors.value>(list, length, next, value + c, grad + c, output + c, sums);
                else
                    piece<lanes.value, vectors.value>(list, length, next, value + c, nullptr, nullptr, output + c);
            });
        }
    }

    // Integers, not pointers: what is prefetched may lie behind the last query.
    MXD_INLINE void ask_for_output(const V *output, int64_t pitch) const {
        const int64_t from = reinterpret_cast<int64_t>(output) + OUTPUTS_AHEAD * pitch * int64_t(sizeof(V));
        for (int64_t line = 0; line < width * int64_t(sizeof(V)); line += 64) ask_for<1>(from + line);
    }

    // K vectors of N channels. out = the sum of the rows in `list`; backward, g is added to the same rows of grad. The
    // rows in `next` are prefetched.
    template <int N, int K, class Out>
    void piece(const int32_t *list, int64_t count, const int32_t *next, const V *value, T *grad, const T *g, Out *out) {
        constexpr int SETS = K >= 8 ? 1 : K == 4 ? 2 : 4;
        constexpr int VALUE_BYTES = K * N * int(sizeof(V)), GRAD_BYTES = K * N * int(sizeof(T));
        const int64_t keys = floor.value.shape[1], pitch = floor.value.strides[1], grad_pitch = floor.grad_value.strides[1];
        Vec<T, N> total[SETS][K] = {}, factor[K] = {};
        if constexpr (BACKWARD) {
            MXD_UNROLL
            for (int k = 0; k < K; ++k) factor[k] = load<T, N>(g + k * N);
        }
        for (int64_t i = 0; i < count && list[i] >= 0; i += ROWS) {
            MXD_UNROLL
            for (int r = 0; r < ROWS; ++r) {
                const int64_t at = list[i + r];
                const V *from = at == keys ? zeros : value + at * pitch;
                if (next && next[i + r] >= 0) {
                    ask_for<VALUE_BYTES>(reinterpret_cast<int64_t>(value + next[i + r] * pitch));
                    if (BACKWARD) ask_for<GRAD_BYTES>(reinterpret_cast<int64_t>(grad + next[i + r] * grad_pitch));
                }
                MXD_UNROLL
                for (int k = 0; k < K; ++k) total[r % SETS][k] += load<T, N>(from + k * N);
                if constexpr (BACKWARD) {
                    T *to = at == keys ? sink : grad + at * grad_pitch;
                    MXD_UNROLL
                    for (int k = 0; k < K; ++k) store<T, N>(to + k * N, load<T, N>(to + k * N) + factor[k]);
                }
            }
        }
        MXD_UNROLL
        for (int k = 0; k < K; ++k) {
            for (int s = 1; s < SETS; ++s) total[0][k] += total[s][k];
            store<T, N>(out + k * N, total[0][k]);
        }
    }
};

template <class V, class T, bool BACKWARD> int run(const Floor &floor) {
    typedef GatherFloor<V, T, BACKWARD> Worker;
    return parallel<Worker>(floor.num_threads, Worker::items(floor), floor) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

} // namespace

int gather_floor(const Floor &floor) {
    const bool backward = floor.grad_value.data;
    switch (floor.value.dtype) {
    case MXD_FLOAT32: return backward ? run<float, float, true>(floor) : run<float, float, false>(floor);
    case MXD_FLOAT64: return backward ? run<double, double, true>(floor) : run<double, double, false>(floor);
    case MXD_FLOAT16: return backward ? MXD_BAD_DTYPE : run<Half, float, false>(floor);
    case MXD_BFLOAT16: return backward ? MXD_BAD_DTYPE : run<BFloat16, float, false>(floor);
    default: return MXD_BAD_DTYPE;
    }
}

} // namespace mxd::MXD_ISA
