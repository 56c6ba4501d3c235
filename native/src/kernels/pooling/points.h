// Sorts points by one of their ranks. The sort is stable, so a sum over the points of a rank has the same bits for any number
// of threads. If points are sorted already, the sort is skipped. In most models points are sorted by cell.
//
// Sums coefficient * row over any number of points. A Window holds at most MOST points, so the window is filled repeatedly.
#pragma once

#include "call/call.h"
#include "kernels/shared/parallel.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

// Calls fn(ranks, stride) with ranks as a pointer to int32_t or int64_t.
template <class Fn> MXD_INLINE auto with_ranks(const Tensor &t, Fn &&fn) {
    const int64_t stride = t.strides[LISTED];
    return t.dtype == MXD_INT64 ? fn(static_cast<const int64_t *>(t.data), stride)
                                : fn(static_cast<const int32_t *>(t.data), stride);
}

// Calls put(i, rank) for i in 0..n-1. `rank` is that of the point at position begin + i of the order. `order` is null if points
// are sorted already.
template <class Put> MXD_INLINE void each_rank(const Tensor &t, const uint32_t *order, int64_t begin, int64_t n, Put &&put) {
    with_ranks(t, [&](auto *ranks, int64_t stride) {
        if (order)
            for (int64_t i = 0; i < n; ++i) put(i, int64_t(ranks[order[begin + i] * stride]));
        else
            for (int64_t i = 0; i < n; ++i) put(i, int64_t(ranks[(begin + i) * stride]));
    });
}

// Returns whether ranks ascend. The loop over a block has no branch, so that compilers vectorise it. Ranks are not negative, so
// a difference does not overflow and is negative if ranks descend.
inline bool ascend(const Tensor &of, int64_t points) {
    return with_ranks(of, [&](auto *ranks, int64_t stride) {
        constexpr int64_t BLOCK = 1024;
        for (int64_t from = 1; from < points; from += BLOCK) {
            const int64_t to = points - from < BLOCK ? points : from + BLOCK;
            __typeof__(*ranks + 0) signs = 0;
            if (stride == 1)
                for (int64_t i = from; i < to; ++i) signs |= ranks[i] - ranks[i - 1];
            else
                for (int64_t i = from; i < to; ++i) signs |= ranks[i * stride] - ranks[(i - 1) * stride];
            if (signs < 0) return false;
        }
        return true;
    });
}

// A stable counting sort. Each thread counts and places one part of the points. If there are several parts, their counters
// together have at most 16 MB.
struct Sorting {
    const Tensor &ranks;
    const int64_t points, rows, parts;
    uint32_t *counters, *order; // order is null while points are counted

    static int64_t parts_of(int64_t rows, int threads) {
        const int64_t most = (int64_t(1) << 22) / (rows + 1);
        return most < 1 || threads < 1 ? 1 : most < threads ? most : threads;
    }
    int64_t begin(int64_t part) const { return points * part / parts; }
};

struct SortPart {
    const Sorting &s;

    SortPart(const Sorting &sorting, Arena &) : s(sorting) {}
    void operator()(int64_t part) {
        uint32_t *const counter = s.counters + part * s.rows, *const order = s.order;
        if (!order) memset(counter, 0, size_t(s.rows) * sizeof *counter);
        with_ranks(s.ranks, [&](auto *ranks, int64_t stride) {
            const int64_t begin = s.begin(part), end = s.begin(part + 1);
            for (int64_t i = begin; !order && i < end; ++i) ++counter[ranks[i * stride]];
            for (int64_t i = begin; order && i < end; ++i) order[counter[ranks[i * stride]]++] = uint32_t(i);
        });
    }
};

// The sorted points. Points of rank r are at the positions start(r) to start(r + 1) - 1 of the order.
class Sorted {
  public:
    const uint32_t *order = nullptr; // null if points are sorted already

    // ready() is false if there was no memory.
    Sorted(const Tensor &ranks_, int64_t points_, int64_t rows, int threads)
        : ranks(ranks_), points(points_), in_order(ascend(ranks, points)), parts(Sorting::parts_of(rows, threads)),
          memory(in_order ? 0 : bytes(rows)) {
        if (in_order || !memory.begin()) return;
        Arena arena(memory.begin());
        starts = arena.take<int64_t>(rows + 1);
        uint32_t *const counters = arena.take<uint32_t>(rows * parts), *const positions = arena.take<uint32_t>(points);
        Sorting s{ranks, points, rows, parts, counters, nullptr};
        if (!parallel<SortPart>(threads, parts, s)) return;
        find_starts(s);
        s.order = positions;
        if (parallel<SortPart>(threads, parts, s)) order = positions;
    }
    bool ready() const { return in_order || order; }

    int64_t start(int64_t rank) const {
        if (order) return starts[rank];
        return with_ranks(ranks, [&](auto *r, int64_t stride) {
            int64_t first = 0, last = points; // the bounds of a binary search
            while (first < last) {
                const int64_t middle = (first + last) / 2;
                if (r[middle * stride] < rank)
                    first = middle + 1;
                else
                    last = middle;
            }
            return first;
        });
    }
    // Writes the end position of each rank of first..end-1 to `ends`. Returns start(first).
    int64_t find_ends(int64_t first, int64_t end, int64_t *ends) const {
        const int64_t begin = start(first);
        if (order) {
            for (int64_t rank = first; rank < end; ++rank) ends[rank - first] = starts[rank + 1];
        } else {
            with_ranks(ranks, [&](auto *r, int64_t stride) {
                int64_t position = begin;
                for (int64_t rank = first; rank < end; ++rank) {
                    while (position < points && r[position * stride] == rank) ++position;
                    ends[rank - first] = position;
                }
            });
        }
        return begin;
    }

  private:
    const Tensor &ranks;
    const int64_t points;
    const bool in_order;
    const int64_t parts;
    const Memory memory;
    int64_t *starts = nullptr; // the start of each rank; null if points are sorted already

    int64_t bytes(int64_t rows) const {
        return Arena::bytes<int64_t>(rows + 1) + Arena::bytes<uint32_t>(rows * parts) + Arena::bytes<uint32_t>(points);
    }
    // Replaces the counter of each part and rank by the position of the part's first point with this rank.
    void find_starts(const Sorting &s) {
        int64_t position = 0;
        for (int64_t rank = 0; rank < s.rows; ++rank) {
            starts[rank] = position;
            for (int64_t part = 0; part < parts; ++part) {
                uint32_t &counter = s.counters[part * s.rows + rank];
                const uint32_t count = counter;
                counter = uint32_t(position);
                position += count;
            }
        }
        starts[s.rows] = position;
    }
};

// Where the rows and coefficients of points lie. Point i has row ranks[i] and coefficient depth[ranks_depth[i]]. Row r is at
// the address begin + r * step.
struct Source {
    const Tensor &ranks, &depth, &ranks_depth;
    int64_t begin, step;
};

// The addresses of rows and the coefficients of at most MOST consecutive points, in the order in which a kernel visits them.
template <class T> class Window {
  public:
    static constexpr int64_t MOST = 512;

    int64_t *const address;
    T *const coefficient;

    explicit Window(Arena &arena) : address(arena.take<int64_t>(MOST + ROWS)), coefficient(arena.take<T>(MOST + ROWS)) {}

    // Reads n points. ROWS copies of the last address follow, so that rows can be read ROWS at a time.
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

// Returns the coefficient in all lanes of a vector. With a single channel GCC would vectorise over points and round products
// before adding them, so the coefficient is hidden from GCC.
template <class T, int N> MXD_INLINE Vec<T, N> factor_of(T coefficient) {
    if constexpr (N == 1)
        return rounded(coefficient);
    else
        return broadcast<T, N>(coefficient);
}

// Adds coefficient * row of n points, in order. `sums` has its channels in the order in which each_vector reads rows of Row.
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

// Computes the sums of `rows` consecutive ranks. The points of the first rank are begin..ends[0]-1, those of the second
// ends[0]..ends[1]-1, and so on. Needs no Window, but sorted points, and contiguous ranks and depth, as in most models.
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

// Fills the window again and again with the points of ranks first..end-1, in the sorted order. In each window, calls fn(rank,
// position, place, n) for each run of points of one rank. The run has n points. It begins at `position` of the order and at
// `place` of the window. A rank with points in two windows gets two calls. end - first must be at most MOST_RANKS.
constexpr int64_t MOST_RANKS = 64;

template <class T, class Fn>
inline void over_windows(Window<T> &window, const Source &from, const Sorted &sorted, int64_t first, int64_t end, Fn &&fn) {
    int64_t ends[MOST_RANKS], position = sorted.find_ends(first, end, ends), rank = first;
    for (const int64_t last_position = ends[end - first - 1]; position < last_position;) {
        const int64_t begin = position, n = last_position - begin < window.MOST ? last_position - begin : window.MOST;
        window.fill(from, sorted.order, begin, n);
        while (position < begin + n) {
            while (ends[rank - first] <= position) ++rank;
            const int64_t end_of_rank = ends[rank - first], stop = end_of_rank < begin + n ? end_of_rank : begin + n;
            fn(rank, position, position - begin, stop - position);
            position = stop;
        }
    }
}

} // namespace
} // namespace mxd::MXD_ISA
