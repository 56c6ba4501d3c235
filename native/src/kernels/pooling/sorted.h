// Points in the order of one of their ranks: a stable counting sort. Points of one rank stay in the order in which they
// came, so a sum over them has the same bits for any number of threads.
#pragma once

#include "kernels/pooling/ranks.h"
#include "kernels/shared/parallel.h"

namespace mxd::MXD_ISA {
namespace {

// Each thread counts and places a part of the points. It has a counter for each rank, of 16 MB in all.
struct Sorting {
    const Tensor &ranks;
    const int64_t points, rows, parts;
    uint32_t *counters, *order;
    bool *in_order; // of a part, and the point before it

    static int64_t parts_of(int64_t rows, int threads) {
        const int64_t most = (int64_t(1) << 22) / (rows + 1);
        return most < 1 || threads < 1 ? 1 : most < threads ? most : threads;
    }
    int64_t begin(int64_t part) const { return points * part / parts; }
};

struct CountRanks {
    const Sorting &s;

    CountRanks(const Sorting &sorting, Arena &) : s(sorting) {}
    void operator()(int64_t part) {
        uint32_t *const counter = s.counters + part * s.rows;
        memset(counter, 0, size_t(s.rows) * sizeof *counter);
        const int64_t begin = s.begin(part), end = s.begin(part + 1);
        s.in_order[part] = with_ranks(s.ranks, [&](auto *ranks, int64_t stride) {
            int64_t last = begin > 0 ? ranks[(begin - 1) * stride] : 0;
            bool in_order = true;
            for (int64_t i = begin; i < end; ++i) {
                const int64_t rank = ranks[i * stride];
                in_order &= rank >= last;
                last = rank;
                ++counter[rank];
            }
            return in_order;
        });
    }
};

struct PlacePoints {
    const Sorting &s;

    PlacePoints(const Sorting &sorting, Arena &) : s(sorting) {}
    void operator()(int64_t part) {
        uint32_t *const next = s.counters + part * s.rows;
        with_ranks(s.ranks, [&](auto *ranks, int64_t stride) {
            for (int64_t i = s.begin(part); i < s.begin(part + 1); ++i) s.order[next[ranks[i * stride]]++] = uint32_t(i);
        });
    }
};

// The points of rank r are at the places start(r) to start(r + 1) - 1 of the order.
class Sorted {
  public:
    const uint32_t *order = nullptr; // null: points came in order

    // ready() is false where there is no memory.
    Sorted(const Tensor &ranks, int64_t points, int64_t rows, int threads)
        : parts(Sorting::parts_of(rows, threads)), memory(bytes(points, rows)) {
        if (!memory.begin()) return;
        Arena arena(memory.begin());
        starts = arena.take<int64_t>(rows + 1);
        const Sorting s{ranks,
                        points,
                        rows,
                        parts,
                        arena.take<uint32_t>(rows * parts),
                        arena.take<uint32_t>(points),
                        arena.take<bool>(parts)};
        is_ready = parallel<CountRanks>(threads, parts, s);
        if (!is_ready) return;
        find_starts(s);
        bool in_order = true;
        for (int64_t part = 0; part < parts; ++part) in_order &= s.in_order[part];
        if (in_order) return;
        order = s.order;
        is_ready = parallel<PlacePoints>(threads, parts, s);
    }
    bool ready() const { return is_ready; }
    int64_t start(int64_t rank) const { return starts[rank]; }

  private:
    const int64_t parts;
    const Memory memory;
    int64_t *starts = nullptr;
    bool is_ready = false;

    int64_t bytes(int64_t points, int64_t rows) const {
        return Arena::bytes<int64_t>(rows + 1) + Arena::bytes<uint32_t>(rows * parts) + Arena::bytes<uint32_t>(points) +
               Arena::bytes<bool>(parts);
    }
    // Counters become the places where a part puts its next point.
    void find_starts(const Sorting &s) {
        int64_t place = 0;
        for (int64_t rank = 0; rank < s.rows; ++rank) {
            starts[rank] = place;
            for (int64_t part = 0; part < parts; ++part) {
                uint32_t &counter = s.counters[part * s.rows + rank];
                const uint32_t count = counter;
                counter = uint32_t(place);
                place += count;
            }
        }
        starts[s.rows] = place;
    }
};

} // namespace
} // namespace mxd::MXD_ISA
