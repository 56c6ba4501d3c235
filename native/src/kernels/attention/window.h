// A window around a reference point: pixel = reference * (W, H) + window, rounded half to even.
#pragma once

#include "kernels/shared/sampling.h"

namespace mxd::MXD_ISA {
namespace {

// This must not become a fused multiply-add: each operation must round as in torch, because another rounding may select another
// pixel.
template <int N, class T> MXD_INLINE Vec<T, N> around_reference(T reference, const T *size, const T *xy) {
    return rounded(Vec<T, N>(reference * raw_load<T, N>(size))) + raw_load<T, N>(xy);
}

template <int N, class Ints> MXD_INLINE Ints on_map(Ints x, Ints last) {
    x = x > 0 ? x : Ints{};
    return x < last ? x : last;
}

template <class T> class Window {
  public:
    Window() {}
    Window(const Call &call, Arena &arena) : points(call.sizes.points) {
        if (!call.has_window) return;
        x_of = arena.zeros<T>(padded_samples(call.sizes)); // zeros, because padding samples are read and never set
        y_of = arena.zeros<T>(padded_samples(call.sizes));
    }
    bool exists() const { return x_of != nullptr; }

    void set(const Tensor &window, int64_t samples) {
        for (int64_t i = 0; i < samples; ++i) {
            T xy[2] = {0, 0};
            read_elements(at(window, i % points * window.strides[PLACE]), window.dtype, window.strides[PLACE_XY], 2, xy);
            x_of[i] = xy[0];
            y_of[i] = xy[1];
        }
    }

    // Computes the pixels of samples i..i+LANES-1, before rounding.
    MXD_INLINE void pixel(const T *reference, const MapLanes<T> &maps, int64_t i, RealLanes<T> &x, RealLanes<T> &y) const {
        x = around_reference<LANES>(reference[0], maps.width, x_of + i);
        y = around_reference<LANES>(reference[1], maps.height, y_of + i);
    }

  private:
    int64_t points = 0;
    T *x_of = nullptr, *y_of = nullptr; // the window's offset of each sample, in pixels
};

} // namespace
} // namespace mxd::MXD_ISA
