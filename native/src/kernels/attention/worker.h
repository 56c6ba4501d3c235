// The base of workers that process queries in order: they open a (batch, head), and prepare and finish its queries.
// A Rule<T> defines an operator's samples:
//
//   CORNERS                                         the number of rows of value that a sample reads
//   rows(query, i)                                  SampledRows: the rows that samples i..i+LANES-1 read
//   reach(query, i, band)                           the samples that may read a row of a band; cheaper than rows()
//   gradients(query, dot, i, grad_xy, grad_weight)  computes the gradients of weights and locations;
//                                                   gradients<true>: of weights and of offsets in pixels.
//                                                   dot: the dot products of grad_output with the rows
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
    // queries, because these elements may still have 16 bits.
    void open_queries(int64_t b, int64_t h) {
        reader.reads_16_bits = CORNERS == 4 && SIXTEEN_AT_ONCE<T> && !rows.far;
        reader.open(b, h);
    }

    // Processes queries begin..end-1 of the open (batch, head). Finds the rows of each query, and with COEFFICIENTS also the
    // rows' coefficients. PIPELINE_DEPTH queries later, calls finish(query, prepared, next), which should prefetch rows of
    // `next`.
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

// Packs a chunk of a head. pack_chunk is a function pointer, so that all types of value that use the same worker share one
// compiled loop.
struct PackHead {
    const Call &call;
    const PackedLevels &levels;
    char *packed;
    void (*pack_chunk)(const Call &, const PackedLevels &, int64_t, int64_t, char *, int64_t, int64_t);

    void operator()(int64_t head, int64_t chunk) const {
        pack_chunk(call, levels, head / call.sizes.heads, head % call.sizes.heads, packed, chunk, STAGE_CHUNKS);
    }
};

// Runs a worker over the blocks of query_blocks(). V is the type of value. If levels are packed, each head is a stage: all
// threads pack the head's levels, and then process its items. Levels that the plan widens become rows of Worker::Row.
template <class V, class Worker> inline bool over_queries(const Job &unpacked) {
    typedef typename Worker::Row Row;
    const Call &call = unpacked.call;
    const Plan &plan = unpacked.plan;
    const Sizes &n = call.sizes;
    const PackedLevels &levels = plan.packed_value;
    const Memory memory(levels.bytes);
    char *packed = memory.begin();
    const Job job{call, plan, packed, unpacked.partial_sums};
    const int64_t items = n.batch * n.heads * query_blocks(call, packed != nullptr).per_range;
    if (!packed) return parallel<Worker>(call.num_threads, items, job);
    return parallel_stages<Worker>(call.num_threads, n.batch * n.heads, items, job,
                                   PackHead{call, levels, packed, pack<V, Row>});
}

} // namespace
} // namespace mxd::MXD_ISA
