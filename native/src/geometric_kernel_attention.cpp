// geometric_kernel_attention on the CPU. Locations are pixels: truncated, clamped to the map, no interpolation.
#include "attention.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// 2^31 for float, 2^63 for double: a number that is not below it is no Int<T>.
template <class T> constexpr T TOO_LARGE = sizeof(T) == 4 ? T(0x1p31) : T(0x1p63);
template <class T> constexpr Int<T> LARGEST = sizeof(T) == 4 ? Int<T>(INT32_MAX) : Int<T>(INT64_MAX);

template <class T> MXD_INLINE IntLanes<T> clamped(IntLanes<T> x, IntLanes<T> last) {
    x = x > 0 ? x : IntLanes<T>{};
    return x < last ? x : last;
}

// Truncated first, then clamped as an integer, because T does not hold every width. A NaN goes to 0: it is not greater
// than 0.
template <class T> MXD_INLINE IntLanes<T> nearest(RealLanes<T> x, IntLanes<T> last) {
    x = x > 0 ? x : RealLanes<T>{};
    const IntLanes<T> whole = x < TOO_LARGE<T> ? convert<Int<T>, LANES>(x) : IntLanes<T>{} + LARGEST<T>;
    return whole < last ? whole : last;
}

template <class T> MXD_INLINE IntLanes<T> nearest(AddressLanes x, IntLanes<T> last) {
    if constexpr (same_type<T, float>)
        return clamped<T>(saturated<LANES>(x), last);
    else
        return clamped<T>(x, last);
}

template <class T> struct Nearest {
    static constexpr int CORNERS = 1;

    // The pixels of samples i..i+LANES-1.
    static MXD_INLINE void pixels(const Query<T> &query, int64_t i, IntLanes<T> &x, IntLanes<T> &y) {
        const Maps<T> &maps = query.maps();
        const IntLanes<T> last_x = raw_load<Int<T>, LANES>(maps.int_width + i) - 1;
        const IntLanes<T> last_y = raw_load<Int<T>, LANES>(maps.int_height + i) - 1;
        if (query.in_whole_numbers()) {
            AddressLanes location_x, location_y;
            query.whole_location(i, location_x, location_y);
            x = nearest<T>(location_x, last_x);
            y = nearest<T>(location_y, last_y);
        } else {
            RealLanes<T> location_x, location_y;
            if (query.has_window())
                query.window_pixel(i, location_x, location_y);
            else
                query.location(i, location_x, location_y);
            x = nearest<T>(location_x, last_x);
            y = nearest<T>(location_y, last_y);
        }
    }

    static MXD_INLINE IntLanes<T> reach(const Query<T> &query, int64_t i, const BandReach<T> &band) {
        IntLanes<T> x, y;
        pixels(query, i, x, y);
        return band.holds(convert<T, LANES>(y), i);
    }

    static MXD_INLINE SampledRows<T, 1> rows(const Query<T> &query, int64_t i) {
        const Maps<T> &maps = query.maps();
        const IntLanes<T> width = raw_load<Int<T>, LANES>(maps.int_width + i);
        IntLanes<T> x, y;
        pixels(query, i, x, y);
        const IntLanes<T> sampled = width > 0; // padding has an empty map, and weights that are another head's
        return {{sampled},
                {raw_load<Int<T>, LANES>(maps.start + i) + y * width + x},
                {sampled ? query.weight(i) : RealLanes<T>{}}};
    }

    // The product with a sample's one row is its weight's gradient.
    static MXD_INLINE void gradients(const Query<T> &, const T *dot, int64_t i, T *, T *grad_weight) {
        store<T, LANES>(grad_weight + i, get_entries<1>(dot, i, 0));
    }
};

} // namespace

bool geometric_kernel_attention(const Call &call, const Plan &plan) { return attention<Nearest>(call, plan); }
bool geometric_kernel_attention_backward(const Call &call, const Plan &plan) {
    return attention_backward<Nearest>(call, plan);
}

} // namespace MXD_ISA
} // namespace mxd
