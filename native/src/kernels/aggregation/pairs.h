// What an anchor's pairs (point, camera) have, whether they are given or computed: which are seen, and weights.
#pragma once

#include "kernels/aggregation/blocks.h"

namespace mxd::MXD_ISA {
namespace {

// The locations of an anchor's pairs, as T, and which of them are seen: those strictly inside the image.
template <class T> class SeenPairs {
  public:
    const int64_t *seen = nullptr;
    int64_t num_seen = 0;

    SeenPairs(const Call &c, Arena &arena) : call(c), n(c.sizes), found(arena.take<int64_t>(pairs_of(n))) {}
    const T *location(int64_t pair) const { return xy + 2 * pair; }

  protected:
    const Call &call;
    Sizes n;
    int64_t *found;
    const T *xy = nullptr;

    bool inside(int64_t pair) const { return is_inside(xy[2 * pair], xy[2 * pair + 1]); }
    // Whether a pair may read rows of a band on map `map`.
    bool reaches(int64_t pair, int64_t map, const BandReach<T> &band) const {
        return band.holds_one(pixel_of<T>(xy[2 * pair + 1], T(call.levels[map].height)), map);
    }
};

// The weights of pairs, or their logits, as they are given.
template <class T> class PairElements {
  public:
    PairElements(const Tensor &t, const Sizes &sizes) : tensor(t), n(sizes), of_pair(t, {SCALE, GROUP}) {}

    // Of a pair, [scales, groups]; of one of its samples, [groups].
    void read(int64_t b, int64_t anchor, int64_t pair, T *to) const { of_pair.read(first(b, anchor, pair), to); }
    void read(int64_t b, int64_t anchor, int64_t pair, int64_t scale, T *to) const {
        read_elements(at(tensor, first(b, anchor, pair) + scale * tensor.strides[SCALE]), tensor.dtype, tensor.strides[GROUP],
                      n.groups, to);
    }
    // Prefetches them.
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair) const {
        prefetch(tensor, first(b, anchor, pair), n.scales * n.groups);
    }
    MXD_INLINE void ask_for(int64_t b, int64_t anchor, int64_t pair, int64_t scale) const {
        prefetch(tensor, first(b, anchor, pair) + scale * tensor.strides[SCALE], n.groups);
    }

  private:
    const Tensor &tensor;
    Sizes n;
    SomeAxes<2> of_pair;

    int64_t first(int64_t b, int64_t anchor, int64_t pair) const {
        return offset_of(tensor, b, anchor) + pair / n.cameras * tensor.strides[KEY_POINT] +
               pair % n.cameras * tensor.strides[CAMERA];
    }
};

} // namespace
} // namespace mxd::MXD_ISA
