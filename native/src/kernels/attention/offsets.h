// The locations of queries from offsets, and the gradients back:
//
//   location = reference + offset / (W, H)                      reference is a point
//   location = reference + offset * (w, h) / (2 * num_points)   reference is a box
//
// Locations exist only in a few queries' scratch memory.
#pragma once

#include "kernels/attention/elements.h"

namespace mxd::MXD_ISA {
namespace {

// Samples that are located together, as pairs (x, y) in one vector; the last of a query may be 4.
template <class T> constexpr int LOCATED = sizeof(T) == 4 ? LANES : 4;

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
            return bits_as<Vec<T, 8>>(Vec<int64_t, 4>{raw_load<int64_t, 1>(a), raw_load<int64_t, 1>(b), raw_load<int64_t, 1>(c),
                                                      raw_load<int64_t, 1>(d)});
        else
            return Vec<T, 8>{a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
    }
}
template <bool SHARED, int N, class T> MXD_INLINE Vec<T, 2 * N> pairs_at(const T *from, const int64_t *place) {
    const Vec<T, 8> four = four_pairs<SHARED>(from, place);
    if constexpr (N == 4)
        return four;
    else
        return bits_as<Vec<T, 2 * N>>(
            eight_of<int64_t>(bits_as<Vec<int64_t, 4>>(four), bits_as<Vec<int64_t, 4>>(four_pairs<SHARED>(from, place + 4))));
}

template <class T> class Offsets {
    typedef PlainRows<T> Rows;

  public:
    Offsets(const Call &c, Arena &arena)
        : call(c), n(c.sizes), boxes(n.coordinates == 4),
          offsets(c.offsets, {LEVEL, POINT, XY}, T(__builtin_nan("")), 2 * padded_samples(n), arena),
          place(arena.take<int64_t>(padded_samples(n))), sum_place(arena.take<int64_t>(padded_samples(n))),
          divisor(arena.take<T>(2 * padded_samples(n))), inverse(arena.take<T>(2 * padded_samples(n))),
          copy(arena.take<T>(4 * longest(n))), located(Rows::ring(2 * COMPUTED_TOGETHER, 2 * padded_samples(n), arena)),
          in_place(c.reference.dtype == OWN<T> && c.reference.strides[COORDINATE] == 1),
          reference_step(c.reference.strides[QUERY] * element_size(c.reference.dtype)) {}

    void use_levels(int64_t first, int64_t last) {
        offsets.use_levels(first, last, 2 * LANES);
        const int64_t padded = round_up((last - first) * n.points, LANES);
        samples = (last - first) * n.points;
        shared = true;
        for (int64_t i = 0; i < padded; ++i) {
            const int64_t sample = i < samples ? i : samples - 1; // padding is like the last
            const Level &level = call.levels[first + sample / n.points];
            const int64_t reference = reference_of(first + sample / n.points, sample % n.points);
            place[i] = reference * reference_apart();
            sum_place[i] = reference * n.coordinates;
            divisor[2 * i] = boxes ? T(2 * n.points) : T(level.width);
            divisor[2 * i + 1] = boxes ? T(2 * n.points) : T(level.height);
            for (int k = 0; k < 2; ++k) inverse[2 * i + k] = 1 / divisor[2 * i + k];
            shared = shared && sum_place[i] == sum_place[i / 4 * 4];
        }
    }

    // Selects the queries of a (batch, head).
    void open(int64_t b, int64_t h) {
        offsets.open(b, h);
        first = reinterpret_cast<int64_t>(at(call.reference, b * call.reference.strides[BATCH]));
    }
    MXD_INLINE void ask_for(int64_t q) const { offsets.at_in_turn(q); }

    // Valid once compute() has reached the query.
    const T *locations_of(int64_t q) const { return located[q]; }
    bool has_boxes() const { return boxes; }

    // Of queries q..last-1.
    MXD_INLINE void compute(int64_t q, int64_t last) {
        const Rows &from = offsets.of(q, last);
        if (boxes)
            shared ? locate<true, true, 0>(q, last, from) : locate<true, false, 0>(q, last, from);
        else if (!shared)
            locate<false, false, 0>(q, last, from);
        else if (samples == 16) // numbers that models have
            locate<false, true, 16>(q, last, from);
        else if (samples == 4)
            locate<false, true, 4>(q, last, from);
        else
            locate<false, true, 0>(q, last, from);
    }

    // From the gradients of a query's offsets in pixels, or of its locations if it has boxes, to those of its offsets,
    // and of its reference points unless of_reference is null. Samples before `direct_until` go to of_offsets, the
    // others are written over of_xy. All levels are in use.
    MXD_INLINE void gradients(int64_t q, T *of_xy, int64_t direct_until, T *of_offsets, T *of_reference) const {
        if (of_reference) add_reference(offsets[q], of_xy, of_reference);
        const T *size = boxes ? references(q) + 2 : nullptr;
        for (int64_t i = 0; i < samples; i += 4) { // as wide as the stores before: a wider load would wait for them
            Vec<T, 8> g = raw_load<T, 8>(of_xy + 2 * i);
            // exactly 0 where the sample is not valid, whose box may be infinite
            if (size) {
                g = g == 0 ? g : g * (shared ? four_pairs<true>(size, place + i) : four_pairs<false>(size, place + i));
                g *= raw_load<T, 8>(inverse + 2 * i);
            }
            store<T, 8>((i < direct_until ? of_offsets : of_xy) + 2 * i, g);
        }
    }

  private:
    const Call &call;
    Sizes n;
    bool boxes;
    bool shared = true; // four samples belong to the same reference point
    PlainElements<T, 3> offsets;
    // For each sample: its reference point's offset from the query's first, and its gradient's among their sums.
    int64_t *place, *sum_place;
    // What offsets are divided by, in pairs. Divided, not multiplied by the inverse, so that locations have the bits
    // that torch gives: untrained offsets are whole pixels, where a slope jumps with the last bit.
    T *divisor, *inverse;
    T *copy; // of a query's reference points
    Rows located;
    bool in_place;                     // reference points are read as they lie
    int64_t reference_step, first = 0; // of reference points, in bytes
    int64_t samples = 0;               // of the levels in use

    struct Places { // of each sample
        const int64_t *place;
        const T *divisor;
    };

    int64_t reference_of(int64_t level, int64_t point) const {
        const int64_t references = n.references;
        return call.reference_by_point ? point % references : references == 1 ? 0 : level;
    }
    // Elements from a query's reference point to its next. All levels often have the same one, at a stride of 0.
    int64_t reference_apart() const {
        const Tensor &t = call.reference;
        return in_place || t.strides[REFERENCE] == 0 ? t.strides[REFERENCE] : n.coordinates;
    }
    static int64_t longest(const Sizes &n) { return n.levels + n.points; } // reference points of a query, at most

    const T *references(int64_t q) const {
        const char *from = reinterpret_cast<const char *>(first + q * reference_step);
        return in_place ? reinterpret_cast<const T *>(from) : copied_reference(from);
    }
    __attribute__((noinline)) const T *copied_reference(const char *from) const {
        const Tensor &t = call.reference;
        if (t.strides[REFERENCE] == 0)
            read_elements(from, t.dtype, t.strides[COORDINATE], n.coordinates, copy);
        else
            SomeAxes<2>(t, {REFERENCE, COORDINATE}).read_at(from, copy);
        return copy;
    }

    // Of queries q..last-1. COUNT: samples, if they are known here.
    template <bool BOXES, bool SHARED, int COUNT> MXD_INLINE void locate(int64_t q, int64_t last, const Rows &offsets) const {
        // Local copies, so that the compiler may keep them in registers across the stores below.
        const Places of{place, divisor};
        const int64_t count = COUNT > 0 ? COUNT : samples, step = reference_step, offset_step = offsets.step,
                      location_step = located.step;
        const bool as_they_lie = in_place;
        const char *reference = reinterpret_cast<const char *>(first + q * step), *offset = offsets.at(q);
        char *location = located.at(q);
        for (; q < last; ++q, reference += step, offset += offset_step, location += location_step) {
            const T *r = as_they_lie ? reinterpret_cast<const T *>(reference) : copied_reference(reference);
            const T *o = reinterpret_cast<const T *>(offset);
            T *to = reinterpret_cast<T *>(location);
            int64_t i = 0;
            if constexpr (LOCATED<T> > 4) {
                for (; count - i > 4; i += LOCATED<T>) locate_some<BOXES, SHARED, LOCATED<T>>(i, of, r, o, to);
            }
            for (; i < count; i += 4) locate_some<BOXES, SHARED, 4>(i, of, r, o, to);
        }
    }
    // Samples i..i+N-1.
    template <bool BOXES, bool SHARED, int N>
    static MXD_INLINE void locate_some(int64_t i, const Places &of, const T *reference, const T *offsets, T *locations) {
        Vec<T, 2 * N> offset = raw_load<T, 2 * N>(offsets + 2 * i);
        if (BOXES) offset *= pairs_at<SHARED, N>(reference + 2, of.place + i);
        store<T, 2 * N>(locations + 2 * i,
                        pairs_at<SHARED, N>(reference, of.place + i) + offset / raw_load<T, 2 * N>(of.divisor + 2 * i));
    }

    // This head's part of the gradient of a query's reference points.
    MXD_INLINE void add_reference(const T *offsets, const T *grad_xy, T *sums) const {
        for (int64_t i = 0; i < n.references * n.coordinates; ++i) sums[i] = 0;
        const int64_t fours = shared ? samples / 4 * 4 : 0;
        for (int64_t i = 0; i < fours; i += 4) { // as wide as the stores before: a wider load would wait for them
            const Vec<T, 8> given = raw_load<T, 8>(grad_xy + 2 * i),
                            g = boxes ? given : given * raw_load<T, 8>(divisor + 2 * i);
            add_pair(g, sums + sum_place[i]);
            if (!boxes) continue;
            const Vec<T, 8> of_size = g * raw_load<T, 8>(offsets + 2 * i) * raw_load<T, 8>(inverse + 2 * i);
            add_pair(g == 0 ? g : of_size, sums + sum_place[i] + 2);
        }
        for (int64_t i = fours; i < samples; ++i) {
            T *to = sums + sum_place[i];
            const T x = grad_xy[2 * i] * (boxes ? 1 : divisor[2 * i]);
            const T y = grad_xy[2 * i + 1] * (boxes ? 1 : divisor[2 * i + 1]);
            to[0] += x;
            to[1] += y;
            if (!boxes) continue;
            to[2] += x == 0 ? x : x * offsets[2 * i] * inverse[2 * i];
            to[3] += y == 0 ? y : y * offsets[2 * i + 1] * inverse[2 * i + 1];
        }
    }
    // Four pairs are added to one.
    static MXD_INLINE void add_pair(Vec<T, 8> pairs, T *to) {
        const Vec<T, 2> sum = fold<T, 4>(fold<T, 8>(pairs));
        to[0] += sum[0];
        to[1] += sum[1];
    }
};

} // namespace
} // namespace mxd::MXD_ISA
