// Samples whose locations and weights are given.
#pragma once

#include "kernels/aggregation/anchors.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> class GivenPairs : public SeenPairs<T> {
  public:
    GivenPairs(const Call &c, Arena &arena)
        : SeenPairs<T>(c, arena), axes(c.locations, {KEY_POINT, CAMERA, PAIR_XY}),
          in_place(axes.contiguous && c.locations.dtype == OWN<T>), copy(arena.take<T>(2 * pairs_of(c.sizes))) {}

    void open(int64_t, int64_t, int64_t) {}
    void read(int64_t b, int64_t anchor) {
        const int64_t offset = offset_of(this->call.locations, b, anchor);
        if (!in_place) axes.read(offset, copy);
        this->xy = in_place ? reinterpret_cast<const T *>(at(this->call.locations, offset)) : copy;
    }
    template <class Skip> void find_seen(int64_t, Skip &&skip) {
        this->num_seen = 0;
        for (int64_t pair = 0; pair < pairs_of(this->n); ++pair)
            if (this->inside(pair))
                this->found[this->num_seen++] = pair;
            else
                skip(pair);
        this->seen = this->found;
    }
    void find_seen(int64_t, int64_t camera, int64_t map, const BandReach<T> &band) {
        this->seen = this->found;
        this->num_seen = 0;
        for (int64_t pair = camera; pair < pairs_of(this->n); pair += this->n.cameras)
            if (this->inside(pair) && this->reaches(pair, map, band)) this->found[this->num_seen++] = pair;
    }

  private:
    SomeAxes<3> axes;
    bool in_place; // locations are read where they lie
    T *copy;
};

template <class T> struct GivenWeights : PairElements<T> {
    GivenWeights(const Job &job, Arena &) : PairElements<T>(job.call.weights, job.call.sizes) {}
    void open(int64_t, int64_t, bool) {}
};

// The gradients of a pair are those of its location and weights, as they stand.
template <class T> class GivenGradients {
  public:
    GivenGradients(const Job &job, Arena &arena)
        : call(job.call), cameras(call.sizes.cameras), of_pair(arena.take<T>(size_of_pair(call.sizes))),
          weights(call.grad_weights, {SCALE, GROUP}) {}

    void open(int64_t) {}
    void begin() {}
    T *of_next_pair() { return of_pair; }
    template <class Pairs>
    void add(int64_t b, const Bundle<T> &bundle, int64_t i, const Pairs &, const T *location, const T *weight) {
        write(b, bundle.anchor, bundle.pairs[i], location, weight);
    }
    void skip(int64_t b, int64_t anchor, int64_t pair) {
        memset(of_pair, 0, size_t(size_of_pair(call.sizes)) * sizeof(T));
        write(b, anchor, pair, of_pair, of_pair);
    }
    template <class Pairs, class Weights> void end(int64_t, int64_t, const Pairs &, Weights &) {}

  private:
    const Call &call;
    int64_t cameras;
    T *of_pair; // of the weights of one pair, [scales, groups]
    SomeAxes<2> weights;

    static int64_t size_of_pair(const Sizes &n) { return n.scales * n.groups > 2 ? n.scales * n.groups : 2; }

    void write(int64_t b, int64_t a, int64_t pair, const T *location, const T *weight) {
        const Tensor &l = call.grad_locations, &w = call.grad_weights;
        const int64_t p = pair / cameras, cam = pair % cameras;
        if (l.data)
            write_elements(location, at(l, offset_of(l, b, a) + p * l.strides[KEY_POINT] + cam * l.strides[CAMERA]), l.dtype,
                           l.strides[PAIR_XY], 2);
        if (w.data) weights.write(offset_of(w, b, a) + p * w.strides[KEY_POINT] + cam * w.strides[CAMERA], weight);
    }
};

template <class T> struct Given {
    typedef GivenPairs<T> Pairs;
    typedef GivenWeights<T> Weights, SampleWeights;
    typedef GivenGradients<T> Gradients;
};

} // namespace
} // namespace mxd::MXD_ISA
