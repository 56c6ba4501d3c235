// The window of geometric_kernel_attention_with_logits: pixel = reference * (W, H) + window, rounded half to even.
#pragma once

#include "sizes.h"

namespace mxd {
namespace MXD_ISA {
namespace {

template <class T> class Window {
  public:
    static int64_t bytes(const Sizes &n) { return n.has_window ? 2 * Arena::bytes<T>(n.room()) : 0; }
    Window() {}
    Window(const Sizes &n, Arena &arena) : points(n.points) {
        if (!n.has_window) return;
        x_of = arena.take<T>(n.room());
        y_of = arena.take<T>(n.room());
        for (int64_t i = 0; i < n.room(); ++i) x_of[i] = y_of[i] = 0; // padding
    }
    bool exists() const { return x_of != nullptr; }

    // For samples in the order of Maps::set_levels.
    void set(const mxd_tensor &window, int64_t samples) {
        for (int64_t i = 0; i < samples; ++i) {
            T place[2];
            read_elements(at(window, i % points * window.strides[0]), window.dtype, window.strides[1], 2, place);
            x_of[i] = place[0];
            y_of[i] = place[1];
        }
    }

    // Of samples i..i+LANES-1, as whole numbers in T. What is not positive need not be rounded well: it is clamped to
    // 0.
    MXD_INLINE void pixel(const T *reference, const Maps<T> &maps, int64_t i, RealLanes<T> &x, RealLanes<T> &y) const {
        x = nearest_whole(reference[0], maps.width + i, x_of + i);
        y = nearest_whole(reference[1], maps.height + i, y_of + i);
    }

  private:
    int64_t points = 0;
    T *x_of = nullptr, *y_of = nullptr; // of each sample

    // Each operation rounds by itself, as in torch, because another pixel is another row.
    static MXD_INLINE RealLanes<T> nearest_whole(T reference, const T *size, const T *place) {
        constexpr T WHOLE = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52); // numbers from here on are whole
        const RealLanes<T> centre = rounded(RealLanes<T>(reference * raw_load<T, LANES>(size)));
        const RealLanes<T> x = centre + raw_load<T, LANES>(place);
        return x < WHOLE ? (x + WHOLE) - WHOLE : x;
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
