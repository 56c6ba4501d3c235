// How deformable_aggregation reads its anchors: which pairs (point, camera) are seen, and bundles of their samples.
//
// A bundle holds all samples of an anchor that are seen, or as many as there is room for. While the rows of one bundle
// are used, the first rows of the next are prefetched.
#pragma once

#include "grouped_rows.h"
#include "kernels.h"
#include "sampling.h"

namespace mxd {
namespace MXD_ISA {
namespace {

struct Sizes {
    int64_t batch, features, channels, anchors, points, cameras, scales, groups, group_channels;

    explicit Sizes(const Call &call)
        : batch(call.value.shape[0]), features(call.value.shape[1]), channels(call.value.shape[2]),
          anchors(call.locations.shape[1]), points(call.locations.shape[2]), cameras(call.locations.shape[3]),
          scales(call.weights.shape[4]), groups(call.weights.shape[5]),
          group_channels(groups > 0 ? channels / groups : 0) {}
    // Samples of a bundle: all scales of a pair (point, camera) stay together.
    int64_t room() const { return round_up(scales > 64 ? scales : 64, LANES); }
};

inline int64_t offset2(const mxd_tensor &t, int64_t i, int64_t j) { return i * t.strides[0] + j * t.strides[1]; }

inline int64_t weight_offset(const mxd_tensor &w, int64_t b, int64_t a, int64_t p, int64_t cam) {
    return offset2(w, b, a) + p * w.strides[2] + cam * w.strides[3];
}

// Items: (batch, block of anchors).
struct AnchorBlocks {
    int64_t anchors, size, blocks;

    AnchorBlocks(const Call &call, const Sizes &n) : anchors(n.anchors) {
        const int64_t wanted = n.batch * n.anchors / (8 * (call.num_threads > 1 ? call.num_threads : 1));
        size = wanted < 1 ? 1 : wanted > 16 ? 16 : wanted;
        blocks = (n.anchors + size - 1) / size;
    }
    int64_t batch(int64_t item) const { return item / blocks; }
    int64_t begin(int64_t item) const { return item % blocks * size; }
    int64_t end(int64_t item) const { return begin(item) + size < anchors ? begin(item) + size : anchors; }
};

constexpr int64_t WEIGHTS_AHEAD = 16;

template <class T> inline T pixel_of(T normalised, int64_t size) { return normalised * T(size) - T(0.5); }

// The locations of one anchor, [points, cameras, 2], as T, and which of its pairs (point, camera) are seen. A pair is
// seen if it lies strictly inside the image.
template <class T> class AnchorReader {
  public:
    int64_t *seen, num_seen = 0; // pairs as point * cameras + camera

    static int64_t bytes(const Sizes &n) {
        return Arena::bytes<T>(n.points * n.cameras * 2) + Arena::bytes<int64_t>(n.points * n.cameras);
    }
    AnchorReader(const Call &c, const Sizes &n, Arena &arena)
        : seen(arena.take<int64_t>(n.points * n.cameras)), call(c), points(n.points), cameras(n.cameras),
          axes(c.locations, 2), in_place(axes.contiguous && c.locations.dtype == OWN<T>),
          copy(arena.take<T>(n.points * n.cameras * 2)) {}
    void read(int64_t b, int64_t anchor) {
        const int64_t offset = offset2(call.locations, b, anchor);
        xy = in_place ? reinterpret_cast<const T *>(at(call.locations, offset)) : copy;
        if (!in_place) axes.read(offset, copy);
    }
    const T *location(int64_t pair) const { return xy + pair * 2; }

    // Finds all pairs that are seen, point by point; calls skip(pair) for the others.
    template <class Skip> void find_seen(Skip &&skip) {
        num_seen = 0;
        for (int64_t pair = 0; pair < points * cameras; ++pair)
            if (inside(pair))
                seen[num_seen++] = pair;
            else
                skip(pair);
    }
    // Finds the pairs of one camera that may read rows of a band on the camera's map `map`.
    void find_seen(int64_t camera, int64_t map, const BandReach<T> &band) {
        num_seen = 0;
        for (int64_t pair = camera; pair < points * cameras; pair += cameras)
            if (inside(pair) && band.holds_one(pixel_of(xy[2 * pair + 1], call.levels[map].height), map))
                seen[num_seen++] = pair;
    }
    // The first weight of pair seen[index].
    int64_t weights_of(int64_t b, int64_t anchor, int64_t index) const {
        return weight_offset(call.weights, b, anchor, seen[index] / cameras, seen[index] % cameras);
    }
    // Prefetches `count` weights of pair seen[index]: the weights of pairs lie apart. Callers are WEIGHTS_AHEAD pairs
    // ahead.
    MXD_INLINE void ask_for_weights(int64_t b, int64_t anchor, int64_t index, int64_t skipped, int64_t count) const {
        if (index < num_seen) prefetch(call.weights, weights_of(b, anchor, index) + skipped, count);
    }

  private:
    const Call &call;
    int64_t points, cameras;
    TrailingAxes<3> axes;
    bool in_place; // locations are read where they lie
    const T *xy = nullptr;
    T *copy;

    bool inside(int64_t pair) const {
        const T u = xy[2 * pair], v = xy[2 * pair + 1];
        return u > 0 && u < 1 && v > 0 && v < 1;
    }
};

// Samples of one anchor: positions, maps, and weights [sample, groups].
template <class T> class Samples {
  public:
    int64_t count = 0;

    static int64_t bytes(const Sizes &n) {
        return Maps<T>::bytes(n.room()) + 2 * Arena::bytes<T>(n.room()) + Arena::bytes<T>(n.room() * n.groups);
    }
    Samples(const Call &c, const Sizes &sizes, Arena &arena)
        : call(c), n(sizes), pair_weights(c.weights, 4), maps_(arena, n.room()), x(arena.take<T>(n.room())),
          y(arena.take<T>(n.room())), weights(arena.take<T>(n.room() * n.groups)) {}

    // Adds the samples of a pair (point, camera) at normalised (u, v), one on each scale. The pair's weights begin at
    // element `offset`.
    void add_pair(T u, T v, int64_t camera, int64_t offset) {
        pair_weights.read(offset, weights + count * n.groups);
        for (int64_t s = 0; s < n.scales; ++s) place(u, v, call.levels[camera * n.scales + s]);
    }
    // Adds the sample on one scale.
    void add(T u, T v, int64_t camera, int64_t scale, int64_t offset) {
        const mxd_tensor &w = call.weights;
        read_elements(at(w, offset + scale * w.strides[4]), w.dtype, w.strides[5], n.groups,
                      weights + count * n.groups);
        place(u, v, call.levels[camera * n.scales + scale]);
    }
    // Adds invalid samples up to a multiple of LANES, and returns the number of samples with them.
    int64_t pad() {
        const int64_t padded = round_up(count, LANES);
        for (int64_t i = count; i < padded; ++i) {
            maps_.set(i, Level{0, 0, 0});
            x[i] = y[i] = T(__builtin_nan(""));
            for (int64_t g = 0; g < n.groups; ++g) weights[i * n.groups + g] = 0;
        }
        return padded;
    }
    const Maps<T> &maps() const { return maps_; }
    const T *weight(int64_t sample) const { return weights + sample * n.groups; }
    Corners<T> corners(int64_t i) const {
        return corners_at<T>(raw_load<T, LANES>(x + i), raw_load<T, LANES>(y + i), maps_, i);
    }

  private:
    const Call &call;
    const Sizes n;
    TrailingAxes<2> pair_weights;
    Maps<T> maps_;
    T *x, *y, *weights;

    void place(T u, T v, const Level &level) {
        maps_.set(count, level);
        x[count] = pixel_of(u, level.width);
        y[count] = pixel_of(v, level.height);
        ++count;
    }
};

// Samples of one anchor and their rows, in the order of lists of rows.
template <class T> struct Bundle {
    Samples<T> samples;
    int64_t anchor = -1;
    bool first = true, last = true; // whether it is its anchor's first bundle, and its last
    int64_t *pairs, num_pairs = 0;  // each has `scales` samples, one after the other
    int64_t *address;
    T *corner_share;  // of each row, before it is multiplied with a weight
    Int<T> *inside;   // whether it is on the map
    T *right, *below; // of each sample, as in Corners

    static int64_t bytes(const Sizes &n) {
        return Samples<T>::bytes(n) + Arena::bytes<int64_t>(n.room()) +
               Arena::bytes<int64_t>(4 * n.room() + ROWS_AHEAD) + Arena::bytes<T>(4 * n.room()) +
               Arena::bytes<Int<T>>(4 * n.room()) + 2 * Arena::bytes<T>(n.room());
    }
    Bundle(const Call &call, const Sizes &n, Arena &arena)
        : samples(call, n, arena), pairs(arena.take<int64_t>(n.room())),
          address(arena.take<int64_t>(4 * n.room() + ROWS_AHEAD)), corner_share(arena.take<T>(4 * n.room())),
          inside(arena.take<Int<T>>(4 * n.room())), right(arena.take<T>(n.room())), below(arena.take<T>(n.room())) {}

    int64_t num_rows() const { return 4 * round_up(samples.count, ROWS); }

    void find_rows(const RowAddresses &rows) {
        const int64_t padded = samples.pad();
        for (int64_t i = 0; i < padded; i += LANES) {
            const Corners<T> c = samples.corners(i);
            rows.put<4>(address, i, c);
            for (int k = 0; k < 4; ++k) {
                put_entries<4>(corner_share, i, k, c.inside[k] ? c.share(k) : RealLanes<T>{});
                put_entries<4>(inside, i, k, c.inside[k]);
            }
            store<T, LANES>(right + i, c.right);
            store<T, LANES>(below + i, c.below);
        }
    }
};

// Goes through the anchors begin..end-1: skip(anchor, pair (point, camera)) for pairs that are not seen, serve(bundle)
// for bundles in order, at least one for each anchor.
template <class V, class T> struct AnchorWorker {
    const Call &call;
    Sizes n;
    AnchorBlocks blocks;
    AnchorReader<T> locations;
    Bundle<T> bundles[2];
    V *zeros; // a row, for corners that are not on the map
    T *row;
    RowAddresses rows;

    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return AnchorReader<T>::bytes(n) + 2 * Bundle<T>::bytes(n) + Arena::bytes<V>(n.channels) +
               Arena::bytes<T>(n.channels) + RowAddresses::bytes(n.room());
    }
    static int64_t items(const Call &call) {
        const Sizes n(call);
        return n.batch * AnchorBlocks(call, n).blocks;
    }
    AnchorWorker(const Call &c, Arena &arena)
        : call(c), n(c), blocks(c, n), locations(c, n, arena), bundles{{c, n, arena}, {c, n, arena}},
          zeros(arena.take<V>(n.channels)), row(arena.take<T>(n.channels)), rows(arena, n.room(), zeros) {
        memset(zeros, 0, size_t(n.channels) * sizeof(V));
    }

    template <class Skip, class Serve> void each(int64_t b, int64_t begin, int64_t end, Skip &&skip, Serve &&serve) {
        rows.set(0, n.room(), at(call.value, b * call.value.strides[0]), call.value.strides[1] * int64_t(sizeof(V)));
        ready = nullptr;
        see(b, begin, skip);
        for (int64_t a = begin; a < end; ++a) {
            open(a, true);
            for (int64_t i = 0; i < locations.num_seen; ++i) {
                if (filling->samples.count + n.scales > n.room()) {
                    close(false, serve);
                    open(a, false);
                }
                const int64_t pair = locations.seen[i];
                const T *xy = locations.location(pair);
                locations.ask_for_weights(b, a, i + WEIGHTS_AHEAD, 0, n.scales * n.groups);
                filling->samples.add_pair(xy[0], xy[1], pair % n.cameras, locations.weights_of(b, a, i));
                filling->pairs[filling->num_pairs++] = pair;
            }
            if (a + 1 < end) see(b, a + 1, skip);
            close(true, serve);
        }
        if (!ready) return;
        for (int64_t i = 0; i < ROWS_AHEAD; ++i) ready->address[ready->num_rows() + i] = rows.nowhere;
        serve(*ready);
    }

  private:
    Bundle<T> *filling = nullptr, *ready = nullptr;

    template <class Skip> void see(int64_t b, int64_t anchor, Skip &&skip) {
        locations.read(b, anchor);
        locations.find_seen([&](int64_t pair) { skip(anchor, pair); });
        for (int64_t i = 0; i < WEIGHTS_AHEAD; ++i) locations.ask_for_weights(b, anchor, i, 0, n.scales * n.groups);
    }
    void open(int64_t anchor, bool first) {
        filling = ready == &bundles[0] ? &bundles[1] : &bundles[0];
        filling->anchor = anchor;
        filling->first = first;
        filling->samples.count = filling->num_pairs = 0;
    }
    template <class Serve> void close(bool last, Serve &&serve) {
        filling->last = last;
        filling->find_rows(rows);
        if (ready) {
            const int64_t end = ready->num_rows(), coming = filling->num_rows();
            for (int64_t i = 0; i < ROWS_AHEAD; ++i)
                ready->address[end + i] = i < coming ? filling->address[i] : rows.nowhere;
            serve(*ready);
        }
        ready = filling;
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
