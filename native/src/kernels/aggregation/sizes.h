// How large a call of deformable_aggregation is. A pair (point, camera) is numbered point * cameras + camera.
#pragma once

#include "kernels/kernels.h"
#include "kernels/shared/sampling.h"

namespace mxd {
namespace MXD_ISA {
namespace {

struct Sizes {
    int64_t batch, features, channels, anchors, points, cameras, scales, groups, group_channels;
    bool with_logits;

    explicit Sizes(const Call &call)
        : batch(call.value.shape[0]), features(call.value.shape[1]), channels(call.value.shape[2]),
          anchors(call.locations.shape[1]), points(call.locations.shape[2]), cameras(call.starts.shape[0]),
          scales(call.starts.shape[1]), groups(call.weights.shape[5]),
          group_channels(groups > 0 ? channels / groups : 0), with_logits(call.with_logits) {}
    // Samples of a bundle: all scales of a pair (point, camera) stay together.
    int64_t room() const { return round_up(scales > 64 ? scales : 64, LANES); }
    int64_t pairs() const { return points * cameras; }
};

inline int64_t offset2(const mxd_tensor &t, int64_t i, int64_t j) { return i * t.strides[0] + j * t.strides[1]; }

// With logits: the rows of one anchor are used when those of the next have been found, and the one after it is turned.
constexpr int64_t KNOWN_ANCHORS = 3;

// Items: (batch, block of anchors).
struct AnchorBlocks {
    int64_t anchors, size, blocks;

    AnchorBlocks(const Call &call, const Sizes &n) : anchors(n.anchors) {
        // sums over a block must not depend on threads
        const int64_t items = call.grad_projection.data ? 64 : 8 * (call.num_threads > 1 ? call.num_threads : 1);
        const int64_t wanted = n.batch * n.anchors / items;
        size = wanted < 1 ? 1 : wanted > 16 ? 16 : wanted;
        blocks = (n.anchors + size - 1) / size;
    }
    int64_t batch(int64_t item) const { return item / blocks; }
    int64_t begin(int64_t item) const { return item % blocks * size; }
    int64_t end(int64_t item) const { return begin(item) + size < anchors ? begin(item) + size : anchors; }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
