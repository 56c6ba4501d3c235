// With logits, where only the gradient of feature_maps is wanted: the totals that the gradients of samples else write.
#pragma once

#include "kernels/aggregation/anchors.h"

namespace mxd::MXD_ISA {
namespace {

// Items: AnchorBlocks.
template <class T> class Totals {
  public:
    static int64_t items(const Job &job) {
        const Sizes &n = job.call.sizes;
        return n.batch * AnchorBlocks(job.call).blocks;
    }
    Totals(const Job &job, Arena &arena) : n(job.call.sizes), blocks(job.call), weights(job, arena) {}

    void operator()(int64_t item) {
        for (int64_t a = blocks.begin(item); a < blocks.end(item); ++a) weights.turn(blocks.batch(item), a);
    }

  private:
    Sizes n;
    AnchorBlocks blocks;
    AnchorWeights<T> weights;
};

} // namespace
} // namespace mxd::MXD_ISA
