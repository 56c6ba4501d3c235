// Sums of coefficient * row over any number of points, some hundred at a time.
#pragma once

#include "kernels/pooling/sorted.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

// Where points of the order find their rows, and their coefficients. Rows are `step` bytes apart.
struct Source {
    const Tensor &ranks, &depth, &ranks_depth;
    int64_t begin, step;
};

// Some points that follow each other in the order.
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

// sums += coefficient * row over n points, of which the first comes first; sums in each_vector's order for rows of type Row.
template <class Row, class T>
inline void add_rows(const int64_t *address, const T *coefficient, int64_t n, int64_t channels, T *sums) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        constexpr int N = lanes.value, K = vectors.value;
        Vec<T, N> sum[K];
        for (int k = 0; k < K; ++k) sum[k] = load<T, N>(sums + c + k * N);
        for (int64_t i = 0; i < n; ++i)
            add_row<Row, T, N, K>(row_at<const Row>(address[i], c), broadcast<T, N>(coefficient[i]), sum);
        for (int k = 0; k < K; ++k) store<T, N>(sums + c + k * N, sum[k]);
    });
}

// fn(rank, place of the first point in the order, its place in the window, count) for the points of each rank of first..end-1,
// window by window.
template <class T, class Fn>
inline void over_windows(Window<T> &window, const Source &from, const Sorted &sorted, int64_t first, int64_t end, Fn &&fn) {
    const int64_t last_place = sorted.start(end);
    int64_t rank = first;
    for (int64_t begin = sorted.start(first); begin < last_place;) {
        const int64_t n = last_place - begin < window.MOST ? last_place - begin : window.MOST;
        window.fill(from, sorted.order, begin, n);
        for (int64_t place = begin; place < begin + n;) {
            while (sorted.start(rank + 1) <= place) ++rank;
            const int64_t stop = sorted.start(rank + 1) < begin + n ? sorted.start(rank + 1) : begin + n;
            fn(rank, place, place - begin, stop - place);
            place = stop;
        }
        begin += n;
    }
}

} // namespace
} // namespace mxd::MXD_ISA
