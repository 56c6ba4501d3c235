// deformable_aggregation on the CPU. A point is projected into cameras. Where it lies strictly inside the image, each
// scale of that camera gives a bilinear sample, weighted group by group. With logits, the points are projected here.
#include "kernels/aggregation/features.h"
#include "kernels/aggregation/forward.h"
#include "kernels/aggregation/samples.h"

namespace mxd::MXD_ISA {

namespace {

template <class V, class T> bool all_gradients(const Job &job) {
    const bool of_features = job.plan.value_gradient != ValueGradient::NOT_WANTED;
    if (job.plan.sample_gradients && !over_items<SampleGradients<V, T>>(job)) return false;
    if (job.projection_sums && !over_items<ProjectionGradient<T>>(job)) return false;
    if (!job.plan.sample_gradients && job.softmax_totals && !over_items<Totals<T>>(job)) return false;
    return !of_features || over_items<FeatureGradient<T>>(job);
}

} // namespace

bool deformable_aggregation(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        return over_items<Forward<__typeof__(*v), __typeof__(*t)>>({call, plan, nullptr, nullptr});
    });
}

bool deformable_aggregation_backward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if (!call.with_logits) return all_gradients<V, T>({call, plan, nullptr, nullptr});
        const int64_t totals = SoftmaxTotals<T>::bytes(call), sums = ProjectionSums<T>::bytes(call);
        const Memory memory(totals + sums + 1); // never nothing
        char *const begin = memory.begin();
        return begin &&
               all_gradients<V, T>({call, plan, nullptr, nullptr, begin, call.grad_projection.data ? begin + totals : nullptr});
    });
}

} // namespace mxd::MXD_ISA
