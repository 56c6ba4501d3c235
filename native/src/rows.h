// What is done to rows of channels. A row is a pointer to adjacent channels in one of the storage types; arithmetic is
// in T.
//
//   weighted_sum   out    = sum over i of  share[i] * row[i]
//   dots           dot[i] = sum over channels of  g * row[i]
//   scatter_add    row[i] += share[i] * g
//
// `next`: as many rows that will be wanted soon, asked for meanwhile; null when they are not known.
//
// Every channel count is cut into pieces of 8, 4, 2, 1 full vectors, then a half, a quarter ... of one, down to one
// channel; each piece is a pass over all rows with its accumulators in registers. No masks, no reading past a row's
// end, and each channel meets the same operations in the same order whatever the number of threads.
#pragma once

#include "simd.h"

#define MXD_UNROLL _Pragma("GCC unroll 16")

namespace mxd {
namespace MXD_ISA {
namespace {

// Addresses and shares of the corners of many samples: corner k of sample i is at [k * pitch + i].
template <class T> struct CornerRows {
    const int64_t *address;
    const T *share;
    int64_t pitch;
    int64_t channel = 0; // where in the rows the channels in question begin
};

template <int N> struct Count {
    static constexpr int value = N;
};

// op(Count<lanes>, Count<vectors>, first channel) for each piece of `channels`.
template <class T, class Op> inline void for_pieces(int64_t channels, Op &&op) {
    int64_t c = 0;
    for (; channels - c >= 8 * WIDTH<T>; c += 8 * WIDTH<T>) op(Count<WIDTH<T>>(), Count<8>(), c);
    const int64_t rest = channels - c;
    if (rest & 4 * WIDTH<T>) op(Count<WIDTH<T>>(), Count<4>(), c), c += 4 * WIDTH<T>;
    if (rest & 2 * WIDTH<T>) op(Count<WIDTH<T>>(), Count<2>(), c), c += 2 * WIDTH<T>;
    if (rest & WIDTH<T>) op(Count<WIDTH<T>>(), Count<1>(), c), c += WIDTH<T>;
    if constexpr (WIDTH<T> > 8)
        if (rest & 8) op(Count<8>(), Count<1>(), c), c += 8;
    if constexpr (WIDTH<T> > 4)
        if (rest & 4) op(Count<4>(), Count<1>(), c), c += 4;
    if constexpr (WIDTH<T> > 2)
        if (rest & 2) op(Count<2>(), Count<1>(), c), c += 2;
    if (rest & 1) op(Count<1>(), Count<1>(), c);
}

template <class V> inline const V *row_at(int64_t address, int64_t channel) {
    return reinterpret_cast<const V *>(address) + channel;
}

// Asks for the cache lines of `bytes` bytes of a row, ahead of their use.
template <int BYTES> __attribute__((always_inline)) inline void ask_for(const void *row) {
    MXD_UNROLL
    for (int line = 0; line < (BYTES + 63) / 64; ++line) __builtin_prefetch(static_cast<const char *>(row) + 64 * line);
}

// One piece of weighted_sum over n samples of CORNERS rows each. Several sets of accumulators hide the latency of the
// multiply-add: K vectors in SETS sets give at least 8 independent chains where registers allow.
template <class V, class T, int CORNERS, int N, int K>
inline void weighted_sum_piece(const CornerRows<T> &rows, const int64_t *next, int64_t n, int64_t channel, T *out,
                               bool accumulate) {
    constexpr int SETS = K >= 8 ? 1 : K == 4 ? 2 : 4;
    constexpr int STEP = CORNERS == 1 ? 4 : 1; // samples per turn: four rows either way
    Vec<T, N> sums[SETS][K] = {};
    const auto add = [&](int set, int64_t at) {
        const V *row = row_at<V>(rows.address[at], rows.channel + channel);
        if (next) ask_for<K * N *int(sizeof(V))>(row_at<V>(next[at], rows.channel + channel));
        const Vec<T, N> share = broadcast<T, N>(rows.share[at]);
        MXD_UNROLL
        for (int k = 0; k < K; ++k) sums[set][k] += share * load<T, N>(row + k * N);
    };
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP) MXD_UNROLL
    for (int r = 0; r < 4; ++r) add(r % SETS, CORNERS == 1 ? i + r : r * rows.pitch + i);
    for (; i < n; ++i) add(0, i);
    MXD_UNROLL
    for (int k = 0; k < K; ++k) {
        Vec<T, N> total = sums[0][k];
        MXD_UNROLL
        for (int s = 1; s < SETS; ++s) total += sums[s][k];
        T *to = out + channel + k * N;
        store<T, N>(to, accumulate ? load<T, N>(to) + total : total);
    }
}

template <class V, class T, int CORNERS>
inline void weighted_sum(const CornerRows<T> &rows, const int64_t *next, int64_t n, int64_t channels, T *out,
                         bool accumulate = false) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t channel) {
        weighted_sum_piece<V, T, CORNERS, lanes.value, vectors.value>(rows, next, n, channel, out, accumulate);
    });
}

// The sums of four vectors, side by side.
template <class T, int N> inline Vec<T, 4> sums_of_four(const Vec<T, N> *v) {
    if constexpr (N <= 4) {
        return Vec<T, 4>{sum<T, N>(v[0]), sum<T, N>(v[1]), sum<T, N>(v[2]), sum<T, N>(v[3])};
    } else {
        const Vec<T, N / 2> half[4] = {fold<T, N>(v[0]), fold<T, N>(v[1]), fold<T, N>(v[2]), fold<T, N>(v[3])};
        return sums_of_four<T, N / 2>(half);
    }
}
template <> inline Vec<float, 4> sums_of_four<float, 4>(const Vec<float, 4> *v) {
    typedef Vec<int32_t, 4> I;
    const Vec<float, 4> a = MXD_SHUFFLE(v[0], v[1], I, 0, 4, 1, 5) + MXD_SHUFFLE(v[0], v[1], I, 2, 6, 3, 7);
    const Vec<float, 4> b = MXD_SHUFFLE(v[2], v[3], I, 0, 4, 1, 5) + MXD_SHUFFLE(v[2], v[3], I, 2, 6, 3, 7);
    return MXD_SHUFFLE(a, b, I, 0, 1, 4, 5) + MXD_SHUFFLE(a, b, I, 2, 3, 6, 7);
}

// One piece of dots over n rows, four at a time.
template <class V, class T, int N, int K>
inline void dots_piece(const int64_t *address, const int64_t *next, int64_t n, int64_t channel, const T *g, T *dot,
                       bool accumulate) {
    Vec<T, N> factor[K];
    MXD_UNROLL
    for (int k = 0; k < K; ++k) factor[k] = load<T, N>(g + k * N);
    const auto product = [&](int64_t i) {
        const V *row = row_at<V>(address[i], channel);
        Vec<T, N> total = factor[0] * load<T, N>(row);
        MXD_UNROLL
        for (int k = 1; k < K; ++k) total += factor[k] * load<T, N>(row + k * N);
        return total;
    };
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        if (next) MXD_UNROLL
        for (int r = 0; r < 4; ++r) ask_for<K * N *int(sizeof(V))>(row_at<V>(next[i + r], channel));
        const Vec<T, N> products[4] = {product(i), product(i + 1), product(i + 2), product(i + 3)};
        const Vec<T, 4> four = sums_of_four<T, N>(products);
        store<T, 4>(dot + i, accumulate ? load<T, 4>(dot + i) + four : four);
    }
    for (; i < n; ++i) {
        const T one = sum<T, N>(product(i));
        dot[i] = accumulate ? dot[i] + one : one;
    }
}

// dot[i] for rows 0..n-1, of `channels` channels: g from its beginning, the rows from channel `first`.
template <class V, class T>
inline void dots(const int64_t *address, const int64_t *next, int64_t n, int64_t channels, const T *g, T *dot,
                 int64_t first = 0) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        dots_piece<V, T, lanes.value, vectors.value>(address, next, n, first + c, g + c, dot, c > 0);
    });
}

template <class T, int N, int K>
inline void scatter_add_piece(const int64_t *address, const T *share, int64_t n, int64_t channel, const T *g,
                              const int64_t *next, int64_t num_next) {
    Vec<T, N> factor[K];
    MXD_UNROLL
    for (int k = 0; k < K; ++k) factor[k] = load<T, N>(g + k * N);
    for (int64_t i = 0; i < n; ++i) {
        if (i < num_next) ask_for<K * N *int(sizeof(T))>(row_at<T>(next[i], channel));
        T *row = const_cast<T *>(row_at<T>(address[i], channel));
        const Vec<T, N> s = broadcast<T, N>(share[i]);
        MXD_UNROLL
        for (int k = 0; k < K; ++k) store<T, N>(row + k * N, load<T, N>(row + k * N) + s * factor[k]);
    }
}

// row[i] += share[i] * g, g from its beginning, the rows from channel `first`.
template <class T>
inline void scatter_add(const int64_t *address, const T *share, int64_t n, int64_t channels, const T *g,
                        int64_t first = 0, const int64_t *next = nullptr, int64_t num_next = 0) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        scatter_add_piece<T, lanes.value, vectors.value>(address, share, n, first + c, g + c, next, num_next);
    });
}

// n elements of storage type V, `stride` apart, as T.
template <class V, class T> inline void read_run(const V *from, int64_t stride, int64_t n, T *to) {
    int64_t i = 0;
    if (stride == 1)
        for (; i + WIDTH<T> <= n; i += WIDTH<T>) store<T, WIDTH<T>>(to + i, load<T, WIDTH<T>>(from + i));
    for (; i < n; ++i) to[i] = load<T, 1>(from + i * stride);
}

template <class V, class T> inline void write_run(const T *from, V *to, int64_t stride, int64_t n) {
    int64_t i = 0;
    if (stride == 1)
        for (; i + WIDTH<T> <= n; i += WIDTH<T>) store<T, WIDTH<T>>(to + i, load<T, WIDTH<T>>(from + i));
    for (; i < n; ++i) store<T, 1>(to + i * stride, from[i]);
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
