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
constexpr int AHEAD = 2;
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
// Where they lie as they are needed they are not copied; what follows them in memory is then taken for the padding,
// which no map makes anything of.
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
        const int64_t own = sizeof(T) == 8 ? MXD_FLOAT64 : MXD_FLOAT32;
        locations_own = locations.packed && call.locations.dtype == own;
        locations_whole = samples == padded && locations.packed && call.locations.dtype == MXD_INT64;
        weights_own = weights.packed && call.weights.dtype == own;
    }
    const Maps<T> &maps() const { return maps_; }

    // Whose queries are read from now on.
    void open(int64_t b, int64_t h) {
        location_of = Rows(call.locations, offset(call.locations, b, h), 2 * samples, 2 * padded, 6);
        weight_of = Rows(call.weights, offset(call.weights, b, h), samples, padded, 5);
    }
    MXD_INLINE void read(int64_t q) {
        if (q + PREFETCH_QUERIES < queries) {
            location_of.prefetch(q + PREFETCH_QUERIES);
            weight_of.prefetch(q + PREFETCH_QUERIES);
        }
        const bool locations_in_place = locations_own && location_of.within(q);
        const bool weights_in_place = weights_own && weight_of.within(q);
        if (!locations_in_place && !locations_whole) locations.read_at(location_of.at(q), xy);
        if (!weights_in_place) weights.read_at(weight_of.at(q), weight_);
        xy_now = locations_in_place ? reinterpret_cast<const T *>(location_of.at(q)) : xy;
        weight_now = weights_in_place ? reinterpret_cast<const T *>(weight_of.at(q)) : weight_;
        whole_now = reinterpret_cast<const int64_t *>(location_of.at(q));
        weight_now = weights_in_place ? reinterpret_cast<const T *>(weight_of.at(q)) : weight_;
    }
    MXD_INLINE RealLanes<T> weight(int64_t sample) const { return raw_load<T, LANES>(weight_now + sample); }
    MXD_INLINE void location(int64_t sample, RealLanes<T> &x, RealLanes<T> &y) const {
        load_pairs<T>(xy_now + 2 * sample, x, y);
    }
    // Locations that are whole numbers and lie as they are needed: then location() has nothing to give.
    bool in_whole_numbers() const { return locations_whole; }
    MXD_INLINE void whole_location(int64_t sample, AddressLanes &x, AddressLanes &y) const {
        const auto a = raw_load<int64_t, LANES>(whole_now + 2 * sample);
        const auto b = raw_load<int64_t, LANES>(whole_now + 2 * sample + LANES);
        take_pairs<int64_t>(a, b, x, y);
    }

  private:
    const Call &call;
    int64_t queries, points, first_level = 0;
    Block<3> locations;
    Block<2> weights;
    Maps<T> maps_;
    T *xy, *weight_; // copies, where the tensors cannot be read as they are
    const T *xy_now = nullptr, *weight_now = nullptr;
    const int64_t *whole_now = nullptr;
    bool locations_own = false, weights_own = false, locations_whole = false;

    // A tensor's elements of one (batch, head), query by query.
    struct Rows {
        const char *first = nullptr;
        int64_t step = 0, bytes = 0;
        int64_t last_within = -1; // of queries whose `padded` elements are all the tensor's own

        Rows() {}
        Rows(const mxd_tensor &t, int64_t offset, int64_t count, int64_t padded, int axes)
            : first(mxd::MXD_ISA::at(t, offset)), step(t.strides[1] * element_size(t.dtype)),
              bytes(count * element_size(t.dtype)) {
            int64_t last = 0, elements = 1;
            bool forwards = t.strides[1] > 0;
            for (int a = 0; a < axes; ++a) {
                last += (t.shape[a] - 1) * t.strides[a];
                elements *= t.shape[a];
                forwards = forwards && t.strides[a] >= 0;
            }
            if (count == padded)
                last_within = INT64_MAX;
            else if (forwards && last + 1 == elements && offset + padded <= elements)
                last_within = (elements - padded - offset) / t.strides[1];
        }
        bool within(int64_t q) const { return q <= last_within; }
        const char *at(int64_t q) const { return first + q * step; }
        MXD_INLINE void prefetch(int64_t q) const {
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + q * step + i);
        }
    };
    Rows location_of, weight_of;

    int64_t offset(const mxd_tensor &t, int64_t b, int64_t h) const {
        return b * t.strides[0] + h * t.strides[2] + first_level * t.strides[3];
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
