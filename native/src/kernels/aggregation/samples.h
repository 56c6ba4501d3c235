// The gradients of sample_locations and weights; with logits, of key points, the projection and logits.
#pragma once

#include "kernels/aggregation/anchors.h"

namespace mxd::MXD_ISA {
namespace {

// With logits: from the gradients of an anchor's samples to those of its key points and logits, and of the projection.
//
//   of a location    goes to its key point and its camera
//   of a logit       = softmax * (of its weight * pair_scale - mean), mean = sum of softmax * of weights * pair_scale
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

// Items: AnchorBlocks.
template <class V, class T> class SampleGradients : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    using Base::items;
    SampleGradients(const Job &job, Arena &arena)
        : Base(job, arena), dot(arena.take<T>(4 * bundle_room(this->n) * this->n.groups)),
          pair(arena.take<T>(pair_size(this->n))), weights_out(job.call.grad_weights, {SCALE, GROUP}), of_anchor(job, arena) {}

    void operator()(int64_t item) {
        const int64_t b = this->blocks.batch(item);
        of_anchor.open(item);
        this->each(
            b, this->blocks.begin(item), this->blocks.end(item),
            [&](int64_t a, int64_t unseen) {
                memset(pair, 0, size_t(pair_size(this->n)) * sizeof(T));
                write(b, a, unseen, pair, pair);
            },
            [&](const Bundle<T> &bundle) { serve(b, bundle); });
    }

  private:
    T *dot;  // [row, groups]
    T *pair; // gradients of the weights of one pair (point, camera), [scales, groups]
    SomeAxes<2> weights_out;
    AnchorGradients<T> of_anchor; // with logits

    static int64_t pair_size(const Sizes &n) { return n.scales * n.groups > 2 ? n.scales * n.groups : 2; }

    void write(int64_t b, int64_t a, int64_t pair_index, const T *location, const T *weight) {
        const Tensor &l = this->call.grad_locations, &w = this->call.grad_weights;
        const int64_t p = pair_index / this->n.cameras, cam = pair_index % this->n.cameras;
        if (l.data)
            write_elements(location, at(l, offset_of(l, b, a) + p * l.strides[KEY_POINT] + cam * l.strides[CAMERA]), l.dtype,
                           l.strides[PAIR_XY], 2);
        if (w.data) weights_out.write(offset_of(w, b, a) + p * w.strides[KEY_POINT] + cam * w.strides[CAMERA], weight);
    }

    void serve(int64_t b, const Bundle<T> &bundle) {
        const Sizes &n = this->n;
        if (this->call.with_logits && bundle.first) of_anchor.begin();
        if (bundle.num_pairs > 0) find_dots(b, bundle);
        for (int64_t i = 0; i < bundle.num_pairs; ++i) {
            T location[2] = {0, 0}, *weight = this->call.with_logits ? of_anchor.of_next_pair() : pair;
            for (int64_t s = 0; s < n.scales; ++s) sample(bundle, i * n.scales + s, location, weight + s * n.groups);
            if (this->call.with_logits)
                of_anchor.add(this->locations, bundle, i, location, weight);
            else
                write(b, bundle.anchor, bundle.pairs[i], location, weight);
        }
        if (this->call.with_logits && bundle.last) of_anchor.write(b, bundle.anchor, this->locations, this->weights);
    }

    void find_dots(int64_t b, const Bundle<T> &bundle) {
        const Sizes &n = this->n;
        const Tensor &grad = this->call.grad_output;
        const T *g =
            row_as(at(grad, offset_of(grad, b, bundle.anchor)), grad.dtype, grad.strides[CHANNEL], n.channels, this->row);
        grouped_dots<V, T>(bundle.address, bundle.num_rows(), n.groups, n.group_channels, g, dot);
    }

    // Adds to location[0], location[1]; writes weight[groups].
    void sample(const Bundle<T> &bundle, int64_t i, T *location, T *weight) {
        T slope_x = 0, slope_y = 0;
        for_pieces<T>(this->n.groups, [&](auto lanes, auto vectors, int64_t c) {
            constexpr int N = lanes.value;
            const auto right = broadcast<T, N>(bundle.right[i]), below = broadcast<T, N>(bundle.below[i]);
            for (int v = 0; v < vectors.value; ++v, c += N) {
                Vec<T, N> d[4];
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const int64_t entry = entry_of<4>(i, k);
                    d[k] = bundle.inside[entry] ? load<T, N>(dot + entry * this->n.groups + c) : Vec<T, N>{};
                }
                const CornerSlopes<Vec<T, N>> slope(d, right, below);
                store<T, N>(weight + c, slope.sample);
                const Vec<T, N> w = load<T, N>(bundle.samples.weight(i) + c);
                slope_x += sum<T, N>(w * slope.dx);
                slope_y += sum<T, N>(w * slope.dy);
            }
        });
        location[0] += bundle.samples.maps().width(i) * slope_x;
        location[1] += bundle.samples.maps().height(i) * slope_y;
    }
};

} // namespace
} // namespace mxd::MXD_ISA
