// The forward direction of deformable_aggregation: each anchor's rows, summed with a coefficient for each group.
#pragma once

#include "kernels/aggregation/anchors.h"

namespace mxd::MXD_ISA {
namespace {

// Items: AnchorBlocks.
template <class V, class T> class Forward : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    using Base::items;
    Forward(const Job &job, Arena &arena)
        : Base(job, arena), coefficients(arena.take<T>(4 * bundle_room(this->n) * this->n.groups)) {}

    void operator()(int64_t item) {
        const int64_t b = this->blocks.batch(item);
        this->each(
            b, this->blocks.begin(item), this->blocks.end(item), [](int64_t, int64_t) {},
            [&](const Bundle<T> &bundle) { serve(b, bundle); });
    }

  private:
    T *coefficients; // [row, groups]

    void serve(int64_t b, const Bundle<T> &bundle) {
        const Sizes &n = this->n;
        if (bundle.first) memset(this->row, 0, size_t(n.channels) * sizeof(T));
        for (int64_t i = 0; i < bundle.num_rows() / 4; ++i)
            for (int k = 0; k < 4; ++k) {
                const int64_t entry = entry_of<4>(i, k);
                scaled<T>(bundle.samples.weight(i), bundle.corner_coefficient[entry], n.groups,
                          coefficients + entry * n.groups);
            }
        grouped_sum<V, T>(bundle.address, coefficients, bundle.num_rows(), n.groups, n.group_channels, this->row);
        const Tensor &out = this->call.output;
        if (bundle.last)
            write_elements(this->row, at(out, offset_of(out, b, bundle.anchor)), out.dtype, out.strides[CHANNEL], n.channels);
    }
};

} // namespace
} // namespace mxd::MXD_ISA
