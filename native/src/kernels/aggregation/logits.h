// The weights of anchors' pairs from logits: the softmax of each group over all samples of an anchor, times the pair's
// scale.
#pragma once

#include "kernels/aggregation/grouped_softmax.h"
#include "kernels/aggregation/pairs.h"

namespace mxd::MXD_ISA {
namespace {

// Of each anchor and group: the largest logit, and 1 / the sum of exps. The gradient of feature_maps goes through the
// anchors once for each band, and makes the weights of that band's samples from these two.
template <class T> class SoftmaxTotals {
  public:
    static int64_t bytes(const Call &call) {
        const Sizes &n = call.sizes;
        return n.batch * n.queries * 2 * n.groups * int64_t(sizeof(T));
    }
    explicit SoftmaxTotals(const Job &job) : n(job.call.sizes), all(reinterpret_cast<T *>(job.softmax_totals)) {}
    explicit operator bool() const { return all; }
    T *most(int64_t b, int64_t anchor) const { return all + (b * n.queries + anchor) * 2 * n.groups; }
    T *inverse(int64_t b, int64_t anchor) const { return most(b, anchor) + n.groups; }

  private:
    Sizes n;
    T *all;
};

// pair_scale, which is 1 where it is not given.
template <class T> class PairScale {
  public:
    explicit PairScale(const Call &call) : tensor(call.pair_scale), cameras(call.sizes.cameras) {}
    T of(int64_t b, int64_t anchor, int64_t pair) const {
        T scale = 1;
        if (tensor.data)
            read_elements(at(tensor, offset_of(tensor, b, anchor) + pair % cameras * tensor.strides[CAMERA] +
                                         pair / cameras * tensor.strides[KEY_POINT]),
                          tensor.dtype, 1, 1, &scale);
        return scale;
    }

  private:
    const Tensor &tensor;
    int64_t cameras;
};

// The softmax of one anchor's logits.
template <class T> struct AnchorSoftmax {
    T *exps;           // [camera, scale, point, group]
    T *most, *inverse; // [group]: as in SoftmaxTotals

    AnchorSoftmax(const Sizes &n, int64_t rows, Arena &arena)
        : exps(arena.take<T>(GroupedSoftmax<T>::room(rows * n.groups))), most(arena.take<T>(2 * n.groups)),
          inverse(most + n.groups) {}
};

template <class T> class LogitsWeights {
  public:
    LogitsWeights(const Job &job, Arena &arena)
        : call(job.call), n(call.sizes), of_anchor(job.call.logits, {CAMERA, SCALE, KEY_POINT, GROUP}), pair_scale(job.call),
          totals(job), softmax(rows_of(call), n.groups, arena),
          anchors{{n, rows_of(call), arena}, {n, rows_of(call), arena}, {n, rows_of(call), arena}} {}

    // Before the weights of an anchor's pairs are read. An anchor that no camera sees has its softmax computed as well
    // where gradients are: where it is NaN, so are they.
    void open(int64_t b, int64_t anchor, bool is_seen) {
        if (call.backward || is_seen) compute(b, anchor);
    }
    // The weights of the two anchors before stay valid.
    void compute(int64_t b, int64_t anchor) {
        AnchorSoftmax<T> &to = anchors[anchor % KNOWN_ANCHORS];
        const int64_t offset = offset_of(call.logits, b, anchor);
        if (totals) {
            to.most = totals.most(b, anchor);
            to.inverse = totals.inverse(b, anchor);
        }
        const auto compute_elements = [&](auto *logits, int64_t step) { // step: to the next anchor
            softmax(logits, reinterpret_cast<int64_t>(logits + step), to.exps, to.most, to.inverse);
        };
        if (of_anchor.contiguous)
            return with_elements(at(call.logits, offset), call.logits.dtype,
                                 [&](auto *logits) { compute_elements(logits, call.logits.strides[QUERY]); });
        of_anchor.read(offset, to.exps);
        compute_elements(static_cast<const T *>(to.exps), 0);
    }

    // The weights of a pair, [scales, groups].
    void read(int64_t b, int64_t anchor, int64_t pair, T *to) const {
        const AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const T *exps = from.exps + first_row(pair) * n.groups, scale = pair_scale.of(b, anchor, pair);
        for (int64_t s = 0; s < n.scales; ++s) multiply(exps + s * n.points * n.groups, from.inverse, scale, to + s * n.groups);
    }
    MXD_INLINE void ask_for(int64_t, int64_t, int64_t) const {} // they were computed just before

    // Turns gradients of the weights of an anchor's pairs, [pair, scales, groups], into those of all its logits.
    // mean[group]: the sum of weights times gradients. of_weights and the anchor's exps are written over.
    void write_gradient(int64_t b, int64_t anchor, const int64_t *pairs, int64_t count, T *of_weights, T *mean) {
        AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const Tensor &grad = call.grad_logits;
        const SomeAxes<4> out(grad, {CAMERA, SCALE, KEY_POINT, GROUP});
        const bool direct = out.contiguous && grad.dtype == OWN<T>;
        const int64_t offset = offset_of(grad, b, anchor);
        T *to = direct ? reinterpret_cast<T *>(at(grad, offset)) : from.exps;
        for (int64_t i = 0; i < count; ++i) {
            const T scale = pair_scale.of(b, anchor, pairs[i]), *exps = from.exps + first_row(pairs[i]) * n.groups;
            for (int64_t s = 0; s < n.scales; ++s)
                of_logits(exps + s * n.points * n.groups, from.inverse, scale, mean,
                          of_weights + (i * n.scales + s) * n.groups);
        }
        for (int64_t g = 0; g < n.groups; ++g) mean[g] *= -from.inverse[g]; // the others have weights * (0 - mean)
        softmax.multiply(from.exps, mean, to);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t s = 0; s < n.scales; ++s)
                memcpy(to + (first_row(pairs[i]) + s * n.points) * n.groups, of_weights + (i * n.scales + s) * n.groups,
                       size_t(n.groups) * sizeof(T));
        if (!direct) out.write(offset, to);
    }

  private:
    const Call &call;
    Sizes n;
    SomeAxes<4> of_anchor;
    PairScale<T> pair_scale;
    SoftmaxTotals<T> totals;
    GroupedSoftmax<T> softmax;
    AnchorSoftmax<T> anchors[KNOWN_ANCHORS];

    static int64_t rows_of(const Call &call) { return call.sizes.levels * call.sizes.points; }
    // Of logits, on the first scale; `points` rows follow until the next scale.
    int64_t first_row(int64_t pair) const { return pair % n.cameras * n.scales * n.points + pair / n.cameras; }
    void multiply(const T *exps, const T *inverse, T scale, T *to) const {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            store<T, N>(to + g, load<T, N>(exps + g) * load<T, N>(inverse + g) * scale);
        });
    }
    // Writes over of_weights.
    void of_logits(const T *exps, const T *inverse, T scale, const T *mean, T *of_weights) const {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            const Vec<T, N> of_softmax = load<T, N>(of_weights + g) * scale;
            store<T, N>(of_weights + g, load<T, N>(exps + g) * load<T, N>(inverse + g) * (of_softmax - load<T, N>(mean + g)));
        });
    }
};

// The weights of single samples.
template <class T> class LogitsSampleWeights {
  public:
    LogitsSampleWeights(const Job &job, Arena &)
        : n(job.call.sizes), logits(job.call.logits, n), pair_scale(job.call), totals(job) {}

    void read(int64_t b, int64_t anchor, int64_t pair, int64_t scale, T *to) const {
        logits.read(b, anchor, pair, scale, to);
        compute(totals.most(b, anchor), totals.inverse(b, anchor), pair_scale.of(b, anchor, pair), to);
    }
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair, int64_t scale) const {
        logits.ask_for(b, anchor, pair, scale);
    }

  private:
    Sizes n;
    PairElements<T> logits;
    PairScale<T> pair_scale;
    SoftmaxTotals<T> totals;

    // Logits become weights.
    void compute(const T *most, const T *inverse, T scale, T *logits) const {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            const Vec<T, N> e = exp_below_zero<T, N>(load<T, N>(logits + g) - load<T, N>(most + g));
            store<T, N>(logits + g, e * load<T, N>(inverse + g) * scale);
        });
    }
};

} // namespace
} // namespace mxd::MXD_ISA
