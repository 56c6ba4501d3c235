// deformable_aggregation on the CPU. A point is projected into cameras. Where it lies strictly inside the image, each
// scale of that camera gives a bilinear sample, weighted group by group.
#include "aggregation_features.h"
#include "aggregation_forward.h"
#include "aggregation_samples.h"

namespace mxd {
namespace MXD_ISA {

bool deformable_aggregation(const Call &call, const Plan &) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef Forward<__typeof__(*v), __typeof__(*t)> Worker;
        return parallel<Worker>(call.num_threads, Worker::items(call), call);
    });
}

bool deformable_aggregation_backward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef SampleGradients<__typeof__(*v), __typeof__(*t)> Samples;
        typedef FeatureGradient<__typeof__(*t)> Features;
        if (plan.sample_gradients && !parallel<Samples>(call.num_threads, Samples::items(call), call)) return false;
        if (plan.value_gradient == ValueGradient::NOT_WANTED) return true;
        const Job job{call, plan, nullptr, nullptr};
        return parallel<Features>(call.num_threads, Features::items(job), job);
    });
}

} // namespace MXD_ISA
} // namespace mxd
