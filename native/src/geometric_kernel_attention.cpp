// geometric_kernel_attention on the CPU. Locations are pixels: truncated, clamped to the map, no interpolation.
#include "attention.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// Clamped before it becomes an integer; a NaN goes to 0 because it is not greater than 0.
template <class T> inline IntLanes<T> nearest(RealLanes<T> x, RealLanes<T> last) {
    x = x > 0 ? x : RealLanes<T>{};
    return convert<Int<T>, LANES>(RealLanes<T>(x < last ? x : last));
}

template <class T> MXD_INLINE IntLanes<T> nearest(AddressLanes at, IntLanes<T> last) {
    IntLanes<T> x;
    if constexpr (same_type<T, float>)
        x = saturated<LANES>(at);
    else
        x = at;
    x = x > 0 ? x : IntLanes<T>{};
    return x < last ? x : last;
}

template <class T> struct Nearest {
    static constexpr int CORNERS = 1;

    // Column and row of samples i..i+LANES-1.
    static MXD_INLINE void pixels(const Query<T> &query, int64_t i, IntLanes<T> &column, IntLanes<T> &row) {
        const Maps<T> &maps = query.maps();
        if (query.in_whole_numbers()) {
            AddressLanes x, y;
            query.whole_location(i, x, y);
            column = nearest<T>(x, raw_load<Int<T>, LANES>(maps.columns + i) - 1);
            row = nearest<T>(y, raw_load<Int<T>, LANES>(maps.rows + i) - 1);
        } else {
            RealLanes<T> x, y;
            query.location(i, x, y);
            column = nearest<T>(x, raw_load<T, LANES>(maps.width + i) - 1);
            row = nearest<T>(y, raw_load<T, LANES>(maps.height + i) - 1);
        }
    }

    static MXD_INLINE IntLanes<T> reach(const Query<T> &query, int64_t i, const BandRows<T> &band) {
        IntLanes<T> column, row;
        pixels(query, i, column, row);
        return band.holds(convert<T, LANES>(row), i);
    }

    static MXD_INLINE SampledRows<T, 1> rows(const Query<T> &query, int64_t i) {
        const Maps<T> &maps = query.maps();
        const IntLanes<T> columns = raw_load<Int<T>, LANES>(maps.columns + i);
        IntLanes<T> column, row;
        pixels(query, i, column, row);
        const IntLanes<T> sampled = columns > 0; // not padding, whose weights are another head's
        return {{sampled},
                {raw_load<Int<T>, LANES>(maps.start + i) + row * columns + column},
                {sampled ? query.weight(i) : RealLanes<T>{}}};
    }

    // One product a sample.
    static MXD_INLINE void gradients(const Query<T> &, const T *dot, int64_t i, T *, T *grad_weight) {
        store<T, LANES>(grad_weight + i, get_entries<1>(dot, i, 0));
    }
};

} // namespace

bool geometric_kernel_attention(const Call &call) { return attention<Nearest>(call); }
bool geometric_kernel_attention_backward(const Call &call) { return attention_backward<Nearest>(call); }

} // namespace MXD_ISA
} // namespace mxd
