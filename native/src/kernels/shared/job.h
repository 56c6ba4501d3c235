// The arguments of a worker, blocks of queries, and the loop over items.
#pragma once

#include "call/plan.h"
#include "kernels/shared/parallel.h"
#include "kernels/shared/storage.h"

namespace mxd::MXD_ISA {
namespace {

struct Job {
    const Call &call;
    const Plan &plan;
    // The packed levels of the current head, or null. If the plan has heads_together: the widened rows of the current batch, or
    // null.
    const char *packed_value = nullptr;
    char *partial_sums = nullptr;   // PartialSums for the gradient of reference points or projections; null if it is not wanted
    char *softmax_totals = nullptr; // SoftmaxTotals, in the backward of deformable_aggregation_with_logits
};

// Blocks of consecutive queries or anchors. An item is (range, block). A range has the queries of one batch element, or of one
// head of one batch element.
struct Blocks {
    // length: the number of queries in a range. size: the most queries in a block. per_range: the number of blocks in a range.
    int64_t length, size, per_range;

    Blocks(int64_t range, int64_t block) : length(range), size(block), per_range((length + size - 1) / size) {}
    int64_t range(int64_t item) const { return item / per_range; }
    int64_t begin(int64_t item) const { return item % per_range * size; }
    int64_t end(int64_t item) const { return begin(item) + size < length ? begin(item) + size : length; }
};
inline int64_t between(int64_t least, int64_t n, int64_t most) { return n < least ? least : n > most ? most : n; }

template <class Worker> inline bool over_items(const Job &job) {
    return parallel<Worker>(job.call.num_threads, Worker::items(job), job);
}

// Calls fn(V*, T*) for the storage type V of value and the type T of the computation.
template <class Fn> inline bool with_types(const Call &call, Fn &&fn) {
    return with_elements(nullptr, call.value.dtype, [&](auto *v) {
        if constexpr (same_type<__typeof__(*v), double>)
            return fn(v, v);
        else
            return fn(v, static_cast<float *>(nullptr));
    });
}

} // namespace
} // namespace mxd::MXD_ISA
