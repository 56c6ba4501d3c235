// Samples of geometric_kernel_attention_with_logits: pixels of a window around reference points, whose weights are
// computed from logits.
#pragma once

#include "kernels/attention/logits.h"
#include "kernels/attention/queries.h"
#include "kernels/attention/sample_output.h"
#include "kernels/attention/window.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> struct WindowQuery : QueryOfMaps<T> {
    Window<T> window;
    T reference[2];

    template <class Reader>
    WindowQuery(const Sizes &, const Reader &reader, Arena &) : QueryOfMaps<T>(reader.maps), window(reader.window) {}
    // The pixel of a sample, rounded.
    MXD_INLINE void whole_pixel(int64_t sample, IntLanes<T> &x, IntLanes<T> &y) const {
        RealLanes<T> real_x, real_y;
        window.pixel(reference, this->maps.at(sample), sample, real_x, real_y);
        x = whole_or_largest<true, LANES>(real_x);
        y = whole_or_largest<true, LANES>(real_y);
    }
};

// Of logits. A sample is one row, whose product is the gradient of the sample's weight.
template <class T> class WindowSampleGradients {
    SampleOutput<T, 2, 1> logits;

  public:
    T *dot; // of each row; then what is not written in place

    WindowSampleGradients(const Job &job, Arena &arena)
        : logits({job.call.grad_logits, {LEVEL, POINT}}, job.call.sizes, arena), dot(logits.memory()) {}
    void open(int64_t b, int64_t h) { logits.open(b, h); }
    template <class Reader> MXD_INLINE void write(int64_t q, const WindowQuery<T> &, const Reader &reader) {
        T *to = logits.begin(q);
        reader.logits.gradients(q, dot, logits.whole_vectors(), to);
        logits.end(q, to);
    }
};

template <class T> class FromWindow {
  public:
    typedef WindowQuery<T> Query;
    template <class Rule> using Gradients = WindowSampleGradients<T>;
    int64_t padded = 0;
    Maps<T> maps;
    Window<T> window;
    Logits<T> logits;

    FromWindow(const Call &c, Arena &arena)
        : maps(arena, padded_samples(c.sizes)), window(c, arena), logits(c, arena), call(c),
          in_place(c.reference.dtype == OWN<T> && c.reference.strides[COORDINATE] == 1) {
        if (!arena.counts) use_levels(0, c.sizes.levels);
    }

    void use_levels(int64_t first, int64_t last) {
        padded = round_up((last - first) * call.sizes.points, LANES);
        window.set(call.window, (last - first) * call.sizes.points);
        logits.use_levels(first);
        maps.set_levels(call.levels, first, last, call.sizes.points, padded);
    }
    void open(int64_t b, int64_t h) {
        references = QueryRows(call.reference, b, h, 2);
        logits.open(b, h);
        computed = 0;
    }
    MXD_INLINE void read(int64_t q, Query &query) {
        const char *reference = references.at_in_turn(q);
        logits.ask_for(q);
        if (q >= computed) compute(q);
        if (in_place)
            memcpy(query.reference, reference, sizeof query.reference);
        else
            read_elements(reference, call.reference.dtype, call.reference.strides[COORDINATE], 2, query.reference);
        query.weights = logits.weights_of(q);
    }

  private:
    const Call &call;
    bool in_place; // reference points are read as they lie
    QueryRows references;
    int64_t computed = 0;

    __attribute__((noinline)) void compute(int64_t q) {
        computed = end_of_computed(q, call.sizes);
        if (padded > 0) logits.compute(q & -COMPUTED_TOGETHER, computed);
    }
};

} // namespace
} // namespace mxd::MXD_ISA
