// geometric_kernel_attention on the CPU. Locations are pixels: truncated, clamped to the map, no interpolation.
#include "attention.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// The largest Int<T> that T holds a bound of: 2^31 for float, 2^63 for double. What is not below it is no Int<T>.
template <class T> constexpr T TOO_LARGE = sizeof(T) == 4 ? T(0x1p31) : T(0x1p63);
template <class T> constexpr Int<T> LARGEST = sizeof(T) == 4 ? Int<T>(INT32_MAX) : Int<T>(INT64_MAX);

template <class T> MXD_INLINE IntLanes<T> clamped(IntLanes<T> x, IntLanes<T> last) {
    x = x > 0 ? x : IntLanes<T>{};
    return x < last ? x : last;
}

// Truncated first and clamped as whole numbers: T does not hold every width. A NaN goes to 0: it is not greater than 0.
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

    // Column and row of samples i..i+LANES-1.
    static MXD_INLINE void pixels(const Query<T> &query, int64_t i, IntLanes<T> &column, IntLanes<T> &row) {
        const Maps<T> &maps = query.maps();
        const IntLanes<T> last_column = raw_load<Int<T>, LANES>(maps.columns + i) - 1;
        const IntLanes<T> last_row = raw_load<Int<T>, LANES>(maps.rows + i) - 1;
        if (query.in_whole_numbers()) {
            AddressLanes x, y;
            query.whole_location(i, x, y);
            column = nearest<T>(x, last_column);
            row = nearest<T>(y, last_row);
        } else {
            RealLanes<T> x, y;
            query.location(i, x, y);
            column = nearest<T>(x, last_column);
            row = nearest<T>(y, last_row);
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
