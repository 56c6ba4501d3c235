// From offsets and logits of one query and head to locations and weights, and the gradients back:
//
//   location = reference + offset / (W, H)                      reference is a point
//   location = reference + offset * (w, h) / (2 * num_points)   reference is a box
//   weights  = softmax of the logits of all levels and points
//
// Locations and weights exist only in a few queries' scratch memory. A call with a window has no
// offsets: only its weights are computed here.
#pragma once

#include "kernels/attention/query_rows.h"
#include "kernels/shared/softmax.h"

namespace mxd::MXD_ISA {
namespace {

// Samples that are located together, as pairs (x, y) in one vector; the last of a query may be 4.
template <class T> constexpr int LOCATED = sizeof(T) == 4 ? LANES : 4;

// The pair at from + begin[i] for each of four samples; SHARED: they have the same.
template <bool SHARED, class T> MXD_INLINE Vec<T, 8> four_pairs(const T *from, const int64_t *begin) {
    const T *a = from + begin[0];
    if constexpr (SHARED && sizeof(T) == 4) {
        const int64_t pair = raw_load<int64_t, 1>(a);
        return bits_as<Vec<T, 8>>(Vec<int64_t, 4>{pair, pair, pair, pair});
    } else if constexpr (SHARED) {
        return Vec<T, 8>{a[0], a[1], a[0], a[1], a[0], a[1], a[0], a[1]};
    } else {
        const T *b = from + begin[1], *c = from + begin[2], *d = from + begin[3];
        if constexpr (sizeof(T) == 4)
            return bits_as<Vec<T, 8>>(Vec<int64_t, 4>{raw_load<int64_t, 1>(a), raw_load<int64_t, 1>(b), raw_load<int64_t, 1>(c),
                                                      raw_load<int64_t, 1>(d)});
        else
            return Vec<T, 8>{a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]};
    }
}
template <bool SHARED, int N, class T> MXD_INLINE Vec<T, 2 * N> pairs_at(const T *from, const int64_t *begin) {
    const Vec<T, 8> four = four_pairs<SHARED>(from, begin);
    if constexpr (N == 4)
        return four;
    else
        return bits_as<Vec<T, 2 * N>>(
            eight_of<int64_t>(bits_as<Vec<int64_t, 4>>(four), bits_as<Vec<int64_t, 4>>(four_pairs<SHARED>(from, begin + 4))));
}

// Queries that are computed together: two independent softmaxes of four queries are interleaved to hide latency. A
// query is used until PIPELINE_DEPTH more are prepared, so there is room for twice as many.
constexpr int64_t COMPUTED_TOGETHER = 8;

template <class T> class Logits {
    typedef PlainRows<T> Rows;

  public:
    Logits(const Call &c, Arena &arena) : call(c), n(c.sizes) {
        if (!call.with_logits) return;
        boxes = !c.has_window && n.coordinates == 4;
        begin = arena.take<int64_t>(padded_samples(n));
        sum_begin = arena.take<int64_t>(padded_samples(n));
        divisor = arena.take<T>(2 * padded_samples(n));
        inverse = arena.take<T>(2 * padded_samples(n));
        copy = arena.take<T>(4 * longest(n));
        offset_copies = Rows::ring(2 * COMPUTED_TOGETHER, 2 * padded_samples(n), arena);
        located = Rows::ring(2 * COMPUTED_TOGETHER, 2 * padded_samples(n), arena);
        logit_copies = Rows::ring(2 * COMPUTED_TOGETHER, weight_room(n), arena);
        all_weights = Rows::ring(2 * COMPUTED_TOGETHER, weight_room(n), arena);
        in_place = c.reference.dtype == OWN<T> && c.reference.strides[COORDINATE] == 1;
        reference_step = c.reference.strides[QUERY] * element_size(c.reference.dtype);
        const SomeAxes<2> references(c.reference, {REFERENCE, COORDINATE});
        reference_run = c.reference.strides[REFERENCE] == 0 ? n.coordinates : references.contiguous ? references.count() : 0;
    }

    void use_levels(int64_t first, int64_t last) {
        if (!call.with_logits) return;
        const int64_t padded = round_up((last - first) * n.points, LANES);
        samples = (last - first) * n.points;
        first_sample = first * n.points;
        shared = true;
        for (int64_t i = 0; i < padded; ++i) {
            const int64_t sample = i < samples ? i : samples - 1; // padding is like the last
            const Level &level = call.levels[first + sample / n.points];
            const int64_t reference = reference_of(first + sample / n.points, sample % n.points);
            begin[i] = reference * reference_apart();
            sum_begin[i] = reference * n.coordinates;
            divisor[2 * i] = boxes ? T(2 * n.points) : T(level.width);
            divisor[2 * i + 1] = boxes ? T(2 * n.points) : T(level.height);
            for (int k = 0; k < 2; ++k) inverse[2 * i + k] = 1 / divisor[2 * i + k];
            shared = shared && sum_begin[i] == sum_begin[i / 4 * 4];
        }
    }

    // Selects the queries of a batch and head. Offsets and logits lie at `offsets` and `logits`, where whole vectors can
    // be read up to query `in_place_until`.
    void open(int64_t b, const QueryRows &offsets, const QueryRows &logits, int64_t in_place_until) {
        if (!call.with_logits) return;
        first = reinterpret_cast<int64_t>(at(call.reference, b * call.reference.strides[BATCH]));
        offsets_in_place = Rows::in_place(offsets);
        logits_in_place = Rows::in_place(logits);
        until = in_place_until;
        copied_from = INT64_MAX;
        computed = 0;
    }

    // Valid once compute() has reached the query; the address before that.
    const T *locations(int64_t q) const { return located[q]; }
    const T *weights(int64_t q) const { return all_weights[q] + first_sample; } // of the levels in use
    int64_t computed_until() const { return computed; }
    bool has_boxes() const { return boxes; }

    // Computes q and its neighbours, because a query by itself waits for each step of its softmax. copy(begin,
    // end, to their offsets, to their logits) is called for queries that cannot be read in place. Queries computed together
    // begin at a multiple of their number, so that they lie side by side in a ring.
    template <class Copy> __attribute__((noinline)) void compute(int64_t q, Copy &&copy) {
        q &= -COMPUTED_TOGETHER;
        const int64_t last = q + COMPUTED_TOGETHER < n.queries ? q + COMPUTED_TOGETHER : n.queries;
        computed = last;
        if (last - 1 > until) { // 16 bits, or the last queries
            if (copied_from > q) copied_from = q;
            copy(q, last, offset_copies, logit_copies);
        }
        if (samples == 0) return;
        const bool copied = q >= copied_from;
        if (!call.has_window) locate(q, last, copied ? offset_copies : offsets_in_place);
        const Rows &logits = copied ? logit_copies : logits_in_place;
        const char *from = logits.at(q);
        char *to = all_weights.at(q);
        const int64_t step = logits.step, weight_step = all_weights.step, count = n.levels * n.points;
        for (; q < last; q += 4, from += 4 * step, to += 4 * weight_step) {
            const T *rows[4];
            T *weights[4];
            for (int64_t i = 0; i < 4; ++i) {
                rows[i] = reinterpret_cast<const T *>(q + i < last ? from + i * step : from);
                weights[i] = reinterpret_cast<T *>(to + i * weight_step);
            }
            softmax<T>(rows, count, weights);
        }
    }

    // From the gradients of a query's offsets in pixels, or of its locations if it has boxes, to those of its offsets,
    // and of its reference points unless grad_reference is null. Samples before `direct_until` go to grad_offsets, the
    // others are overwritten in grad_xy. All levels are in use.
    MXD_INLINE void offset_gradients(int64_t q, T *grad_xy, int64_t direct_until, T *grad_offsets, T *grad_reference) const {
        if (call.has_window) return;
        if (grad_reference) add_reference(offsets_of(q), grad_xy, grad_reference);
        const T *size = boxes ? references(q) + 2 : nullptr;
        for (int64_t i = 0; i < samples; i += 4) { // as wide as the stores before: a wider load would wait for them
            Vec<T, 8> g = raw_load<T, 8>(grad_xy + 2 * i);
            // exactly 0 where the sample is not valid, whose box may be infinite
            if (size) {
                g = g == 0 ? g : g * (shared ? four_pairs<true>(size, begin + i) : four_pairs<false>(size, begin + i));
                g *= raw_load<T, 8>(inverse + 2 * i);
            }
            store<T, 8>((i < direct_until ? grad_offsets : grad_xy) + 2 * i, g);
        }
    }
    // From the gradients of a query's weights to those of its logits, in the same way.
    MXD_INLINE void logit_gradients(int64_t q, T *grad_weights, int64_t direct_until, T *grad_logits) const {
        softmax_gradient<T>(all_weights[q], samples, grad_weights, direct_until, grad_logits);
    }

  private:
    const Call &call;
    Sizes n;
    bool boxes = false;
    bool shared = true; // four samples belong to the same reference point
    // For each sample: its reference point's offset from the query's first, and its gradient's among their sums.
    int64_t *begin = nullptr, *sum_begin = nullptr;
    // What offsets are divided by, in pairs. Divided, not multiplied by the inverse, so that locations have the bits
    // that torch gives: untrained offsets are whole pixels, where a slope jumps with the last bit.
    T *divisor = nullptr, *inverse = nullptr;
    T *copy = nullptr;                     // of a query's reference points
    bool in_place = false;                 // reference points are read as they lie
    int64_t reference_run = 0;             // elements of a query's that lie side by side; 0: not all that are read
    int64_t first = 0, reference_step = 0; // of reference points, in bytes
    int64_t samples = 0, first_sample = 0; // of the levels in use
    int64_t computed = 0;
    Rows offsets_in_place, logits_in_place, offset_copies, logit_copies, located, all_weights;
    int64_t until = -1, copied_from = 0; // the last query that can be read in place, the first that was copied

    struct Places { // of each sample
        const int64_t *begin;
        const T *divisor;
    };

    const T *offsets_of(int64_t q) const { return q < copied_from ? offsets_in_place[q] : offset_copies[q]; }

    static int64_t weight_room(const Sizes &n) { return round_up(n.levels * n.points, SOFTMAX_LANES<T>) + LANES; }

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
        if (reference_run > 0)
            read_elements(from, t.dtype, t.strides[COORDINATE], reference_run, copy);
        else
            SomeAxes<2>(t, {REFERENCE, COORDINATE}).read_at(from, copy);
        return copy;
    }

    // Of queries q..last-1, whose offsets are `offsets`.
    MXD_INLINE void locate(int64_t q, int64_t last, const Rows &offsets) const {
        if (boxes)
            shared ? locate<true, true, 0>(q, last, offsets) : locate<true, false, 0>(q, last, offsets);
        else if (!shared)
            locate<false, false, 0>(q, last, offsets);
        else if (samples == 16) // numbers that models have
            locate<false, true, 16>(q, last, offsets);
        else if (samples == 4)
            locate<false, true, 4>(q, last, offsets);
        else
            locate<false, true, 0>(q, last, offsets);
    }
    // COUNT: samples, if they are known here.
    template <bool BOXES, bool SHARED, int COUNT> MXD_INLINE void locate(int64_t q, int64_t last, const Rows &offsets) const {
        // Local copies, so that the compiler may keep them in registers across the stores below.
        const Places of{begin, divisor};
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
        if (BOXES) offset *= pairs_at<SHARED, N>(reference + 2, of.begin + i);
        store<T, 2 * N>(locations + 2 * i,
                        pairs_at<SHARED, N>(reference, of.begin + i) + offset / raw_load<T, 2 * N>(of.divisor + 2 * i));
    }

    // This head's part of the gradient of a query's reference points.
    MXD_INLINE void add_reference(const T *offsets, const T *grad_xy, T *sums) const {
        for (int64_t i = 0; i < n.references * n.coordinates; ++i) sums[i] = 0;
        const int64_t fours = shared ? samples / 4 * 4 : 0;
        for (int64_t i = 0; i < fours; i += 4) { // as wide as the stores before: a wider load would wait for them
            const Vec<T, 8> gradient = raw_load<T, 8>(grad_xy + 2 * i),
                            g = boxes ? gradient : gradient * raw_load<T, 8>(divisor + 2 * i);
            add_pair(g, sums + sum_begin[i]);
            if (!boxes) continue;
            const Vec<T, 8> grad_size = g * raw_load<T, 8>(offsets + 2 * i) * raw_load<T, 8>(inverse + 2 * i);
            add_pair(g == 0 ? g : grad_size, sums + sum_begin[i] + 2);
        }
        for (int64_t i = fours; i < samples; ++i) {
            T *to = sums + sum_begin[i];
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
        const Vec<T, 2> sum = folded_lanes<T, 8, 2>(pairs, Total());
        to[0] += sum[0];
        to[1] += sum[1];
    }
};

} // namespace
} // namespace mxd::MXD_ISA
