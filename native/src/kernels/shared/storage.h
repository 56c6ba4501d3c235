// The four storage types, and their conversions to and from vectors of float and double.
#pragma once

#include "kernels/shared/vectors.h"
#include "mx_driving.h"

namespace mxd::MXD_ISA {
namespace {

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

// Calls fn with the address as a pointer to elements of a floating dtype.
template <class Fn> MXD_INLINE auto with_elements(char *at, int64_t dtype, Fn &&fn) {
    switch (dtype) {
    case MXD_FLOAT64: return fn(reinterpret_cast<double *>(at));
    case MXD_FLOAT16: return fn(reinterpret_cast<Half *>(at));
    case MXD_BFLOAT16: return fn(reinterpret_cast<BFloat16 *>(at));
    default: return fn(reinterpret_cast<float *>(at));
    }
}

// Converts halves to floats with operations that every machine has. The multiplication rescales the exponent.
template <int N> MXD_INLINE Vec<float, N> half_to_float(Vec<uint16_t, N> half) {
    typedef Vec<uint32_t, N> U;
    const U bits = convert<uint32_t, N>(half), magnitude = bits & 0x7fff;
    const Vec<float, N> scaled = bits_as<Vec<float, N>>(U(magnitude << 13)) * 0x1p112f;
    const U special = magnitude >= 0x7c00 ? U(bits | 0x7f800000u) & 0x7f800000u : U(bits & 0);
    return bits_as<Vec<float, N>>(U(bits_as<U>(scaled) | special | (bits & 0x8000) << 16));
}

inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00); // x rounds to 65536 or more, which is infinity
    if (magnitude < 0x38800000)                                  // a subnormal half: adding 0.5 rounds it
        return uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u));
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13));
#endif
}

// Rounds to bfloat16. The result is the upper half of each lane; the lower half is undefined.
template <int N> MXD_INLINE Vec<uint32_t, N> rounded_to_bfloat16(Vec<float, N> x) {
    typedef Vec<uint32_t, N> U;
    const U bits = bits_as<U>(x), rounded = bits + 0x7fff + (bits >> 16 & 1), nan = bits | 0x400000;
    return x == x ? rounded : nan;
}

// Loads N elements of storage type V and converts them to T.
template <class T, int N, class V> MXD_INLINE Vec<T, N> load(const V *from) { return convert<T, N>(raw_load<V, N>(from)); }
template <class T, int N> MXD_INLINE Vec<T, N> load(const BFloat16 *from) {
    typedef Vec<uint32_t, N> U;
    const U bits = convert<uint32_t, N>(raw_load<uint16_t, N>(from)) << 16;
    return convert<T, N>(bits_as<Vec<float, N>>(bits));
}
template <class T, int N> MXD_INLINE Vec<T, N> load(const Half *from) {
#if defined(__AVX512F__)
    if constexpr (N == 16)
        return convert<T, N>(
            (Vec<float, 16>)(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)))));
#endif
#if defined(__F16C__)
    if constexpr (N == 8)
        return convert<T, N>((Vec<float, 8>)(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)))));
    if constexpr (N == 1) return T(_cvtsh_ss(from->bits));
#endif
    return convert<T, N>(half_to_float<N>(raw_load<uint16_t, N>(from)));
}

template <int N> MXD_INLINE void store_as_half(Half *to, Vec<float, N> x) {
#if defined(__AVX512F__)
    if constexpr (N == 16) {
        const __m256i half = _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
        memcpy(to, &half, sizeof half);
        return;
    }
#endif
#if defined(__F16C__)
    if constexpr (N == 8) {
        const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
        memcpy(to, &half, sizeof half);
        return;
    }
#endif
    float lanes[N];
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < N; ++i) to[i].bits = float_to_half(lanes[i]);
}
template <class T, int N, class V> MXD_INLINE void store(V *to, Vec<T, N> x) {
    if constexpr (same_type<V, Half>) {
        store_as_half<N>(to, convert<float, N>(x));
    } else if constexpr (same_type<V, BFloat16>) {
        const Vec<uint16_t, N> y = convert<uint16_t, N>(rounded_to_bfloat16<N>(convert<float, N>(x)) >> 16);
        memcpy(to, &y, sizeof y);
    } else {
        const Vec<V, N> y = convert<V, N>(x);
        memcpy(to, &y, sizeof y);
    }
}

} // namespace
} // namespace mxd::MXD_ISA
