// deformable_aggregation on the CPU. A key point has a location in each camera. If the location is strictly inside the image,
// each scale of the camera gives a bilinear sample, with a weight for each group. With logits the locations are computed here.
#include "kernels/aggregation/anchors.h"
#include "kernels/shared/bands.h"
#include "kernels/shared/partial_sums.h"

namespace mxd::MXD_ISA {
namespace {

// ---- forward: sums the rows of each anchor with a coefficient for each group

template <class V, class T> class Forward : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    using Base::items;
    Forward(const Job &job, Arena &arena)
        : Base(job, arena), coefficients(arena.take<T>(4 * bundle_room(this->n) * this->n.groups)) {}

    void operator()(int64_t item) {
        const int64_t b = this->blocks.range(item);
        this->each(
            b, this->blocks.begin(item), this->blocks.end(item), [](int64_t, int64_t) {},
            [&](const Bundle<T> &bundle) { serve(b, bundle); });
    }

  private:
    T *coefficients; // [row, groups]

    void serve(int64_t b, const Bundle<T> &bundle) {
        const Sizes &n = this->n;
        if (bundle.first) memset(this->row, 0, size_t(n.channels) * sizeof(T));
        for (int64_t i = 0; i < bundle.num_rows() / 4; ++i)
            for (int k = 0; k < 4; ++k) {
                const int64_t entry = entry_of<4>(i, k);
                scaled<T>(bundle.samples.weight(i), bundle.corner_coefficient[entry], n.groups,
                          coefficients + entry * n.groups);
            }
        grouped_sum<V, T>(bundle.address, coefficients, bundle.num_rows(), n.groups, n.group_channels, this->row);
        const Tensor &out = this->call.output;
        if (bundle.last)
            write_elements(this->row, at(out, offset_of(out, b, bundle.anchor)), out.dtype, out.strides[CHANNEL], n.channels);
    }
};

// ---- the gradients of locations and weights; with logits: of key points, projections and logits

// With logits: computes the gradients of an anchor's key points, projections and logits from the gradients of its samples.
//
//   grad_location    contributes to the gradients of its key point and of its camera's projection
//   grad_logit       = softmax * (grad_weight * pair_scale - mean), mean = sum of softmax * grad_weight * pair_scale
template <class T> class AnchorGradients {
  public:
    AnchorGradients(const Job &job, Arena &arena)
        : call(job.call), n(call.sizes), points(call.grad_locations, {KEY_POINT, XYZ}),
          sums(call.grad_projection, job.partial_sums) {
        if (!call.with_logits) return;
        grad_weights = arena.take<T>(pairs_of(n) * n.scales * n.groups);
        mean = arena.take<T>(n.groups);
        grad_points = arena.take<T>(3 * n.points);
    }

    void open(int64_t item) {
        grad_matrices = sums.of(item, 0);
        if (grad_matrices) memset(grad_matrices, 0, size_t(sums.bytes(1)));
    }
    // Begins an anchor. Then call add() for the anchor's pairs in the order of SeenPoints.
    void begin() {
        num_pairs = 0;
        memset(mean, 0, size_t(n.groups) * sizeof(T));
        memset(grad_points, 0, size_t(3 * n.points) * sizeof(T));
    }
    // Returns memory for the gradients of the next pair's weights, [scales, groups].
    T *next_pair() { return grad_weights + num_pairs++ * n.scales * n.groups; }

    void add(const AnchorReader<T> &reader, const Bundle<T> &bundle, int64_t i, const T *location, const T *grad_pair) {
        const int64_t pair = bundle.pairs[i];
        if (call.grad_locations.data || grad_matrices)
            reader.all_cameras().add_gradients(reader.points_of(bundle.anchor), pair, location,
                                               grad_points + pair / n.cameras * 3, grad_matrices);
        for (int64_t s = 0; s < n.scales; ++s) add_products(grad_pair + s * n.groups, bundle.samples.weight(i * n.scales + s));
    }
    void write(int64_t b, int64_t anchor, const AnchorReader<T> &reader, AnchorWeights<T> &weights) {
        if (call.grad_locations.data) points.write(offset_of(call.grad_locations, b, anchor), grad_points);
        if (call.grad_weights.data)
            weights.write_gradient(b, anchor, reader.points_of(anchor).pairs, num_pairs, grad_weights, mean);
    }

  private:
    const Call &call;
    Sizes n;
    SomeAxes<2> points;
    PartialSums<T> sums; // the gradient of projections; each block of anchors is a part
    T *grad_weights = nullptr, *mean = nullptr, *grad_points = nullptr;
    T *grad_matrices = nullptr; // sums over this item's anchors; null if the gradient of projections is not wanted
    int64_t num_pairs = 0;

    void add_products(const T *grad, const T *weight) {
        for_vectors<T>(n.groups, [&](auto lanes, int64_t g) {
            constexpr int N = lanes.value;
            store<T, N>(mean + g, load<T, N>(mean + g) + load<T, N>(grad + g) * load<T, N>(weight + g));
        });
    }
};

template <class V, class T> class SampleGradients : AnchorWorker<V, T> {
    typedef AnchorWorker<V, T> Base;

  public:
    using Base::items;
    SampleGradients(const Job &job, Arena &arena)
        : Base(job, arena), dot(arena.take<T>(4 * bundle_room(this->n) * this->n.groups)),
          pair(arena.take<T>(pair_size(this->n))), weights_out(job.call.grad_weights, {SCALE, GROUP}),
          anchor_gradients(job, arena) {}

    void operator()(int64_t item) {
        const int64_t b = this->blocks.range(item);
        anchor_gradients.open(item);
        this->each(
            b, this->blocks.begin(item), this->blocks.end(item),
            [&](int64_t a, int64_t unseen) {
                memset(pair, 0, size_t(pair_size(this->n)) * sizeof(T));
                write(b, a, unseen, pair, pair);
            },
            [&](const Bundle<T> &bundle) { serve(b, bundle); });
    }

  private:
    T *dot;  // [row, groups]
    T *pair; // the gradients of one pair's weights, [scales, groups]
    SomeAxes<2> weights_out;
    AnchorGradients<T> anchor_gradients; // used only with logits

    static int64_t pair_size(const Sizes &n) { return n.scales * n.groups > 2 ? n.scales * n.groups : 2; }

    void write(int64_t b, int64_t a, int64_t pair_index, const T *location, const T *weight) {
        const Tensor &l = this->call.grad_locations, &w = this->call.grad_weights;
        const int64_t p = pair_index / this->n.cameras, cam = pair_index % this->n.cameras;
        if (l.data)
            write_elements(location, at(l, offset_of(l, b, a) + p * l.strides[KEY_POINT] + cam * l.strides[CAMERA]), l.dtype,
                           l.strides[PAIR_XY], 2);
        if (w.data) weights_out.write(offset_of(w, b, a) + p * w.strides[KEY_POINT] + cam * w.strides[CAMERA], weight);
    }

    void serve(int64_t b, const Bundle<T> &bundle) {
        const Sizes &n = this->n;
        if (this->call.with_logits && bundle.first) anchor_gradients.begin();
        if (bundle.num_pairs > 0) find_dots(b, bundle);
        for (int64_t i = 0; i < bundle.num_pairs; ++i) {
            T location[2] = {0, 0}, *weight = this->call.with_logits ? anchor_gradients.next_pair() : pair;
            for (int64_t s = 0; s < n.scales; ++s) sample(bundle, i * n.scales + s, location, weight + s * n.groups);
            if (this->call.with_logits)
                anchor_gradients.add(this->locations, bundle, i, location, weight);
            else
                write(b, bundle.anchor, bundle.pairs[i], location, weight);
        }
        if (this->call.with_logits && bundle.last) anchor_gradients.write(b, bundle.anchor, this->locations, this->weights);
    }

    void find_dots(int64_t b, const Bundle<T> &bundle) {
        const Sizes &n = this->n;
        const Tensor &grad = this->call.grad_output;
        const T *g =
            row_as(at(grad, offset_of(grad, b, bundle.anchor)), grad.dtype, grad.strides[CHANNEL], n.channels, this->row);
        grouped_dots<V, T>(bundle.address, bundle.num_rows(), n.groups, n.group_channels, g, dot);
    }

    // Computes the gradients of sample i: adds to location[0] and location[1], writes weight[groups].
    void sample(const Bundle<T> &bundle, int64_t i, T *location, T *weight) {
        T slope_x = 0, slope_y = 0;
        for_pieces<T>(this->n.groups, [&](auto lanes, auto vectors, int64_t c) {
            constexpr int N = lanes.value;
            const auto right = broadcast<T, N>(bundle.right[i]), below = broadcast<T, N>(bundle.below[i]);
            for (int v = 0; v < vectors.value; ++v, c += N) {
                Vec<T, N> d[4];
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const int64_t entry = entry_of<4>(i, k);
                    d[k] = bundle.inside[entry] ? load<T, N>(dot + entry * this->n.groups + c) : Vec<T, N>{};
                }
                const CornerSlopes<Vec<T, N>> slope(d, right, below);
                store<T, N>(weight + c, slope.sample);
                const Vec<T, N> w = load<T, N>(bundle.samples.weight(i) + c);
                slope_x += sum<T, N>(w * slope.dx);
                slope_y += sum<T, N>(w * slope.dy);
            }
        });
        location[0] += bundle.samples.maps().width(i) * slope_x;
        location[1] += bundle.samples.maps().height(i) * slope_y;
    }
};

// ---- the gradient of feature_maps, in bands of rows

template <class T> class FeatureGradient {
  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * job.plan.num_bands; }
    FeatureGradient(const Job &job, Arena &arena)
        : call(job.call), plan(job.plan), n(call.sizes), locations(call, arena), weights(job), samples(call, arena),
          row(arena.take<T>(n.channels)), sink(arena.take<T>(n.channels)),
          address(arena.take<int64_t>(4 * bundle_room(n) + ROWS_AHEAD)),
          coefficients(arena.take<T>(4 * bundle_room(n) * n.groups)), band(call, plan, n.channels, arena),
          reach(arena, call.sizes.levels) {}

    void operator()(int64_t item) {
        const int64_t b = item / plan.num_bands;
        band.open(item % plan.num_bands, b, 0);
        reach.set_levels(call.levels, 0, call.sizes.levels, 1, call.sizes.levels, band);
        band.levels_touched(first_map, end_map);
        if (first_map >= end_map) return band.close();
        locations.open(b, first_map / n.scales, (end_map - 1) / n.scales + 1);
        for (int64_t a = 0; a < n.queries; ++a) anchor(b, a);
        band.close();
    }

  private:
    const Call &call;
    const Plan &plan;
    Sizes n;
    AnchorReader<T> locations;
    SampleWeights<T> weights;
    Samples<T> samples;
    T *row;
    T *sink; // a row to prefetch after the last row; never read or written
    int64_t *address;
    T *coefficients; // [row, groups]
    Band<T> band;
    BandReach<T> reach;
    int64_t first_map = 0, end_map = 0; // all maps with rows in the band are in first_map..end_map-1

    void anchor(int64_t b, int64_t a) {
        locations.read(b, a);
        for (int64_t map = first_map; map < end_map; ++map) {
            if (!band.touches(call.levels[map])) continue;
            const int64_t cam = map / n.scales, scale = map % n.scales;
            locations.find_seen(a, cam, map, reach);
            for (int64_t i = 0; i < locations.num_seen; ++i) {
                if (samples.count == bundle_room(n)) serve(b, a);
                const int64_t pair = locations.seen[i], ahead = i + WEIGHTS_AHEAD;
                if (ahead < locations.num_seen) weights.ask_for(b, a, locations.seen[ahead], scale);
                const T *xy = locations.location(pair);
                weights.read(b, a, pair, scale, samples.add(xy[0], xy[1], map, map + 1));
            }
        }
        serve(b, a);
    }

    // Adds the rows of the collected samples, sample by sample, so that the order of additions is the same for any bands.
    void serve(int64_t b, int64_t a) {
        if (samples.count == 0) return;
        const int64_t padded = samples.pad();
        int64_t count = 0;
        for (int64_t first = 0; first < padded; first += LANES) {
            const Corners<T> c = samples.corners(first);
            Int<T> pixel[4][LANES], inside[4][LANES];
            T coefficient[4][LANES];
            for (int k = 0; k < 4; ++k) {
                const IntLanes<T> mine = in_band<T>(c, k, band), from = c.pixel[k] - Int<T>(band.begin);
                const RealLanes<T> s = c.coefficient(k);
                memcpy(inside[k], &mine, sizeof mine);
                memcpy(pixel[k], &from, sizeof from);
                memcpy(coefficient[k], &s, sizeof s);
            }
            for (int i = 0; i < LANES; ++i)
                for (int k = 0; k < 4; ++k)
                    if (inside[k][i]) {
                        address[count] = band.address + pixel[k][i] * band.step;
                        scaled<T>(samples.weight(first + i), coefficient[k][i], n.groups, coefficients + count * n.groups);
                        ++count;
                    }
        }
        for (int64_t i = 0; i < ROWS_AHEAD; ++i) address[count + i] = reinterpret_cast<int64_t>(sink);
        for (int64_t i = 0; i < ROWS_AHEAD; ++i)
            for (int64_t at = 0; at < n.channels * int64_t(sizeof(T)); at += 64) ask_for<64>(address[i] + at);
        const Tensor &grad = call.grad_output;
        const T *g = row_as(at(grad, offset_of(grad, b, a)), grad.dtype, grad.strides[CHANNEL], n.channels, row);
        grouped_add<T>(address, coefficients, count, n.groups, n.group_channels, g);
        samples.count = 0;
    }
};

template <class V, class T> bool all_gradients(const Job &job) {
    const bool needs_features = job.plan.value_gradient != ValueGradient::NOT_WANTED;
    if (job.plan.sample_gradients && !over_items<SampleGradients<V, T>>(job)) return false;
    if (!job.plan.sample_gradients && job.softmax_totals && !over_items<Totals<T>>(job)) return false;
    return !needs_features || over_items<FeatureGradient<T>>(job);
}

} // namespace

bool deformable_aggregation(const Call &call, const Plan &plan) {
    return with_types(call,
                      [&](auto *v, auto *t) { return over_items<Forward<__typeof__(*v), __typeof__(*t)>>({call, plan}); });
}

bool deformable_aggregation_backward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if (!call.with_logits) return all_gradients<V, T>({call, plan});
        const Tensor &grad = call.grad_projection;
        const int64_t totals = SoftmaxTotals<T>::bytes(call), blocks = anchor_blocks(call).per_range;
        // Memory of 0 bytes is null, so ask for at least 1.
        const Memory memory(1 + totals + PartialSums<T>(grad, nullptr).bytes(call.sizes.batch * blocks));
        char *const begin = memory.begin(), *const sums = grad.data ? begin + totals : nullptr;
        if (!begin || !all_gradients<V, T>({call, plan, nullptr, sums, begin})) return false;
        return !sums || add_parts<T>(call.num_threads, {grad, blocks, {grad, sums}});
    });
}

} // namespace mxd::MXD_ISA
