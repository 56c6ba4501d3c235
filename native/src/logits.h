// From offsets and logits of one query and head to locations and weights, and the gradients back:
//
//   location = reference + offset / (W, H)                      reference is a point
//   location = reference + offset * (w, h) / (2 * num_points)   reference is a box
//   pixel    = reference * (W, H) + window, rounded             geometric_kernel_attention
//   weights  = softmax of the logits of all levels and points
//
// Nothing of this goes to memory but a query's scratch.
#pragma once

#include "sizes.h"
#include "softmax.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// Samples that are located together, as pairs (x, y) in one vector.
template <class T> constexpr int LOCATED = sizeof(T) == 4 ? LANES : 4;
template <class T> using Pairs = Vec<T, 2 * LOCATED<T>>;

// The pair at from + place[i] for each of four samples; SHARED: they have the same.
template <bool SHARED, class T> MXD_INLINE Vec<T, 8> four_pairs(const T *from, const int64_t *place) {
    const T *a = from + place[0];
    if constexpr (SHARED && sizeof(T) == 4) {
        const int64_t pair = raw_load<int64_t, 1>(a);
        return bits_as<Vec<T, 8>>(Vec<int64_t, 4>{pair, pair, pair, pair});
    } else if constexpr (SHARED) {
        return Vec<T, 8>{a[0], a[1], a[0], a[1], a[0], a[1], a[0], a[1]};
    } else {
        const T *b = from + place[1], *c = from + place[2], *d = from + place[3];
        if constexpr (sizeof(T) == 4)
            return bits_as<Vec<T, 8>>(Vec<int64_t, 4>{raw_load<int64_t, 1>(a), raw_load<int64_t, 1>(b),
                                                      raw_load<int64_t, 1>(c), raw_load<int64_t, 1>(d)});
        else
            return Vec<T, 8>{a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
    }
}
template <bool SHARED, class T> MXD_INLINE Pairs<T> pairs_at(const T *from, const int64_t *place) {
    const Vec<T, 8> four = four_pairs<SHARED>(from, place);
    if constexpr (LOCATED<T> == 4)
        return four;
    else
        return bits_as<Pairs<T>>(eight_of<int64_t>(bits_as<Vec<int64_t, 4>>(four),
                                                   bits_as<Vec<int64_t, 4>>(four_pairs<SHARED>(from, place + 4))));
}

// Queries that are turned together. A query stays while those AHEAD of it are prepared, so there is room for twice as
// many.
constexpr int64_t TURNED = 4;

template <class T> class Logits {
  public:
    static int64_t bytes(const Sizes &n) {
        if (!n.with_logits) return 0;
        return Arena::bytes<int64_t>(n.room()) + 2 * Arena::bytes<T>(2 * n.room()) + Arena::bytes<T>(4 * longest(n)) +
               (n.has_window ? Arena::bytes<T>(2 * n.room()) : 0) +
               2 * TURNED * (2 * Arena::bytes<T>(2 * n.room()) + 2 * Arena::bytes<T>(weight_room(n)));
    }
    Logits(const Call &c, const Sizes &sizes, Arena &arena) : call(c), n(sizes) {
        if (!n.with_logits) return;
        boxes = !n.has_window && c.reference.shape[3] == 4;
        place = arena.take<int64_t>(n.room());
        divisor = arena.take<T>(2 * n.room());
        inverse = arena.take<T>(2 * n.room());
        copy = arena.take<T>(4 * longest(n));
        if (n.has_window) window = arena.take<T>(2 * n.room());
        for (Turned &query : ring) {
            query.offset_copy = arena.take<T>(2 * n.room());
            query.locations = arena.take<T>(2 * n.room());
            query.logit_copy = arena.take<T>(weight_room(n));
            query.all_weights = arena.take<T>(weight_room(n));
        }
        in_place = c.reference.dtype == OWN<T> && c.reference.strides[3] == 1 &&
                   (n.has_window || c.reference.strides[2] == c.reference.shape[3] || c.reference.shape[2] == 1);
        step = c.reference.strides[1] * element_size(c.reference.dtype);
    }

    void use_levels(int64_t first, int64_t last) {
        if (!n.with_logits) return;
        const int64_t padded = round_up((last - first) * n.points, LANES);
        samples = (last - first) * n.points;
        first_sample = first * n.points;
        shared = true;
        for (int64_t i = 0; i < padded; ++i) {
            const int64_t sample = i < samples ? i : samples - 1; // padding is like the last
            const Level &level = call.levels[first + sample / n.points];
            if (n.has_window)
                read_elements(at(call.window, sample % n.points * call.window.strides[0]), call.window.dtype,
                              call.window.strides[1], 2, window + 2 * i);
            place[i] = place_of(first + sample / n.points, sample % n.points);
            divisor[2 * i] = boxes ? T(2 * n.points) : T(level.width);
            divisor[2 * i + 1] = boxes ? T(2 * n.points) : T(level.height);
            for (int k = 0; k < 2; ++k) inverse[2 * i + k] = 1 / divisor[2 * i + k];
            shared = shared && place[i] == place[i / 4 * 4];
        }
    }

    // The queries of this (batch, head) are read from now on, from any query on.
    void open(int64_t b, int64_t h) {
        const mxd_tensor &t = call.reference;
        if (n.with_logits)
            first = reinterpret_cast<int64_t>(at(t, b * t.strides[0] + (n.has_window ? h * t.strides[2] : 0)));
        turned = 0;
    }

    // What is known of a query that is turned.
    struct Turned {
        T *offset_copy, *logit_copy; // for offsets, and logits of all levels, that cannot be read as they lie
        const T *offsets, *logits;   // whole vectors
        T *locations, *all_weights;
    };
    Turned &of(int64_t q) { return ring[q & (2 * TURNED - 1)]; }
    const Turned &of(int64_t q) const { return ring[q & (2 * TURNED - 1)]; }
    const T *weights(int64_t q) const { return of(q).all_weights + first_sample; } // of the levels in use
    int64_t turned_until() const { return turned; }

    // Queries q..q+TURNED-1, whose offsets and logits are known; those from `last` on do not exist.
    void turn(int64_t q, int64_t last) {
        turned = q + TURNED;
        if (samples == 0) return;
        for (int64_t i = q; i < last; ++i)
            if (n.has_window)
                locate_window(i, of(i).locations);
            else
                locate(reference_of(i), of(i).offsets, of(i).locations);
        const T *rows[TURNED];
        T *weights[TURNED];
        for (int64_t i = 0; i < TURNED; ++i) {
            rows[i] = of(q + i < last ? q + i : q).logits;
            weights[i] = of(q + i).all_weights;
        }
        softmax<T>(rows, n.levels * n.points, weights);
    }

    // From the gradients of the locations and weights of a query to those of its offsets and logits, and to those of
    // its reference points, where they are wanted. What lies before sample `direct_until` is written to memory of its
    // own. All levels are in use.
    MXD_INLINE void gradients(int64_t q, T *of_xy, T *of_weights, int64_t direct_until, T *of_offsets, T *of_logits,
                              T *of_reference) const {
        if (of_reference) add_reference(of(q).offsets, of_xy, of_reference);
        const T *size = boxes ? reference_of(q) + 2 : nullptr;
        for (int64_t i = 0; i < samples && !n.has_window;
             i += 4) { // as they were stored: a wider load would wait for the stores
            Vec<T, 8> g = raw_load<T, 8>(of_xy + 2 * i);
            // exactly 0 where the sample is not valid, whose box may be infinite
            if (size)
                g = g == 0 ? g : g * (shared ? four_pairs<true>(size, place + i) : four_pairs<false>(size, place + i));
            store<T, 8>((i < direct_until ? of_offsets : of_xy) + 2 * i, g * raw_load<T, 8>(inverse + 2 * i));
        }
        softmax_gradient<T>(of(q).all_weights, samples, of_weights, direct_until, of_logits);
    }

  private:
    const Call &call;
    Sizes n;
    bool boxes = false;
    bool shared = true;       // four samples belong to the same reference point
    int64_t *place = nullptr; // where a sample's reference point is, among the query's numbers
    // Of the offsets, pairs. Locations are divided, so that they are those of torch to the bit: a model's first offsets
    // are whole pixels, where a slope jumps with the last bit.
    T *divisor = nullptr, *inverse = nullptr;
    T *copy = nullptr;                     // of a query's reference points
    T *window = nullptr;                   // pairs
    bool in_place = false;                 // reference points are read as they lie
    int64_t first = 0, step = 0;           // of reference points, in bytes
    int64_t samples = 0, first_sample = 0; // of the levels in use
    int64_t turned = 0;
    Turned ring[2 * TURNED];

    static int64_t weight_room(const Sizes &n) { return round_up(n.levels * n.points, SOFTMAX_LANES<T>) + LANES; }

    int64_t place_of(int64_t level, int64_t point) const {
        const int64_t references = n.has_window ? 1 : call.reference.shape[2];
        const int64_t r = call.reference_by_point ? point % references : references == 1 ? 0 : level;
        return r * call.reference.shape[3];
    }
    static int64_t longest(const Sizes &n) { return n.levels + n.points; } // reference points of a query, at most

    const T *reference_of(int64_t q) const {
        const char *from = reinterpret_cast<const char *>(first + q * step);
        if (in_place) return reinterpret_cast<const T *>(from);
        copy_reference(from);
        return copy;
    }
    __attribute__((noinline)) void copy_reference(const char *from) const {
        const mxd_tensor &t = call.reference;
        const int64_t coordinates = t.shape[3];
        for (int64_t r = 0; r < t.shape[2]; ++r)
            read_elements(from + r * t.strides[2] * element_size(t.dtype), t.dtype, t.strides[3], coordinates,
                          copy + r * coordinates);
    }

    MXD_INLINE void locate(const T *reference, const T *offsets, T *locations) const {
        if (boxes)
            shared ? locate<true, true>(reference, offsets, locations)
                   : locate<true, false>(reference, offsets, locations);
        else
            shared ? locate<false, true>(reference, offsets, locations)
                   : locate<false, false>(reference, offsets, locations);
    }
    template <bool BOXES, bool SHARED>
    MXD_INLINE void locate(const T *reference, const T *offsets, T *locations) const {
        const int64_t *const places = place;
        const T *const divisors = divisor;
        for (int64_t i = 0, padded = round_up(samples, LANES); i < padded; i += LANES) {
            MXD_UNROLL
            for (int64_t k = i; k < i + LANES; k += LOCATED<T>) {
                Pairs<T> offset = raw_load<T, 2 * LOCATED<T>>(offsets + 2 * k);
                if (BOXES) offset *= pairs_at<SHARED>(reference + 2, places + k);
                store<T, 2 * LOCATED<T>>(locations + 2 * k, pairs_at<SHARED>(reference, places + k) +
                                                                offset / raw_load<T, 2 * LOCATED<T>>(divisors + 2 * k));
            }
        }
    }

    // The pixel nearest to reference * (W, H) + window, half to even, as a whole number in T. What is not positive need
    // not be rounded well: it is clamped to 0. Each operation rounds by itself, as in torch, because another pixel is
    // another row: the compiler must not make one of a product and a sum.
    MXD_INLINE void locate_window(int64_t q, T *locations) const {
        constexpr T WHOLE = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52); // numbers from here on are whole
        const T *reference = reinterpret_cast<const T *>(first + q * step);
        if (!in_place) {
            read_elements(reinterpret_cast<const char *>(reference), call.reference.dtype, call.reference.strides[3], 2,
                          copy);
            reference = copy;
        }
        const Vec<T, 8> pairs = four_pairs<true>(reference, place);
        for (int64_t i = 0; i < 2 * samples; i += 8) store<T, 8>(locations + i, pairs * raw_load<T, 8>(divisor + i));
        __asm__ volatile("" ::: "memory");
        for (int64_t i = 0; i < 2 * samples; i += 8) {
            const Vec<T, 8> x = raw_load<T, 8>(locations + i) + raw_load<T, 8>(window + i);
            store<T, 8>(locations + i, x < WHOLE ? (x + WHOLE) - WHOLE : x);
        }
    }

    MXD_INLINE void add_reference(const T *offsets, const T *grad_xy, T *sums) const {
        for (int64_t i = 0; i < call.reference.shape[2] * call.reference.shape[3]; ++i) sums[i] = 0;
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
