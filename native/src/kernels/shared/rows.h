// All arithmetic on rows. A row is the contiguous channels of one pixel. V is the storage type of rows. T is the type of all
// arithmetic. weighted_sum stores its result as V or T. widen_row converts rows that are read often to T in advance.
//
//   weighted_sum           out     = sum over i of  coefficient[i] * row[i]
//   dots                   dot[i]  = sum over channels of  g * row[i]
//   scatter_add            row[i] += coefficient[i] * g
//   dots_and_scatter_add   dots with rows of value, scatter_add to the same rows of its gradient
//
// g is a row of T, such as a row of grad_output. A list of rows has an address and a coefficient for each row. The length of a
// list is a multiple of ROWS. A padding entry has coefficient 0 or points to the zero row. The rows of the
// list `next` are prefetched meanwhile. `next` has the same length, and its addresses may be invalid, because a prefetch cannot
// fault.
//
// Channels are cut into pieces of 8, 4, 2 and 1 vectors, then of a half vector, a quarter and so on, down to one channel. A
// piece is processed for the whole list before the next piece, with its accumulators in registers. So there are no masks and no
// reads past the end of a row, and the order of operations on a channel does not depend on threads.
#pragma once

#include "call/plan.h"
#include "kernels/shared/lanes.h"
#include "kernels/shared/storage.h"

namespace mxd::MXD_ISA {
namespace {

// The range of list entries whose rows are prefetched: begin..begin+count-1.
struct FarRows {
    int64_t begin = 0, count = INT64_MAX;

    MXD_INLINE bool holds(int64_t i) const { return uint64_t(i - begin) < uint64_t(count); }
};

template <int N> struct Count {
    static constexpr int value = N;
    constexpr operator int64_t() const { return N; }
};

// Calls op(Count<lanes>, Count<vectors>, first channel) for each piece of `channels`.
template <class T, class Op> MXD_INLINE void for_pieces(int64_t channels, Op &&op) {
    // Nearly every model has 32 channels per head. This branch tells the compiler that 32 channels are one piece, which begins
    // at 0.
    if constexpr (sizeof(T) == 4)
        if (channels == 32) return op(Count<WIDTH<T>>(), Count<32 / WIDTH<T>>(), 0);
    int64_t c = 0;
    for (; channels - c >= 8 * WIDTH<T>; c += 8 * WIDTH<T>) op(Count<WIDTH<T>>(), Count<8>(), c);
    const int64_t rest = channels - c;
    if (rest & 4 * WIDTH<T>) op(Count<WIDTH<T>>(), Count<4>(), c), c += 4 * WIDTH<T>;
    if (rest & 2 * WIDTH<T>) op(Count<WIDTH<T>>(), Count<2>(), c), c += 2 * WIDTH<T>;
    if (rest & WIDTH<T>) op(Count<WIDTH<T>>(), Count<1>(), c), c += WIDTH<T>;
    if (c == channels) return;
    if constexpr (WIDTH<T> > 8)
        if (rest & 8) op(Count<8>(), Count<1>(), c), c += 8;
    if constexpr (WIDTH<T> > 4)
        if (rest & 4) op(Count<4>(), Count<1>(), c), c += 4;
    if constexpr (WIDTH<T> > 2)
        if (rest & 2) op(Count<2>(), Count<1>(), c), c += 2;
    if (rest & 1) op(Count<1>(), Count<1>(), c);
}

// Calls op(Count<lanes>, first channel) for each vector of `channels`.
template <class T, class Op> inline void for_vectors(int64_t channels, Op &&op) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        MXD_UNROLL
        for (int k = 0; k < vectors.value; ++k) op(lanes, c + k * lanes.value);
    });
}

// Returns a pointer to a channel of the row at this address. Callers that only read the row pass a const V.
template <class V> MXD_INLINE V *row_at(int64_t address, int64_t channel) {
    return reinterpret_cast<V *>(address + channel * int64_t(sizeof(V)));
}

template <class V, int N, int K> constexpr int PIECE_BYTES = K * N * int(sizeof(V));

// Prefetches BYTES bytes from an address on. The address may be invalid, because a prefetch cannot fault.
template <int BYTES> MXD_INLINE void ask_for(int64_t address) {
    MXD_UNROLL
    for (int line = 0; line < (BYTES + 63) / 64; ++line)
        __builtin_prefetch(reinterpret_cast<const void *>(address + 64 * line));
}

// True if sums read two vectors of bfloat16 as one vector of 32-bit words. The upper half of a word is already a float; the
// lower half becomes a float by a shift. Reading words is cheaper than widening two vectors, but it separates even channels
// from odd ones, so stores put sums in order. Dot products do not read words, because they add channels in the same order as in
// float32.
template <class V, class T, int N, int K>
constexpr bool IN_WORDS = same_type<V, BFloat16> && same_type<T, float> && N >= 4 && K % 2 == 0;

// Calls op(vector k, k) for the K vectors of a row. With IN_WORDS and even k, vector k has even channels and vector k + 1 has
// odd channels.
template <class V, class T, int N, int K, class Op> MXD_INLINE void each_vector(const V *row, Op &&op) {
    if constexpr (IN_WORDS<V, T, N, K>) {
        MXD_UNROLL
        for (int k = 0; k < K; k += 2) {
            const Vec<uint32_t, N> words = raw_load<uint32_t, N>(row + k * N);
            op(bits_as<Vec<float, N>>(Vec<uint32_t, N>(words << 16)), k);
            op(bits_as<Vec<float, N>>(Vec<uint32_t, N>(words & 0xffff0000u)), k + 1);
        }
    } else {
        MXD_UNROLL
        for (int k = 0; k < K; ++k) op(load<T, N>(row + k * N), k);
    }
}
// sums += factor * row
template <class V, class T, int N, int K> MXD_INLINE void add_row(const V *row, Vec<T, N> factor, Vec<T, N> (&sums)[K]) {
    each_vector<V, T, N, K>(row, [&](Vec<T, N> v, int k) __attribute__((always_inline)) { sums[k] += factor * v; });
}
template <class V, class T, int N, int K> MXD_INLINE void put_in_order(Vec<T, N> (&sums)[K]) {
    if constexpr (IN_WORDS<V, T, N, K>) {
        MXD_UNROLL
        for (int k = 0; k < K; k += 2) interleave<T, N>(sums[k], sums[k + 1], sums[k], sums[k + 1]);
    }
}
// Stores K vectors of sums as a row of V. The channels of the sums are in the order in which each_vector reads rows of Row.
template <class V, class Row, class T, int N, int K> MXD_INLINE void store_row(V *row, Vec<T, N> (&vectors)[K]) {
    if constexpr (IN_WORDS<V, T, N, K> && same_type<V, Row>) {
        MXD_UNROLL
        for (int k = 0; k < K; k += 2) {
            const Vec<uint32_t, N> words =
                rounded_to_bfloat16<N>(vectors[k]) >> 16 | (rounded_to_bfloat16<N>(vectors[k + 1]) & 0xffff0000u);
            memcpy(row + k * N, &words, sizeof words);
        }
    } else {
        put_in_order<Row, T, N, K>(vectors);
        MXD_UNROLL
        for (int k = 0; k < K; ++k) store<T, N>(row + k * N, vectors[k]);
    }
}

template <class V, class T> inline void widen_row(const V *row, T *widened, int64_t channels) {
    for_vectors<T>(channels, [&](auto lanes, int64_t c) {
        constexpr int N = lanes.value;
        store<T, N>(widened + c, load<T, N>(row + c));
    });
}
// Puts channels in order. `widened` has its channels in the order in which each_vector reads rows of V.
template <class V, class T> inline void order_row(const T *widened, T *ordered, int64_t channels) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        constexpr int N = lanes.value, K = vectors.value;
        Vec<T, N> row[K];
        for (int k = 0; k < K; ++k) row[k] = load<T, N>(widened + c + k * N);
        put_in_order<V, T, N, K>(row);
        for (int k = 0; k < K; ++k) store<T, N>(ordered + c + k * N, row[k]);
    });
}

// Computes one piece of weighted_sum. Rows in the range `far` have type V. The other rows have type Near, which is V or T. The
// sum is stored in `computed` as T, or in `out` as V if `computed` is null.
template <class V, class T, int N, int K, bool SOME_FAR, class Near = V>
inline void weighted_sum_piece(const int64_t *address, const T *coefficient, const int64_t *next, FarRows far, int64_t n,
                               int64_t channel, V *out, T *computed) {
    static_assert(!SOME_FAR || same_type<V, Near> || !IN_WORDS<V, T, N, K>, "one order of channels in the sums");
    // SETS copies of the K accumulators give 8 independent sums (4 if K is 1), which hides the latency of the multiply-add.
    constexpr int SETS = K >= 8 ? 1 : K == 4 ? 2 : 4;
    Vec<T, N> sums[SETS][K] = {};
    const auto factor = [&](int64_t i) __attribute__((always_inline)) { return broadcast<T, N>(coefficient[i]); };
    for (int64_t i = 0; i < n; i += ROWS) {
        if (SOME_FAR && far.holds(i)) {
            MXD_UNROLL
            for (int r = 0; r < ROWS; ++r) {
                // Prefetch one row before each sum: with all prefetches first, the vendor's example takes 5 % longer.
                ask_for<PIECE_BYTES<V, N, K>>(next[i + r] + channel * int64_t(sizeof(V)));
                add_row<V, T, N, K>(row_at<const V>(address[i + r], channel), factor(i + r), sums[r % SETS]);
            }
        } else {
            MXD_UNROLL
            for (int r = 0; r < ROWS; ++r)
                add_row<Near, T, N, K>(row_at<const Near>(address[i + r], channel), factor(i + r), sums[r % SETS]);
        }
    }
    MXD_UNROLL
    for (int s = 1; s < SETS; ++s) {
        MXD_UNROLL
        for (int k = 0; k < K; ++k) sums[0][k] += sums[s][k];
    }
    if (computed)
        store_row<T, Near, T, N, K>(computed + channel, sums[0]);
    else
        store_row<V, Near, T, N, K>(out + channel, sums[0]);
}

// Computes weighted_sum. Prefetches the rows of `next` that are in the range `far`. Without SOME_FAR prefetches no row.
template <class V, class T, bool SOME_FAR, class Near = V>
inline void weighted_sum(const int64_t *address, const T *coefficient, const int64_t *next, FarRows far, int64_t n,
                         int64_t channels, V *out, T *computed) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        weighted_sum_piece<V, T, lanes.value, vectors.value, SOME_FAR, Near>(address, coefficient, next, far, n, c, out,
                                                                             computed);
    });
}

// Folds each of four vectors to one number and returns the four numbers. This takes half the steps of four separate folds.
// fold(a, b) combines two vectors lane by lane.
template <class T, int N, class Fold> MXD_INLINE Vec<T, 4> folded_four(const Vec<T, N> (&v)[4], Fold &&fold) {
    typedef Vec<int32_t, N> I;
    if constexpr (!same_type<T, float> || N < 4) {
        const auto folded = [&](Vec<T, N> x) __attribute__((always_inline)) { return folded_lanes<T, N>(x, fold); };
        return Vec<T, 4>{folded(v[0]), folded(v[1]), folded(v[2]), folded(v[3])};
    } else if constexpr (N == 4) {
        const Vec<float, 4> a = fold(MXD_SHUFFLE(v[0], v[1], I, 0, 4, 1, 5), MXD_SHUFFLE(v[0], v[1], I, 2, 6, 3, 7));
        const Vec<float, 4> b = fold(MXD_SHUFFLE(v[2], v[3], I, 0, 4, 1, 5), MXD_SHUFFLE(v[2], v[3], I, 2, 6, 3, 7));
        return fold(MXD_SHUFFLE(a, b, I, 0, 1, 4, 5), MXD_SHUFFLE(a, b, I, 2, 3, 6, 7));
    } else if constexpr (N == 8) {
        const auto halves = [&](Vec<float, 8> a, Vec<float, 8> b) __attribute__((always_inline)) {
            return fold(MXD_SHUFFLE(a, b, I, 0, 1, 2, 3, 8, 9, 10, 11), MXD_SHUFFLE(a, b, I, 4, 5, 6, 7, 12, 13, 14, 15));
        };
        const Vec<float, 8> a = halves(v[0], v[1]), b = halves(v[2], v[3]);
        const Vec<float, 8> pairs = // two lanes of each vector, in the order 0, 2, 1, 3
            fold(MXD_SHUFFLE(a, b, I, 0, 1, 8, 9, 4, 5, 12, 13), MXD_SHUFFLE(a, b, I, 2, 3, 10, 11, 6, 7, 14, 15));
        const Vec<float, 8> all = fold(pairs, MXD_SHUFFLE(pairs, pairs, I, 1, 0, 3, 2, 5, 4, 7, 6));
        return four_of<0>(MXD_SHUFFLE(all, all, I, 0, 4, 2, 6, 0, 4, 2, 6));
    } else {
        const auto halves = [&](Vec<float, 16> a, Vec<float, 16> b) __attribute__((always_inline)) {
            return fold(MXD_SHUFFLE(a, b, I, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                        MXD_SHUFFLE(a, b, I, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
        };
        const Vec<float, 16> a = halves(v[0], v[1]), b = halves(v[2], v[3]);
        const Vec<float, 16> quarters = fold(MXD_SHUFFLE(a, b, I, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                                             MXD_SHUFFLE(a, b, I, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
        const Vec<float, 16> pairs =
            fold(quarters, MXD_SHUFFLE(quarters, quarters, I, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
        const Vec<float, 16> all =
            fold(pairs, MXD_SHUFFLE(pairs, pairs, I, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
        const Vec<float, 16> four = MXD_SHUFFLE(all, all, I, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
        return raw_load<float, 4>(&four);
    }
}
template <class T, int N> MXD_INLINE Vec<T, 4> sums_of_four(const Vec<T, N> (&v)[4]) { return folded_four<T, N>(v, Total()); }

template <class T, int N, int K> MXD_INLINE void read_factors(const T *g, Vec<T, N> (&factor)[K]) {
    MXD_UNROLL
    for (int k = 0; k < K; ++k) factor[k] = load<T, N>(g + k * N);
}
// Multiplies a row by factors, and adds the vectors of products. The sum over the lanes of the result is the dot product.
template <class V, class T, int N, int K> MXD_INLINE Vec<T, N> multiply_row(const V *row, const Vec<T, N> (&factor)[K]) {
    Vec<T, N> products = factor[0] * load<T, N>(row);
    MXD_UNROLL
    for (int k = 1; k < K; ++k) products += factor[k] * load<T, N>(row + k * N);
    return products;
}

// Computes one piece of dots for G groups of K vectors each, and writes dot[i * groups + group] for row i. Folds four vectors
// of products at a time. Groups is int64_t, or Count<1> if there is one group.
template <class V, class T, int N, int K, int G = 1, class Groups>
inline void dots_piece(const int64_t *address, const int64_t *next, Groups groups, int64_t n, int64_t channel, const T *g,
                       T *dot, bool accumulate) {
    constexpr int R = G < 4 ? 4 / G : 1; // rows per step
    constexpr bool SIDE_BY_SIDE = G > 1 ? G % 4 == 0 : same_type<Groups, Count<1>>;
    Vec<T, N> factor[G][K];
    MXD_UNROLL
    for (int group = 0; group < G; ++group) read_factors<T, N, K>(g + group * K * N, factor[group]);
    for (int64_t i = 0; i < n; i += R) {
        Vec<T, N> products[R * G];
        MXD_UNROLL
        for (int r = 0; r < R; ++r) {
            const V *row = row_at<const V>(address[i + r], channel);
            ask_for<G * PIECE_BYTES<V, N, K>>(next[i + r] + channel * int64_t(sizeof(V)));
            MXD_UNROLL
            for (int group = 0; group < G; ++group) {
                products[r * G + group] = multiply_row<V, T, N, K>(row + group * K * N, factor[group]);
                finish(products[r * G + group]);
            }
        }
        MXD_UNROLL
        for (int four = 0; four < R * G; four += 4) {
            const Vec<T, N> some[4] = {products[four], products[four + 1], products[four + 2], products[four + 3]};
            const Vec<T, 4> sums = sums_of_four<T, N>(some);
            T *const to = dot + (i + four / G) * groups + four % G;
            if constexpr (SIDE_BY_SIDE) store<T, 4>(to, accumulate ? load<T, 4>(to) + sums : sums);
            MXD_UNROLL
            for (int s = 0; s < 4 && !SIDE_BY_SIDE; ++s) {
                T &one = to[s / G * groups + s % G];
                one = accumulate ? one + sums[s] : sums[s];
            }
        }
    }
}

template <class V, class T>
inline void dots(const int64_t *address, const int64_t *next, int64_t n, int64_t channels, const T *g, T *dot) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        dots_piece<V, T, lanes.value, vectors.value>(address, next, Count<1>(), n, c, g + c, dot, c > 0);
    });
}

// row += coefficient * factor
template <class T, int N, int K> MXD_INLINE void add_to_row(T *row, T coefficient, const Vec<T, N> (&factor)[K]) {
    const Vec<T, N> s = broadcast<T, N>(coefficient);
    MXD_UNROLL
    for (int k = 0; k < K; ++k) store<T, N>(row + k * N, load<T, N>(row + k * N) + s * factor[k]);
}

// Computes one piece of scatter_add for G groups of K vectors each. Row i has the coefficients coefficient[i * groups + group].
template <class T, int N, int K, int G = 1, class Groups>
inline void scatter_add_piece(const int64_t *address, const T *coefficient, const int64_t *next, Groups groups, int64_t n,
                              int64_t channel, const T *g) {
    Vec<T, N> factor[G][K];
    MXD_UNROLL
    for (int group = 0; group < G; ++group) read_factors<T, N, K>(g + group * K * N, factor[group]);
    for (int64_t i = 0; i < n; ++i) {
        T *row = row_at<T>(address[i], channel);
        ask_for<G * PIECE_BYTES<T, N, K>>(next[i] + channel * int64_t(sizeof(T)));
        MXD_UNROLL
        for (int group = 0; group < G; ++group)
            add_to_row<T, N, K>(row + group * K * N, coefficient[i * groups + group], factor[group]);
    }
}

template <class T>
inline void scatter_add(const int64_t *address, const T *coefficient, const int64_t *next, int64_t n, int64_t channels,
                        const T *g) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) {
        scatter_add_piece<T, lanes.value, vectors.value>(address, coefficient, next, Count<1>(), n, c, g + c);
    });
}

// Maps the address of a row of value to the address of the same row of its gradient. Both tensors have the same zero row.
struct OtherRows {
    int64_t distance, zero_row;

    MXD_INLINE int64_t of(int64_t address) const { return address == zero_row ? zero_row : address + distance; }
};
// Maps addresses like OtherRows, if value and its gradient each have a zero row. The two zero rows have the same distance as
// other rows.
struct SameDistance {
    int64_t distance;

    MXD_INLINE int64_t of(int64_t address) const { return address + distance; }
};

// Computes one piece of dots and of scatter_add, ROWS rows at a time. Reads ROWS rows of value before it adds to a row of the
// gradient: a load waits for an earlier store to an address with the same low bits, and a row of value and a row of the
// gradient may have such addresses.
template <class T, int N, int K, bool PREFETCH, class Others>
MXD_INLINE void dots_and_scatter_add_piece(const int64_t *address, const T *coefficient, const int64_t *next, Others others,
                                           int64_t n, int64_t channel, const T *g, T *dot, bool accumulate) {
    Vec<T, N> factor[K];
    read_factors<T, N, K>(g, factor);
    for (int64_t i = 0; i < n; i += ROWS) {
        Vec<T, N> products[ROWS];
        MXD_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            if constexpr (PREFETCH) {
                const int64_t soon = next[i + r] + channel * int64_t(sizeof(T));
                ask_for<PIECE_BYTES<T, N, K>>(soon);
                ask_for<PIECE_BYTES<T, N, K>>(soon + others.distance);
            }
            products[r] = multiply_row<T, T, N, K>(row_at<const T>(address[i + r], channel), factor);
            finish(products[r]);
        }
        MXD_UNROLL
        for (int r = 0; r < ROWS; ++r)
            add_to_row<T, N, K>(row_at<T>(others.of(address[i + r]), channel), coefficient[i + r], factor);
        const Vec<T, ROWS> sums = sums_of_four<T, N>(products);
        store<T, ROWS>(dot + i, accumulate ? load<T, ROWS>(dot + i) + sums : sums);
    }
}

template <class T, bool PREFETCH, class Others>
MXD_INLINE void dots_and_scatter_add(const int64_t *address, const T *coefficient, const int64_t *next, Others others,
                                     int64_t n, int64_t channels, const T *g, T *dot) {
    for_pieces<T>(channels, [&](auto lanes, auto vectors, int64_t c) __attribute__((always_inline)) {
        dots_and_scatter_add_piece<T, lanes.value, vectors.value, PREFETCH>(address, coefficient, next, others, n, c, g + c,
                                                                            dot, c > 0);
    });
}

// Converts n elements to T and then to To. At least one of the two strides is 1.
template <class T, class From, class To>
inline void convert_run(const From *from, int64_t from_stride, To *to, int64_t to_stride, int64_t n) {
    int64_t i = 0;
    if (from_stride == 1 && to_stride == 1) {
        for (; i + WIDTH<T> <= n; i += WIDTH<T>) store<T, WIDTH<T>>(to + i, load<T, WIDTH<T>>(from + i));
        if constexpr (WIDTH<T> > 8)
            if (i + 8 <= n) store<T, 8>(to + i, load<T, 8>(from + i)), i += 8;
        if constexpr (WIDTH<T> > 4)
            if (i + 4 <= n) store<T, 4>(to + i, load<T, 4>(from + i)), i += 4;
    }
    for (; i < n; ++i) store<T, 1>(to + i * to_stride, load<T, 1>(from + i * from_stride));
}
// Widens n contiguous elements. This function is not inlined, so that loops around it keep their registers.
template <class V> __attribute__((noinline)) void widen_run(const V *from, float *to, int64_t n) {
    constexpr int N = WIDTH<float>;
    int64_t i = 0;
    for (; i + 2 * N <= n; i += 2 * N) {
        const Vec<float, N> first = load<float, N>(from + i), second = load<float, N>(from + i + N);
        store<float, N>(to + i, first);
        store<float, N>(to + i + N, second);
    }
    if (i < n) convert_run<float>(from + i, 1, to + i, 1, n - i);
}

} // namespace
} // namespace mxd::MXD_ISA
