// Operations across the lanes of vectors: masks, shuffles, sums. Conversions to integers.
#pragma once

#include "kernels/shared/vectors.h"

namespace mxd::MXD_ISA {
namespace {

// Returns the lanes of `yes` where mask is all ones, and the lanes of `no` where mask is 0.
template <class Mask, class Address> MXD_INLINE Address choose(Mask mask, Address yes, Address no) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    if constexpr (same_type<Mask, Vec<int32_t, 8>>)
        return (Address)_mm512_mask_blend_epi64(_mm256_movepi32_mask((__m256i)mask), (__m512i)no, (__m512i)yes);
#elif defined(__AVX2__)
    if constexpr (same_type<Mask, Vec<int32_t, 4>>) // GCC 12 would compare the mask with 0 first
        return (Address)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)convert<int64_t, 4>(mask));
#endif
    return convert<int64_t, sizeof(Address) / sizeof(int64_t)>(mask) ? yes : no;
}

// Returns x where mask is all ones, and 0 where mask is 0. For `mask ? x : 0` GCC 12 emits two instructions.
template <class Mask, class V> MXD_INLINE V or_zero(Mask mask, V x) {
    static_assert(sizeof(Mask) == sizeof(V), "a mask for each lane");
    return bits_as<V>(Mask(bits_as<Mask>(x) & mask));
}

// Returns whether any lane of a mask is all ones. The other lanes must be 0.
template <class Mask> MXD_INLINE bool any(Mask mask) {
#if defined(__AVX512F__)
    if constexpr (same_type<Mask, Vec<int32_t, 8>>) return _mm256_movepi32_mask((__m256i)mask) != 0;
    if constexpr (same_type<Mask, Vec<int64_t, 8>>) return _mm512_movepi64_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
    if constexpr (sizeof(Mask) == 16) return _mm_movemask_epi8((__m128i)mask) != 0;
    if constexpr (sizeof(Mask) == 32) return _mm256_movemask_epi8((__m256i)mask) != 0;
#endif
    const auto words = bits_as<Vec<int64_t, sizeof(Mask) / sizeof(int64_t)>>(mask);
    int64_t all = 0;
    for (size_t i = 0; i < sizeof(Mask) / sizeof(int64_t); ++i) all |= words[i];
    return all != 0;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each of the 16 subsets of four lanes, a shuffle that moves the lanes of the subset to the front. `lanes` is for lanes of
// 32 bits. `halves` is for lanes of 64 bits: it numbers the 32-bit halves of lanes.
struct KeptLanes {
    int32_t lanes[16][4], halves[16][8];

    constexpr KeptLanes() : lanes(), halves() {
        for (int choice = 0; choice < 16; ++choice)
            for (int lane = 0, count = 0; lane < 4; ++lane)
                if (choice >> lane & 1) {
                    lanes[choice][count] = lane;
                    halves[choice][2 * count] = 2 * lane;
                    halves[choice][2 * count++ + 1] = 2 * lane + 1;
                }
    }
};
constexpr KeptLanes KEPT;
#endif

// Stores the lanes of `address` and `coefficient` that the mask keeps, without gaps. Returns the number of these lanes. Always
// writes four elements to each array.
template <class T, class Mask>
MXD_INLINE int64_t put_kept(Mask mask, Vec<int64_t, 4> address, Vec<T, 4> coefficient, int64_t *addresses, T *coefficients) {
#if defined(__AVX512F__)
    __mmask8 kept;
    if constexpr (same_type<T, float>) {
        kept = _mm_movepi32_mask((__m128i)mask);
        _mm_storeu_ps(coefficients, _mm_maskz_compress_ps(kept, (__m128)coefficient));
    } else {
        kept = _mm256_movepi64_mask((__m256i)mask);
        _mm256_storeu_pd(coefficients, _mm256_maskz_compress_pd(kept, (__m256d)coefficient));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(addresses), _mm256_maskz_compress_epi64(kept, (__m256i)address));
    return __builtin_popcount(kept);
#elif defined(__AVX2__)
    int kept;
    if constexpr (same_type<T, float>)
        kept = _mm_movemask_ps((__m128)mask);
    else
        kept = _mm256_movemask_pd((__m256d)mask);
    const auto halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(KEPT.halves[kept]));
    const __m256i first = _mm256_permutevar8x32_epi32((__m256i)address, halves);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(addresses), first);
    if constexpr (same_type<T, float>) {
        const __m128i lanes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(KEPT.lanes[kept]));
        _mm_storeu_ps(coefficients, _mm_permutevar_ps((__m128)coefficient, lanes));
    } else {
        _mm256_storeu_pd(coefficients, (__m256d)_mm256_permutevar8x32_epi32((__m256i)coefficient, halves));
    }
    return __builtin_popcount(unsigned(kept));
#else
    int64_t count = 0;
    MXD_UNROLL
    for (int lane = 0; lane < 4; ++lane) {
        addresses[count] = address[lane];
        coefficients[count] = coefficient[lane];
        count -= mask[lane];
    }
    return count;
#endif
}

// four_of returns four lanes of a vector of four or eight; eight_of joins two vectors of four. Both avoid memory, because a
// load of a vector that was stored as two halves is slow.
template <int FIRST, class V> MXD_INLINE auto four_of(V v) {
    typedef __typeof__(v[0] + v[0]) E;
    if constexpr (sizeof(V) == 4 * sizeof(E))
        return v;
    else
#if defined(__clang__) || __GNUC__ >= 12
        return __builtin_shufflevector(v, v, FIRST, FIRST + 1, FIRST + 2, FIRST + 3);
#else
        return Vec<E, 4>{v[FIRST], v[FIRST + 1], v[FIRST + 2], v[FIRST + 3]};
#endif
}
template <class T> MXD_INLINE Vec<T, 8> eight_of(Vec<T, 4> a, Vec<T, 4> b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return Vec<T, 8>{a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]};
#endif
}

// Returns a vector with the lanes of a, then the lanes of b.
template <class T, int N> MXD_INLINE Vec<T, 2 * N> joined(Vec<T, N> a, Vec<T, N> b) {
    if constexpr (N == 4)
        return eight_of<T>(a, b);
    else
        return bits_as<Vec<T, 2 * N>>(eight_of<int64_t>(bits_as<Vec<int64_t, 4>>(a), bits_as<Vec<int64_t, 4>>(b)));
}

// Interleaves lanes: low and high together are a0 b0 a1 b1 ...
template <class T, int N> MXD_INLINE void interleave(Vec<T, N> a, Vec<T, N> b, Vec<T, N> &low, Vec<T, N> &high) {
    typedef Vec<Int<T>, N> I;
    if constexpr (N == 16) {
        low = MXD_SHUFFLE(a, b, I, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        high = MXD_SHUFFLE(a, b, I, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    } else if constexpr (N == 8) {
        low = MXD_SHUFFLE(a, b, I, 0, 8, 1, 9, 2, 10, 3, 11);
        high = MXD_SHUFFLE(a, b, I, 4, 12, 5, 13, 6, 14, 7, 15);
    } else {
        static_assert(N == 4, "4, 8 or 16 lanes");
        low = MXD_SHUFFLE(a, b, I, 0, 4, 1, 5);
        high = MXD_SHUFFLE(a, b, I, 2, 6, 3, 7);
    }
}

// The reverse of interleave: returns the even and the odd lanes of a followed by b.
template <class T, int N> MXD_INLINE void separate(Vec<T, N> a, Vec<T, N> b, Vec<T, N> &even, Vec<T, N> &odd) {
    typedef Vec<Int<T>, N> I;
    if constexpr (N == 16) {
        even = MXD_SHUFFLE(a, b, I, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        odd = MXD_SHUFFLE(a, b, I, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    } else if constexpr (N == 8) {
        even = MXD_SHUFFLE(a, b, I, 0, 2, 4, 6, 8, 10, 12, 14);
        odd = MXD_SHUFFLE(a, b, I, 1, 3, 5, 7, 9, 11, 13, 15);
    } else {
        static_assert(N == 4, "4, 8 or 16 lanes");
        even = MXD_SHUFFLE(a, b, I, 0, 2, 4, 6);
        odd = MXD_SHUFFLE(a, b, I, 1, 3, 5, 7);
    }
}

// Transposes N rows of N lanes. Each step interleaves the first half of the rows with the second half.
template <class T, int N> MXD_INLINE void transpose(Vec<T, N> (&rows)[N]) {
    MXD_UNROLL
    for (int step = 1; step < N; step *= 2) {
        Vec<T, N> next[N];
        MXD_UNROLL
        for (int i = 0; i < N / 2; ++i) interleave<T, N>(rows[i], rows[i + N / 2], next[2 * i], next[2 * i + 1]);
        MXD_UNROLL
        for (int i = 0; i < N; ++i) rows[i] = next[i];
    }
}

// Folds all lanes into one number, or into TO numbers. Each step folds the lower half with the upper half, lane by lane.
template <class T, int N, int TO = 1, class Fold> MXD_INLINE Vec<T, TO> folded_lanes(Vec<T, N> x, Fold &&fold) {
    if constexpr (N == TO) {
        return x;
    } else {
        struct Halves {
            Vec<T, N / 2> low, high;
        };
        const Halves halves = bits_as<Halves>(x);
        return folded_lanes<T, N / 2, TO>(fold(halves.low, halves.high), fold);
    }
}

struct Total {
    template <class V> MXD_INLINE V operator()(V a, V b) const { return a + b; }
};
struct Larger { // returns b if a or b is NaN
    template <class V> MXD_INLINE V operator()(V a, V b) const { return a > b ? a : b; }
};

template <class T, int N> MXD_INLINE T sum(Vec<T, N> x) { return folded_lanes<T, N>(x, Total()); }

// Converts integers to int32. Clamps an integer that does not fit to the nearest int32.
template <int N> MXD_INLINE Vec<int32_t, N> saturated(Vec<int64_t, N> x) {
#if defined(__AVX512F__)
    if constexpr (N == 8) return (Vec<int32_t, 8>)_mm512_maskz_cvtsepi64_epi32(0xff, (__m512i)x);
#endif
    const Vec<int64_t, N> most = Vec<int64_t, N>{} + INT32_MAX, least = Vec<int64_t, N>{} + INT32_MIN;
    x = x < most ? x : most;
    return convert<int32_t, N>(Vec<int64_t, N>(x > least ? x : least));
}

// Returns a * b if b fits in 32 bits; otherwise the result is undefined. A full 64-bit product takes eight instructions on
// AVX2, and one slow instruction on some processors with AVX-512.
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

// Returns floor(x), and stores it as an integer in `whole`. `whole` is undefined where the integer type is too small.
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

// Converts x to integers. Rounds toward zero, or with ROUND to nearest, half to even. A number that is too large becomes the
// largest integer. Numbers that are not positive, and NaN, become 0 or a negative integer.
template <bool ROUND, int N, class Real> MXD_INLINE auto whole_or_largest(Real x) {
    typedef __typeof__(x[0] + x[0]) T;
    typedef Vec<Int<T>, N> Ints;
    constexpr T TOO_LARGE = sizeof(T) == 4 ? T(0x1p31) : T(0x1p63); // the smallest number that no Int can hold
#if defined(__AVX2__)
    // The instruction returns the least integer for a number that does not fit. If the number is too large, the xor turns the
    // least integer into the largest.
    if constexpr (same_type<Real, Vec<float, 4>>)
        return Ints(ROUND ? _mm_cvtps_epi32((__m128)x) : _mm_cvttps_epi32((__m128)x)) ^ (x >= TOO_LARGE);
    if constexpr (same_type<Real, Vec<float, 8>>)
        return Ints(ROUND ? _mm256_cvtps_epi32((__m256)x) : _mm256_cvttps_epi32((__m256)x)) ^ (x >= TOO_LARGE);
#elif defined(__aarch64__)
    if constexpr (same_type<Real, Vec<float, 4>>)
        return (Ints)(ROUND ? vcvtnq_s32_f32((float32x4_t)x) : vcvtq_s32_f32((float32x4_t)x));
#endif
    constexpr T WHOLE = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52); // numbers from here on have no fraction
    if constexpr (ROUND) x = x < WHOLE ? (x + WHOLE) - WHOLE : x;
    x = x > 0 ? x : Real{};
    return x < TOO_LARGE ? convert<Int<T>, N>(x) : broadcast<Int<T>, N>(sizeof(T) == 4 ? INT32_MAX : Int<T>(INT64_MAX));
}

// Reads N pairs (x, y) of int64. With a 32-bit Int, a number that does not fit becomes the nearest integer that fits.
template <class Int, int N> MXD_INLINE void whole_pairs(const int64_t *from, Vec<Int, N> &x, Vec<Int, N> &y) {
    const auto a = raw_load<int64_t, N>(from), b = raw_load<int64_t, N>(from + N);
#if defined(__AVX2__)
    // `low` and `high` have the low and the high 32 bits of x and y, pair by pair, in the order of pairs 0, 2, 1, 3. So one
    // comparison tests the range of all numbers.
    if constexpr (same_type<Int, int32_t> && N == 4) {
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
