// Sixteen bilinear samples at once, for vectors of sixteen float32. This takes half the instructions of twice eight samples.
// Rows and coefficients have the same bits as from corners_at().
#pragma once

#include "kernels/attention/queries.h"

namespace mxd::MXD_ISA {
namespace {

#if defined(__AVX512F__)
template <class T> constexpr bool SIXTEEN_AT_ONCE = sizeof(T) == 4;

// The corners of sixteen samples. `inside` has masks of the corners on the map. `pixel` is the pixel of corner 0.
struct SixteenCorners {
    __mmask16 inside[4];
    __m512i pixel;
    Vec<float, 16> right, below;

    MXD_INLINE SixteenCorners(Vec<float, 16> x, Vec<float, 16> y, const MapLanes<float, 16> &maps) {
        constexpr int DOWN = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        const __m512i left = _mm512_maskz_cvt_roundps_epi32(0xffff, (__m512)x, DOWN);
        const __m512i top = _mm512_maskz_cvt_roundps_epi32(0xffff, (__m512)y, DOWN);
        right = x - (Vec<float, 16>)_mm512_maskz_cvtepi32_ps(0xffff, left);
        below = y - (Vec<float, 16>)_mm512_maskz_cvtepi32_ps(0xffff, top);
        __mmask16 left_in, right_in, top_in, bottom_in;
        on_axis(x, left, maps.width, maps.last_x, left_in, right_in);
        on_axis(y, top, maps.height, maps.last_y, top_in, bottom_in);
        inside[0] = _mm512_kand(top_in, left_in);
        inside[1] = _mm512_kand(top_in, right_in);
        inside[2] = _mm512_kand(bottom_in, left_in);
        inside[3] = _mm512_kand(bottom_in, right_in);
        pixel = _mm512_add_epi32(_mm512_add_epi32(_mm512_mullo_epi32(top, _mm512_loadu_si512(maps.row)), left),
                                 _mm512_loadu_si512(maps.start));
    }

  private:
    // On one axis, finds the samples whose pixel `whole` is on the map (first_in), and those whose pixel `whole` + 1 is on the
    // map (next_in). `whole` is x rounded down, or the least integer if x is NaN or does not fit in 32 bits. A sample is valid
    // if -1 < x < size.
    static MXD_INLINE void on_axis(Vec<float, 16> x, __m512i whole, const float *size, const int32_t *last, __mmask16 &first_in,
                                   __mmask16 &next_in) {
        const __mmask16 below_size = _mm512_cmp_ps_mask((__m512)x, _mm512_loadu_ps(size), _CMP_LT_OQ);
        const __mmask16 valid = _mm512_mask_cmp_ps_mask(below_size, (__m512)x, _mm512_set1_ps(-1), _CMP_GT_OQ);
        first_in = _mm512_mask_cmp_ps_mask(below_size, (__m512)x, _mm512_setzero_ps(), _CMP_GE_OQ);
        next_in = _mm512_mask_cmplt_epi32_mask(valid, whole, _mm512_loadu_si512(last));
    }
};

template <int HALF> MXD_INLINE __m256i half_of(__m512i v) { return _mm512_maskz_extracti64x4_epi64(0xff, v, HALF); }
template <int QUARTER> MXD_INLINE __m128 quarter_of(__m512 v) { return _mm512_maskz_extractf32x4_ps(0xf, v, QUARTER); }

// Writes the entries of one corner of eight samples in the order of entry_of(): two groups of four.
MXD_INLINE void put_addresses(int64_t *to, __m512i eight) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), half_of<0>(eight));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 4 * ROWS), half_of<1>(eight));
}

template <bool COEFFICIENTS>
MXD_INLINE void put_sixteen(const Query<float> &query, int64_t i, const RowAddresses &rows, int64_t *address,
                            float *coefficient) {
    const MapLanes<float, 16> &maps = query.maps().sixteen_at(i);
    Vec<float, 16> x, y;
    query.sixteen_locations(i, x, y);
    const SixteenCorners c(pixel_of<float>(x, raw_load<float, 16>(maps.width)),
                           pixel_of<float>(y, raw_load<float, 16>(maps.height)), maps);
    const __m512i off_map = _mm512_set1_epi64(rows.zero_row);
    MXD_UNROLL
    for (int half = 0; half < 2; ++half) {
        const int64_t first = i + 8 * half;
        const __m256i pixel = half ? half_of<1>(c.pixel) : half_of<0>(c.pixel);
        const __m512i step = _mm512_loadu_si512(rows.stride + first);
        const __m512i upper = _mm512_add_epi64(_mm512_loadu_si512(rows.base + first),
                                               _mm512_maskz_mul_epi32(0xff, _mm512_maskz_cvtepi32_epi64(0xff, pixel), step));
        const __m512i lower = _mm512_add_epi64(upper, _mm512_loadu_si512(rows.row_bytes + first));
        const auto inside = [&](int k) { return __mmask8(c.inside[k] >> 8 * half); };
        int64_t *to = address + first_entry_of<4>(first, 0);
        put_addresses(to, _mm512_mask_mov_epi64(off_map, inside(0), upper));
        put_addresses(to + ROWS, _mm512_mask_add_epi64(off_map, inside(1), upper, step));
        put_addresses(to + 2 * ROWS, _mm512_mask_mov_epi64(off_map, inside(2), lower));
        put_addresses(to + 3 * ROWS, _mm512_mask_add_epi64(off_map, inside(3), lower, step));
    }
    if (!COEFFICIENTS) return;
    const Vec<float, 16> weight = query.sixteen_weights(i);
    MXD_UNROLL
    for (int k = 0; k < 4; ++k) {
        const __m512 product =
            _mm512_maskz_mul_ps(c.inside[k], (__m512)weight, (__m512)corner_coefficient(k, c.right, c.below));
        float *to = coefficient + first_entry_of<4>(i, k);
        _mm_storeu_ps(to, quarter_of<0>(product));
        _mm_storeu_ps(to + 4 * ROWS, quarter_of<1>(product));
        _mm_storeu_ps(to + 8 * ROWS, quarter_of<2>(product));
        _mm_storeu_ps(to + 12 * ROWS, quarter_of<3>(product));
    }
}
#else
template <class T> constexpr bool SIXTEEN_AT_ONCE = false;
template <bool> void put_sixteen(...);
#endif

} // namespace
} // namespace mxd::MXD_ISA
