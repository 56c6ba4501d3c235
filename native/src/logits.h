// From offsets and logits of one query and head to locations and weights, and the gradients back:
//
//   location = reference + offset / (W, H)                      reference is a point
//   location = reference + offset * (w, h) / (2 * num_points)   reference is a box
//   weights  = softmax of the logits of all levels and points
//
// Nothing of this goes to memory but a query's scratch.
#pragma once

#include "sizes.h"
#include "softmax.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// Samples that are located together: two vectors of pairs (x, y) where vectors are narrow.
constexpr int LOCATED = 4;
template <class T> using Pairs = Vec<T, 2 * LOCATED>;

// The same pair (x, y) for all, or a pair for each.
template <class T> MXD_INLINE Pairs<T> repeated_pair(const T *xy) {
    if constexpr (sizeof(T) == 4) {
        const int64_t pair = raw_load<int64_t, 1>(xy);
        return bits_as<Pairs<T>>(Vec<int64_t, 4>{pair, pair, pair, pair});
    } else {
        const T x = xy[0], y = xy[1];
        return Pairs<T>{x, y, x, y, x, y, x, y};
    }
}
template <class T> MXD_INLINE Pairs<T> four_pairs(const T *from, const int64_t *place) {
    const T *a = from + place[0], *b = from + place[1], *c = from + place[2], *d = from + place[3];
    if constexpr (sizeof(T) == 4)
        return bits_as<Pairs<T>>(Vec<int64_t, 4>{raw_load<int64_t, 1>(a), raw_load<int64_t, 1>(b),
                                                 raw_load<int64_t, 1>(c), raw_load<int64_t, 1>(d)});
    else
        return Pairs<T>{a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
}

template <class T> class Logits {
  public:
    static int64_t bytes(const Sizes &n) {
        return n.with_logits
                   ? Arena::bytes<int64_t>(n.room()) + Arena::bytes<T>(2 * n.room()) + Arena::bytes<T>(4 * longest(n))
                   : 0;
    }
    // Scratch for the logits of a query, or their weights: whole vectors from any level on.
    static int64_t room(const Sizes &n) { return round_up(n.levels * n.points, SOFTMAX_LANES<T>) + LANES; }

    Logits(const Call &c, const Sizes &sizes, Arena &arena) : call(c), n(sizes) {
        if (!n.with_logits) return;
        numbers = c.reference.shape[2] * c.reference.shape[3];
        boxes = c.reference.shape[3] == 4;
        place = arena.take<int64_t>(n.room());
        divisor = arena.take<T>(2 * n.room());
        copy = arena.take<T>(4 * longest(n));
        step = c.reference.strides[1] * element_size(c.reference.dtype);
    }

    // How many numbers a query has of its reference points, and whether they have width and height.
    int64_t numbers = 0;

    void use_levels(int64_t first, int64_t last) {
        if (!n.with_logits) return;
        const int64_t coordinates = call.reference.shape[3], count = call.reference.shape[2];
        const int64_t padded = round_up((last - first) * n.points, LANES);
        samples = (last - first) * n.points;
        first_sample = first * n.points;
        shared = true;
        for (int64_t i = 0; i < padded; ++i) {
            const int64_t l = i < samples ? first + i / n.points : first, p = i % n.points;
            const bool is_padding = i >= samples;
            place[i] = is_padding                ? i > 0 ? place[i - 1] : 0
                       : call.reference_by_point ? p % count * coordinates
                       : count == 1              ? 0
                                                 : l * coordinates;
            divisor[2 * i] = boxes ? T(2 * n.points) : is_padding ? T(1) : T(call.levels[l].width);
            divisor[2 * i + 1] = boxes ? T(2 * n.points) : is_padding ? T(1) : T(call.levels[l].height);
            shared = shared && place[i] == place[i / LOCATED * LOCATED];
        }
    }

    void open(int64_t b) {
        if (n.with_logits) first = reinterpret_cast<int64_t>(at(call.reference, b * call.reference.strides[0]));
    }

    // offsets and logits are those of query q in whole vectors. logits are of all levels; weights has room for all, and
    // those of the levels in use are returned.
    __attribute__((noinline)) const T *turn(int64_t q, const T *offsets, const T *logits, T *locations,
                                            T *weights) const {
        if (samples == 0) return weights;
        locate(reference_of(q), offsets, locations);
        softmax<T>(logits, n.levels * n.points, weights);
        return weights + first_sample;
    }

    // From the gradients of the locations and weights of query q to those of its offsets and logits, in place, and to
    // those of its reference points, where they are wanted. weights: what turn() made of all levels.
    __attribute__((noinline)) void gradients(int64_t q, const T *offsets, const T *weights, T *grad_xy, T *grad_weight,
                                             T *grad_reference) const {
        if (grad_reference) add_reference(offsets, grad_xy, grad_reference);
        const T *size = boxes ? reference_of(q) + 2 : nullptr;
        for (int64_t i = 0; i < samples; i += LOCATED) {
            Pairs<T> g = raw_load<T, 2 * LOCATED>(grad_xy + 2 * i);
            // exactly 0 where the sample is not valid, whose box may be infinite
            if (size) g = g == 0 ? g : g * pairs(size, i);
            store<T, 2 * LOCATED>(grad_xy + 2 * i, g / raw_load<T, 2 * LOCATED>(divisor + 2 * i));
        }
        softmax_gradient<T>(weights, samples, grad_weight);
    }

  private:
    const Call &call;
    Sizes n;
    bool boxes = false;
    bool shared = true;                    // LOCATED samples belong to the same reference point
    int64_t *place = nullptr;              // where a sample's reference point is, among the query's numbers
    T *divisor = nullptr;                  // of the offsets, pairs
    T *copy = nullptr;                     // of a query's reference points
    int64_t first = 0, step = 0;           // of reference points, in bytes
    int64_t samples = 0, first_sample = 0; // of the levels in use

    static int64_t longest(const Sizes &n) { return n.levels + n.points; } // reference points of a query, at most

    MXD_INLINE Pairs<T> pairs(const T *from, int64_t i) const {
        return shared ? repeated_pair<T>(from + place[i]) : four_pairs<T>(from, place + i);
    }

    const T *reference_of(int64_t q) const {
        const mxd_tensor &t = call.reference;
        const char *from = reinterpret_cast<const char *>(first + q * step);
        const int64_t coordinates = t.shape[3];
        if (t.dtype == OWN<T> && t.strides[3] == 1 && (t.strides[2] == coordinates || t.shape[2] == 1))
            return reinterpret_cast<const T *>(from);
        for (int64_t r = 0; r < t.shape[2]; ++r)
            read_elements(from + r * t.strides[2] * element_size(t.dtype), t.dtype, t.strides[3], coordinates,
                          copy + r * coordinates);
        return copy;
    }

    MXD_INLINE void locate(const T *reference, const T *offsets, T *locations) const {
        for (int64_t i = 0; i < samples; i += LOCATED) {
            Pairs<T> offset = raw_load<T, 2 * LOCATED>(offsets + 2 * i);
            if (boxes) offset *= pairs(reference + 2, i);
            store<T, 2 * LOCATED>(locations + 2 * i,
                                  pairs(reference, i) + offset / raw_load<T, 2 * LOCATED>(divisor + 2 * i));
        }
    }

    MXD_INLINE void add_reference(const T *offsets, const T *grad_xy, T *sums) const {
        for (int64_t i = 0; i < numbers; ++i) sums[i] = 0;
        for (int64_t i = 0; i < samples; ++i) {
            T *to = sums + place[i];
            const T x = grad_xy[2 * i], y = grad_xy[2 * i + 1];
            to[0] += x;
            to[1] += y;
            if (!boxes) continue;
            to[2] += x == 0 ? x : x * offsets[2 * i] / divisor[2 * i];
            to[3] += y == 0 ? y : y * offsets[2 * i + 1] / divisor[2 * i + 1];
        }
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
