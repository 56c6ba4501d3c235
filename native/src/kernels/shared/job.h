// What a worker is given.
#pragma once

#include "call/plan.h"
#include "kernels/shared/parallel.h"
#include "kernels/shared/storage.h"

namespace mxd::MXD_ISA {
namespace {

struct Job {
    const Call &call;
    const Plan &plan;
    // plan.packed_value of the head that is worked on; where heads go together, rows of 16 bits of the batch that is
    // worked on, widened; null where there are none
    const char *packed_value = nullptr;
    char *partial_sums = nullptr;   // of the gradient of reference points or of projections; null where it is not wanted
    char *softmax_totals = nullptr; // of deformable_aggregation with logits, backward
};

// Queries or anchors in blocks of consecutive ones. Items: (range, block); a range is a batch, or a head of one.
struct Blocks {
    int64_t length, size, per_range; // of a range; of a block, at most

    Blocks(int64_t range, int64_t block) : length(range), size(block), per_range((length + size - 1) / size) {}
    int64_t range(int64_t item) const { return item / per_range; }
    int64_t begin(int64_t item) const { return item % per_range * size; }
    int64_t end(int64_t item) const { return begin(item) + size < length ? begin(item) + size : length; }
};
inline int64_t between(int64_t least, int64_t n, int64_t most) { return n < least ? least : n > most ? most : n; }

// Runs a worker over its items.
template <class Worker> inline bool over_items(const Job &job) {
    return parallel<Worker>(job.call.num_threads, Worker::items(job), job);
}

// fn(V*, T*) for the storage type of value and the type computed in.
template <class Fn> inline bool with_types(const Call &call, Fn &&fn) {
    return with_elements(nullptr, call.value.dtype, [&](auto *v) {
        constexpr bool wide = same_type<__typeof__(*v), double>;
        return fn(v, static_cast<typename RealOfSize<wide ? 8 : 4>::type *>(nullptr));
    });
}

} // namespace
} // namespace mxd::MXD_ISA
