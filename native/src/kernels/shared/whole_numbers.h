// Integers from real numbers, and integers of other sizes.
#pragma once

#include "kernels/shared/lanes.h"

namespace mxd::MXD_ISA {
namespace {

// Integers as int32. One that does not fit becomes the nearest that does.
template <int N> MXD_INLINE Vec<int32_t, N> saturated(Vec<int64_t, N> x) {
#if defined(__AVX512F__)
    if constexpr (N == 8) return (Vec<int32_t, 8>)_mm512_maskz_cvtsepi64_epi32(0xff, (__m512i)x);
#endif
    const Vec<int64_t, N> most = Vec<int64_t, N>{} + INT32_MAX, least = Vec<int64_t, N>{} + INT32_MIN;
    x = x < most ? x : most;
    return convert<int32_t, N>(Vec<int64_t, N>(x > least ? x : least));
}

// a * b, where b fits in 32 bits; else anything. A product of 64 bits is eight instructions on AVX2, and three on some
// processors with AVX-512.
template <int N, class Ints> MXD_INLINE Vec<int64_t, N> short_product(Ints a, Vec<int64_t, N> b) {
    const Vec<int64_t, N> wide = convert<int64_t, N>(a);
#if defined(__AVX512F__)
    if constexpr (N == 8) return (Vec<int64_t, 8>)_mm512_maskz_mul_epi32(0xff, (__m512i)wide, (__m512i)b);
#endif
#if defined(__AVX2__)
    if constexpr (N == 4) return (Vec<int64_t, 4>)_mm256_mul_epi32((__m256i)wide, (__m256i)b);
#endif
    return wide * b;
}

// The largest whole number that is not above x; the same as an integer goes to `whole`, or anything where it does not
// fit.
template <int N, class Real, class Ints> MXD_INLINE Real floor_of(Real x, Ints &whole) {
    typedef __typeof__(x[0] + x[0]) T;
    typedef __typeof__(whole[0] + whole[0]) Int;
#if defined(__AVX2__)
    if constexpr (same_type<T, float> && (N == 4 || N == 8)) {
        Real floor;
        if constexpr (N == 4)
            floor = (Real)_mm_floor_ps((__m128)x);
        else
            floor = (Real)_mm256_floor_ps((__m256)x);
        whole = convert<Int, N>(floor);
        return floor;
    }
#elif defined(__aarch64__)
    if constexpr (same_type<T, float> && N == 4) {
        whole = (Ints)vcvtmq_s32_f32((float32x4_t)x);
        return (Real)vrndmq_f32((float32x4_t)x);
    }
#endif
    whole = convert<Int, N>(x);
    whole += x < convert<T, N>(whole);
    return convert<T, N>(whole);
}

// x as an integer: towards zero or, ROUND, the nearest, halves to even. What is too large becomes the largest integer;
// what is not positive, and a NaN, becomes 0 or less.
template <bool ROUND, int N, class Real> MXD_INLINE auto whole_or_largest(Real x) {
    typedef __typeof__(x[0] + x[0]) T;
    typedef typename IntOfSize<sizeof(T)>::type Int;
    typedef Vec<Int, N> Ints;
    constexpr T TOO_LARGE = sizeof(T) == 4 ? T(0x1p31) : T(0x1p63); // no integer from here on
#if defined(__AVX2__)
    // What does not fit becomes the least integer, whose bits are the complement of the largest's.
    if constexpr (same_type<Real, Vec<float, 4>>)
        return Ints(ROUND ? _mm_cvtps_epi32((__m128)x) : _mm_cvttps_epi32((__m128)x)) ^ (x >= TOO_LARGE);
    if constexpr (same_type<Real, Vec<float, 8>>)
        return Ints(ROUND ? _mm256_cvtps_epi32((__m256)x) : _mm256_cvttps_epi32((__m256)x)) ^ (x >= TOO_LARGE);
#elif defined(__aarch64__)
    if constexpr (same_type<Real, Vec<float, 4>>)
        return (Ints)(ROUND ? vcvtnq_s32_f32((float32x4_t)x) : vcvtq_s32_f32((float32x4_t)x));
#endif
    constexpr T WHOLE = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52); // numbers from here on are whole
    if constexpr (ROUND) x = x < WHOLE ? (x + WHOLE) - WHOLE : x;
    x = x > 0 ? x : Real{};
    return x < TOO_LARGE ? convert<Int, N>(x) : broadcast<Int, N>(sizeof(T) == 4 ? INT32_MAX : Int(INT64_MAX));
}

// The x and the y of N pairs, each as the nearest integer that fits.
template <class Int, int N> MXD_INLINE void whole_pairs(const int64_t *from, Vec<Int, N> &x, Vec<Int, N> &y) {
    const auto a = raw_load<int64_t, N>(from), b = raw_load<int64_t, N>(from + N);
#if defined(__AVX2__)
    if constexpr (same_type<Int, int32_t> && N == 4) { // halves of pairs 0 2 1 3, and one answer for both x and y
        const __m256i low = (__m256i)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
        const __m256i high = (__m256i)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
        const __m256i fits = _mm256_cmpeq_epi32(high, _mm256_srai_epi32(low, 31));
        const __m256i most = _mm256_xor_si256(_mm256_srai_epi32(high, 31), _mm256_set1_epi32(INT32_MAX));
        const __m256i pairs = _mm256_blendv_epi8(most, low, fits);
        const auto all = (Vec<int32_t, 8>)_mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
        x = four_of<0>(all);
        y = four_of<4>(all);
        return;
    }
#endif
    Vec<int64_t, N> wide_x, wide_y;
    separate<int64_t, N>(a, b, wide_x, wide_y);
    if constexpr (same_type<Int, int32_t>) {
        x = saturated<N>(wide_x);
        y = saturated<N>(wide_y);
    } else {
        x = wide_x;
        y = wide_y;
    }
}

} // namespace
} // namespace mxd::MXD_ISA
