// deformable_aggregation on the CPU. A point is projected into cameras; where it is seen strictly inside the image,
// every scale of that camera gives a bilinear sample, weighted group by group.
#include "anchors.h"
#include "bands.h"
#include "kernels.h"

namespace mxd {
namespace MXD_ISA {
namespace {

template <class V, class T> class Forward : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    using Base::items;
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return Base::scratch_bytes(call) + Arena::bytes<T>(4 * n.room() * n.groups);
    }
    Forward(const Call &c, Arena arena) : Base(c, arena), shares(arena.take<T>(4 * this->n.room() * this->n.groups)) {}

    void operator()(int64_t item) {
        const int64_t b = this->blocks.batch(item);
        this->each(
            b, this->blocks.begin(item), this->blocks.end(item), [](int64_t, int64_t) {},
            [&](const Batch<T> &batch) { serve(b, batch); });
    }

  private:
    T *shares; // [row, groups]

    void serve(int64_t b, const Batch<T> &batch) {
        const Sizes &n = this->n;
        if (batch.first) memset(this->row, 0, size_t(n.channels) * sizeof(T));
        for (int64_t i = 0; i < batch.num_rows() / 4; ++i)
            for (int k = 0; k < 4; ++k) {
                const int64_t entry = entry_of<4>(i, k);
                scaled<T>(batch.samples.weight(i), batch.corner_share[entry], n.groups, shares + entry * n.groups);
            }
        grouped_sum<V, T>(batch.address, shares, batch.num_rows(), n.groups, n.group_channels, this->row);
        const mxd_tensor &out = this->call.output;
        if (batch.last)
            write_elements(this->row, at(out, offset2(out, b, batch.anchor)), out.dtype, out.strides[2], n.channels);
    }
};

// Gradients of locations and weights.
template <class V, class T> class SampleGradients : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    using Base::items;
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return Base::scratch_bytes(call) + Arena::bytes<T>(4 * n.room() * n.groups) + Arena::bytes<T>(block(n));
    }
    SampleGradients(const Call &c, Arena arena)
        : Base(c, arena), dot(arena.take<T>(4 * this->n.room() * this->n.groups)), pair(arena.take<T>(block(this->n))),
          weights_out(c.grad_weights, 4) {}

    void operator()(int64_t item) {
        const int64_t b = this->blocks.batch(item);
        this->each(
            b, this->blocks.begin(item), this->blocks.end(item),
            [&](int64_t a, int64_t unseen) {
                memset(pair, 0, size_t(block(this->n)) * sizeof(T));
                write(b, a, unseen, pair, pair);
            },
            [&](const Batch<T> &batch) { serve(b, batch); });
    }

  private:
    T *dot;  // [row, groups]
    T *pair; // gradients of the weights of one pair (point, camera), [scales, groups]
    Block<2> weights_out;

    static int64_t block(const Sizes &n) { return n.scales * n.groups > 2 ? n.scales * n.groups : 2; }

    void write(int64_t b, int64_t a, int64_t pair_index, const T *location, const T *weight) {
        const mxd_tensor &l = this->call.grad_locations, &w = this->call.grad_weights;
        const int64_t p = pair_index / this->n.cameras, cam = pair_index % this->n.cameras;
        if (l.data)
            write_elements(location, at(l, offset2(l, b, a) + p * l.strides[2] + cam * l.strides[3]), l.dtype,
                           l.strides[4], 2);
        if (w.data) weights_out.write(weight_offset(w, b, a, p, cam), weight);
    }

    void serve(int64_t b, const Batch<T> &batch) {
        if (batch.num_pairs == 0) return;
        const Sizes &n = this->n;
        const mxd_tensor &out = this->call.output;
        const T *g = row_as(at(out, offset2(out, b, batch.anchor)), out.dtype, out.strides[2], n.channels, this->row);
        grouped_dots<V, T>(batch.address, batch.num_rows(), n.groups, n.group_channels, g, dot);
        for (int64_t i = 0; i < batch.num_pairs; ++i) {
            T location[2] = {0, 0};
            for (int64_t s = 0; s < n.scales; ++s) sample(batch, i * n.scales + s, location, pair + s * n.groups);
            write(b, batch.anchor, batch.pairs[i], location, pair);
        }
    }

    // Adds to location[0], location[1]; writes weight[groups].
    void sample(const Batch<T> &batch, int64_t i, T *location, T *weight) {
        const T right = batch.right[i], below = batch.below[i];
        const T share[4] = {(1 - right) * (1 - below), right * (1 - below), (1 - right) * below, right * below};
        T slope_x = 0, slope_y = 0;
        for_pieces<T>(this->n.groups, [&](auto lanes, auto vectors, int64_t c) {
            constexpr int N = lanes.value;
            for (int v = 0; v < vectors.value; ++v, c += N) {
                Vec<T, N> d[4], sum_of_corners = {};
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const int64_t entry = entry_of<4>(i, k);
                    d[k] = batch.inside[entry] ? load<T, N>(dot + entry * this->n.groups + c) : Vec<T, N>{};
                    sum_of_corners += broadcast<T, N>(share[k]) * d[k];
                }
                store<T, N>(weight + c, sum_of_corners);
                const Vec<T, N> w = load<T, N>(batch.samples.weight(i) + c);
                slope_x += sum<T, N>(
                    w * (broadcast<T, N>(1 - below) * (d[1] - d[0]) + broadcast<T, N>(below) * (d[3] - d[2])));
                slope_y += sum<T, N>(
                    w * (broadcast<T, N>(1 - right) * (d[2] - d[0]) + broadcast<T, N>(right) * (d[3] - d[1])));
            }
        });
        location[0] += batch.samples.maps().width[i] * slope_x;
        location[1] += batch.samples.maps().height[i] * slope_y;
    }
};

// The gradient of feature_maps. Items (batch, band).
template <class T> class FeatureGradient {
  public:
    static int64_t scratch_bytes(const Call &call) {
        const Sizes n(call);
        return AnchorReader<T>::bytes(n) + Samples<T>::bytes(n) + 2 * Arena::bytes<T>(n.channels) +
               Arena::bytes<int64_t>(4 * n.room() + ROWS_AHEAD) + Arena::bytes<T>(4 * n.room() * n.groups) +
               Band<T>::bytes(call, n.channels) + BandRows<T>::bytes(call.num_levels);
    }
    FeatureGradient(const Call &c, Arena arena)
        : call(c), n(c), locations(c, n, arena), samples(c, n, arena), row(arena.take<T>(n.channels)),
          sink(arena.take<T>(n.channels)), address(arena.take<int64_t>(4 * n.room() + ROWS_AHEAD)),
          shares(arena.take<T>(4 * n.room() * n.groups)), band(c, n.channels, arena), band_rows(arena, c.num_levels) {}

    void operator()(int64_t item) {
        const int64_t b = item / call.num_bands;
        const mxd_tensor &grad = call.grad_value;
        band.open(item % call.num_bands, b * grad.strides[0], grad.strides[1], grad.strides[2]);
        band_rows.set_levels(call.levels, 0, call.num_levels, 1, call.num_levels, band);
        band.levels_touched(first_map, end_map);
        for (int64_t a = 0; a < n.anchors; ++a) anchor(b, a);
        band.close();
    }

  private:
    const Call &call;
    Sizes n;
    AnchorReader<T> locations;
    Samples<T> samples;
    T *row;
    T *sink; // never written: asked for when there is nothing ahead
    int64_t *address;
    T *shares; // [row, groups]
    Band<T> band;
    BandRows<T> band_rows;
    int64_t first_map = 0, end_map = 0; // all that reach into the band lie between

    void anchor(int64_t b, int64_t a) {
        locations.read(b, a);
        for (int64_t map = first_map; map < end_map; ++map) {
            if (!band.touches(call.levels[map])) continue;
            const int64_t cam = map / n.scales, scale = map % n.scales;
            locations.find_seen(cam, map, band_rows);
            const int64_t skipped = scale * call.weights.strides[4];
            for (int64_t i = 0; i < locations.num_seen; ++i) {
                if (samples.count == n.room()) serve(b, a);
                locations.ask_for_weights(b, a, i + WEIGHTS_AHEAD, skipped, n.groups);
                const T *xy = locations.location(locations.seen[i]);
                samples.add(xy[0], xy[1], cam, scale, locations.weights_of(b, a, i));
            }
        }
        serve(b, a);
    }

    // Sample by sample, so that where value is cut into bands does not change the order of additions.
    void serve(int64_t b, int64_t a) {
        if (samples.count == 0) return;
        const int64_t padded = samples.pad();
        int64_t count = 0;
        for (int64_t first = 0; first < padded; first += LANES) {
            const Corners<T> c = samples.corners(first);
            Int<T> pixel[4][LANES], inside[4][LANES];
            T share[4][LANES];
            for (int k = 0; k < 4; ++k) {
                const IntLanes<T> mine =
                    c.inside[k] & (c.pixel[k] >= Int<T>(band.begin)) & (c.pixel[k] < Int<T>(band.end));
                const IntLanes<T> from = c.pixel[k] - Int<T>(band.begin);
                const RealLanes<T> s = c.share(k);
                memcpy(inside[k], &mine, sizeof mine);
                memcpy(pixel[k], &from, sizeof from);
                memcpy(share[k], &s, sizeof s);
            }
            for (int i = 0; i < LANES; ++i)
                for (int k = 0; k < 4; ++k)
                    if (inside[k][i]) {
                        address[count] = band.address + pixel[k][i] * band.step;
                        scaled<T>(samples.weight(first + i), share[k][i], n.groups, shares + count * n.groups);
                        ++count;
                    }
        }
        for (int64_t i = 0; i < ROWS_AHEAD; ++i) address[count + i] = reinterpret_cast<int64_t>(sink);
        for (int64_t i = 0; i < ROWS_AHEAD; ++i)
            for (int64_t at = 0; at < n.channels * int64_t(sizeof(T)); at += 64) ask_for<64>(address[i] + at);
        const mxd_tensor &grad = call.output;
        const T *g = row_as(at(grad, offset2(grad, b, a)), grad.dtype, grad.strides[2], n.channels, row);
        grouped_add<T>(address, shares, count, n.groups, n.group_channels, g);
        samples.count = 0;
    }
};

} // namespace

bool deformable_aggregation(const Call &call) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef Forward<__typeof__(*v), __typeof__(*t)> Worker;
        return parallel<Worker>(call.num_threads, Worker::items(call), call);
    });
}

bool deformable_aggregation_backward(const Call &call) {
    const Sizes n(call);
    return with_types(call, [&](auto *v, auto *t) {
        typedef SampleGradients<__typeof__(*v), __typeof__(*t)> Worker;
        bool enough = true;
        if (call.grad_locations.data || call.grad_weights.data)
            enough = parallel<Worker>(call.num_threads, Worker::items(call), call);
        if (enough && call.grad_value.data)
            enough = parallel<FeatureGradient<__typeof__(*t)>>(call.num_threads, n.batch * call.num_bands, call);
        return enough;
    });
}

} // namespace MXD_ISA
} // namespace mxd
