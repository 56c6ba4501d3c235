// The weights of anchors' pairs: as they are given, or with logits the softmax of each group over all samples of an
// anchor, times the pair's scale.
#pragma once

#include "anchor_sizes.h"
#include "grouped_softmax.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// Where weights or logits of samples are.
struct WeightAxes {
    int64_t camera, scale, point, group; // strides

    explicit WeightAxes(const Call &call)
        : camera(call.weights.strides[call.with_logits ? 2 : 3]), scale(call.weights.strides[call.with_logits ? 3 : 4]),
          point(call.weights.strides[call.with_logits ? 4 : 2]), group(call.weights.strides[5]) {}
};

// Of each anchor and group: the largest logit, and 1 / the sum of exps. The gradient of feature_maps goes through the
// anchors once for each band, and makes the weights of that band's samples from them.
template <class T> class SoftmaxTotals {
  public:
    static int64_t bytes(const Call &call) {
        const Sizes n(call);
        return n.with_logits ? n.batch * n.anchors * 2 * n.groups * int64_t(sizeof(T)) : 0;
    }
    explicit SoftmaxTotals(const Job &job) : n(job.call), all(reinterpret_cast<T *>(job.softmax_totals)) {}
    explicit operator bool() const { return all; }
    T *most(int64_t b, int64_t anchor) const { return all + (b * n.anchors + anchor) * 2 * n.groups; }
    T *share(int64_t b, int64_t anchor) const { return most(b, anchor) + n.groups; }

  private:
    Sizes n;
    T *all;
};

// pair_scale, which is 1 where it is not given.
template <class T> class PairScale {
  public:
    PairScale(const Call &call, const Sizes &n) : tensor(call.pair_scale), cameras(n.cameras) {}
    T of(int64_t b, int64_t anchor, int64_t pair) const {
        T scale = 1;
        if (tensor.data)
            read_elements(at(tensor, offset2(tensor, b, anchor) + pair % cameras * tensor.strides[2] +
                                         pair / cameras * tensor.strides[3]),
                          tensor.dtype, 1, 1, &scale);
        return scale;
    }

  private:
    const mxd_tensor &tensor;
    int64_t cameras;
};

// What is known of the logits of one anchor.
template <class T> struct AnchorSoftmax {
    T *exps;         // [camera, scale, point, group]
    T *most, *share; // [group]

    static int64_t bytes(const Sizes &n, int64_t rows) {
        return Arena::bytes<T>(GroupedSoftmax<T>::room(rows * n.groups)) + Arena::bytes<T>(2 * n.groups);
    }
    AnchorSoftmax(const Sizes &n, int64_t rows, Arena &arena)
        : exps(arena.take<T>(GroupedSoftmax<T>::room(rows * n.groups))), most(arena.take<T>(2 * n.groups)),
          share(most + n.groups) {}
};

template <class T> class AnchorWeights {
  public:
    static int64_t bytes(const Sizes &n) {
        const int64_t rows = rows_of(n);
        return GroupedSoftmax<T>::bytes(rows * n.groups, n.groups) + KNOWN_ANCHORS * AnchorSoftmax<T>::bytes(n, rows);
    }
    AnchorWeights(const Job &job, const Sizes &sizes, Arena &arena)
        : call(job.call), n(sizes), axes(job.call), of_pair(job.call.weights, 4), of_anchor(job.call.weights, 2),
          in_place(of_anchor.contiguous && call.weights.dtype == OWN<T>), pair_scale(job.call, sizes), totals(job),
          softmax(rows_of(n), n.groups, arena),
          anchors{{n, rows_of(n), arena}, {n, rows_of(n), arena}, {n, rows_of(n), arena}} {}

    // With logits, before the weights of an anchor's pairs are read. The two anchors before it are still known.
    void turn(int64_t b, int64_t anchor) {
        AnchorSoftmax<T> &to = anchors[anchor % KNOWN_ANCHORS];
        const int64_t offset = offset2(call.weights, b, anchor);
        if (totals) {
            to.most = totals.most(b, anchor);
            to.share = totals.share(b, anchor);
        }
        if (!in_place) of_anchor.read(offset, to.exps);
        const T *logits = in_place ? reinterpret_cast<const T *>(at(call.weights, offset)) : to.exps;
        const int64_t step = in_place ? call.weights.strides[1] * int64_t(sizeof(T)) : 0; // to the next anchor
        softmax(logits, reinterpret_cast<int64_t>(logits) + step, to.exps, to.most, to.share);
    }

    // The weights of a pair, [scales, groups].
    void read(int64_t b, int64_t anchor, int64_t pair, T *to) const {
        if (!n.with_logits) return of_pair.read(first(b, anchor, pair), to);
        const AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const T *exps = from.exps + first_row(pair) * n.groups, scale = pair_scale.of(b, anchor, pair);
        for (int64_t s = 0; s < n.scales; ++s)
            multiply(exps + s * n.points * n.groups, from.share, scale, to + s * n.groups);
    }
    // Prefetches them. With logits they were made just before.
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair) const {
        if (!n.with_logits) prefetch(call.weights, first(b, anchor, pair), n.scales * n.groups);
    }

    // Turns gradients of the weights of an anchor's pairs, [pair, scales, groups], into those of all its logits.
    // mean[group]: the sum of weights times gradients. of_weights and the anchor's exps are written over.
    void write_gradient(int64_t b, int64_t anchor, const int64_t *pairs, int64_t count, T *of_weights, T *mean) {
        AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const mxd_tensor &grad = call.grad_weights;
        const TrailingAxes<4> out(grad, 2);
        const bool direct = out.contiguous && grad.dtype == OWN<T>;
        const int64_t offset = offset2(grad, b, anchor);
        T *to = direct ? reinterpret_cast<T *>(at(grad, offset)) : from.exps;
        for (int64_t i = 0; i < count; ++i) {
            const T scale = pair_scale.of(b, anchor, pairs[i]), *exps = from.exps + first_row(pairs[i]) * n.groups;
            for (int64_t s = 0; s < n.scales; ++s)
                of_logits(exps + s * n.points * n.groups, from.share, scale, mean,
                          of_weights + (i * n.scales + s) * n.groups);
        }
        for (int64_t g = 0; g < n.groups; ++g) mean[g] *= -from.share[g]; // the others have weights * (0 - mean)
        softmax.scaled(from.exps, mean, to);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t s = 0; s < n.scales; ++s)
                memcpy(to + (first_row(pairs[i]) + s * n.points) * n.groups, of_weights + (i * n.scales + s) * n.groups,
                       size_t(n.groups) * sizeof(T));
        if (!direct) out.write(offset, to);
    }

  private:
    const Call &call;
    Sizes n;
    WeightAxes axes;
    TrailingAxes<2> of_pair;
    TrailingAxes<4> of_anchor;
    bool in_place; // logits are read as they lie
    PairScale<T> pair_scale;
    SoftmaxTotals<T> totals;
    GroupedSoftmax<T> softmax;
    AnchorSoftmax<T> anchors[KNOWN_ANCHORS];

    static int64_t rows_of(const Sizes &n) { return n.with_logits ? n.cameras * n.scales * n.points : 0; }
    int64_t first(int64_t b, int64_t anchor, int64_t pair) const {
        return offset2(call.weights, b, anchor) + pair / n.cameras * axes.point + pair % n.cameras * axes.camera;
    }
    // Of logits, on the first scale; `points` rows follow until the next scale.
    int64_t first_row(int64_t pair) const { return pair % n.cameras * n.scales * n.points + pair / n.cameras; }
    void multiply(const T *exps, const T *share, T scale, T *to) const {
        for_pieces<T>(n.groups, [&](auto lanes, auto vectors, int64_t g) {
            constexpr int N = lanes.value;
            for (int v = 0; v < vectors.value; ++v, g += N)
                store<T, N>(to + g, raw_load<T, N>(exps + g) * raw_load<T, N>(share + g) * scale);
        });
    }
    // Writes over of_weights.
    void of_logits(const T *exps, const T *share, T scale, const T *mean, T *of_weights) const {
        for_pieces<T>(n.groups, [&](auto lanes, auto vectors, int64_t g) {
            constexpr int N = lanes.value;
            for (int v = 0; v < vectors.value; ++v, g += N)
                store<T, N>(of_weights + g, raw_load<T, N>(exps + g) * raw_load<T, N>(share + g) *
                                                (raw_load<T, N>(of_weights + g) * scale - raw_load<T, N>(mean + g)));
        });
    }
};

// The weights of single samples, from SoftmaxTotals where logits are given.
template <class T> class SampleWeights {
  public:
    SampleWeights(const Job &job, const Sizes &sizes)
        : tensor(job.call.weights), n(sizes), axes(job.call), pair_scale(job.call, sizes), totals(job) {}

    void read(int64_t b, int64_t anchor, int64_t pair, int64_t scale, T *to) const {
        read_elements(at(tensor, first(b, anchor, pair, scale)), tensor.dtype, axes.group, n.groups, to);
        if (n.with_logits) turn(totals.most(b, anchor), totals.share(b, anchor), pair_scale.of(b, anchor, pair), to);
    }
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair, int64_t scale) const {
        prefetch(tensor, first(b, anchor, pair, scale), n.groups);
    }

  private:
    const mxd_tensor &tensor;
    Sizes n;
    WeightAxes axes;
    PairScale<T> pair_scale;
    SoftmaxTotals<T> totals;

    int64_t first(int64_t b, int64_t anchor, int64_t pair, int64_t scale) const {
        return offset2(tensor, b, anchor) + pair / n.cameras * axes.point + pair % n.cameras * axes.camera +
               scale * axes.scale;
    }
    void turn(const T *most, const T *share, T scale, T *logits) const {
        for_pieces<T>(n.groups, [&](auto lanes, auto vectors, int64_t g) {
            constexpr int N = lanes.value;
            for (int v = 0; v < vectors.value; ++v, g += N) {
                const Vec<T, N> e = exp_below_zero<T, N>(raw_load<T, N>(logits + g) - raw_load<T, N>(most + g));
                store<T, N>(logits + g, e * raw_load<T, N>(share + g) * scale);
            }
        });
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
