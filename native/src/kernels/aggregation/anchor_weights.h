// The weights of anchors' pairs: as they are given, or with logits the softmax of each group over all samples of an
// anchor, times the pair's scale.
#pragma once

#include "kernels/aggregation/blocks.h"
#include "kernels/aggregation/grouped_softmax.h"

namespace mxd::MXD_ISA {
namespace {

// The offset of a pair in weights, logits or pair_scale; on the first scale.
inline int64_t offset_of_pair(const Call &call, const Tensor &t, int64_t b, int64_t anchor, int64_t pair) {
    return offset_of(t, b, anchor) + pair / call.sizes.cameras * t.strides[KEY_POINT] +
           pair % call.sizes.cameras * t.strides[CAMERA];
}

// The pair's number in pair_scale, or 1.
template <class T> T scale_of_pair(const Call &call, int64_t b, int64_t anchor, int64_t pair) {
    const Tensor &t = call.pair_scale;
    T scale = 1;
    if (t.data) read_elements(at(t, offset_of_pair(call, t, b, anchor, pair)), t.dtype, 1, 1, &scale);
    return scale;
}

// Of each anchor and group: the largest logit, and 1 / the sum of exps. The gradient of feature_maps goes through the
// anchors once for each band, and makes the weights of that band's samples from these two.
template <class T> class SoftmaxTotals {
  public:
    static int64_t bytes(const Call &call) {
        const Sizes &n = call.sizes;
        return call.with_logits ? n.batch * n.queries * 2 * n.groups * int64_t(sizeof(T)) : 0;
    }
    explicit SoftmaxTotals(const Job &job) : n(job.call.sizes), all(reinterpret_cast<T *>(job.softmax_totals)) {}
    explicit operator bool() const { return all; }
    T *most(int64_t b, int64_t anchor) const { return all + (b * n.queries + anchor) * 2 * n.groups; }
    T *inverse(int64_t b, int64_t anchor) const { return most(b, anchor) + n.groups; }

  private:
    Sizes n;
    T *all;
};

// The softmax of one anchor's logits.
template <class T> struct AnchorSoftmax {
    T *exps;           // [camera, scale, point, group]
    T *most, *inverse; // [group]: as in SoftmaxTotals

    AnchorSoftmax(const Sizes &n, int64_t rows, Arena &arena)
        : exps(arena.take<T>(GroupedSoftmax<T>::room(rows * n.groups))), most(arena.take<T>(2 * n.groups)),
          inverse(most + n.groups) {}
};

template <class T> class AnchorWeights {
  public:
    AnchorWeights(const Job &job, Arena &arena)
        : call(job.call), n(call.sizes), of_pair(job.call.weights, {SCALE, GROUP}),
          of_anchor(job.call.weights, {CAMERA, SCALE, KEY_POINT, GROUP}), totals(job), softmax(rows_of(call), n.groups, arena),
          anchors{{n, rows_of(call), arena}, {n, rows_of(call), arena}, {n, rows_of(call), arena}} {}

    // With logits, before the weights of an anchor's pairs are read. The weights of the two anchors before stay valid.
    void compute(int64_t b, int64_t anchor) {
        AnchorSoftmax<T> &to = anchors[anchor % KNOWN_ANCHORS];
        const int64_t offset = offset_of(call.weights, b, anchor);
        if (totals) {
            to.most = totals.most(b, anchor);
            to.inverse = totals.inverse(b, anchor);
        }
        const auto compute_elements = [&](auto *logits, int64_t step) { // step: to the next anchor
            softmax(logits, reinterpret_cast<int64_t>(logits + step), to.exps, to.most, to.inverse);
        };
        if (of_anchor.contiguous)
            return with_elements(at(call.weights, offset), call.weights.dtype,
                                 [&](auto *logits) { compute_elements(logits, call.weights.strides[QUERY]); });
        of_anchor.read(offset, to.exps);
        compute_elements(static_cast<const T *>(to.exps), 0);
    }

    // The weights of a pair, [scales, groups].
    void read(int64_t b, int64_t anchor, int64_t pair, T *to) const {
        if (!call.with_logits) return of_pair.read(offset_of_pair(call, call.weights, b, anchor, pair), to);
        const AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const T *exps = from.exps + first_row(pair) * n.groups, scale = scale_of_pair<T>(call, b, anchor, pair);
        for (int64_t s = 0; s < n.scales; ++s) multiply(exps + s * n.points * n.groups, from.inverse, scale, to + s * n.groups);
    }
    // Prefetches the weights of a pair. With logits they were computed just before.
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair) const {
        if (!call.with_logits) prefetch(call.weights, offset_of_pair(call, call.weights, b, anchor, pair), n.scales * n.groups);
    }

    // Turns gradients of the weights of an anchor's pairs, [pair, scales, groups], into those of all its logits.
    // mean[group]: the sum of weights times gradients. of_weights and the anchor's exps are written over.
    void write_gradient(int64_t b, int64_t anchor, const int64_t *pairs, int64_t count, T *of_weights, T *mean) {
        AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const Tensor &grad = call.grad_weights;
        const SomeAxes<4> out(grad, {CAMERA, SCALE, KEY_POINT, GROUP});
        const bool direct = out.contiguous && grad.dtype == OWN<T>;
        const int64_t offset = offset_of(grad, b, anchor);
        T *to = direct ? reinterpret_cast<T *>(at(grad, offset)) : from.exps;
        for (int64_t i = 0; i < count; ++i) {
            const T scale = scale_of_pair<T>(call, b, anchor, pairs[i]), *exps = from.exps + first_row(pairs[i]) * n.groups;
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
    SomeAxes<2> of_pair;
    SomeAxes<4> of_anchor;
    SoftmaxTotals<T> totals;
    GroupedSoftmax<T> softmax;
    AnchorSoftmax<T> anchors[KNOWN_ANCHORS];

    static int64_t rows_of(const Call &call) { return call.with_logits ? call.sizes.levels * call.sizes.points : 0; }
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

// The weights of single samples, from SoftmaxTotals where logits are given.
template <class T> class SampleWeights {
  public:
    explicit SampleWeights(const Job &job) : call(job.call), n(call.sizes), totals(job) {}

    void read(int64_t b, int64_t anchor, int64_t pair, int64_t scale, T *to) const {
        read_elements(at(call.weights, offset(b, anchor, pair, scale)), call.weights.dtype, call.weights.strides[GROUP],
                      n.groups, to);
        if (call.with_logits)
            compute(totals.most(b, anchor), totals.inverse(b, anchor), scale_of_pair<T>(call, b, anchor, pair), to);
    }
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair, int64_t scale) const {
        prefetch(call.weights, offset(b, anchor, pair, scale), n.groups);
    }

  private:
    const Call &call;
    Sizes n;
    SoftmaxTotals<T> totals;

    int64_t offset(int64_t b, int64_t anchor, int64_t pair, int64_t scale) const {
        return offset_of_pair(call, call.weights, b, anchor, pair) + scale * call.weights.strides[SCALE];
    }
    // Logits become weights.
    void compute(const T *most, const T *inverse, T scale, T *logits) const {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            const Vec<T, N> e = exp_below_zero<T, N>(load<T, N>(logits + g) - load<T, N>(most + g));
            store<T, N>(logits + g, e * load<T, N>(inverse + g) * scale);
        });
    }
};

// Where only the gradient of feature_maps is wanted: SoftmaxTotals, which the gradients of samples else write. Items:
// AnchorBlocks.
template <class T> class Totals {
  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * AnchorBlocks(job.call).blocks; }
    Totals(const Job &job, Arena &arena) : n(job.call.sizes), blocks(job.call), weights(job, arena) {}

    void operator()(int64_t item) {
        for (int64_t a = blocks.begin(item); a < blocks.end(item); ++a) weights.compute(blocks.batch(item), a);
    }

  private:
    Sizes n;
    AnchorBlocks blocks;
    AnchorWeights<T> weights;
};

} // namespace
} // namespace mxd::MXD_ISA
