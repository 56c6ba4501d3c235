// All arithmetic on rows with groups of channels. coefficient[i * groups + group] is the coefficient of a group of row i.
//
//   grouped_sum    out    += sum over i of  coefficient[i][group] * row[i]
//   grouped_dots   dot[i][group] = sum over the group's channels of  g * row[i]
//   grouped_add    row[i] += coefficient[i][group] * g
//
// g is a row of grad_output. A list of rows has the form of rows.h, and ROWS_AHEAD more addresses at its end, which are only
// prefetched.
#pragma once

#include "kernels/shared/rows.h"

namespace mxd::MXD_ISA {
namespace {

// How many rows ahead rows are prefetched. A row may have a kilobyte, so a few rows are enough.
constexpr int ROWS_AHEAD = 8;

// The number of vectors of sums that fit into registers.
constexpr int PASS_VECTORS = VECTOR_BYTES == 64 ? 16 : 8;

template <class T, int K, class Op> inline void for_groups_together(int64_t groups, Op &&op) {
    constexpr int G = PASS_VECTORS / K;
    int64_t g = 0;
    for (; g + G <= groups; g += G) op(Count<WIDTH<T>>(), Count<K>(), Count<G>(), g, int64_t(0));
    for (; g < groups; ++g) op(Count<WIDTH<T>>(), Count<K>(), Count<1>(), g, int64_t(0));
}

// Calls op(Count<lanes>, Count<vectors of a group>, Count<groups>, first group, first channel in the group) for each piece.
// Together the pieces cover all groups, which have `channels` channels each.
template <class T, class Op> inline void for_groups(int64_t groups, int64_t channels, Op &&op) {
    if (channels == WIDTH<T>) return for_groups_together<T, 1>(groups, op);
    if (channels == 2 * WIDTH<T>) return for_groups_together<T, 2>(groups, op);
    if (channels == 4 * WIDTH<T>) return for_groups_together<T, 4>(groups, op);
    for (int64_t g = 0; g < groups; ++g)
        for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) { op(lanes, vectors, Count<1>(), g, c); });
}

// SUM_ROWS rows are summed at a time, and then these sums are added up, because rounding errors would grow in one sum over
// thousands of rows.
constexpr int64_t SUM_ROWS = 32;

template <class V, class T, int N, int K, int G>
inline void grouped_sum_piece(const int64_t *address, const T *coefficient, int64_t groups, int64_t n, int64_t channel,
                              T *out) {
    for (int64_t first = 0; first < n; first += SUM_ROWS) {
        const int64_t end = first + SUM_ROWS < n ? first + SUM_ROWS : n;
        Vec<T, N> sums[G][K] = {};
        for (int64_t i = first; i < end; ++i) {
            const V *row = row_at<const V>(address[i], channel);
            ask_for<G * PIECE_BYTES<V, N, K>>(address[i + ROWS_AHEAD] + channel * int64_t(sizeof(V)));
            MXD_UNROLL
            for (int g = 0; g < G; ++g)
                add_row<V, T, N, K>(row + g * K * N, broadcast<T, N>(coefficient[i * groups + g]), sums[g]);
        }
        MXD_UNROLL
        for (int g = 0; g < G; ++g) {
            put_in_order<V, T, N, K>(sums[g]);
            MXD_UNROLL
            for (int k = 0; k < K; ++k) {
                T *to = out + (g * K + k) * N;
                store<T, N>(to, load<T, N>(to) + sums[g][k]);
            }
        }
    }
}

template <class V, class T>
inline void grouped_sum(const int64_t *address, const T *coefficient, int64_t n, int64_t groups, int64_t channels, T *out) {
    for_groups<T>(groups, channels, [&](auto lanes, auto vectors, auto together, int64_t g, int64_t c) {
        const int64_t first = g * channels + c;
        grouped_sum_piece<V, T, lanes.value, vectors.value, together.value>(address, coefficient + g, groups, n, first,
                                                                            out + first);
    });
}

// n must be a multiple of ROWS.
template <class V, class T>
inline void grouped_dots(const int64_t *address, int64_t n, int64_t groups, int64_t channels, const T *g, T *dot) {
    if (channels == 0) memset(dot, 0, size_t(n * groups) * sizeof(T));
    for_groups<T>(groups, channels, [&](auto lanes, auto vectors, auto together, int64_t group, int64_t c) {
        const int64_t first = group * channels + c;
        dots_piece<V, T, lanes.value, vectors.value, together.value>(address, address + ROWS_AHEAD, groups, n, first, g + first,
                                                                     dot + group, c > 0);
    });
}

template <class T>
inline void grouped_add(const int64_t *address, const T *coefficient, int64_t n, int64_t groups, int64_t channels, const T *g) {
    for_groups<T>(groups, channels, [&](auto lanes, auto vectors, auto together, int64_t group, int64_t c) {
        const int64_t first = group * channels + c;
        scatter_add_piece<T, lanes.value, vectors.value, together.value>(address, coefficient + group, address + ROWS_AHEAD,
                                                                         groups, n, first, g + first);
    });
}

// to = factor * from
template <class T> MXD_INLINE void scaled(const T *from, T factor, int64_t n, T *to) {
    for_vectors<T>(n, [&](auto lanes, int64_t c) __attribute__((always_inline)) {
        constexpr int N = lanes.value;
        store<T, N>(to + c, broadcast<T, N>(factor) * load<T, N>(from + c));
    });
}

} // namespace
} // namespace mxd::MXD_ISA
