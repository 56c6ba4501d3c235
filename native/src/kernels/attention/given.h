// Samples whose locations and weights are given.
#pragma once

#include "kernels/attention/queries.h"
#include "kernels/attention/sample_output.h"

namespace mxd::MXD_ISA {
namespace {

// Locations and weights are read in place where dtype and strides allow it. The padding is then whatever follows in
// memory.
template <class T> class GivenQuery : public QueryOfMaps<T> {
  public:
    template <class Reader>
    GivenQuery(const Sizes &n, const Reader &reader, Arena &arena)
        : QueryOfMaps<T>(reader.maps), xy_copy(arena.take<int64_t>(2 * padded_samples(n))),
          weight_copy(arena.take<T>(padded_samples(n))) {}

    MXD_INLINE void location(int64_t sample, RealLanes<T> &x, RealLanes<T> &y) const {
        load_pairs<T>(static_cast<const T *>(xy) + 2 * sample, x, y);
    }
    // The pixel of a location in pixels, truncated. Integer locations stay integers, because T cannot represent all of
    // them.
    MXD_INLINE void whole_pixel(int64_t sample, IntLanes<T> &x, IntLanes<T> &y) const {
        if (whole) return whole_pairs<Int<T>, LANES>(static_cast<const int64_t *>(xy) + 2 * sample, x, y);
        RealLanes<T> real_x, real_y;
        location(sample, real_x, real_y);
        x = whole_or_largest<false, LANES>(real_x);
        y = whole_or_largest<false, LANES>(real_y);
    }

  private:
    template <class> friend class Given;
    const void *xy = nullptr; // T, or int64_t where they are whole
    bool whole = false;
    void *xy_copy; // T or int64_t
    T *weight_copy;
};

template <class T, class Rule> class GivenGradients {
  public:
    T *dot; // of each row

    GivenGradients(const Job &job, Arena &arena)
        : dot(arena.zeros<T>(4 * padded_samples(job.call.sizes))),
          xy({job.call.grad_locations, {LEVEL, POINT, XY}}, job.call.sizes, arena),
          weights({job.call.grad_weights, {LEVEL, POINT}}, job.call.sizes, arena) {}
    void open(int64_t b, int64_t h) {
        xy.open(b, h);
        weights.open(b, h);
    }
    MXD_INLINE void write(int64_t q, const GivenQuery<T> &query, const typename Rule::Reader &reader) {
        T *grad_xy = xy.begin(q), *grad_weight = weights.begin(q);
        each_vector(query, reader.padded, dot,
                    [&](int64_t i, const GivenQuery<T> &own, const T *dots) __attribute__((always_inline)) {
                        Rule::gradients(own, dots, i, xy.of_vector(grad_xy, i), weights.of_vector(grad_weight, i));
                    });
        xy.end(q, grad_xy);
        weights.end(q, grad_weight);
    }

  private:
    SampleOutput<T, 3, 2> xy;
    SampleOutput<T, 2, 1> weights;
};

template <class T> class Given {
  public:
    typedef GivenQuery<T> Query;
    template <class Rule> using Gradients = GivenGradients<T, Rule>;
    int64_t padded = 0;
    Maps<T> maps;

    Given(const Call &c, Arena &arena)
        : maps(arena, padded_samples(c.sizes)), call(c), locations(c.locations, {LEVEL, POINT, XY}),
          weights(c.weights, {LEVEL, POINT}), whole(c.locations.dtype == MXD_INT32 || c.locations.dtype == MXD_INT64) {
        if (!arena.counts) use_levels(0, c.sizes.levels);
    }

    void use_levels(int64_t first, int64_t last) {
        padded = round_up((last - first) * call.sizes.points, LANES);
        locations.use_levels(first, last, 2 * LANES);
        weights.use_levels(first, last, LANES);
        maps.set_levels(call.levels, first, last, call.sizes.points, padded);
    }
    void open(int64_t b, int64_t h) {
        locations.open(b, h);
        weights.open(b, h);
        const int64_t of_locations =
                          whole ? locations.template in_place_until<int64_t>() : locations.template in_place_until<T>(),
                      of_weights = weights.template in_place_until<T>();
        in_place_until = of_locations < of_weights ? of_locations : of_weights;
    }
    MXD_INLINE void read(int64_t q, Query &query) const {
        const char *location = locations.at_in_turn(q), *weight = weights.at_in_turn(q);
        query.whole = whole;
        query.xy = location;
        query.weights = reinterpret_cast<const T *>(weight);
        if (q <= in_place_until) return; // nearly always: one test for both
        if (whole)
            query.xy = locations.values(q, location, int64_t(0), static_cast<int64_t *>(query.xy_copy));
        else
            query.xy = locations.values(q, location, T(__builtin_nan("")), static_cast<T *>(query.xy_copy));
        query.weights = weights.values(q, weight, T(0), query.weight_copy);
    }

  private:
    const Call &call;
    QueryElements<3> locations;
    QueryElements<2> weights;
    int64_t in_place_until = -1; // the last query of which nothing is copied
    bool whole;                  // locations are whole numbers
};

} // namespace
} // namespace mxd::MXD_ISA
