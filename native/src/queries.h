// What multi_scale_deformable_attn and geometric_kernel_attention share: value [bs, num_keys, num_heads, embed_dims]
// read by queries [bs, num_queries, num_heads, num_levels, num_points], and in which order.
#pragma once

#include "bands.h"
#include "kernels.h"
#include "sampling.h"

namespace mxd {
namespace MXD_ISA {
namespace {

struct Sizes {
    int64_t batch, keys, heads, channels, queries, levels, points;

    explicit Sizes(const Call &call)
        : batch(call.value.shape[0]), keys(call.value.shape[1]), heads(call.value.shape[2]),
          channels(call.value.shape[3]), queries(call.locations.shape[1]), levels(call.num_levels),
          points(call.locations.shape[4]) {}
    int64_t room() const { return round_up(levels * points, LANES); }
};

inline int64_t offset3(const mxd_tensor &t, int64_t i, int64_t j, int64_t k) {
    return i * t.strides[0] + j * t.strides[1] + k * t.strides[2];
}

// How many queries ahead inputs are asked for. A head's share of a query is a few cache lines a kilobyte apart, which
// hardware does not foresee.
constexpr int64_t PREFETCH_QUERIES = 8;

// Positions are worked out two queries ahead of their use, so that rows can be asked for while earlier ones are added
// up. One query ahead is not enough: rows that are too near wait for each other.
constexpr int AHEAD = 1;
constexpr int SLOTS = 4; // a power of two above AHEAD

// prepare(query, slot) for each query, and AHEAD queries later finish(query, slot, slot prepared last).
template <class Prepare, class Finish>
inline void ahead(int64_t begin, int64_t end, Prepare &&prepare, Finish &&finish) {
    for (int64_t q = begin; q < end + AHEAD; ++q) {
        const int64_t i = q - begin;
        if (q < end) prepare(q, i % SLOTS);
        if (i >= AHEAD) finish(q - AHEAD, (i - AHEAD) % SLOTS, i % SLOTS);
    }
}

// Items (batch, head, block of queries): consecutive items share a head's rows of value in the cache. Long blocks
// prefetch best, but every thread shall have several items of what is to be done at once: all heads, or one.
struct QueryBlocks {
    Sizes n;
    int64_t size, per_head;

    explicit QueryBlocks(const Call &call) : n(call) {
        const int64_t together = (call.copy ? 1 : n.batch * n.heads) * n.queries;
        const int64_t wanted = together / (8 * (call.num_threads > 1 ? call.num_threads : 1));
        size = wanted < SHORTEST ? SHORTEST : wanted > LONGEST ? LONGEST : wanted;
        per_head = (n.queries + size - 1) / size;
    }
    int64_t count() const { return n.batch * n.heads * per_head; }
    int64_t batch(int64_t item) const { return item / per_head / n.heads; }
    int64_t head(int64_t item) const { return item / per_head % n.heads; }
    int64_t begin(int64_t item) const { return item % per_head * size; }
    int64_t end(int64_t item) const { return begin(item) + size < n.queries ? begin(item) + size : n.queries; }

  private:
    static constexpr int64_t SHORTEST = 32, LONGEST = 1024;
};

// Locations and weights of one query and head on levels first..last-1, as T, padded to LANES samples on empty maps.
template <class T> class QueryReader {
  public:
    int64_t samples = 0, padded = 0;

    static int64_t bytes(const Sizes &n) {
        return Maps<T>::bytes(n.room()) + Arena::bytes<T>(2 * n.room()) + Arena::bytes<T>(n.room());
    }
    QueryReader(const Call &c, const Sizes &n, Arena &arena)
        : call(c), queries(n.queries), points(n.points), locations(c.locations, 3), weights(c.weights, 3),
          maps_(arena, n.room()), xy(arena.take<T>(2 * n.room())), weight_(arena.take<T>(n.room())) {
        use_levels(0, n.levels);
    }

    void use_levels(int64_t first, int64_t last) {
        first_level = first;
        samples = (last - first) * points;
        padded = round_up(samples, LANES);
        locations.shape[0] = weights.shape[0] = last - first;
        maps_.set_levels(call.levels, first, last, points, padded);
        for (int64_t i = 0; i < 2 * padded; ++i) xy[i] = T(__builtin_nan(""));
        for (int64_t i = 0; i < padded; ++i) weight_[i] = 0;
    }
    const Maps<T> &maps() const { return maps_; }

    void read(int64_t b, int64_t h, int64_t q) {
        if (q + PREFETCH_QUERIES < queries) {
            prefetch(call.locations, offset(call.locations, b, h, q + PREFETCH_QUERIES), 2 * samples);
            prefetch(call.weights, offset(call.weights, b, h, q + PREFETCH_QUERIES), samples);
        }
        locations.read(offset(call.locations, b, h, q), xy);
        weights.read(offset(call.weights, b, h, q), weight_);
    }
    RealLanes<T> weight(int64_t sample) const { return raw_load<T, LANES>(weight_ + sample); }
    void location(int64_t sample, RealLanes<T> &x, RealLanes<T> &y) const { load_pairs<T>(xy + 2 * sample, x, y); }

  private:
    const Call &call;
    int64_t queries, points, first_level = 0;
    Block<3> locations;
    Block<2> weights;
    Maps<T> maps_;
    T *xy, *weight_;

    int64_t offset(const mxd_tensor &t, int64_t b, int64_t h, int64_t q) const {
        return b * t.strides[0] + q * t.strides[1] + h * t.strides[2] + first_level * t.strides[3];
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
