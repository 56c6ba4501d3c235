// deformable_aggregation on the CPU. A point is projected into cameras. Where it lies strictly inside the image, each
// scale of that camera gives a bilinear sample, weighted group by group. With logits, the points are projected here.
#include "kernels/aggregation/features.h"
#include "kernels/aggregation/forward.h"
#include "kernels/aggregation/from_logits.h"
#include "kernels/aggregation/given.h"
#include "kernels/aggregation/samples.h"

namespace mxd::MXD_ISA {

namespace {

template <template <class> class Reader> bool forward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*t) T;
        return over_items<Forward<__typeof__(*v), T, Reader<T>>>({call, plan, nullptr, nullptr});
    });
}

template <class T, template <class> class Reader> bool gradient_of_features(const Job &job) {
    return job.plan.value_gradient == ValueGradient::NOT_WANTED || over_items<FeatureGradient<T, Reader<T>>>(job);
}

template <class V, class T> bool gradients_of_given(const Job &job) {
    if (job.plan.sample_gradients && !over_items<SampleGradients<V, T, Given<T>>>(job)) return false;
    return gradient_of_features<T, Given>(job);
}

template <class V, class T> bool gradients_from_logits(const Call &call, const Plan &plan) {
    const int64_t totals = SoftmaxTotals<T>::bytes(call), sums = ProjectionSums<T>::bytes(call);
    const Memory memory(totals + sums + 1); // never nothing
    char *const begin = memory.begin();
    if (!begin) return false;
    const Job job{call, plan, nullptr, nullptr, begin, call.grad_projection.data ? begin + totals : nullptr};
    if (!(plan.sample_gradients ? over_items<SampleGradients<V, T, FromLogits<T>>>(job) : over_items<Totals<T>>(job)))
        return false;
    if (job.projection_sums && !over_items<ProjectionGradient<T>>(job)) return false;
    return gradient_of_features<T, FromLogits>(job);
}

} // namespace

bool deformable_aggregation(const Call &call, const Plan &plan) {
    return plan.source == Source::GIVEN ? forward<Given>(call, plan) : forward<FromLogits>(call, plan);
}

bool deformable_aggregation_backward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        return plan.source == Source::GIVEN ? gradients_of_given<V, T>({call, plan, nullptr, nullptr})
                                            : gradients_from_logits<V, T>(call, plan);
    });
}

} // namespace mxd::MXD_ISA
