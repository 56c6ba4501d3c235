// The gradient of feature_maps, by bands of rows.
#pragma once

#include "kernels/aggregation/anchors.h"
#include "kernels/shared/bands.h"

namespace mxd::MXD_ISA {
namespace {

// Items: (batch, band).
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
    T *sink; // never written: prefetched where no row is ahead
    int64_t *address;
    T *coefficients; // [row, groups]
    Band<T> band;
    BandReach<T> reach;
    int64_t first_map = 0, end_map = 0; // the maps that reach into the band lie between

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

    // Sample by sample, so that where value is cut into bands does not change the order of additions.
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

} // namespace
} // namespace mxd::MXD_ISA
