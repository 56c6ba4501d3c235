// Reads the anchors of deformable_aggregation: finds the seen pairs (point, camera), and makes bundles of samples.
//
// A bundle has the seen samples of one anchor. An anchor with too many samples gets several bundles. While the rows of one
// bundle are summed, the first rows of the next bundle are prefetched.
#pragma once

#include "kernels/aggregation/anchor_weights.h"
#include "kernels/aggregation/projection.h"
#include "kernels/shared/grouped_rows.h"

namespace mxd::MXD_ISA {
namespace {

// Returns the most samples that a bundle can have: at least n.scales, because all scales of a pair are in one bundle.
inline int64_t bundle_room(const Sizes &n) { return round_up(n.scales > 64 ? n.scales : 64, LANES); }

constexpr int64_t WEIGHTS_AHEAD = 16;

// The locations of an anchor's pairs (point, camera) as T, and the seen pairs: those whose location is strictly inside the
// camera's image. With logits only seen pairs have locations, which stay valid while the next two anchors are read.
template <class T> class AnchorReader {
  public:
    const int64_t *seen = nullptr;
    int64_t num_seen = 0;

    AnchorReader(const Call &c, Arena &arena)
        : call(c), n(c.sizes), axes(c.locations, {KEY_POINT, CAMERA, PAIR_XY}),
          in_place(axes.contiguous && c.locations.dtype == OWN<T>), seen_pairs(arena.take<int64_t>(pairs_of(n))),
          copy(arena.take<T>(call.with_logits ? 0 : 2 * pairs_of(n))), cameras(c, arena),
          anchors{{c, arena}, {c, arena}, {c, arena}}, last_camera(n.cameras) {}

    // Selects a batch. With logits, read() projects only into the cameras first..last-1.
    void open(int64_t b, int64_t first, int64_t last) {
        first_camera = first;
        last_camera = last;
        if (call.with_logits) cameras.open(b);
    }
    void read(int64_t b, int64_t anchor) {
        const int64_t offset = offset_of(call.locations, b, anchor);
        if (call.with_logits) {
            cameras.find_seen(offset, first_camera, last_camera, anchors[anchor % KNOWN_ANCHORS]);
            xy = anchors[anchor % KNOWN_ANCHORS].xy;
        } else if (in_place) {
            xy = reinterpret_cast<const T *>(at(call.locations, offset));
        } else {
            axes.read(offset, copy);
            xy = copy;
        }
    }
    const T *location(int64_t pair) const { return xy + pair * 2; }
    const SeenPoints<T> &points_of(int64_t anchor) const { return anchors[anchor % KNOWN_ANCHORS]; }
    const Cameras<T> &all_cameras() const { return cameras; }

    // Finds all seen pairs. Without logits, calls skip(pair) for every other pair.
    template <class Skip> void find_seen(int64_t anchor, Skip &&skip) {
        num_seen = 0;
        if (call.with_logits) {
            seen = points_of(anchor).pairs;
            num_seen = points_of(anchor).count;
            return;
        }
        for (int64_t pair = 0; pair < pairs_of(n); ++pair)
            if (inside(pair))
                seen_pairs[num_seen++] = pair;
            else
                skip(pair);
        seen = seen_pairs;
    }
    // Finds the seen pairs of one camera that may read rows of a band on `map`, one of the camera's maps.
    void find_seen(int64_t anchor, int64_t camera, int64_t map, const BandReach<T> &band) {
        const T height = T(call.levels[map].height);
        const auto reaches = [&](int64_t pair) { return band.holds_one(pixel_of<T>(xy[2 * pair + 1], height), map); };
        seen = seen_pairs;
        num_seen = 0;
        if (!call.with_logits) {
            for (int64_t pair = camera; pair < pairs_of(n); pair += n.cameras)
                if (inside(pair) && reaches(pair)) seen_pairs[num_seen++] = pair;
            return;
        }
        const SeenPoints<T> &points = points_of(anchor);
        for (int64_t i = points.begins[camera]; i < points.begins[camera + 1]; ++i)
            if (reaches(points.pairs[i])) seen_pairs[num_seen++] = points.pairs[i];
    }

  private:
    const Call &call;
    Sizes n;
    SomeAxes<3> axes;
    bool in_place; // true if locations are read without a copy
    int64_t *seen_pairs;
    T *copy;
    Cameras<T> cameras;
    SeenPoints<T> anchors[KNOWN_ANCHORS];
    int64_t first_camera = 0, last_camera;
    const T *xy = nullptr;

    bool inside(int64_t pair) const { return is_inside(xy[2 * pair], xy[2 * pair + 1]); }
};

// Samples of one anchor: positions in pixels, maps, and weights [sample, groups].
template <class T> class Samples {
  public:
    int64_t count = 0;

    Samples(const Call &c, Arena &arena)
        : call(c), n(c.sizes), maps_(arena, bundle_room(n)), x(arena.take<T>(bundle_room(n))), y(arena.take<T>(bundle_room(n))),
          weights(arena.take<T>(bundle_room(n) * n.groups)) {}

    // Adds samples at normalised (u, v), one on each of the maps first..last-1. Returns memory for their weights.
    T *add(T u, T v, int64_t first, int64_t last) {
        T *const first_weights = weights + count * n.groups;
        for (int64_t map = first; map < last; ++map, ++count) {
            const Level &level = call.levels[map];
            maps_.set(count, level);
            x[count] = pixel_of<T>(u, T(level.width));
            y[count] = pixel_of<T>(v, T(level.height));
        }
        return first_weights;
    }
    // Pads with invalid samples to a multiple of LANES. Returns the number of samples, including padding.
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
        return corners_at<T>(raw_load<T, LANES>(x + i), raw_load<T, LANES>(y + i), maps_.at(i));
    }

  private:
    const Call &call;
    const Sizes n;
    Maps<T> maps_;
    T *x, *y, *weights;
};

// Samples of one anchor, and lists of their rows. The lists have the order of entry_of().
template <class T> struct Bundle {
    Samples<T> samples;
    int64_t anchor = -1;
    bool first = true, last = true; // first: this is the anchor's first bundle; last: its last bundle
    int64_t *pairs, num_pairs = 0;  // each pair has `scales` consecutive samples
    int64_t *address;
    T *corner_coefficient; // the bilinear coefficient of each row, not multiplied by the sample's weight
    Int<T> *inside;        // true for each row that is on the map
    T *right, *below;      // as in Corners, for each sample

    Bundle(const Call &call, const Sizes &n, Arena &arena)
        : samples(call, arena), pairs(arena.take<int64_t>(bundle_room(n))),
          address(arena.take<int64_t>(4 * bundle_room(n) + ROWS_AHEAD)), corner_coefficient(arena.take<T>(4 * bundle_room(n))),
          inside(arena.take<Int<T>>(4 * bundle_room(n))), right(arena.take<T>(bundle_room(n))),
          below(arena.take<T>(bundle_room(n))) {}

    int64_t num_rows() const { return 4 * round_up(samples.count, ROWS); }

    void find_rows(const RowAddresses &rows) {
        const int64_t padded = samples.pad();
        for (int64_t i = 0; i < padded; i += LANES) {
            const Corners<T> c = samples.corners(i);
            rows.put<4>(address, i, c);
            for (int k = 0; k < 4; ++k) {
                put_entries<4>(corner_coefficient, i, k, or_zero(c.inside[k], c.coefficient(k)));
                put_entries<4>(inside, i, k, c.inside[k]);
            }
            store<T, LANES>(right + i, c.right);
            store<T, LANES>(below + i, c.below);
        }
    }
};

// The base of workers that process anchors in order. each() calls serve(bundle) for the bundles of the anchors begin..end-1, at
// least one bundle for each anchor. Without logits each() also calls skip(anchor, pair) for pairs that are not seen.
template <class V, class T> struct AnchorWorker {
    const Call &call;
    Sizes n;
    Blocks blocks;
    AnchorReader<T> locations;
    AnchorWeights<T> weights;
    Bundle<T> bundles[2];
    V *zeros; // the zero row, for corners off the map
    T *row;
    RowAddresses rows;

    static int64_t items(const Job &job) { return job.call.sizes.batch * anchor_blocks(job.call).per_range; }
    AnchorWorker(const Job &job, Arena &arena)
        : call(job.call), n(call.sizes), blocks(anchor_blocks(call)), locations(call, arena), weights(job, arena),
          bundles{{call, n, arena}, {call, n, arena}}, zeros(arena.zeros<V>(n.channels)), row(arena.take<T>(n.channels)),
          rows(arena, bundle_room(n), zeros) {}

    template <class Skip, class Serve> void each(int64_t b, int64_t begin, int64_t end, Skip &&skip, Serve &&serve) {
        rows.set(0, bundle_room(n), at(call.value, b * call.value.strides[BATCH]),
                 call.value.strides[KEY] * int64_t(sizeof(V)));
        ready = nullptr;
        locations.open(b, 0, n.cameras);
        see(b, begin, skip);
        for (int64_t a = begin; a < end; ++a) {
            open(a, true);
            for (int64_t i = 0; i < locations.num_seen; ++i) {
                if (filling->samples.count + n.scales > bundle_room(n)) {
                    close(false, serve);
                    open(a, false);
                }
                const int64_t pair = locations.seen[i];
                const int64_t map = pair % n.cameras * n.scales;
                const T *xy = locations.location(pair);
                ask_for_weights(b, a, i + WEIGHTS_AHEAD);
                weights.read(b, a, pair, filling->samples.add(xy[0], xy[1], map, map + n.scales));
                filling->pairs[filling->num_pairs++] = pair;
            }
            if (a + 1 < end) see(b, a + 1, skip);
            close(true, serve);
        }
        if (!ready) return;
        for (int64_t i = 0; i < ROWS_AHEAD; ++i) ready->address[ready->num_rows() + i] = rows.zero_row;
        serve(*ready);
    }

  private:
    Bundle<T> *filling = nullptr, *ready = nullptr;

    template <class Skip> void see(int64_t b, int64_t anchor, Skip &&skip) {
        locations.read(b, anchor);
        locations.find_seen(anchor, [&](int64_t pair) { skip(anchor, pair); });
        // The backward computes the softmax even if no camera sees the anchor: a NaN in the logits makes the gradients NaN.
        if (call.with_logits && (call.backward || locations.num_seen > 0)) weights.compute(b, anchor);
        for (int64_t i = 0; i < WEIGHTS_AHEAD; ++i) ask_for_weights(b, anchor, i);
    }
    // Prefetches the weights of the pair seen[index]. Weights of pairs are too far apart for the hardware's prefetcher.
    MXD_INLINE void ask_for_weights(int64_t b, int64_t anchor, int64_t index) const {
        if (index < locations.num_seen) weights.ask_for(b, anchor, locations.seen[index]);
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
            for (int64_t i = 0; i < ROWS_AHEAD; ++i) ready->address[end + i] = i < coming ? filling->address[i] : rows.zero_row;
            serve(*ready);
        }
        ready = filling;
    }
};

} // namespace
} // namespace mxd::MXD_ISA
