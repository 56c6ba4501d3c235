// multi_scale_deformable_attn on the CPU. Locations are normalised, samples are bilinear, and corners off the map are zero.
#include "kernels/attention/backward.h"
#include "kernels/attention/forward.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> struct Bilinear {
    static constexpr int CORNERS = 4;

    static MXD_INLINE void pixels(const Query<T> &query, int64_t i, RealLanes<T> &x, RealLanes<T> &y) {
        const MapLanes<T> &maps = query.maps().at(i);
        query.location(i, x, y);
        x = pixel_of<T>(x, raw_load<T, LANES>(maps.width));
        y = pixel_of<T>(y, raw_load<T, LANES>(maps.height));
    }

    static MXD_INLINE Corners<T> corners(const Query<T> &query, int64_t i) {
        RealLanes<T> x, y;
        pixels(query, i, x, y);
        return corners_at<T>(x, y, query.maps().at(i));
    }

    static MXD_INLINE IntLanes<T> reach(const Query<T> &query, int64_t i, const BandReach<T> &band) {
        RealLanes<T> x, y;
        pixels(query, i, x, y);
        return band.holds(y, i);
    }

    static MXD_INLINE SampledRows<T, 4> rows(const Query<T> &query, int64_t i) {
        const Corners<T> c = corners(query, i);
        const RealLanes<T> weight = query.weight(i);
        SampledRows<T, 4> rows;
        rows.row = c.row;
        for (int k = 0; k < 4; ++k) {
            rows.inside[k] = c.inside[k];
            rows.pixel[k] = c.pixel[k];
            rows.coefficient[k] = or_zero(c.inside[k], weight * c.coefficient(k));
        }
        return rows;
    }

    // Computes the gradients of weights and locations; with OF_OFFSETS, of weights and offsets in pixels.
    template <bool OF_OFFSETS = false>
    static MXD_INLINE void gradients(const Query<T> &query, const T *dot, int64_t i, T *grad_xy, T *grad_weight) {
        const Corners<T> c = corners(query, i);
        const auto slope = slopes_at<T>(c, dot, i);
        const RealLanes<T> weight = query.weight(i);
        const MapLanes<T> &maps = query.maps().at(i);
        const RealLanes<T> x = OF_OFFSETS ? weight : raw_load<T, LANES>(maps.width) * weight;
        const RealLanes<T> y = OF_OFFSETS ? weight : raw_load<T, LANES>(maps.height) * weight;
        store_pairs<T>(grad_xy + 2 * i, or_zero(c.valid, x * slope.dx), or_zero(c.valid, y * slope.dy));
        store<T, LANES>(grad_weight + i, or_zero(c.valid, slope.sample));
    }
};

} // namespace

bool multi_scale_deformable_attn(const Call &call, const Plan &plan) { return attention<Bilinear>(call, plan); }
bool multi_scale_deformable_attn_backward(const Call &call, const Plan &plan) {
    return attention_backward<Bilinear>(call, plan);
}

} // namespace mxd::MXD_ISA
