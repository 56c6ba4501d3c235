// Samples whose locations are computed from offsets, and whose weights from logits.
#pragma once

#include "kernels/attention/logits.h"
#include "kernels/attention/offsets.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/reference_gradient.h"
#include "kernels/attention/sample_output.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> struct LocatedQuery : QueryOfMaps<T> {
    const T *xy = nullptr;

    template <class Reader> LocatedQuery(const Sizes &, const Reader &reader, Arena &) : QueryOfMaps<T>(reader.maps) {}
    MXD_INLINE void location(int64_t sample, RealLanes<T> &x, RealLanes<T> &y) const { load_pairs<T>(xy + 2 * sample, x, y); }
};

// Of offsets, logits and reference points.
template <class T, class Rule> class LogitsGradients {
    typedef typename Rule::Reader Reader;

  public:
    T *dot; // of each row

    LogitsGradients(const Job &job, Arena &arena)
        : dot(arena.zeros<T>(4 * padded_samples(job.call.sizes))),
          xy({job.call.grad_offsets, {LEVEL, POINT, XY}}, job.call.sizes, arena),
          weights({job.call.grad_logits, {LEVEL, POINT}}, job.call.sizes, arena), sums(job) {}
    void open(int64_t b, int64_t h) {
        xy.open(b, h);
        weights.open(b, h);
        sums.open(b, h);
        at_once = xy.in_whole_vectors() && weights.in_whole_vectors() && !sums.of(0);
    }
    MXD_INLINE void write(int64_t q, const LocatedQuery<T> &query, const Reader &reader) {
        if (at_once && !reader.offsets.has_boxes()) return write_at_once(q, query, reader);
        write_in_turn(q, query, reader);
    }

  private:
    SampleOutput<T, 3, 2> xy;
    SampleOutput<T, 2, 1> weights;
    ReferenceSums<T> sums;
    bool at_once = false; // whole vectors are written in place, and reference points have no gradient

    MXD_INLINE void write_at_once(int64_t q, const LocatedQuery<T> &query, const Reader &reader) {
        T *grad_offsets = xy.begin(q), *grad_weight = weights.memory();
        each_vector(query, reader.padded, dot,
                    [&](int64_t i, const LocatedQuery<T> &own, const T *dots) __attribute__((always_inline)) {
                        Rule::template gradients<true>(own, dots, i, grad_offsets, grad_weight);
                    });
        reader.logits.gradients(q, grad_weight, weights.whole_vectors(), weights.begin(q));
    }
    __attribute__((noinline)) void write_in_turn(int64_t q, const LocatedQuery<T> &query, const Reader &reader) {
        T *grad_xy = xy.memory(), *grad_weight = weights.memory();
        each_vector(query, reader.padded, dot, [&](int64_t i, const LocatedQuery<T> &own, const T *dots) {
            if (reader.offsets.has_boxes())
                Rule::template gradients<false>(own, dots, i, grad_xy, grad_weight);
            else
                Rule::template gradients<true>(own, dots, i, grad_xy, grad_weight);
        });
        T *grad_offsets = xy.begin(q), *grad_logits = weights.begin(q);
        reader.offsets.gradients(q, grad_xy, xy.whole_vectors(), grad_offsets, sums.of(q));
        reader.logits.gradients(q, grad_weight, weights.whole_vectors(), grad_logits);
        xy.end(q, grad_offsets);
        weights.end(q, grad_logits);
    }
};

template <class T> class FromLogits {
  public:
    typedef LocatedQuery<T> Query;
    template <class Rule> using Gradients = LogitsGradients<T, Rule>;
    int64_t padded = 0;
    Maps<T> maps;
    Offsets<T> offsets;
    Logits<T> logits;

    FromLogits(const Call &c, Arena &arena)
        : maps(arena, padded_samples(c.sizes)), offsets(c, arena), logits(c, arena), call(c) {
        if (!arena.counts) use_levels(0, c.sizes.levels);
    }

    void use_levels(int64_t first, int64_t last) {
        padded = round_up((last - first) * call.sizes.points, LANES);
        offsets.use_levels(first, last);
        logits.use_levels(first);
        maps.set_levels(call.levels, first, last, call.sizes.points, padded);
    }
    void open(int64_t b, int64_t h) {
        offsets.open(b, h);
        logits.open(b, h);
        computed = 0;
    }
    MXD_INLINE void read(int64_t q, Query &query) {
        offsets.ask_for(q);
        logits.ask_for(q);
        if (q >= computed) compute(q);
        query.xy = offsets.locations_of(q);
        query.weights = logits.weights_of(q);
    }

  private:
    const Call &call;
    int64_t computed = 0;

    __attribute__((noinline)) void compute(int64_t q) {
        computed = end_of_computed(q, call.sizes);
        if (padded == 0) return;
        offsets.compute(q & -COMPUTED_TOGETHER, computed);
        logits.compute(q & -COMPUTED_TOGETHER, computed);
    }
};

} // namespace
} // namespace mxd::MXD_ISA
