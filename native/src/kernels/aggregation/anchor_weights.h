// The weights of an anchor's pairs (point, camera). Without logits they are an input. With logits they are the softmax of each
// group over all samples of the anchor, times the scale of the pair.
#pragma once

#include "kernels/shared/job.h"
#include "kernels/shared/sampling.h"
#include "kernels/shared/softmax.h"

namespace mxd::MXD_ISA {
namespace {

// The softmax over the rows of contiguous logits [row, groups], for each group. The rows are processed as one array, in
// vectors. Number i of the array belongs to group i % groups. So the groups of a vector's lanes repeat after `cycle` numbers,
// and each of `cycle` lanes gets a maximum and a sum. At the end the lanes of each group are folded.
template <class T> class GroupedSoftmax {
    static constexpr int N = WIDTH<T>;
    static constexpr int64_t STEP = 4 * N; // four vectors at once, which hides the latency of exp
    typedef Vec<T, N> Lanes;

  public:
    static int64_t room(int64_t count) { return round_up(count, STEP); }
    GroupedSoftmax(int64_t rows, int64_t row_size, Arena &arena)
        : groups(row_size), count(rows * row_size), whole(count / STEP * STEP), padded(room(count)),
          cycle(row_size > 0 ? STEP / common_divisor(row_size, STEP) * row_size : STEP), used(cycle < padded ? cycle : padded),
          lanes(arena.take<T>(padded + row_size)) {}

    // Computes exps = e^(logit - most[group]) and inverse[group] = 1 / sum of exps. As in torch, a group with a NaN or with an
    // infinite maximum becomes NaN. next: the address of logits to prefetch, which may be invalid.
    template <class S> void operator()(const S *logits, int64_t next, T *exps, T *most, T *inverse) const {
        if (count == 0) return;
        find_most(logits, exps, most);
        if constexpr (same_type<S, T>)
            find_exps(logits, next, int64_t(sizeof(S)), exps, inverse);
        else
            find_exps(exps, next, int64_t(sizeof(S)), exps, inverse);
    }

    // Computes to[row, group] = exps * factor[group]. The last numbers, which do not fill STEP, are first computed in exps.
    void multiply(T *exps, const T *factor, T *to) const {
        for (int64_t i = 0; i < used; i += groups) memcpy(lanes + i, factor, size_t(groups) * sizeof(T));
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes by[4];
            memcpy(by, lanes + column, sizeof by);
            for (int64_t i = column; i < padded; i += cycle) {
                T *out = (i < whole ? to : exps) + i;
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) store<T, N>(out + k * N, raw_load<T, N>(exps + i + k * N) * by[k]);
            }
        }
        if (to != exps) memcpy(to + whole, exps + whole, size_t(count - whole) * sizeof(T));
    }

  private:
    int64_t groups, count, whole, padded, cycle, used;
    T *lanes; // the maximum, and later the sum, of each of `used` lanes

    // Finds the maximum of each group. Copies all logits to exps if they have another dtype than T. Otherwise copies only the
    // last logits, which do not fill STEP numbers.
    template <class S> void find_most(const S *logits, T *exps, T *most) const {
        const Lanes least = broadcast<T, N>(-T(__builtin_inf()));
        for (int64_t i = whole; i < padded; ++i) exps[i] = i < count ? load<T, 1>(logits + i) : least[0];
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes top[4] = {least, least, least, least};
            const auto use = [&](Lanes x, int k) __attribute__((always_inline)) { top[k] = x > top[k] ? x : top[k]; };
            int64_t i = column;
            for (; i < whole; i += cycle) {
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const Lanes x = load<T, N>(logits + i + k * N);
                    if constexpr (!same_type<S, T>) store<T, N>(exps + i + k * N, x);
                    use(x, k);
                }
            }
            if (i < padded) {
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) use(load<T, N>(exps + i + k * N), k);
            }
            memcpy(lanes + column, top, sizeof top);
        }
        fold(least[0], most, Larger());
    }

    // Computes exps and inverse. `logits` is `exps` if find_most copied all logits to exps.
    void find_exps(const T *logits, int64_t next, int64_t size, T *exps, T *inverse) const {
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes top[4], sums[4] = {};
            memcpy(top, lanes + column, sizeof top);
            for (int64_t i = column; i < padded; i += cycle) {
                const T *from = (i < whole ? logits : exps) + i;
                for (int64_t line = 0; line < STEP * size; line += 64) ask_for<64>(next + i * size + line);
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const Lanes e = exp_below_zero<T, N>(load<T, N>(from + k * N) - top[k]);
                    store<T, N>(exps + i + k * N, e);
                    sums[k] += e;
                }
            }
            memcpy(lanes + column, sums, sizeof sums);
        }
        fold(T(0), inverse, Total());
        for (int64_t g = 0; g < groups; ++g) inverse[g] = 1 / inverse[g];
    }

    static int64_t common_divisor(int64_t a, int64_t b) {
        while (b != 0) {
            const int64_t rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    }

    // Folds the lanes of each group into one number, and stores it in `to` and in all lanes of the group.
    template <class Fold> void fold(T neutral, T *to, Fold &&fold) const {
        const int64_t end = round_up(used, groups);
        for (int64_t i = used; i < end; ++i) lanes[i] = neutral;
        for_vectors<T>(groups, [&](auto width, int64_t g) {
            constexpr int W = width.value;
            Vec<T, W> all = raw_load<T, W>(lanes + g);
            for (int64_t i = groups + g; i < end; i += groups) all = fold(raw_load<T, W>(lanes + i), all);
            store<T, W>(to + g, all);
            for (int64_t i = g; i < end; i += groups) store<T, W>(lanes + i, all);
        });
    }
};

// The number of anchors whose softmax is kept. The rows of anchor i are summed while the rows of anchor i + 1 are found and the
// softmax of anchor i + 2 is computed.
constexpr int64_t KNOWN_ANCHORS = 3;

// Cuts anchors into Blocks. A range has the anchors of one batch element.
inline Blocks anchor_blocks(const Call &call) {
    // The gradient of projections is a sum over blocks, so the blocks must not depend on the number of threads.
    const int64_t items = call.grad_projection.data ? 64 : 8 * (call.num_threads > 1 ? call.num_threads : 1);
    return {call.sizes.queries, between(1, call.sizes.batch * call.sizes.queries / items, 16)};
}

// Returns the offset of a pair in weights, logits or pair_scale, for the first scale.
inline int64_t offset_of_pair(const Call &call, const Tensor &t, int64_t b, int64_t anchor, int64_t pair) {
    return offset_of(t, b, anchor) + pair / call.sizes.cameras * t.strides[KEY_POINT] +
           pair % call.sizes.cameras * t.strides[CAMERA];
}

// Returns the pair's element of pair_scale, or 1 if pair_scale is not given.
template <class T> T scale_of_pair(const Call &call, int64_t b, int64_t anchor, int64_t pair) {
    const Tensor &t = call.pair_scale;
    T scale = 1;
    if (t.data) read_elements(at(t, offset_of_pair(call, t, b, anchor, pair)), t.dtype, 1, 1, &scale);
    return scale;
}

// The largest logit and 1 / sum of exps, for each anchor and group. The gradient of feature_maps reads the anchors once for
// each band, and recomputes the weights of the band's samples from these two numbers.
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

template <class T> struct AnchorSoftmax {
    T *exps;           // [camera, scale, point, group]
    T *most, *inverse; // [group], as in SoftmaxTotals

    AnchorSoftmax(const Sizes &n, int64_t rows, Arena &arena)
        : exps(arena.take<T>(GroupedSoftmax<T>::room(rows * n.groups))), most(arena.take<T>(2 * n.groups)),
          inverse(most + n.groups) {}
};

template <class T> class AnchorWeights {
  public:
    AnchorWeights(const Job &job, Arena &arena)
        : call(job.call), n(call.sizes), by_pair(job.call.weights, {SCALE, GROUP}),
          by_anchor(job.call.weights, {CAMERA, SCALE, KEY_POINT, GROUP}), totals(job), softmax(rows_of(call), n.groups, arena),
          anchors{{n, rows_of(call), arena}, {n, rows_of(call), arena}, {n, rows_of(call), arena}} {}

    // Computes the softmax of an anchor, which read() needs in calls with logits. The softmaxes of the two previous anchors
    // stay valid.
    void compute(int64_t b, int64_t anchor) {
        AnchorSoftmax<T> &to = anchors[anchor % KNOWN_ANCHORS];
        const int64_t offset = offset_of(call.weights, b, anchor);
        if (totals) {
            to.most = totals.most(b, anchor);
            to.inverse = totals.inverse(b, anchor);
        }
        const auto compute_elements = [&](auto *logits, int64_t step) { // step: elements to the next anchor
            softmax(logits, reinterpret_cast<int64_t>(logits + step), to.exps, to.most, to.inverse);
        };
        if (by_anchor.contiguous)
            return with_elements(at(call.weights, offset), call.weights.dtype,
                                 [&](auto *logits) { compute_elements(logits, call.weights.strides[QUERY]); });
        by_anchor.read(offset, to.exps);
        compute_elements(static_cast<const T *>(to.exps), 0);
    }

    // Reads the weights of a pair, [scales, groups].
    void read(int64_t b, int64_t anchor, int64_t pair, T *to) const {
        if (!call.with_logits) return by_pair.read(offset_of_pair(call, call.weights, b, anchor, pair), to);
        const AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const T *exps = from.exps + first_row(pair) * n.groups, scale = scale_of_pair<T>(call, b, anchor, pair);
        for (int64_t s = 0; s < n.scales; ++s) multiply(exps + s * n.points * n.groups, from.inverse, scale, to + s * n.groups);
    }
    // Prefetches the weights of a pair. With logits does nothing, because the softmax is still in the cache.
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair) const {
        if (!call.with_logits) prefetch(call.weights, offset_of_pair(call, call.weights, b, anchor, pair), n.scales * n.groups);
    }

    // Computes the gradients of all logits of an anchor. grad_weights, [pair, scales, groups], has the gradients of the weights
    // of seen pairs. mean[group] is the sum of weights times gradients. Overwrites grad_weights, mean and the anchor's exps.
    void write_gradient(int64_t b, int64_t anchor, const int64_t *pairs, int64_t count, T *grad_weights, T *mean) {
        AnchorSoftmax<T> &from = anchors[anchor % KNOWN_ANCHORS];
        const Tensor &grad = call.grad_weights;
        const SomeAxes<4> out(grad, {CAMERA, SCALE, KEY_POINT, GROUP});
        const bool direct = out.contiguous && grad.dtype == OWN<T>;
        const int64_t offset = offset_of(grad, b, anchor);
        T *to = direct ? reinterpret_cast<T *>(at(grad, offset)) : from.exps;
        for (int64_t i = 0; i < count; ++i) {
            const T scale = scale_of_pair<T>(call, b, anchor, pairs[i]), *exps = from.exps + first_row(pairs[i]) * n.groups;
            for (int64_t s = 0; s < n.scales; ++s)
                find_grad_logits(exps + s * n.points * n.groups, from.inverse, scale, mean,
                                 grad_weights + (i * n.scales + s) * n.groups);
        }
        for (int64_t g = 0; g < n.groups; ++g)
            mean[g] *= -from.inverse[g]; // the gradient is softmax * (0 - mean) for pairs that are not seen
        softmax.multiply(from.exps, mean, to);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t s = 0; s < n.scales; ++s)
                memcpy(to + (first_row(pairs[i]) + s * n.points) * n.groups, grad_weights + (i * n.scales + s) * n.groups,
                       size_t(n.groups) * sizeof(T));
        if (!direct) out.write(offset, to);
    }

  private:
    const Call &call;
    Sizes n;
    SomeAxes<2> by_pair;
    SomeAxes<4> by_anchor;
    SoftmaxTotals<T> totals;
    GroupedSoftmax<T> softmax;
    AnchorSoftmax<T> anchors[KNOWN_ANCHORS];

    static int64_t rows_of(const Call &call) { return call.with_logits ? call.sizes.levels * call.sizes.points : 0; }
    // Returns the row of a pair's logits for the first scale. The row for the next scale is `points` rows later.
    int64_t first_row(int64_t pair) const { return pair % n.cameras * n.scales * n.points + pair / n.cameras; }
    void multiply(const T *exps, const T *inverse, T scale, T *to) const {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            store<T, N>(to + g, load<T, N>(exps + g) * load<T, N>(inverse + g) * scale);
        });
    }
    // Overwrites the gradients of weights with the gradients of logits.
    void find_grad_logits(const T *exps, const T *inverse, T scale, const T *mean, T *grads) const {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            const Vec<T, N> grad_softmax = load<T, N>(grads + g) * scale;
            store<T, N>(grads + g, load<T, N>(exps + g) * load<T, N>(inverse + g) * (grad_softmax - load<T, N>(mean + g)));
        });
    }
};

// Reads the weights of single samples. With logits computes the weights from SoftmaxTotals.
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
    // Replaces logits by weights.
    void compute(const T *most, const T *inverse, T scale, T *logits) const {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            const Vec<T, N> e = exp_below_zero<T, N>(load<T, N>(logits + g) - load<T, N>(most + g));
            store<T, N>(logits + g, e * load<T, N>(inverse + g) * scale);
        });
    }
};

// Computes SoftmaxTotals in calls that do not run SampleGradients, because SampleGradients computes them itself. An item is a
// block of anchor_blocks.
template <class T> class Totals {
  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * anchor_blocks(job.call).per_range; }
    Totals(const Job &job, Arena &arena) : blocks(anchor_blocks(job.call)), weights(job, arena) {}

    void operator()(int64_t item) {
        for (int64_t a = blocks.begin(item); a < blocks.end(item); ++a) weights.compute(blocks.range(item), a);
    }

  private:
    Blocks blocks;
    AnchorWeights<T> weights;
};

} // namespace
} // namespace mxd::MXD_ISA
