// Computes locations and weights of queries from offsets and logits, and the gradients of offsets and logits:
//
//   location = reference + offset / (W, H)                      reference is a point
//   location = reference + offset * (w, h) / (2 * num_points)   reference is a box
//   weights  = softmax of the logits of all levels and points
//
// Locations and weights exist only in scratch memory, for a few queries at a time. geometric_kernel_attention_with_logits has a
// window and no offsets, so this file computes only its weights.
#pragma once

#include "kernels/attention/query_rows.h"
#include "kernels/shared/softmax.h"

namespace mxd::MXD_ISA {
namespace {

// The number of samples whose locations (x, y) are computed in one vector. The last vector may have only four samples.
template <class T> constexpr int LOCATED = sizeof(T) == 4 ? LANES : 4;

// Reads the pair at from + begin[i] for each of four samples. With SHARED all four samples read the first sample's pair.
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

// The number of queries that are computed together. Two independent softmaxes of four queries overlap, which hides latency. The
// rings of PlainRows have room for twice as many queries, because a query stays in use until PIPELINE_DEPTH more queries are
// prepared.
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
            const int64_t sample = i < samples ? i : samples - 1; // padding repeats the last sample
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

    // Selects the queries of a batch and head. Queries up to `in_place_until` can be read in place in whole vectors.
    void open(int64_t b, const QueryRows &offsets, const QueryRows &logits, int64_t in_place_until) {
        if (!call.with_logits) return;
        first = reinterpret_cast<int64_t>(at(call.reference, b * call.reference.strides[BATCH]));
        offsets_in_place = Rows::in_place(offsets);
        logits_in_place = Rows::in_place(logits);
        until = in_place_until;
        copied_from = INT64_MAX;
        computed = 0;
    }

    // The address of a query's locations is always valid; the locations are valid after compute() has reached the query.
    const T *locations(int64_t q) const { return located[q]; }
    const T *weights(int64_t q) const { return all_weights[q] + first_sample; } // the weights of the levels in use
    int64_t computed_until() const { return computed; }
    bool has_boxes() const { return boxes; }

    // Computes the locations and weights of COMPUTED_TOGETHER queries, of the block that contains q: the softmax of a single
    // query would have too much latency. Calls copy(begin, end, offsets, logits) to copy the inputs of queries begin..end-1, if
    // they cannot be read in place. Blocks begin at multiples of COMPUTED_TOGETHER, so that a block is contiguous in a ring.
    template <class Copy> __attribute__((noinline)) void compute(int64_t q, Copy &&copy) {
        q &= -COMPUTED_TOGETHER;
        const int64_t last = q + COMPUTED_TOGETHER < n.queries ? q + COMPUTED_TOGETHER : n.queries;
        computed = last;
        if (last - 1 > until) { // the inputs need conversion, or whole vectors would go past the tensor
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

    // Computes the gradients of a query's offsets, and of its reference points unless grad_reference is null. grad_xy has the
    // gradients of offsets in pixels, or of locations if reference points are boxes. The gradients of the first `direct_until`
    // samples are written to grad_offsets; the gradients of the other samples overwrite grad_xy. All levels must be in use.
    MXD_INLINE void offset_gradients(int64_t q, T *grad_xy, int64_t direct_until, T *grad_offsets, T *grad_reference) const {
        if (call.has_window) return;
        if (grad_reference) add_reference(offsets_of(q), grad_xy, grad_reference);
        const T *size = boxes ? references(q) + 2 : nullptr;
        for (int64_t i = 0; i < samples; i += 4) { // as wide as AVX-512's stores of grad_xy: a wider load would wait for them
            Vec<T, 8> g = raw_load<T, 8>(grad_xy + 2 * i);
            // The gradient of an invalid sample stays exactly 0, even if its box is infinite.
            if (size) {
                g = g == 0 ? g : g * (shared ? four_pairs<true>(size, begin + i) : four_pairs<false>(size, begin + i));
                g *= raw_load<T, 8>(inverse + 2 * i);
            }
            store<T, 8>((i < direct_until ? grad_offsets : grad_xy) + 2 * i, g);
        }
    }
    // Computes the gradients of a query's logits from the gradients of its weights. direct_until: as in offset_gradients.
    MXD_INLINE void logit_gradients(int64_t q, T *grad_weights, int64_t direct_until, T *grad_logits) const {
        softmax_gradient<T>(all_weights[q], samples, grad_weights, direct_until, grad_logits);
    }

  private:
    const Call &call;
    Sizes n;
    bool boxes = false;
    bool shared = true; // true if every group of four samples has one reference point
    // For each sample, in elements. begin: where the sample's reference point begins among the reference points of a query.
    // sum_begin: where the gradient of this point begins in the sums of add_reference.
    int64_t *begin = nullptr, *sum_begin = nullptr;
    // The divisors of offsets, in pairs (x, y), and their inverses for gradients. Locations are computed by division, to have
    // the same bits as torch: untrained offsets are whole pixels, where the last bit decides between two slopes.
    T *divisor = nullptr, *inverse = nullptr;
    T *copy = nullptr;                     // a query's reference points as T
    bool in_place = false;                 // true if reference points are read without a copy
    int64_t reference_run = 0;             // elements of a query's reference points if they are contiguous, else 0
    int64_t first = 0, reference_step = 0; // the reference points of query q are at address first + q * reference_step
    int64_t samples = 0, first_sample = 0; // the levels in use have `samples` samples, from number first_sample on
    int64_t computed = 0;
    Rows offsets_in_place, logits_in_place, offset_copies, logit_copies, located, all_weights;
    int64_t until = -1, copied_from = 0; // queries 0..until can be read in place; queries from copied_from on were copied

    struct Places { // pointers to the arrays of Logits with these names
        const int64_t *begin;
        const T *divisor;
    };

    const T *offsets_of(int64_t q) const { return q < copied_from ? offsets_in_place[q] : offset_copies[q]; }

    static int64_t weight_room(const Sizes &n) { return round_up(n.levels * n.points, SOFTMAX_LANES<T>) + LANES; }

    int64_t reference_of(int64_t level, int64_t point) const {
        const int64_t references = n.references;
        return call.reference_by_point ? point % references : references == 1 ? 0 : level;
    }
    // Returns the number of elements from one reference point of a query to the next. Returns 0 if the stride is 0, so that all
    // levels share one point.
    int64_t reference_apart() const {
        const Tensor &t = call.reference;
        return in_place || t.strides[REFERENCE] == 0 ? t.strides[REFERENCE] : n.coordinates;
    }
    static int64_t longest(const Sizes &n) { return n.levels + n.points; } // at least the number of a query's reference points

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

    MXD_INLINE void locate(int64_t q, int64_t last, const Rows &offsets) const {
        if (boxes)
            shared ? locate<true, true, 0>(q, last, offsets) : locate<true, false, 0>(q, last, offsets);
        else if (!shared)
            locate<false, false, 0>(q, last, offsets);
        else if (samples == 16) // 16 and 4 samples are common in models
            locate<false, true, 16>(q, last, offsets);
        else if (samples == 4)
            locate<false, true, 4>(q, last, offsets);
        else
            locate<false, true, 0>(q, last, offsets);
    }
    // COUNT is the number of samples, or 0 if it is not known at compile time.
    template <bool BOXES, bool SHARED, int COUNT> MXD_INLINE void locate(int64_t q, int64_t last, const Rows &offsets) const {
        // These are local copies, so that the compiler can keep them in registers across the stores below.
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
    template <bool BOXES, bool SHARED, int N>
    static MXD_INLINE void locate_some(int64_t i, const Places &of, const T *reference, const T *offsets, T *locations) {
        Vec<T, 2 * N> offset = raw_load<T, 2 * N>(offsets + 2 * i);
        if (BOXES) offset *= pairs_at<SHARED, N>(reference + 2, of.begin + i);
        store<T, 2 * N>(locations + 2 * i,
                        pairs_at<SHARED, N>(reference, of.begin + i) + offset / raw_load<T, 2 * N>(of.divisor + 2 * i));
    }

    // Computes what this head adds to the gradient of a query's reference points.
    MXD_INLINE void add_reference(const T *offsets, const T *grad_xy, T *sums) const {
        for (int64_t i = 0; i < n.references * n.coordinates; ++i) sums[i] = 0;
        const int64_t fours = shared ? samples / 4 * 4 : 0;
        for (int64_t i = 0; i < fours; i += 4) { // as wide as AVX-512's stores of grad_xy: a wider load would wait for them
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
    static MXD_INLINE void add_pair(Vec<T, 8> pairs, T *to) {
        const Vec<T, 2> sum = folded_lanes<T, 8, 2>(pairs, Total());
        to[0] += sum[0];
        to[1] += sum[1];
    }
};

} // namespace
} // namespace mxd::MXD_ISA
