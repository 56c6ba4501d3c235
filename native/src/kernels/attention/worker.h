// The base of workers that process queries in order: they open a (batch, head), and prepare and finish its queries.
#pragma once

#include "kernels/attention/packing.h"
#include "kernels/attention/sixteen_samples.h"

namespace mxd::MXD_ISA {
namespace {

// A query that is prepared and not finished yet: its inputs, the addresses of its rows, and their coefficients.
template <class T> struct alignas(64) PreparedQuery { // begins at a cache line
    Query<T> query;
    int64_t *address;
    T *coefficient;

    template <class Reader>
    PreparedQuery(const Sizes &n, const Reader &reader, Arena &arena)
        : query(n, reader, arena), // addresses are zeros, because they are prefetched before the first query is prepared
          address(arena.zeros<int64_t>(4 * padded_samples(n))), coefficient(arena.take<T>(4 * padded_samples(n))) {}
};

// V is the type of the rows, which belong to value or to its gradient.
template <class V, class T, template <class> class Rule> struct QueryWorker {
    static constexpr int CORNERS = Rule<T>::CORNERS;
    const Call &call;
    Sizes n; // n.levels counts only the levels in use
    QueryReader<T> reader;
    PreparedQuery<T> prepared_queries[IN_FLIGHT];
    V *zero_row; // for corners off the map
    T *row;      // memory for a row of grad_output that needs conversion
    RowAddresses rows;
    int64_t num_rows; // rows of a query, with padding

    QueryWorker(const Job &job, Arena &arena)
        : call(job.call), n(job.call.sizes), reader(job.call, arena),
          prepared_queries{{n, reader, arena}, {n, reader, arena}, {n, reader, arena}, {n, reader, arena}},
          zero_row(arena.zeros<V>(n.channels)), row(arena.take<T>(n.channels)), rows(arena, padded_samples(n), zero_row),
          num_rows(round_up(n.levels * n.points, ROWS) * CORNERS) {}

    void use_levels(int64_t first, int64_t last) {
        n.levels = last - first;
        num_rows = round_up(n.levels * n.points, ROWS) * CORNERS;
        reader.use_levels(first, last);
    }

    void find_value(const Job &job, int64_t b, int64_t h) {
        find_levels(call, n, 0, {call.value, b, h}, job.plan.packed_value, job.packed_value, rows);
    }

    // Selects a (batch, head). Call find_value or find_levels first. Callers must not read the locations or weights of the
    // queries, because these may still have 16 bits.
    void open_queries(int64_t b, int64_t h) {
        reader.reads_16_bits = CORNERS == 4 && SIXTEEN_AT_ONCE<T> && !rows.far;
        reader.open(b, h);
    }

    // Processes queries begin..end-1 of the open (batch, head). Finds the rows of each query, with COEFFICIENTS also their
    // coefficients. PIPELINE_DEPTH queries later calls finish(query, prepared, next), which should prefetch rows of `next`.
    template <bool COEFFICIENTS, class Finish> MXD_INLINE void queries(int64_t begin, int64_t end, Finish &&finish) {
        ahead(
            begin, end,
            [&](int64_t q, int64_t number) __attribute__((always_inline)) {
                PreparedQuery<T> &prepared = prepared_queries[number];
                reader.read(q, prepared.query);
                // These are local copies, so that the compiler can keep them in registers across the stores below.
                const Query<T> query = prepared.query;
                const RowAddresses to = rows;
                int64_t *const address = prepared.address;
                T *const coefficient = prepared.coefficient;
                const int64_t padded = reader.padded;
                int64_t i = 0;
                if constexpr (CORNERS == 4 && SIXTEEN_AT_ONCE<T>) {
                    if (!to.far)
                        for (; i + 16 <= padded; i += 16) put_sixteen<COEFFICIENTS>(query, i, to, address, coefficient);
                }
                for (; i < padded; i += LANES) {
                    const auto sampled = Rule<T>::rows(query, i);
                    to.put<CORNERS>(address, i, sampled);
                    MXD_UNROLL
                    for (int k = 0; COEFFICIENTS && k < CORNERS; ++k)
                        put_entries<CORNERS>(coefficient, i, k, sampled.coefficient[k]);
                }
            },
            [&](int64_t q, int64_t number, int64_t next)
                __attribute__((always_inline)) { finish(q, prepared_queries[number], prepared_queries[next]); });
    }
};

} // namespace
} // namespace mxd::MXD_ISA
