// What a worker is given.
#pragma once

#include "call/plan.h"
#include "kernels/shared/storage.h"

namespace mxd::MXD_ISA {
namespace {

struct Job {
    const Call &call;
    const Plan &plan;
    // plan.packed_value of the head that is worked on; where heads go together, rows of 16 bits of the batch that is
    // worked on, widened; null where there are none
    const char *packed_value;
    char *reference_sums; // the gradient of reference points, head by head; null where it is not wanted
    // Of deformable_aggregation with logits, backward: SoftmaxTotals; ProjectionSums, null where they are not wanted.
    char *softmax_totals = nullptr, *projection_sums = nullptr;
};

// fn(V*, T*) for the storage type of value and the type computed in.
template <class Fn> inline bool with_types(const Call &call, Fn &&fn) {
    float *const single = nullptr;
    double *const wide = nullptr;
    switch (call.value.dtype) {
    case MXD_FLOAT64:
        return fn(wide, wide);
    case MXD_FLOAT16:
        return fn(static_cast<Half *>(nullptr), single);
    case MXD_BFLOAT16:
        return fn(static_cast<BFloat16 *>(nullptr), single);
    default:
        return fn(single, single);
    }
}

} // namespace
} // namespace mxd::MXD_ISA
