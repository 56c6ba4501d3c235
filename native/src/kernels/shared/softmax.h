// exp and softmax, from operations that every instruction set has.
#pragma once

#include "kernels/shared/rows.h"

namespace mxd::MXD_ISA {
namespace {

// Constants for e^x = 2^n e^r, where n is the integer nearest to x / ln 2. TERMS is a polynomial for (e^r - 1 - r) / r^2 where
// |r| <= ln 2 / 2, highest power first, from a Chebyshev fit. The polynomial's relative error is below 0.2 units in the last
// place.
template <class T> struct ExpOf;
template <> struct ExpOf<float> {
    typedef uint32_t Bits;
    static constexpr int MANTISSA = 23, BIAS = 127;
    static constexpr float LEAST = -104; // e^x is 0 below this x
    static constexpr float ROUND = 0x1.8p23f, LOG2_E = 0x1.715476p0f;
    static constexpr float LN2_HIGH = 0x1.62cp-1f, LN2_LOW = 0x1.217f7ep-12f; // n * LN2_HIGH is exact
    static constexpr int UP = 64;                                             // 2^(n + UP) is a normal number for every n
    static constexpr float DOWN = 0x1p-64f;
    static constexpr float TERMS[] = {0x1.6d117cp-10f, 0x1.120be2p-7f, 0x1.555518p-5f, 0x1.5554dcp-3f, 0.5f};
};
template <> struct ExpOf<double> {
    typedef uint64_t Bits;
    static constexpr int MANTISSA = 52, BIAS = 1023;
    static constexpr double LEAST = -746;
    static constexpr double ROUND = 0x1.8p52, LOG2_E = 0x1.71547652b82fep0;
    static constexpr double LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;
    static constexpr int UP = 512;
    static constexpr double DOWN = 0x1p-512;
    static constexpr double TERMS[] = {
        0x1.af390ba7e6f47p-26, 0x1.2891d4ffbb0f9p-22, 0x1.71de0d85293b8p-19, 0x1.a019b8ca26fcfp-16, 0x1.a01a01a7cebcdp-13,
        0x1.6c16c1789d1d7p-10, 0x1.11111111109a6p-7,  0x1.5555555553d37p-5,  0x1.5555555555556p-3,  0x1.0000000000001p-1};
};

// Returns e^x for x <= 0, with an error of at most two units in the last place. Returns 0 for -inf and NaN for NaN.
template <class T, int N> MXD_INLINE Vec<T, N> exp_below_zero(Vec<T, N> x) {
    typedef ExpOf<T> E;
    typedef Vec<typename E::Bits, N> Bits;
    const Vec<T, N> least = broadcast<T, N>(E::LEAST);
    x = least > x ? least : x; // a NaN stays
    const Vec<T, N> shifted = x * E::LOG2_E + E::ROUND, n = shifted - E::ROUND;
    const Vec<T, N> r = x - n * E::LN2_HIGH - n * E::LN2_LOW;
    Vec<T, N> p = broadcast<T, N>(E::TERMS[0]);
    MXD_UNROLL
    for (int k = 1; k < int(sizeof E::TERMS / sizeof(T)); ++k) p = p * r + E::TERMS[k];
    p = p * (r * r) + r + 1;
    // the low bits of `shifted` are n; the shift removes the high bits
    const Bits power = (bits_as<Bits>(shifted) << E::MANTISSA) + (typename E::Bits(E::BIAS + E::UP) << E::MANTISSA);
    return p * bits_as<Vec<T, N>>(power) * E::DOWN;
}

// How many numbers of a row are processed at once.
template <class T> constexpr int SOFTMAX_LANES = VECTOR_BYTES / int(sizeof(T)) > LANES ? VECTOR_BYTES / int(sizeof(T)) : LANES;

template <class T, int N> MXD_INLINE auto lanes_below(int64_t count) {
    typedef Int<T> I;
    static constexpr I NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return raw_load<I, N>(NUMBERS) < broadcast<I, N>(I(count));
}

// Folds each part of PART lanes into one number, and returns that number in all lanes of the part.
template <class T, int N, int PART, class Fold> MXD_INLINE Vec<T, N> folded_parts(Vec<T, N> x, Fold &&fold) {
    typedef Vec<Int<T>, N> I;
    static_assert((PART == 4 || PART == 8) && (N == 8 || N == 16), "parts and vectors that models need");
    if constexpr (N == 16) {
        if constexpr (PART == 8) x = fold(x, MXD_SHUFFLE(x, x, I, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
        x = fold(x, MXD_SHUFFLE(x, x, I, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
        return fold(x, MXD_SHUFFLE(x, x, I, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    } else {
        x = fold(x, MXD_SHUFFLE(x, x, I, 2, 3, 0, 1, 6, 7, 4, 5));
        return fold(x, MXD_SHUFFLE(x, x, I, 1, 0, 3, 2, 5, 4, 7, 6));
    }
}

template <class T, int N, int PART> MXD_INLINE Vec<T, N> softmax_of_parts(Vec<T, N> logits) {
    const Vec<T, N> e = exp_below_zero<T, N>(logits - folded_parts<T, N, PART>(logits, Larger()));
    return e / folded_parts<T, N, PART>(e, Total());
}
template <class T, int N> MXD_INLINE Vec<T, N> first_of(const T *row, int64_t count) {
    return lanes_below<T, N>(count) ? raw_load<T, N>(row) : broadcast<T, N>(-T(__builtin_inf()));
}

// softmax for rows of at most LANES numbers, if a vector has 2 * LANES numbers. Each vector holds two rows.
template <class T> MXD_INLINE void softmax_of_halves(const T *const (&rows)[4], int64_t count, T *const (&weights)[4]) {
    typedef Vec<T, LANES> Half;
    struct Two {
        Half first, second;
    };
    MXD_UNROLL
    for (int r = 0; r < 4; r += 2) {
        const auto logits = joined<T, LANES>(first_of<T, LANES>(rows[r], count), first_of<T, LANES>(rows[r + 1], count));
        const Two both = bits_as<Two>(softmax_of_parts<T, 2 * LANES, LANES>(logits));
        store<T, LANES>(weights[r], both.first);
        store<T, LANES>(weights[r + 1], both.second);
    }
}
// softmax of four rows of at most 4 numbers each. A vector of 16 numbers holds all four rows.
template <class T> MXD_INLINE void softmax_of_fours(const T *const (&rows)[4], int64_t count, T *const (&weights)[4]) {
    typedef Vec<T, 4> Four;
    struct All {
        Four of[4];
    };
    const auto low = joined<T, 4>(first_of<T, 4>(rows[0], count), first_of<T, 4>(rows[1], count));
    const auto high = joined<T, 4>(first_of<T, 4>(rows[2], count), first_of<T, 4>(rows[3], count));
    const All all = bits_as<All>(softmax_of_parts<T, 16, 4>(joined<T, 8>(low, high)));
    MXD_UNROLL
    for (int r = 0; r < 4; ++r) store<T, 8>(weights[r], joined<T, 4>(all.of[r], Four{})); // readers load eight weights
}

// softmax for rows that fill VECTORS vectors. VECTORS is 0 for rows of any length.
template <class T, int VECTORS>
MXD_INLINE void softmax_of_vectors(const T *const (&rows)[4], int64_t count, T *const (&weights)[4]) {
    constexpr int N = SOFTMAX_LANES<T>;
    typedef Vec<T, N> Lanes;
    const Larger larger;
    const int64_t last = VECTORS > 0 ? (VECTORS - 1) * N : (count - 1) / N * N;
    Lanes tail[4], top[4], sums[4];
    MXD_UNROLL
    for (int r = 0; r < 4; ++r)
        top[r] = tail[r] = VECTORS > 0 ? raw_load<T, N>(rows[r] + last) : first_of<T, N>(rows[r] + last, count - last);
    for (int64_t i = 0; i < last; i += N) {
        MXD_UNROLL
        for (int r = 0; r < 4; ++r) top[r] = larger(raw_load<T, N>(rows[r] + i), top[r]);
    }
    const Vec<T, 4> most = folded_four<T, N>(top, larger);
    MXD_UNROLL
    for (int r = 0; r < 4; ++r) sums[r] = tail[r] = exp_below_zero<T, N>(tail[r] - most[r]);
    for (int64_t i = 0; i < last; i += N) {
        MXD_UNROLL
        for (int r = 0; r < 4; ++r) {
            const Lanes e = exp_below_zero<T, N>(raw_load<T, N>(rows[r] + i) - most[r]);
            store<T, N>(weights[r] + i, e);
            sums[r] += e;
        }
    }
    const Vec<T, 4> coefficient = 1 / sums_of_four<T, N>(sums);
    for (int64_t i = 0; i < last; i += N) {
        MXD_UNROLL
        for (int r = 0; r < 4; ++r) store<T, N>(weights[r] + i, raw_load<T, N>(weights[r] + i) * coefficient[r]);
    }
    MXD_UNROLL
    for (int r = 0; r < 4; ++r) store<T, N>(weights[r] + last, tail[r] * coefficient[r]);
}
// This function is not inlined, because it is long and few models need it.
template <class T>
__attribute__((noinline)) void softmax_of_any(const T *const (&rows)[4], int64_t count, T *const (&weights)[4]) {
    softmax_of_vectors<T, 0>(rows, count, weights);
}

// Computes the softmax of four rows of `count` > 0 numbers as torch does: the maximum is subtracted, -inf gets weight 0, and a
// row with a NaN or with an infinite maximum becomes NaN. Four rows are processed together to hide latency. Whole vectors are
// read and written. The numbers after a row may be anything. The weights that are written for these numbers are 0 or NaN.
template <class T> MXD_INLINE void softmax(const T *const (&rows)[4], int64_t count, T *const (&weights)[4]) {
    constexpr int N = SOFTMAX_LANES<T>;
    if constexpr (N == 16 && LANES == 8)
        if (count <= 4) return softmax_of_fours<T>(rows, count, weights);
    if constexpr (N == 2 * LANES)
        if (count <= LANES) return softmax_of_halves<T>(rows, count, weights);
    if (count == N) return softmax_of_vectors<T, 1>(rows, count, weights);
    if (count == 2 * N) return softmax_of_vectors<T, 2>(rows, count, weights);
    softmax_of_any<T>(rows, count, weights);
}

// Computes the gradient of the logits: weights * (grad_weights - sum over the row of weights * grad_weights). Whole vectors of
// LANES are read and written. The gradients of the first `in_place` logits go to grad_logits; the gradients of the other logits
// overwrite grad_weights.
template <class T>
MXD_INLINE void softmax_gradient(const T *weights, int64_t count, T *grad_weights, int64_t in_place, T *grad_logits) {
    typedef Vec<T, LANES> Lanes;
    const int64_t last = count & -LANES;
    Lanes sums = {};
    for (int64_t i = 0; i < last; i += LANES) sums += raw_load<T, LANES>(grad_weights + i) * raw_load<T, LANES>(weights + i);
    if (last < count) {
        const auto mine = lanes_below<T, LANES>(count - last);
        const Lanes products = raw_load<T, LANES>(grad_weights + last) * raw_load<T, LANES>(weights + last);
        sums += mine ? products : Lanes{};
    }
    const Lanes total = broadcast<T, LANES>(sum<T, LANES>(sums));
    for (int64_t i = 0; i < count; i += LANES)
        store<T, LANES>((i < in_place ? grad_logits : grad_weights) + i,
                        raw_load<T, LANES>(weights + i) * (raw_load<T, LANES>(grad_weights + i) - total));
}

} // namespace
} // namespace mxd::MXD_ISA
