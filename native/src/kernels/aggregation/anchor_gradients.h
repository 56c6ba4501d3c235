// With logits: from the gradients of an anchor's samples to those of its key points and logits, and of the projection.
//
//   of a location    goes to its key point and its camera
//   of a logit       = softmax * (of its weight * pair_scale - mean), mean = sum of softmax * of weights * pair_scale
#pragma once

#include "kernels/aggregation/anchors.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> class AnchorGradients {
  public:
    AnchorGradients(const Job &job, Arena &arena)
        : call(job.call), n(call.sizes), points(call.grad_locations, {KEY_POINT, XYZ}), sums(job) {
        if (!call.with_logits) return;
        of_weights = arena.take<T>(pairs_of(n) * n.scales * n.groups);
        mean = arena.take<T>(n.groups);
        of_points = arena.take<T>(3 * n.points);
    }

    void open(int64_t item) {
        of_matrices = sums.of(item);
        for (int64_t i = 0; of_matrices && i < sums.numbers(); ++i) of_matrices[i] = 0;
    }
    // Another anchor. Its pairs come in the order in which they are seen.
    void begin() {
        num_pairs = 0;
        memset(mean, 0, size_t(n.groups) * sizeof(T));
        memset(of_points, 0, size_t(3 * n.points) * sizeof(T));
    }
    // Where the gradients of the next pair's weights belong, [scales, groups].
    T *of_next_pair() { return of_weights + num_pairs++ * n.scales * n.groups; }

    // Pair i of a bundle.
    void add(const AnchorReader<T> &reader, const Bundle<T> &bundle, int64_t i, const T *location, const T *of_pair) {
        const int64_t pair = bundle.pairs[i];
        if (call.grad_locations.data || of_matrices)
            reader.all_cameras().add_gradients(reader.points_of(bundle.anchor), pair, location,
                                               of_points + pair / n.cameras * 3, of_matrices);
        for (int64_t s = 0; s < n.scales; ++s) add_products(of_pair + s * n.groups, bundle.samples.weight(i * n.scales + s));
    }
    void write(int64_t b, int64_t anchor, const AnchorReader<T> &reader, AnchorWeights<T> &weights) {
        if (call.grad_locations.data) points.write(offset_of(call.grad_locations, b, anchor), of_points);
        if (call.grad_weights.data)
            weights.write_gradient(b, anchor, reader.points_of(anchor).pairs, num_pairs, of_weights, mean);
    }

  private:
    const Call &call;
    Sizes n;
    SomeAxes<2> points;
    ProjectionSums<T> sums;
    T *of_weights = nullptr, *mean = nullptr, *of_points = nullptr;
    T *of_matrices = nullptr; // of this item's anchors; null where it is not wanted
    int64_t num_pairs = 0;

    void add_products(const T *of_weight, const T *weight) {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            store<T, N>(mean + g, load<T, N>(mean + g) + load<T, N>(of_weight + g) * load<T, N>(weight + g));
        });
    }
};

} // namespace
} // namespace mxd::MXD_ISA
