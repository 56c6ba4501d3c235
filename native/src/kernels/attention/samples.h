// The gradients of samples: of their locations and weights.
#pragma once

#include "kernels/attention/worker.h"
#include "kernels/shared/partial_sums.h"

namespace mxd::MXD_ISA {
namespace {

// Writes a gradient with OF_EACH numbers per sample, query by query. If dtype and strides allow it, whole vectors are written
// directly to the tensor. Other elements are collected in scratch memory and then copied.
template <class T, int AXES, int OF_EACH> class SampleOutput {
  public:
    SampleOutput(const SomeAxes<AXES> &sample_axes, const Sizes &n, Arena &arena)
        : tensor(sample_axes.tensor), axes(sample_axes), samples(n.levels * n.points), in_vectors(samples / LANES * LANES),
          direct(tensor.data && axes.contiguous && tensor.dtype == OWN<T>),
          scratch(arena.take<T>(OF_EACH * padded_samples(n))) {}

    void open(int64_t b, int64_t h) {
        if (tensor.data) queries = QueryRows(tensor, b, h, samples * OF_EACH);
    }
    MXD_INLINE T *begin(int64_t q) const {
        char *to = tensor.data ? queries.template at_in_turn<true>(q) : nullptr;
        return direct ? reinterpret_cast<T *>(to) : scratch;
    }
    // Returns where to write samples i..i+LANES-1. `begun` is the address that begin() returned.
    MXD_INLINE T *address(T *begun, int64_t i) const { return i < in_vectors ? begun : scratch; }
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
    T *scratch; // the gradient of one query
    QueryRows queries;
};

// Computes the gradients of a query's samples from the dot products of its rows with grad_output.
template <class T, template <class> class Rule> class SampleOutputs {
  public:
    T *dot; // the dot product of grad_output with each row

    SampleOutputs(const Job &job, Arena &arena)
        : dot(arena.zeros<T>(4 * padded_samples(job.call.sizes))), call(job.call), n(call.sizes),
          xy({job.call.grad_locations, {LEVEL, POINT, XY}}, n, arena),
          weights({job.call.grad_weights, {LEVEL, POINT}}, n, arena), sums(call.grad_reference, job.partial_sums) {}
    void open(int64_t b, int64_t h) {
        xy.open(b, h);
        weights.open(b, h);
        part = b * n.heads + h;
        at_once = call.with_logits && xy.in_whole_vectors() && weights.in_whole_vectors() && !sums.all;
    }
    MXD_INLINE void write(int64_t q, const Query<T> &query, const QueryReader<T> &reader) {
        if (call.has_window && weights.in_whole_vectors()) // with a window, `dot` is the gradient of the weights
            return reader.with_logits().logit_gradients(q, dot, n.levels * n.points, weights.begin(q));
        if constexpr (Rule<T>::CORNERS == 4)
            if (at_once && !reader.with_logits().has_boxes()) return write_at_once(q, query, reader);
        if (call.with_logits) return write_computed(q, query, reader);
        T *grad_xy = xy.begin(q), *grad_weight = weights.begin(q);
        each_vector(query, reader.padded, [&](int64_t i, const Query<T> &own, const T *dots) {
            Rule<T>::gradients(own, dots, i, xy.address(grad_xy, i), weights.address(grad_weight, i));
        });
        xy.end(q, grad_xy);
        weights.end(q, grad_weight);
    }

  private:
    const Call &call;
    Sizes n;
    SampleOutput<T, 3, 2> xy;
    SampleOutput<T, 2, 1> weights;
    PartialSums<T> sums; // the gradient of reference points; each head is a part
    int64_t part = 0;
    // Calls with logits: true if all gradients are written in whole vectors and reference points need no gradient.
    bool at_once = false;

    // Calls op(first of LANES samples, query, dot) for all samples of a query. The query is a local copy, so that the compiler
    // can keep it in registers across the stores of gradients.
    template <class Op> MXD_INLINE void each_vector(const Query<T> &query, int64_t padded, Op &&op) const {
        const Query<T> own = query;
        const T *dots = dot;
        for (int64_t i = 0; i < padded; i += LANES) op(i, own, dots);
    }

    MXD_INLINE void write_at_once(int64_t q, const Query<T> &query, const QueryReader<T> &reader) {
        T *grad_offsets = xy.begin(q), *grad_weight = weights.memory();
        each_vector(query, reader.padded, [&](int64_t i, const Query<T> &own, const T *dots) __attribute__((always_inline)) {
            Rule<T>::template gradients<true>(own, dots, i, grad_offsets, grad_weight);
        });
        reader.with_logits().logit_gradients(q, grad_weight, weights.whole_vectors(), weights.begin(q));
    }
    __attribute__((noinline)) void write_computed(int64_t q, const Query<T> &query, const QueryReader<T> &reader) {
        const Logits<T> &logits = reader.with_logits();
        T *grad_xy = xy.memory(), *grad_weight = weights.memory();
        each_vector(query, reader.padded, [&](int64_t i, const Query<T> &own, const T *dots) {
            if (logits.has_boxes())
                Rule<T>::template gradients<false>(own, dots, i, grad_xy, grad_weight);
            else
                Rule<T>::template gradients<true>(own, dots, i, grad_xy, grad_weight);
        });
        T *grad_offsets = xy.begin(q), *grad_logits = weights.begin(q);
        logits.offset_gradients(q, grad_xy, xy.whole_vectors(), grad_offsets, sums.of(part, q));
        logits.logit_gradients(q, grad_weight, weights.whole_vectors(), grad_logits);
        xy.end(q, grad_offsets);
        weights.end(q, grad_logits);
    }
};

// Computes the gradients of samples without the gradient of value. An item is a block of query_blocks.
template <class V, class T, template <class> class Rule> class SampleGradients : QueryWorker<V, T, Rule> {
    typedef QueryWorker<V, T, Rule> Base;

  public:
    typedef V Row;
    SampleGradients(const Job &j, Arena &arena)
        : Base(j, arena), job(j), blocks(query_blocks(j.call, j.packed_value != nullptr)), samples(j, arena) {}

    void operator()(int64_t item) {
        const int64_t b = blocks.range(item) / this->n.heads, h = blocks.range(item) % this->n.heads;
        const OutputGradient<T> grad_output(this->call, b, h, this->row);
        this->find_value(job, b, h);
        this->reader.open(b, h);
        samples.open(b, h);
        this->template queries<false>(blocks.begin(item), blocks.end(item),
                                      [&](int64_t q, const PreparedQuery<T> &prepared, const PreparedQuery<T> &next) {
                                          const T *g = grad_output.of(q);
                                          dots<V, T>(prepared.address, next.address, this->num_rows, this->n.channels, g,
                                                     samples.dot);
                                          samples.write(q, prepared.query, this->reader);
                                      });
    }

  private:
    const Job job;
    Blocks blocks; // a range is one head of a batch
    SampleOutputs<T, Rule> samples;
};

} // namespace
} // namespace mxd::MXD_ISA
