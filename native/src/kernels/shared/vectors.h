// The vector types of GCC and Clang: their width, loads, conversions and shuffles.
//
// Code under kernels/ is compiled once per instruction set, in namespace MXD_ISA. Without the namespace the linker would merge
// an inline function of several object files into one, whose instructions this machine may not have. For the same reason code
// here uses no function of the standard library.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// Functions with vector arguments must be inlined, because a call would pass the vectors through memory.
#define MXD_INLINE __attribute__((always_inline)) inline
#define MXD_UNROLL _Pragma("GCC unroll 16")

// Selects lanes of a and b by number. The lanes of b are numbered after those of a. Index: an integer vector type.
#if defined(__clang__)
#define MXD_SHUFFLE(a, b, Index, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MXD_SHUFFLE(a, b, Index, ...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif

namespace mxd::MXD_ISA {
namespace {

template <class A, class B> constexpr bool same_type = false;
template <class A> constexpr bool same_type<A, A> = true;

template <int BYTES> struct IntOfSize {
    typedef int32_t type;
};
template <> struct IntOfSize<8> {
    typedef int64_t type;
};
template <class T> using Int = typename IntOfSize<sizeof(T)>::type;

template <class T, int N> struct VecOf {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T> struct VecOf<T, 1> {
    typedef T type;
};
template <class T, int N> using Vec = typename VecOf<T, N>::type;

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
template <class T> constexpr int WIDTH = VECTOR_BYTES / int(sizeof(T));

// The number of samples that are prepared at once: as many as a vector has 64-bit addresses, but at least four.
constexpr int LANES = VECTOR_BYTES == 64 ? 8 : 4;

template <class To, class From> MXD_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

template <class To, int N, class From> MXD_INLINE Vec<To, N> convert(From from) {
    // GCC 12 widens the two halves separately, so we use intrinsics: those with maskz, because GCC 12 warns of others.
#if defined(__AVX512F__)
    if constexpr (same_type<To, int64_t> && same_type<From, Vec<int32_t, 8>>)
        return (Vec<int64_t, 8>)_mm512_maskz_cvtepi32_epi64(0xff, (__m256i)from);
    if constexpr (same_type<To, uint32_t> && same_type<From, Vec<uint16_t, 16>>)
        return (Vec<uint32_t, 16>)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)from);
#endif
#if defined(__AVX2__)
    if constexpr (same_type<To, uint32_t> && same_type<From, Vec<uint16_t, 8>>)
        return (Vec<uint32_t, 8>)_mm256_cvtepu16_epi32((__m128i)from);
    if constexpr (same_type<To, uint32_t> && same_type<From, Vec<uint16_t, 4>>)
        return (Vec<uint32_t, 4>)_mm_cvtepu16_epi32(_mm_cvtsi64_si128(bits_as<long long>(from)));
    if constexpr (same_type<To, int64_t> && same_type<From, Vec<int32_t, 4>>)
        return (Vec<int64_t, 4>)_mm256_cvtepi32_epi64((__m128i)from);
#endif
    if constexpr (N == 1)
        return To(from);
    else
        return __builtin_convertvector(from, Vec<To, N>);
}

template <class T, int N> MXD_INLINE Vec<T, N> broadcast(T x) {
    if constexpr (N == 1)
        return x;
    else
        return x - Vec<T, N>{};
}

template <class T, int N> MXD_INLINE Vec<T, N> raw_load(const void *from) {
    Vec<T, N> v;
    memcpy(&v, from, sizeof v);
    return v;
}

// Hides x from the optimiser, which then cannot fuse the operations before and after into a multiply-add.
template <class V> MXD_INLINE V rounded(V x) {
#if defined(__AVX2__)
    if constexpr (sizeof(V) <= VECTOR_BYTES) {
        __asm__("" : "+v"(x));
        return x;
    }
#endif
    __asm__("" : "+m"(x));
    return x;
}

// Forces x to be computed here. On ARM, Clang otherwise delays sums until their terms no longer fit into the registers.
template <class V> MXD_INLINE void finish(V &x) {
#if defined(__aarch64__)
    __asm__ volatile("" : "+w"(x) : : "memory");
#else
    (void)x;
#endif
}

} // namespace
} // namespace mxd::MXD_ISA
