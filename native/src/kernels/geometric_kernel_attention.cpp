// geometric_kernel_attention on the CPU. Locations are pixels, which are truncated (with a window: rounded) and clamped to the
// map.
#include "kernels/attention/backward.h"
#include "kernels/attention/forward.h"
#include "kernels/attention/heads_together.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> struct Nearest {
    static constexpr int CORNERS = 1;

    // Finds the pixels of samples i..i+LANES-1. Pixels are clamped as integers, because T cannot represent every width.
    static MXD_INLINE void pixels(const Query<T> &query, int64_t i, IntLanes<T> &x, IntLanes<T> &y) {
        const MapLanes<T> &maps = query.maps().at(i);
        if (query.in_whole_numbers()) {
            query.whole_location(i, x, y);
        } else {
            RealLanes<T> location_x, location_y;
            if (query.has_window()) {
                query.window_pixel(i, location_x, location_y);
                x = whole_or_largest<true, LANES>(location_x);
                y = whole_or_largest<true, LANES>(location_y);
            } else {
                query.location(i, location_x, location_y);
                x = whole_or_largest<false, LANES>(location_x);
                y = whole_or_largest<false, LANES>(location_y);
            }
        }
        x = on_map<LANES>(x, raw_load<Int<T>, LANES>(maps.last_x));
        y = on_map<LANES>(y, raw_load<Int<T>, LANES>(maps.last_y));
    }

    static MXD_INLINE IntLanes<T> reach(const Query<T> &query, int64_t i, const BandReach<T> &band) {
        IntLanes<T> x, y;
        pixels(query, i, x, y);
        return band.holds(convert<T, LANES>(y), i);
    }

    static MXD_INLINE SampledRows<T, 1> rows(const Query<T> &query, int64_t i) {
        const MapLanes<T> &maps = query.maps().at(i);
        const IntLanes<T> width = raw_load<Int<T>, LANES>(maps.row);
        IntLanes<T> x, y;
        pixels(query, i, x, y);
        const IntLanes<T> sampled = width > 0; // false for padding samples: their weights may belong to another head
        return {{sampled},
                {raw_load<Int<T>, LANES>(maps.start) + y * width + x},
                width,
                {sampled ? query.weight(i) : RealLanes<T>{}}};
    }

    // The gradient of a weight is the dot product of the sample's row with grad_output.
    template <bool OF_OFFSETS = false>
    static MXD_INLINE void gradients(const Query<T> &, const T *dot, int64_t i, T *, T *grad_weight) {
        store<T, LANES>(grad_weight + i, get_entries<1>(dot, i, 0));
    }
};

} // namespace

bool geometric_kernel_attention(const Call &call, const Plan &plan) {
    return plan.heads_together > 0 ? all_heads_together(call, plan) : attention<Nearest>(call, plan);
}
bool geometric_kernel_attention_backward(const Call &call, const Plan &plan) {
    return plan.heads_together > 0 ? gradients_of_heads_together(call, plan) : attention_backward<Nearest>(call, plan);
}

} // namespace mxd::MXD_ISA
