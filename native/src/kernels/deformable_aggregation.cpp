// deformable_aggregation on the CPU. A point is projected into cameras. Where it lies strictly inside the image, each
// scale of that camera gives a bilinear sample, weighted group by group. With logits, the points are projected here.
#include "kernels/aggregation/features.h"
#include "kernels/aggregation/forward.h"
#include "kernels/aggregation/samples.h"
#include "kernels/aggregation/totals.h"

namespace mxd::MXD_ISA {

namespace {

// Worker over its items.
template <class Worker> bool run(const Job &job) {
    return parallel<Worker>(job.call.num_threads, Worker::items(job), job);
}

template <class V, class T> bool all_gradients(const Job &job) {
    const bool of_features = job.plan.value_gradient != ValueGradient::NOT_WANTED;
    if (job.plan.sample_gradients && !run<SampleGradients<V, T>>(job)) return false;
    if (job.projection_sums && !run<ProjectionGradient<T>>(job)) return false;
    if (!job.plan.sample_gradients && job.softmax_totals && !run<Totals<T>>(job)) return false;
    return !of_features || run<FeatureGradient<T>>(job);
}

} // namespace

bool deformable_aggregation(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        return run<Forward<__typeof__(*v), __typeof__(*t)>>({call, plan, nullptr, nullptr});
    });
}

bool deformable_aggregation_backward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if (!call.with_logits) return all_gradients<V, T>({call, plan, nullptr, nullptr});
        const int64_t totals = SoftmaxTotals<T>::bytes(call), sums = ProjectionSums<T>::bytes(call);
        char *memory = static_cast<char *>(malloc(size_t(totals + sums) + 1)); // never nothing
        const bool done = memory && all_gradients<V, T>({call, plan, nullptr, nullptr, memory,
                                                         call.grad_projection.data ? memory + totals : nullptr});
        free(memory);
        return done;
    });
}

} // namespace mxd::MXD_ISA
