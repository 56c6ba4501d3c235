// The gradient of value, by bands of rows: where threads are more than heads, and where the gradient is buffered
// because kernels do not compute in its dtype or its channels are not contiguous.
#pragma once

#include "kernels/attention/worker.h"
#include "kernels/shared/bands.h"

namespace mxd::MXD_ISA {
namespace {

// Items: (batch, head, band).
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

    // Samples of levels first..last-1.
    void add_queries(int64_t b, int64_t h, int64_t first, int64_t last) {
        const OutputGradient<T> grad_output(call, b, h, row);
        while (first * n.points % ROWS != 0) --first; // lists take ROWS samples at a time, in every band the same
        reader.use_levels(first, last);
        reach.set_levels(call.levels, first, last, n.points, reader.padded, band);
        reader.open(b, h);
        ahead(
            0, n.queries,
            [&](int64_t q, int64_t prepared) {
                reader.read(q, query);
                lists[prepared].count = 0;
                for (int64_t i = 0; i < reader.padded; i += LANES)
                    if (any(Rule<T>::reach(query, i, reach))) // few vectors do: a band covers little of a map
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

} // namespace
} // namespace mxd::MXD_ISA
