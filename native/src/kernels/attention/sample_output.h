// How the gradients of samples are written, query by query.
#pragma once

#include "kernels/attention/query_rows.h"

namespace mxd::MXD_ISA {
namespace {

// Writes a gradient of OF_EACH numbers a sample, query by query. If dtype and strides allow it, whole vectors are
// written in place as they are worked out. Everything else goes through scratch memory.
template <class T, int AXES, int OF_EACH> class SampleOutput {
  public:
    SampleOutput(const SomeAxes<AXES> &of_sample, const Sizes &n, Arena &arena)
        : tensor(of_sample.tensor), axes(of_sample), samples(n.levels * n.points), in_vectors(samples / LANES * LANES),
          direct(tensor.data && axes.contiguous && tensor.dtype == OWN<T>),
          scratch(arena.take<T>(OF_EACH * padded_samples(n))) {}

    void open(int64_t b, int64_t h) {
        if (tensor.data) queries = QueryRows(tensor, b, h, samples * OF_EACH);
    }
    MXD_INLINE T *begin(int64_t q) const {
        char *to = tensor.data ? queries.template at_in_turn<true>(q) : nullptr;
        return direct ? reinterpret_cast<T *>(to) : scratch;
    }
    // Where samples i..i+LANES-1 of a query are written. begun: what begin() returned.
    MXD_INLINE T *of_vector(T *begun, int64_t i) const { return i < in_vectors ? begun : scratch; }
    T *memory() const { return scratch; }
    int64_t whole_vectors() const { return in_vectors; }
    bool in_whole_vectors() const { return direct && in_vectors == samples; }
    MXD_INLINE void end(int64_t q, T *begun) const {
        if (tensor.data && !direct) axes.write_at(queries.at(q), scratch);
        if (direct && in_vectors < samples)
            memcpy(begun + in_vectors * OF_EACH, scratch + in_vectors * OF_EACH,
                   size_t((samples - in_vectors) * OF_EACH) * sizeof(T));
    }

  private:
    const Tensor &tensor;
    SomeAxes<AXES> axes;
    int64_t samples, in_vectors;
    bool direct;
    T *scratch; // of a query
    QueryRows queries;
};

// op(first of LANES samples, the query, dot) for all samples of a query. The query is a local copy, so that the compiler
// may keep it in registers across the stores of gradients.
template <class T, class Query, class Op>
MXD_INLINE void each_vector(const Query &query, int64_t padded, const T *dot, Op &&op) {
    const Query own = query;
    for (int64_t i = 0; i < padded; i += LANES) op(i, own, dot);
}

} // namespace
} // namespace mxd::MXD_ISA
