// The backward of the attention operators. The plan chooses the workers: the gradients of samples (their locations and weights)
// and the gradient of value have passes of their own, or one pass together (ValueGradient, call/plan.h).
#pragma once

#include "kernels/attention/worker.h"
#include "kernels/shared/bands.h"
#include "kernels/shared/partial_sums.h"

namespace mxd::MXD_ISA {
namespace {

// Writes a gradient with OF_EACH numbers per sample, query by query. If dtype and strides allow it, whole vectors are written
// directly to the tensor. All other elements are collected in scratch memory and then copied.
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

// Computes the gradients of a query's samples from the dot products of the query's rows with grad_output.
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

// Computes the gradients of samples without the gradient of value. An item is one of the blocks that query_blocks() makes.
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
    Blocks blocks; // blocks of queries of one head of one batch element
    SampleOutputs<T, Rule> samples;
};

// Computes the gradient of value for a head or a part of a head. No other worker adds to these rows. Rows of packed levels are
// summed in memory of the worker, and copied to grad_value at the end. Other rows are summed in grad_value.
//
// An item is (batch, head, part). grad_value must be zero, unless all rows are packed. Value is not read, so the rows have type
// T.
template <class T, template <class> class Rule> class ValueByHeads : QueryWorker<T, T, Rule> {
    typedef QueryWorker<T, T, Rule> Base;

  public:
    static int64_t parts(const Plan &plan) { return plan.parts > 1 ? plan.parts : 1; }
    static int64_t items(const Job &job) { return job.call.sizes.batch * job.call.sizes.heads * parts(job.plan); }
    ValueByHeads(const Job &j, Arena &arena)
        : Base(j, arena), plan(j.plan), packed(arena.take<char>(plan.packed_gradient.bytes)) {}

    void operator()(int64_t item) {
        const Call &call = this->call;
        const int64_t part = item % parts(plan), h = item / parts(plan) % this->n.heads, b = item / parts(plan) / this->n.heads;
        const OutputGradient<T> grad_output(call, b, h, this->row);
        open(b, h, call.sizes.levels * part / parts(plan), call.sizes.levels * (part + 1) / parts(plan));
        this->template queries<true>(0, this->n.queries,
                                     [&](int64_t q, const PreparedQuery<T> &prepared, const PreparedQuery<T> &next) {
                                         scatter_add<T>(prepared.address, prepared.coefficient, next.address, this->num_rows,
                                                        this->n.channels, grad_output.of(q));
                                     });
        unpack<T>(call, plan.packed_gradient, packed, b, h);
    }

  private:
    const Plan &plan;
    char *packed; // the levels of plan.packed_gradient

    void open(int64_t b, int64_t h, int64_t first_level, int64_t last_level) {
        memset(packed, 0, size_t(plan.packed_gradient.bytes));
        this->use_levels(first_level, last_level);
        find_levels(this->call, this->n, first_level, {this->call.grad_value, b, h}, plan.packed_gradient,
                    plan.packed_gradient.bytes > 0 ? packed : nullptr, this->rows);
        this->open_queries(b, h);
    }
};

// Computes the gradient of value for a band of rows. The plan chooses bands if whole heads would leave threads idle and parts
// do not help, or if grad_value is buffered because its dtype is not T or its channels are not contiguous, and its rows are not
// all packed.
//
// An item is (batch, head, band).
template <class T, template <class> class Rule> class ValueByBands {
  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * job.call.sizes.heads * job.plan.num_bands; }
    ValueByBands(const Job &job, Arena &arena)
        : call(job.call), plan(job.plan), n(job.call.sizes), reader(job.call, arena), query(n, reader, arena),
          lists{{arena, padded_samples(n)}, {arena, padded_samples(n)}, {arena, padded_samples(n)}, {arena, padded_samples(n)}},
          row(arena.take<T>(n.channels)), band(call, plan, n.channels, arena), reach(arena, padded_samples(n)) {}

    void operator()(int64_t item) {
        const int64_t h = item / plan.num_bands % n.heads, b = item / plan.num_bands / n.heads;
        band.open(item % plan.num_bands, b, h);
        int64_t first, last;
        band.levels_touched(first, last);
        if (first < last) add_queries(b, h, first, last);
        band.close();
    }

  private:
    const Call &call;
    const Plan &plan;
    Sizes n;
    QueryReader<T> reader;
    Query<T> query;
    ScatterList<T> lists[IN_FLIGHT];
    T *row;
    Band<T> band;
    BandReach<T> reach;

    void add_queries(int64_t b, int64_t h, int64_t first, int64_t last) {
        const OutputGradient<T> grad_output(call, b, h, row);
        while (first * n.points % ROWS != 0) --first; // lists have groups of ROWS samples; every band must have the same groups
        reader.use_levels(first, last);
        reach.set_levels(call.levels, first, last, n.points, reader.padded, band);
        reader.open(b, h);
        ahead(
            0, n.queries,
            [&](int64_t q, int64_t prepared) {
                reader.read(q, query);
                lists[prepared].count = 0;
                for (int64_t i = 0; i < reader.padded; i += LANES)
                    if (any(Rule<T>::reach(query, i, reach))) // true for few vectors, because a band covers little of a map
                        lists[prepared].add(Rule<T>::rows(query, i), band);
            },
            [&](int64_t q, int64_t prepared, int64_t next) {
                const ScatterList<T> &list = lists[prepared];
                if (list.count > 0)
                    scatter_add<T>(list.address, list.coefficient, lists[next].address, list.count, n.channels,
                                   grad_output.of(q));
            });
    }
};

// Computes all gradients of a head in one pass: multiplies rows of value with grad_output, and adds to rows of grad_value.
//
// An item is (batch, head). With PACKED all rows of value and of its gradient are packed in memory of the worker, and the
// tensors may have any dtype and layout. Without PACKED both tensors have type T and the same layout, and grad_value must be
// zero.
template <class V, class T, template <class> class Rule, bool PACKED> class AllGradients : QueryWorker<T, T, Rule> {
    static_assert(PACKED || same_type<V, T>, "rows that are added to are of the type computed in");
    typedef QueryWorker<T, T, Rule> Base;

  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * job.call.sizes.heads; }
    AllGradients(const Job &j, Arena &arena)
        : Base(j, arena), job(j), levels(j.plan.packed_gradient), samples(j, arena),
          packed_value(arena.take<char>(levels.bytes)), packed_gradient(arena.take<char>(levels.bytes)) {}

    void operator()(int64_t item) {
        const Call &call = this->call;
        const int64_t h = item % this->n.heads, b = item / this->n.heads;
        const OutputGradient<T> grad_output(call, b, h, this->row);
        const OtherRows gradient{open_rows(b, h), reinterpret_cast<int64_t>(this->zero_row)};
        this->reader.open(b, h);
        samples.open(b, h);
        this->template queries<true>(
            0, this->n.queries, [&](int64_t q, const PreparedQuery<T> &prepared, const PreparedQuery<T> &next) {
                const T *g = grad_output.of(q);
                dots_and_scatter_add<T, !PACKED>(prepared.address, prepared.coefficient, next.address, gradient, this->num_rows,
                                                 this->n.channels, g, samples.dot);
                samples.write(q, prepared.query, this->reader);
            });
        if (PACKED) unpack<T>(call, levels, packed_gradient, b, h);
    }

  private:
    const Job job;
    const PackedLevels &levels;
    SampleOutputs<T, Rule> samples;
    char *packed_value, *packed_gradient;

    // Selects the rows of a head. Returns the distance from a row of value to the same row of its gradient.
    int64_t open_rows(int64_t b, int64_t h) {
        const Call &call = this->call;
        const HeadRows value(call.value, b, h), gradient(call.grad_value, b, h);
        if (PACKED) {
            pack<V, T>(call, levels, b, h, packed_value, 0, 1);
            memset(packed_gradient, 0, size_t(levels.bytes));
        }
        find_levels(call, this->n, 0, value, levels, PACKED ? packed_value : nullptr, this->rows);
        return PACKED ? packed_gradient - packed_value : gradient.first - value.first;
    }
};

// Sets a chunk of grad_value to zero, in the order of memory. Zeroing one head after the other takes longer.
template <class T> inline void set_to_zero(const Call &call, int64_t chunk) {
    const Sizes &n = call.sizes;
    const Tensor &grad = call.grad_value;
    const int64_t begin = n.keys * chunk / STAGE_CHUNKS, end = n.keys * (chunk + 1) / STAGE_CHUNKS;
    const bool contiguous = grad.strides[HEAD] == n.channels && grad.strides[KEY] == n.heads * n.channels;
    for (int64_t b = 0; b < n.batch; ++b) {
        if (contiguous) {
            memset(at(grad, offset_of(grad, b, begin, 0)), 0, size_t((end - begin) * grad.strides[KEY]) * sizeof(T));
            continue;
        }
        for (int64_t i = begin; i < end; ++i)
            for (int64_t h = 0; h < n.heads; ++h) memset(at(grad, offset_of(grad, b, i, h)), 0, size_t(n.channels) * sizeof(T));
    }
}

// Runs a worker over its items. First sets grad_value to zero, unless the worker writes all rows of grad_value.
template <class T, class Worker> inline bool add_to_zero(const Job &job) {
    if (job.plan.all_rows_are_packed) return over_items<Worker>(job);
    return parallel_stages<Worker>(job.call.num_threads, 1, Worker::items(job), job,
                                   [&](int64_t, int64_t chunk) { set_to_zero<T>(job.call, chunk); });
}

template <class V, class T, template <class> class Rule> inline bool sample_gradients(const Job &job) {
    if constexpr (Rule<T>::CORNERS == 4)
        if (job.plan.near_as_computed) return over_queries<V, SampleGradients<T, T, Rule>>(job);
    return over_queries<V, SampleGradients<V, T, Rule>>(job);
}

template <class V, class T, template <class> class Rule> inline bool all_gradients(const Job &job) {
    if (job.plan.sample_gradients && !sample_gradients<V, T, Rule>(job)) return false;
    switch (job.plan.value_gradient) {
    case ValueGradient::NOT_WANTED: return true;
    case ValueGradient::WITH_SAMPLES:
        if constexpr (Rule<T>::CORNERS == 1) {
            if (job.plan.packed_gradient.bytes > 0) return add_to_zero<T, AllGradients<V, T, Rule, true>>(job);
        }
        if constexpr (same_type<V, T>) return add_to_zero<T, AllGradients<V, T, Rule, false>>(job);
        return false;
    case ValueGradient::BY_HEADS:
    case ValueGradient::BY_PARTS: return add_to_zero<T, ValueByHeads<T, Rule>>(job);
    case ValueGradient::BY_BANDS: return over_items<ValueByBands<T, Rule>>(job);
    }
    return false;
}

template <template <class> class Rule> inline bool attention_backward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if (!call.grad_reference.data) return all_gradients<V, T, Rule>({call, plan});
        const Sizes &n = call.sizes;
        // Memory of 0 bytes is null, so ask for at least 1.
        const Memory memory(1 + PartialSums<T>(call.grad_reference, nullptr).bytes(n.batch * n.heads));
        return memory.begin() && all_gradients<V, T, Rule>({call, plan, nullptr, memory.begin()}) &&
               add_parts<T>(call.num_threads, {call.grad_reference, n.heads, {call.grad_reference, memory.begin()}});
    });
}

} // namespace
} // namespace mxd::MXD_ISA
