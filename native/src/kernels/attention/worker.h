// What workers that go query by query have in common. They open one (batch, head) and go through its queries. A query
// is prepared AHEAD queries before it is finished, so that its rows can be prefetched.
#pragma once

#include "kernels/attention/packing.h"

namespace mxd::MXD_ISA {
namespace {

// A query between prepare and finish: its inputs, the addresses of its rows, and the share of each.
template <class T> struct alignas(64) Slot { // so that a shift finds it among others
    Query<T> query;
    int64_t *address;
    T *share;

    template <class Reader>
    Slot(const Sizes &n, const Reader &reader, Arena &arena)
        : query(n, reader, arena), // addresses are prefetched before the first query is prepared
          address(arena.zeros<int64_t>(4 * padded_samples(n))), share(arena.take<T>(4 * padded_samples(n))) {}
};

// V: the type of the rows, of value or of its gradient.
template <class V, class T, template <class> class Rule> struct QueryWorker {
    static constexpr int CORNERS = Rule<T>::CORNERS;
    const Call &call;
    Sizes n; // n.levels: those that are worked on
    QueryReader<T> reader;
    Slot<T> slots[SLOTS];
    V *nowhere; // a row of zeros, for corners that are not on the map
    T *row;     // memory for a row of another dtype
    RowAddresses rows;
    int64_t num_rows; // of a query, padded

    QueryWorker(const Job &job, Arena &arena)
        : call(job.call), n(job.call.sizes), reader(job.call, arena),
          slots{{n, reader, arena}, {n, reader, arena}, {n, reader, arena}, {n, reader, arena}},
          nowhere(arena.zeros<V>(n.channels)), row(arena.take<T>(n.channels)), rows(arena, padded_samples(n), nowhere),
          num_rows(round_up(n.levels * n.points, ROWS) * CORNERS) {}

    // Restricts this worker to levels first..last-1.
    void use_levels(int64_t first, int64_t last) {
        n.levels = last - first;
        num_rows = round_up(n.levels * n.points, ROWS) * CORNERS;
        reader.use_levels(first, last);
    }

    void find_value(const Job &job, int64_t b, int64_t h) {
        find_levels(call, n, 0, {call.value, b, h}, job.plan.packed_value, job.packed_value, n.channels * int64_t(sizeof(V)),
                    rows);
    }

    // For queries begin..end-1 of the open (batch, head): prepare(its shares, first of LANES samples, their rows) for
    // all its samples, and AHEAD queries later finish(query, its slot, the slot prepared last).
    template <class Prepare, class Finish>
    MXD_INLINE void queries(int64_t begin, int64_t end, Prepare &&prepare, Finish &&finish) {
        ahead(
            begin, end,
            [&](int64_t q, int64_t number) __attribute__((always_inline)) {
                Slot<T> &slot = slots[number];
                reader.read(q, slot.query);
                // Copies, because lists are written here: in a register they stay as they are.
                const Query<T> query = slot.query;
                const RowAddresses to = rows;
                int64_t *const address = slot.address;
                T *const share = slot.share;
                const int64_t padded = reader.padded;
                for (int64_t i = 0; i < padded; i += LANES) {
                    const auto sampled = Rule<T>::rows(query, i);
                    to.put<CORNERS>(address, i, sampled);
                    prepare(share, i, sampled);
                }
            },
            [&](int64_t q, int64_t number, int64_t next)
                __attribute__((always_inline)) { finish(q, slots[number], slots[next]); });
    }

    template <class Sampled> static MXD_INLINE void put_shares(T *shares, int64_t i, const Sampled &sampled) {
        MXD_UNROLL
        for (int k = 0; k < CORNERS; ++k) put_entries<CORNERS>(shares, i, k, sampled.share[k]);
    }
};

} // namespace
} // namespace mxd::MXD_ISA
