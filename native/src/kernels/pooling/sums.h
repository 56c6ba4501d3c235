// Sums of coefficient * row over any number of points, some hundred at a time.
#pragma once

#include "kernels/pooling/sorted.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

// Where points find their rows and coefficients. `begin` is the first row's address; rows are `step` bytes apart.
struct Source {
    const Tensor &ranks, &depth, &ranks_depth;
    int64_t begin, step;
};

// The rows and coefficients of some consecutive points of the order.
template <class T> class Window {
  public:
    static constexpr int64_t MOST = 512;

    int64_t *const address;
    T *const coefficient;

    explicit Window(Arena &arena) : address(arena.take<int64_t>(MOST + ROWS)), coefficient(arena.take<T>(MOST + ROWS)) {}

    // Behind the last point come ROWS more, so that rows can be read ROWS at a time.
    void fill(const Source &from, const uint32_t *order, int64_t begin, int64_t n) {
        int64_t *const to = address;
        const int64_t first = from.begin, step = from.step;
        each_rank(from.ranks, order, begin, n, [=](int64_t i, int64_t rank) { to[i] = first + rank * step; });
        for (int64_t i = n; i < n + ROWS; ++i) address[i] = address[n - 1];
        T *const coefficients = coefficient;
        const int64_t stride = from.depth.strides[LISTED];
        with_elements(static_cast<char *>(from.depth.data), from.depth.dtype, [&](auto *depth) {
            each_rank(from.ranks_depth, order, begin, n,
                      [=](int64_t i, int64_t rank) { coefficients[i] = load<T, 1>(depth + rank * stride); });
        });
    }
};

// A single channel: hide the products from GCC, which would vectorise over points and round products before adding.
template <class T, int N> MXD_INLINE Vec<T, N> factor_of(T coefficient) {
    if constexpr (N == 1)
        return rounded(coefficient);
    else
        return broadcast<T, N>(coefficient);
}

// sums += coefficient * row over n points, in order. Sums are in each_vector's order for rows of type Row.
template <class Row, class T>
inline void add_rows(const int64_t *address, const T *coefficient, int64_t n, int64_t channels, T *sums) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        constexpr int N = lanes.value, K = vectors.value;
        Vec<T, N> sum[K];
        for (int k = 0; k < K; ++k) sum[k] = load<T, N>(sums + c + k * N);
        for (int64_t i = 0; i < n; ++i)
            add_row<Row, T, N, K>(row_at<const Row>(address[i], c), factor_of<T, N>(coefficient[i]), sum);
        for (int k = 0; k < K; ++k) store<T, N>(sums + c + k * N, sum[k]);
    });
}

// The sums of `rows` ranks whose points come one after the other, from `begin` to ends[0], from there to ends[1] and so on.
// Their ranks lie side by side, as most models have them: no window, so ranks and depth are read while rows are added.
template <class Row, class T>
inline void sum_points(const Row *feat, int64_t step, const int32_t *ranks, const Row *depth, const int32_t *ranks_depth,
                       int64_t begin, const int64_t *ends, int64_t rows, int64_t channels, T *sums) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        constexpr int N = lanes.value, K = vectors.value;
        int64_t i = begin;
        for (int64_t row = 0; row < rows; ++row) {
            Vec<T, N> sum[K] = {};
            for (; i < ends[row]; ++i)
                add_row<Row, T, N, K>(feat + ranks[i] * step + c, factor_of<T, N>(load<T, 1>(depth + ranks_depth[i])), sum);
            for (int k = 0; k < K; ++k) store<T, N>(sums + row * channels + c + k * N, sum[k]);
        }
    });
}

// fn(rank, place of the first point in the order, its place in the window, count) for the points of each rank of first..end-1,
// MOST_RANKS at most, window by window.
constexpr int64_t MOST_RANKS = 64;

template <class T, class Fn>
inline void over_windows(Window<T> &window, const Source &from, const Sorted &sorted, int64_t first, int64_t end, Fn &&fn) {
    int64_t ends[MOST_RANKS], place = sorted.find_ends(first, end, ends), rank = first;
    for (const int64_t last_place = ends[end - first - 1]; place < last_place;) {
        const int64_t begin = place, n = last_place - begin < window.MOST ? last_place - begin : window.MOST;
        window.fill(from, sorted.order, begin, n);
        while (place < begin + n) {
            while (ends[rank - first] <= place) ++rank;
            const int64_t end_of_rank = ends[rank - first], stop = end_of_rank < begin + n ? end_of_rank : begin + n;
            fn(rank, place, place - begin, stop - place);
            place = stop;
        }
    }
}

} // namespace
} // namespace mxd::MXD_ISA
