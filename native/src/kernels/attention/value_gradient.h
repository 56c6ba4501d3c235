// Workers for the gradient of value, in the ways of ValueGradient (call/plan.h): by heads or parts of heads, by bands, and
// together with the gradients of samples.
#pragma once

#include "kernels/attention/samples.h"
#include "kernels/attention/worker.h"
#include "kernels/shared/bands.h"

namespace mxd::MXD_ISA {
namespace {

// Computes the gradient of value for a head or a part of a head. No other worker adds to these rows. Rows of packed levels are
// summed in memory of the worker, and copied to grad_value at the end. Other rows are summed in grad_value.
//
// An item is (batch, head, part). grad_value must be zero. Value is not read, so the rows have type T.
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

// Computes the gradient of value for a band of rows. The plan chooses bands if there are more threads than heads, or if
// grad_value is buffered because its dtype is not T or its channels are not contiguous.
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

// Computes all gradients of a head in one pass: multiplies rows of value with grad_output, and adds to rows of the gradient.
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

} // namespace
} // namespace mxd::MXD_ISA
