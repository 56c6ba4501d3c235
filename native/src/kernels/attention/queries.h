// In which order the attention operators take their queries, and what all of these have. value is [bs, num_keys,
// num_heads, embed_dims], a query [num_heads, num_levels, num_points].
//
// Samples are read from what a caller gives (given.h), from offsets and logits (from_logits.h), or from a window and
// logits (from_window.h). Each file has a class Reader<T>, which a worker reads one (batch, head) after the other with:
//
//   Reader::Query                  what a Rule finds the rows of samples from
//   use_levels(first, last)        restricts queries to some levels
//   open(b, h)                     selects a (batch, head)
//   read(q, query)                 reads its queries, in ascending order
//   padded, maps                   of the levels in use: samples of a query, and their maps
//   Reader::Gradients<Rule>        from products of rows with grad_output to the gradients of what was read
#pragma once

#include "kernels/attention/elements.h"

namespace mxd::MXD_ISA {
namespace {

// Software pipelining: query q + PIPELINE_DEPTH is prepared, which finds and prefetches its rows, while the rows of q
// are summed. With a depth below three, queries of few rows wait for memory.
constexpr int PIPELINE_DEPTH = 3;
constexpr int IN_FLIGHT = 4; // prepared queries that are kept: a power of two above PIPELINE_DEPTH

// prepare(query, place) for each query, and PIPELINE_DEPTH queries later finish(query, its place, the place prepared
// last). Places are 0..IN_FLIGHT-1.
template <class Prepare, class Finish> MXD_INLINE void ahead(int64_t begin, int64_t end, Prepare &&prepare, Finish &&finish) {
    for (int64_t q = begin; q < end + PIPELINE_DEPTH; ++q) {
        const int64_t place = (q - begin) & (IN_FLIGHT - 1);
        if (q < end) prepare(q, place);
        if (q >= begin + PIPELINE_DEPTH) finish(q - PIPELINE_DEPTH, (place - PIPELINE_DEPTH) & (IN_FLIGHT - 1), place);
    }
}

// Items: (batch, head, block of queries). Consecutive items read the same head's rows, which stay in the cache. Long
// blocks prefetch best, but each thread should get several items of a stage. A stage is one head if levels are packed,
// else all heads.
struct QueryBlocks {
    Sizes n;
    int64_t size, per_head;

    QueryBlocks(const Call &call, bool head_by_head) : n(call.sizes) {
        const int64_t together = (head_by_head ? 1 : n.batch * n.heads) * n.queries;
        const int64_t wanted = together / (8 * (call.num_threads > 1 ? call.num_threads : 1));
        size = round_up(wanted < SHORTEST ? SHORTEST : wanted > LONGEST ? LONGEST : wanted, COMPUTED_TOGETHER);
        per_head = (n.queries + size - 1) / size;
    }
    int64_t count() const { return n.batch * n.heads * per_head; }
    int64_t batch(int64_t item) const { return item / per_head / n.heads; }
    int64_t head(int64_t item) const { return item / per_head % n.heads; }
    int64_t begin(int64_t item) const { return item % per_head * size; }
    int64_t end(int64_t item) const { return begin(item) + size < n.queries ? begin(item) + size : n.queries; }

  private:
    static constexpr int64_t SHORTEST = 32, LONGEST = 1024;
};

// What a query has, whatever its samples are read from: maps and weights of one head's samples, as T, padded to a multiple
// of LANES samples on empty maps. The padding of weights is any number, which does no harm: an empty map has no rows.
template <class T> struct QueryOfMaps {
    Maps<T> maps;
    const T *weights = nullptr;

    explicit QueryOfMaps(const Maps<T> &of_samples) : maps(of_samples) {}
    MXD_INLINE RealLanes<T> weight(int64_t sample) const { return raw_load<T, LANES>(weights + sample); }
};

// grad_output of one (batch, head), query by query, as T.
template <class T> class OutputGradient {
  public:
    OutputGradient(const Call &call, int64_t b, int64_t h, T *memory)
        : tensor(call.grad_output), channels(call.sizes.channels), rows(tensor, b, h, channels), row(memory),
          in_place(tensor.dtype == OWN<T> && tensor.strides[CHANNEL] == 1) {}
    MXD_INLINE const T *of(int64_t query) const {
        const char *from = rows.at_in_turn(query);
        return in_place ? reinterpret_cast<const T *>(from)
                        : row_as(from, tensor.dtype, tensor.strides[CHANNEL], channels, row);
    }

  private:
    const Tensor &tensor;
    int64_t channels;
    QueryRows rows;
    T *row; // where the tensor has another dtype or stride
    bool in_place;
};

} // namespace
} // namespace mxd::MXD_ISA
