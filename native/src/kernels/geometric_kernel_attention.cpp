// geometric_kernel_attention on the CPU. Locations are pixels: truncated, clamped to the map, no interpolation.
#include "kernels/attention/attention.h"
#include "kernels/heads_together/forward.h"
#include "kernels/heads_together/gradients.h"

namespace mxd::MXD_ISA {
namespace {

template <class T, template <class> class From> struct Nearest {
    static constexpr int CORNERS = 1;
    typedef From<T> Reader;
    typedef typename Reader::Query Query;

    // The pixels of samples i..i+LANES-1. They are clamped as integers, because T does not hold every width.
    static MXD_INLINE void pixels(const Query &query, int64_t i, IntLanes<T> &x, IntLanes<T> &y) {
        const MapLanes<T> &maps = query.maps.at(i);
        query.whole_pixel(i, x, y);
        x = on_map<LANES>(x, raw_load<Int<T>, LANES>(maps.last_x));
        y = on_map<LANES>(y, raw_load<Int<T>, LANES>(maps.last_y));
    }

    static MXD_INLINE IntLanes<T> reach(const Query &query, int64_t i, const BandReach<T> &band) {
        IntLanes<T> x, y;
        pixels(query, i, x, y);
        return band.holds(convert<T, LANES>(y), i);
    }

    static MXD_INLINE SampledRows<T, 1> rows(const Query &query, int64_t i) {
        const MapLanes<T> &maps = query.maps.at(i);
        const IntLanes<T> width = raw_load<Int<T>, LANES>(maps.row);
        IntLanes<T> x, y;
        pixels(query, i, x, y);
        const IntLanes<T> sampled = width > 0; // padding has an empty map, and weights that are another head's
        return {{sampled},
                {raw_load<Int<T>, LANES>(maps.start) + y * width + x},
                width,
                {sampled ? query.weight(i) : RealLanes<T>{}}};
    }

    // The product with a sample's one row is its weight's gradient.
    static MXD_INLINE void gradients(const Query &, const T *dot, int64_t i, T *, T *grad_weight) {
        store<T, LANES>(grad_weight + i, get_entries<1>(dot, i, 0));
    }
};

} // namespace

bool geometric_kernel_attention(const Call &call, const Plan &plan) {
    if (plan.heads_together > 0) return all_heads_together(call, plan);
    return plan.source == Source::GIVEN ? attention<Nearest, Given>(call, plan) : attention<Nearest, FromWindow>(call, plan);
}
bool geometric_kernel_attention_backward(const Call &call, const Plan &plan) {
    if (plan.heads_together > 0) return gradients_of_heads_together(call, plan);
    return plan.source == Source::GIVEN ? attention_backward<Nearest, Given>(call, plan)
                                        : attention_backward<Nearest, FromWindow>(call, plan);
}

} // namespace mxd::MXD_ISA
