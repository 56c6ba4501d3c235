// The gradients of samples: of all inputs but feature_maps.
#pragma once

#include "kernels/aggregation/anchors.h"

namespace mxd::MXD_ISA {
namespace {

// Items: AnchorBlocks.
template <class V, class T, class Reader> class SampleGradients : AnchorWorker<V, T, Reader> {
    typedef AnchorWorker<V, T, Reader> Base;

  public:
    using Base::items;
    SampleGradients(const Job &job, Arena &arena)
        : Base(job, arena), dot(arena.take<T>(4 * bundle_room(this->n) * this->n.groups)), gradients(job, arena) {}

    void operator()(int64_t item) {
        const int64_t b = this->blocks.batch(item);
        gradients.open(item);
        this->each(
            b, this->blocks.begin(item), this->blocks.end(item),
            [&](int64_t anchor, int64_t pair) { gradients.skip(b, anchor, pair); },
            [&](const Bundle<T> &bundle) { serve(b, bundle); });
    }

  private:
    T *dot; // [row, groups]
    typename Reader::Gradients gradients;

    void serve(int64_t b, const Bundle<T> &bundle) {
        const Sizes &n = this->n;
        if (bundle.first) gradients.begin();
        if (bundle.num_pairs > 0) find_dots(b, bundle);
        for (int64_t i = 0; i < bundle.num_pairs; ++i) {
            T location[2] = {0, 0}, *weight = gradients.of_next_pair();
            for (int64_t s = 0; s < n.scales; ++s) sample(bundle, i * n.scales + s, location, weight + s * n.groups);
            gradients.add(b, bundle, i, this->locations, location, weight);
        }
        if (bundle.last) gradients.end(b, bundle.anchor, this->locations, this->weights);
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
