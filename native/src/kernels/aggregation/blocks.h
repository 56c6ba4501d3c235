// How the anchors of deformable_aggregation are cut into items, and numbered.
#pragma once

#include "kernels/shared/job.h"
#include "kernels/shared/sampling.h"

namespace mxd::MXD_ISA {
namespace {

// Samples of a bundle: all scales of a pair (point, camera) stay together.
inline int64_t bundle_room(const Sizes &n) { return round_up(n.scales > 64 ? n.scales : 64, LANES); }

// A pair (point, camera) is numbered point * cameras + camera.
inline int64_t pairs_of(const Sizes &n) { return n.points * n.cameras; }

// With logits: while the rows of one anchor are used, those of the next are found, and the one after it is computed.
constexpr int64_t KNOWN_ANCHORS = 3;

// Items: (batch, block of anchors).
struct AnchorBlocks {
    int64_t anchors, size, blocks;

    explicit AnchorBlocks(const Call &call) : anchors(call.sizes.queries) {
        // sums over a block must not depend on threads
        const int64_t items = call.grad_projection.data ? 64 : 8 * (call.num_threads > 1 ? call.num_threads : 1);
        const int64_t wanted = call.sizes.batch * anchors / items;
        size = wanted < 1 ? 1 : wanted > 16 ? 16 : wanted;
        blocks = (anchors + size - 1) / size;
    }
    int64_t batch(int64_t item) const { return item / blocks; }
    int64_t begin(int64_t item) const { return item % blocks * size; }
    int64_t end(int64_t item) const { return begin(item) + size < anchors ? begin(item) + size : anchors; }
};

} // namespace
} // namespace mxd::MXD_ISA
