// The weights of queries from their logits, the softmax of all levels and points, and the gradient back. Weights exist
// only in a few queries' scratch memory.
#pragma once

#include "kernels/attention/elements.h"
#include "kernels/shared/softmax.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> class Logits {
  public:
    Logits(const Call &call, Arena &arena)
        : n(call.sizes), logits(call.logits, {LEVEL, POINT}, T(0), room(n), arena),
          weights(PlainRows<T>::ring(2 * COMPUTED_TOGETHER, room(n), arena)) {
        logits.use_levels(0, n.levels, SOFTMAX_LANES<T>);
    }
    void use_levels(int64_t first) { first_sample = first * n.points; }
    void open(int64_t b, int64_t h) { logits.open(b, h); }
    MXD_INLINE void ask_for(int64_t q) const { logits.at_in_turn(q); }

    // Of the levels in use. Valid once compute() has reached the query.
    const T *weights_of(int64_t q) const { return weights[q] + first_sample; }

    // Of queries q..last-1, which begin at a multiple of their number, so that they lie side by side in a ring. A query
    // by itself waits for each step of its softmax.
    MXD_INLINE void compute(int64_t q, int64_t last) {
        const PlainRows<T> &rows = logits.of(q, last);
        const char *from = rows.at(q);
        char *to = weights.at(q);
        const int64_t step = rows.step, weight_step = weights.step, count = n.levels * n.points;
        for (; q < last; q += 4, from += 4 * step, to += 4 * weight_step) {
            const T *four[4];
            T *of_four[4];
            for (int64_t i = 0; i < 4; ++i) {
                four[i] = reinterpret_cast<const T *>(q + i < last ? from + i * step : from);
                of_four[i] = reinterpret_cast<T *>(to + i * weight_step);
            }
            softmax<T>(four, count, of_four);
        }
    }

    // From the gradients of a query's weights to those of its logits. Samples before `direct_until` go to of_logits,
    // the others are written over of_weights. All levels are in use.
    MXD_INLINE void gradients(int64_t q, T *of_weights, int64_t direct_until, T *of_logits) const {
        softmax_gradient<T>(weights[q], n.levels * n.points, of_weights, direct_until, of_logits);
    }

  private:
    Sizes n;
    PlainElements<T, 2> logits;
    PlainRows<T> weights;
    int64_t first_sample = 0; // of the levels in use

    static int64_t room(const Sizes &n) { return round_up(n.levels * n.points, SOFTMAX_LANES<T>) + LANES; }
};

} // namespace
} // namespace mxd::MXD_ISA
