// deformable_aggregation on the CPU. A point is projected into cameras; where it is seen strictly inside the image,
// every scale of that camera gives a bilinear sample, weighted group by group.
//
// Samples that count are collected until SAMPLES are at hand; then positions are worked out for all of them and the
// groups are served one after the other while the rows are in the first-level cache.
#include "bands.h"
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
    // Samples collected before they are served: all scales of a pair (point, camera) stay together.
    int64_t room() const { return round_up(scales > 8 ? scales : 8, LANES); }
};

inline int64_t offset2(const mxd_tensor &t, int64_t i, int64_t j) { return i * t.strides[0] + j * t.strides[1]; }

// Samples of one anchor: positions, maps, and the weight of each group.
template <class T> class Samples {
  public:
    int64_t count = 0;

    static int64_t bytes(const Sizes &n) {
        return Maps<T>::bytes(n.room()) + 2 * Arena::bytes<T>(n.room()) + Arena::bytes<T>(n.room() * n.groups) +
               Arena::bytes<T>(n.groups);
    }
    Samples(const Sizes &sizes, Arena &arena)
        : n(sizes), maps_(arena, n.room()), x(arena.take<T>(n.room())), y(arena.take<T>(n.room())),
          weights(arena.take<T>(n.room() * n.groups)), one(arena.take<T>(n.groups)) {}

    // A sample of map `level` at normalised (u, v); its weights lie at element `offset` of `weight`.
    void add(const Level &level, T u, T v, const mxd_tensor &weight, int64_t offset) {
        maps_.set(count, level);
        x[count] = u * T(level.width) - T(0.5);
        y[count] = v * T(level.height) - T(0.5);
        read_elements(at(weight, offset), weight.dtype, weight.strides[5], n.groups, one);
        for (int64_t g = 0; g < n.groups; ++g) weights[g * n.room() + count] = one[g];
        ++count;
    }
    // Fills up to a multiple of LANES with samples that are not valid; returns how many there are then.
    int64_t pad() {
        const int64_t padded = round_up(count, LANES);
        for (int64_t i = count; i < padded; ++i) {
            maps_.set(i, Level{0, 0, 0});
            x[i] = y[i] = T(__builtin_nan(""));
            for (int64_t g = 0; g < n.groups; ++g) weights[g * n.room() + i] = 0;
        }
        return padded;
    }
    const Maps<T> &maps() const { return maps_; }
    const T *weight(int64_t group) const { return weights + group * n.room(); }
    Corners<T> corners(int64_t i) const {
        return corners_at<T>(raw_load<T, LANES>(x + i), raw_load<T, LANES>(y + i), maps_, i);
    }

  private:
    const Sizes n;
    Maps<T> maps_;
    T *x, *y, *weights, *one;
};

template <class T> inline bool counts(T u, T v) { return u > 0 && u < 1 && v > 0 && v < 1; }

// The locations of one anchor, [points, cameras, 2], as T.
template <class T> class AnchorReader {
  public:
    static int64_t bytes(const Sizes &n) { return Arena::bytes<T>(n.points * n.cameras * 2); }
    AnchorReader(const Call &c, const Sizes &n, Arena &arena)
        : call(c), cameras(n.cameras), block(c.locations, 2), xy(arena.take<T>(n.points * n.cameras * 2)) {}
    void read(int64_t b, int64_t anchor) { block.read(offset2(call.locations, b, anchor), xy); }
    const T *location(int64_t point, int64_t camera) const { return xy + (point * cameras + camera) * 2; }

  private:
    const Call &call;
    int64_t cameras;
    Block<3> block;
    T *xy;
};

inline int64_t weight_offset(const mxd_tensor &w, int64_t b, int64_t a, int64_t p, int64_t cam) {
    return offset2(w, b, a) + p * w.strides[2] + cam * w.strides[3];
}

template <class V, class T> struct AnchorWorker {
    const Call &call;
    Sizes n;
    AnchorReader<T> locations;
    Samples<T> samples;
    int64_t *address; // the samples' rows, a list
    T *share;         // without weights
    V *zeros;
    T *row;
    RowAddresses rows;

    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return AnchorReader<T>::bytes(n) + Samples<T>::bytes(n) + Arena::bytes<int64_t>(4 * n.room()) +
               Arena::bytes<T>(4 * n.room()) + Arena::bytes<V>(n.channels) + Arena::bytes<T>(n.channels) +
               RowAddresses::bytes(n.room());
    }
    AnchorWorker(const Call &c, Arena &arena)
        : call(c), n(c), locations(c, n, arena), samples(n, arena), address(arena.take<int64_t>(4 * n.room())),
          share(arena.take<T>(4 * n.room())), zeros(arena.take<V>(n.channels)), row(arena.take<T>(n.channels)),
          rows(arena, n.room(), zeros) {
        memset(zeros, 0, size_t(n.channels) * sizeof(V));
    }
    void prepare(int64_t padded, int64_t b) {
        rows.set(0, padded, at(call.value, b * call.value.strides[0]), call.value.strides[1] * int64_t(sizeof(V)));
        for (int64_t i = 0; i < padded; i += LANES) {
            const Corners<T> c = samples.corners(i);
            for (int k = 0; k < 4; ++k) {
                put_entries<4>(address, i, k, rows.of(i, c.inside[k], c.pixel[k]));
                put_entries<4>(share, i, k, c.inside[k] ? c.share(k) : RealLanes<T>{});
            }
        }
    }
    void add_pair(int64_t b, int64_t anchor, int64_t point, int64_t camera) {
        const T *xy = locations.location(point, camera);
        const int64_t offset = weight_offset(call.weights, b, anchor, point, camera);
        for (int64_t s = 0; s < n.scales; ++s)
            samples.add(call.levels[camera * n.scales + s], xy[0], xy[1], call.weights,
                        offset + s * call.weights.strides[4]);
    }
};

template <class V, class T> class Forward : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    static int64_t scratch_bytes(const Call &call) {
        return Base::scratch_bytes(call) + Arena::bytes<T>(4 * Sizes(call).room());
    }
    Forward(const Call &c, Arena arena) : Base(c, arena), shares(arena.take<T>(4 * this->n.room())) {}

    void operator()(int64_t item) {
        const Sizes &n = this->n;
        const int64_t b = item / n.anchors, a = item % n.anchors;
        for (int64_t c = 0; c < n.channels; ++c) this->row[c] = 0;
        this->locations.read(b, a);
        for (int64_t p = 0; p < n.points; ++p)
            for (int64_t cam = 0; cam < n.cameras; ++cam) {
                const T *xy = this->locations.location(p, cam);
                if (!counts(xy[0], xy[1])) continue;
                if (this->samples.count + n.scales > n.room()) serve(b);
                this->add_pair(b, a, p, cam);
            }
        serve(b);
        const mxd_tensor &out = this->call.output;
        write_elements(this->row, at(out, offset2(out, b, a)), out.dtype, out.strides[2], n.channels);
    }

  private:
    T *shares;

    void serve(int64_t b) {
        const Sizes &n = this->n;
        const int64_t padded = this->samples.pad(), num_rows = 4 * round_up(this->samples.count, ROWS);
        this->prepare(padded, b);
        for (int64_t g = 0; g < n.groups; ++g) {
            for (int64_t i = 0; i < padded; i += LANES) {
                const RealLanes<T> weight = raw_load<T, LANES>(this->samples.weight(g) + i);
                for (int k = 0; k < 4; ++k)
                    put_entries<4>(shares, i, k, RealLanes<T>(get_entries<4>(this->share, i, k) * weight));
            }
            const int64_t channel = g * n.group_channels;
            weighted_sum<V, T>(this->address, shares, nullptr, num_rows, n.group_channels, this->row + channel, true,
                               channel);
        }
        this->samples.count = 0;
    }
};

// Gradients of locations and weights, anchor by anchor.
template <class V, class T> class SampleGradients : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return Base::scratch_bytes(call) + Arena::bytes<T>(4 * n.room()) + Arena::bytes<T>(n.room() * n.groups) +
               2 * Arena::bytes<T>(n.room()) + Arena::bytes<int64_t>(n.room()) + Arena::bytes<T>(block(n));
    }
    SampleGradients(const Call &c, Arena arena)
        : Base(c, arena), dot(arena.take<T>(4 * this->n.room())),
          grad_weight(arena.take<T>(this->n.room() * this->n.groups)), grad_x(arena.take<T>(this->n.room())),
          grad_y(arena.take<T>(this->n.room())), pairs(arena.take<int64_t>(this->n.room())),
          one(arena.take<T>(block(this->n))), weights_out(c.grad_weights, 4) {
        memset(dot, 0, size_t(4 * this->n.room()) * sizeof(T)); // read beyond the last sample of a turn
    }

    void operator()(int64_t item) {
        const Sizes &n = this->n;
        const int64_t b = item / n.anchors, a = item % n.anchors;
        this->locations.read(b, a);
        g = row_as(this->call.output, offset2(this->call.output, b, a), this->call.output.strides[2], n.channels,
                   this->row);
        for (int64_t p = 0; p < n.points; ++p)
            for (int64_t cam = 0; cam < n.cameras; ++cam) {
                const T *xy = this->locations.location(p, cam);
                if (!counts(xy[0], xy[1])) {
                    write_zeros(b, a, p, cam);
                    continue;
                }
                if (this->samples.count + n.scales > n.room()) serve(b, a);
                pairs[num_pairs++] = p * n.cameras + cam;
                this->add_pair(b, a, p, cam);
            }
        serve(b, a);
    }

  private:
    T *dot, *grad_weight, *grad_x, *grad_y;
    int64_t *pairs, num_pairs = 0;
    T *one;
    Block<2> weights_out;
    const T *g = nullptr;

    static int64_t block(const Sizes &n) { return n.scales * n.groups > 2 ? n.scales * n.groups : 2; }

    void write(int64_t b, int64_t a, int64_t p, int64_t cam, const T *location, const T *weight) {
        const mxd_tensor &l = this->call.grad_locations, &w = this->call.grad_weights;
        if (l.data)
            write_elements(location, at(l, offset2(l, b, a) + p * l.strides[2] + cam * l.strides[3]), l.dtype,
                           l.strides[4], 2);
        if (w.data) weights_out.write(weight_offset(w, b, a, p, cam), weight);
    }
    void write_zeros(int64_t b, int64_t a, int64_t p, int64_t cam) {
        for (int64_t i = 0; i < block(this->n); ++i) one[i] = 0;
        write(b, a, p, cam, one, one);
    }

    void serve(int64_t b, int64_t a) {
        const Sizes &n = this->n;
        const int64_t padded = this->samples.pad(), num_rows = 4 * round_up(this->samples.count, ROWS);
        this->prepare(padded, b);
        for (int64_t i = 0; i < padded; ++i) grad_x[i] = grad_y[i] = 0;
        for (int64_t group = 0; group < n.groups; ++group) {
            const int64_t channel = group * n.group_channels;
            dots<V, T>(this->address, nullptr, num_rows, n.group_channels, g + channel, dot, channel);
            for (int64_t i = 0; i < padded; i += LANES) finish(i, group);
        }
        for (int64_t i = 0; i < num_pairs; ++i) write_pair(b, a, i);
        this->samples.count = num_pairs = 0;
    }

    void finish(int64_t i, int64_t group) {
        const Corners<T> c = this->samples.corners(i);
        const CornerSlopes<T> slope(c, dot, i);
        const Maps<T> &maps = this->samples.maps();
        const RealLanes<T> weight = raw_load<T, LANES>(this->samples.weight(group) + i);
        const RealLanes<T> gx = raw_load<T, LANES>(maps.width + i) * weight * slope.dx;
        const RealLanes<T> gy = raw_load<T, LANES>(maps.height + i) * weight * slope.dy;
        store<T, LANES>(grad_x + i, raw_load<T, LANES>(grad_x + i) + gx);
        store<T, LANES>(grad_y + i, raw_load<T, LANES>(grad_y + i) + gy);
        store<T, LANES>(grad_weight + group * this->n.room() + i, slope.sample);
    }

    void write_pair(int64_t b, int64_t a, int64_t pair) {
        const Sizes &n = this->n;
        T location[2] = {0, 0};
        for (int64_t s = 0; s < n.scales; ++s) {
            const int64_t i = pair * n.scales + s;
            location[0] += grad_x[i];
            location[1] += grad_y[i];
            for (int64_t group = 0; group < n.groups; ++group)
                one[s * n.groups + group] = grad_weight[group * n.room() + i];
        }
        write(b, a, pairs[pair] / n.cameras, pairs[pair] % n.cameras, location, one);
    }
};

// The gradient of feature_maps. Items (batch, band).
template <class T> class FeatureGradient {
  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return AnchorReader<T>::bytes(n) + Samples<T>::bytes(n) + ScatterList<T>::bytes(n.room()) +
               Arena::bytes<T>(n.channels) + Band<T>::bytes(call, n.channels);
    }
    FeatureGradient(const Call &c, Arena arena)
        : call(c), n(c), locations(c, n, arena), samples(n, arena), list(arena, n.room()),
          row(arena.take<T>(n.channels)), band(c, n.channels, arena) {}

    void operator()(int64_t item) {
        const int64_t b = item / call.num_bands;
        const mxd_tensor &grad = call.grad_value;
        band.open(item % call.num_bands, b * grad.strides[0], grad.strides[1], grad.strides[2]);
        for (int64_t a = 0; a < n.anchors; ++a) one(b, a);
        band.close();
    }

  private:
    const Call &call;
    Sizes n;
    AnchorReader<T> locations;
    Samples<T> samples;
    ScatterList<T> list;
    T *row;
    Band<T> band;

    void one(int64_t b, int64_t a) {
        bool ready = false; // locations are read when the first map asks for them
        for (int64_t map = 0; map < call.num_levels; ++map) {
            if (!band.touches(call.levels[map])) continue;
            if (!ready) locations.read(b, a);
            ready = true;
            const int64_t cam = map / n.scales, scale = map % n.scales;
            for (int64_t p = 0; p < n.points; ++p) {
                const T *xy = locations.location(p, cam);
                if (!counts(xy[0], xy[1])) continue;
                if (samples.count == n.room()) serve(b, a);
                samples.add(call.levels[map], xy[0], xy[1], call.weights,
                            weight_offset(call.weights, b, a, p, cam) + scale * call.weights.strides[4]);
            }
        }
        serve(b, a);
    }

    void serve(int64_t b, int64_t a) {
        if (samples.count == 0) return;
        const int64_t padded = samples.pad();
        const T *g = row_as(call.output, offset2(call.output, b, a), call.output.strides[2], n.channels, row);
        for (int64_t group = 0; group < n.groups; ++group) {
            list.count = 0;
            for (int64_t i = 0; i < padded; i += LANES) {
                const Corners<T> c = samples.corners(i);
                const RealLanes<T> weight = raw_load<T, LANES>(samples.weight(group) + i);
                SampledRows<T, 4> rows;
                for (int k = 0; k < 4; ++k) {
                    rows.inside[k] = c.inside[k];
                    rows.pixel[k] = c.pixel[k];
                    rows.share[k] = weight * c.share(k);
                }
                list.template add<1>(rows, band);
            }
            scatter_add<T>(list.address, list.share, list.count, n.group_channels, g + group * n.group_channels,
                           group * n.group_channels);
        }
        samples.count = 0;
    }
};

} // namespace

bool deformable_aggregation(const Call &call) {
    const Sizes n(call);
    return with_types(call, [&](auto *v, auto *t) {
        return parallel<Forward<__typeof__(*v), __typeof__(*t)>>(call.num_threads, n.batch * n.anchors, call);
    });
}

bool deformable_aggregation_backward(const Call &call) {
    const Sizes n(call);
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        bool enough = true;
        if (call.grad_locations.data || call.grad_weights.data)
            enough = parallel<SampleGradients<V, T>>(call.num_threads, n.batch * n.anchors, call);
        if (enough && call.grad_value.data)
            enough = parallel<FeatureGradient<T>>(call.num_threads, n.batch * call.num_bands, call);
        return enough;
    });
}

} // namespace MXD_ISA
} // namespace mxd
