// The C interface: a call is checked, prepared and planned, and goes to the kernels of the best instruction set that
// this machine has.
#include "interface.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <string>

#include "call/arguments.h"
#include "call/axes.h"
#include "call/check.h"
#define MXD_ISA baseline
#include "call/prepare.h"
#include "kernels/kernels.h"
#ifdef MXD_HAVE_AVX2
#include "processor.h"
#endif
#include "threads/threads.h"

namespace mxd {

namespace avx2 {
extern const Kernels kernels[];
}
namespace avx512 {
extern const Kernels kernels[];
}

namespace {

struct Isa {
    const char *name;
    bool (*supported)();
    const Kernels *kernels; // by Operator
};

// Best last.
const Isa ISAS[] = {
    {"baseline", [] { return true; }, baseline::kernels},
#ifdef MXD_HAVE_AVX2
    {"avx2", [] { return Processor().avx2(); }, avx2::kernels},
#endif
#ifdef MXD_HAVE_AVX512
    {"avx512", [] { return Processor().avx512(); }, avx512::kernels},
#endif
};

const Isa *best_isa() {
    const Isa *best = &ISAS[0];
    for (const Isa &isa : ISAS)
        if (isa.supported()) best = &isa;
    return best;
}

std::atomic<const Isa *> &chosen_isa() {
    static std::atomic<const Isa *> isa(best_isa());
    return isa;
}

// Whether nothing is to be written. No kernel may go through the queries then: expanded inputs take no memory and can
// have more queries than anyone can wait for.
bool nothing_to_do(const Call &call) {
    const Axes axes = axes_of(call);
    if (!call.backward) return is_empty(call.output, axes.value);
    const auto nothing = [](const mxd_tensor &t, int n) { return !t.data || is_empty(t, n); };
    return nothing(call.grad_value, axes.value) && nothing(call.grad_locations, axes.locations) &&
           nothing(call.grad_weights, axes.weights) && nothing(call.grad_reference, axes.reference) &&
           nothing(call.grad_projection, axes.projection);
}

// Backward without samples: value's gradient is zero for any number of queries, so the kernel is given no query.
void forget_queries_without_samples(Call &call) {
    const Axes axes = axes_of(call);
    if (!call.backward || !is_empty(call.weights, axes.weights)) return;
    if (call.grad_locations.data && !is_empty(call.grad_locations, axes.locations)) return;
    if (call.grad_reference.data && !is_empty(call.grad_reference, axes.reference)) return;
    call.grad_output.shape[1] = 0;
    call.locations.shape[1] = call.locations.shape[axes.points] = 0;
    call.weights.shape[1] = call.weights.shape[axes.points_of_weights] = 0;
}

// Checks a call and reads its levels.
int open(Call &call, Prepared &prepared) {
    const int status = check(call);
    if (status != MXD_OK) return status;
    forget_queries_without_samples(call);
    return query_is_too_large(call) ? MXD_OUT_OF_MEMORY : prepare_levels(call, prepared);
}

int checked_run(Call &call) {
    Prepared prepared;
    PlanLists lists;
    int status = open(call, prepared);
    if (status == MXD_OK) status = prepare_value(call, prepared);
    if (status != MXD_OK || nothing_to_do(call)) return status;
    prefer_huge_pages(call);
    const Kernels &kernels = chosen_isa().load()->kernels[call.op];
    const Plan plan = make_plan(call, lists);
    return (call.backward ? kernels.backward : kernels.forward)(call, plan) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

int checked_description(Call &call, std::string &text) {
    Prepared prepared;
    PlanLists lists;
    const int status = open(call, prepared);
    if (status != MXD_OK) return status;
    call.value = readable_value(call);
    text = describe(call, make_plan(call, lists));
    return MXD_OK;
}

template <class Fn> int out_of_memory_if_thrown(Fn &&fn) {
    try {
        return fn();
    } catch (const std::exception &) { // a list of levels that is too long
        return MXD_OUT_OF_MEMORY;
    }
}

} // namespace

int run(Call &call) {
    return out_of_memory_if_thrown([&] { return checked_run(call); });
}

} // namespace mxd

extern "C" {

int mxd_multi_scale_deformable_attn(const mxd_tensor *value, const mxd_tensor *shapes, const mxd_tensor *starts,
                                    const mxd_tensor *locations, const mxd_tensor *weights, const mxd_tensor *output,
                                    int num_threads) {
    mxd::Call call = mxd::call_of(mxd::MULTI_SCALE, value, shapes, starts, locations, weights, num_threads);
    call.output = *output;
    return mxd::run(call);
}

int mxd_multi_scale_deformable_attn_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                             const mxd_tensor *shapes, const mxd_tensor *starts,
                                             const mxd_tensor *locations, const mxd_tensor *weights,
                                             const mxd_tensor *grad_value, const mxd_tensor *grad_locations,
                                             const mxd_tensor *grad_weights, int num_threads) {
    mxd::Call call = mxd::call_of(mxd::MULTI_SCALE, value, shapes, starts, locations, weights, num_threads);
    mxd::set_gradients(call, grad_output, grad_value, grad_locations, grad_weights);
    return mxd::run(call);
}

int mxd_multi_scale_deformable_attn_with_logits(const mxd_tensor *value, const mxd_tensor *shapes,
                                                const mxd_tensor *starts, const mxd_tensor *reference,
                                                const mxd_tensor *offsets, const mxd_tensor *logits,
                                                const mxd_tensor *output, int reference_axis, int num_threads) {
    if (reference_axis != 0 && reference_axis != 1) return MXD_BAD_SHAPE;
    mxd::Call call = mxd::call_of(mxd::MULTI_SCALE, value, shapes, starts, offsets, logits, num_threads);
    mxd::set_reference(call, reference, reference_axis == 1);
    call.output = *output;
    return mxd::run(call);
}

int mxd_multi_scale_deformable_attn_with_logits_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                                         const mxd_tensor *shapes, const mxd_tensor *starts,
                                                         const mxd_tensor *reference, const mxd_tensor *offsets,
                                                         const mxd_tensor *logits, const mxd_tensor *grad_value,
                                                         const mxd_tensor *grad_reference,
                                                         const mxd_tensor *grad_offsets, const mxd_tensor *grad_logits,
                                                         int reference_axis, int num_threads) {
    if (reference_axis != 0 && reference_axis != 1) return MXD_BAD_SHAPE;
    mxd::Call call = mxd::call_of(mxd::MULTI_SCALE, value, shapes, starts, offsets, logits, num_threads);
    mxd::set_reference(call, reference, reference_axis == 1);
    mxd::set_gradients(call, grad_output, grad_value, grad_offsets, grad_logits);
    if (grad_reference) call.grad_reference = *grad_reference;
    return mxd::run(call);
}

int mxd_deformable_aggregation(const mxd_tensor *features, const mxd_tensor *shapes, const mxd_tensor *starts,
                               const mxd_tensor *locations, const mxd_tensor *weights, const mxd_tensor *output,
                               int num_threads) {
    mxd::Call call = mxd::call_of(mxd::AGGREGATION, features, shapes, starts, locations, weights, num_threads);
    call.output = *output;
    return mxd::run(call);
}

int mxd_deformable_aggregation_backward(const mxd_tensor *grad_output, const mxd_tensor *features,
                                        const mxd_tensor *shapes, const mxd_tensor *starts, const mxd_tensor *locations,
                                        const mxd_tensor *weights, const mxd_tensor *grad_features,
                                        const mxd_tensor *grad_locations, const mxd_tensor *grad_weights,
                                        int num_threads) {
    mxd::Call call = mxd::call_of(mxd::AGGREGATION, features, shapes, starts, locations, weights, num_threads);
    mxd::set_gradients(call, grad_output, grad_features, grad_locations, grad_weights);
    return mxd::run(call);
}

int mxd_deformable_aggregation_with_logits(const mxd_tensor *features, const mxd_tensor *shapes,
                                           const mxd_tensor *starts, const mxd_tensor *key_points,
                                           const mxd_tensor *projection, const mxd_tensor *logits,
                                           const mxd_tensor *image_size, const mxd_tensor *pair_scale,
                                           const mxd_tensor *output, int num_threads) {
    mxd::Call call = mxd::call_with_cameras(features, shapes, starts, key_points, projection, logits, image_size,
                                            pair_scale, num_threads);
    call.output = *output;
    return mxd::run(call);
}

int mxd_deformable_aggregation_with_logits_backward(
    const mxd_tensor *grad_output, const mxd_tensor *features, const mxd_tensor *shapes, const mxd_tensor *starts,
    const mxd_tensor *key_points, const mxd_tensor *projection, const mxd_tensor *logits, const mxd_tensor *image_size,
    const mxd_tensor *pair_scale, const mxd_tensor *grad_features, const mxd_tensor *grad_key_points,
    const mxd_tensor *grad_projection, const mxd_tensor *grad_logits, int num_threads) {
    mxd::Call call = mxd::call_with_cameras(features, shapes, starts, key_points, projection, logits, image_size,
                                            pair_scale, num_threads);
    mxd::set_gradients(call, grad_output, grad_features, grad_key_points, grad_logits);
    if (grad_projection) call.grad_projection = *grad_projection;
    return mxd::run(call);
}

int mxd_geometric_kernel_attention(const mxd_tensor *value, const mxd_tensor *shapes, const mxd_tensor *starts,
                                   const mxd_tensor *locations, const mxd_tensor *weights, const mxd_tensor *output,
                                   int num_threads) {
    mxd::Call call = mxd::call_of(mxd::GEOMETRIC, value, shapes, starts, locations, weights, num_threads);
    call.output = *output;
    return mxd::run(call);
}

int mxd_geometric_kernel_attention_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                            const mxd_tensor *shapes, const mxd_tensor *starts,
                                            const mxd_tensor *locations, const mxd_tensor *weights,
                                            const mxd_tensor *grad_value, const mxd_tensor *grad_weights,
                                            int num_threads) {
    mxd::Call call = mxd::call_of(mxd::GEOMETRIC, value, shapes, starts, locations, weights, num_threads);
    mxd::set_gradients(call, grad_output, grad_value, nullptr, grad_weights);
    return mxd::run(call);
}

int mxd_geometric_kernel_attention_with_logits(const mxd_tensor *value, const mxd_tensor *shapes,
                                               const mxd_tensor *starts, const mxd_tensor *reference,
                                               const mxd_tensor *window, const mxd_tensor *logits,
                                               const mxd_tensor *output, int num_threads) {
    mxd::Call call = mxd::call_with_window(value, shapes, starts, reference, window, logits, num_threads);
    call.output = *output;
    return mxd::run(call);
}

int mxd_geometric_kernel_attention_with_logits_backward(const mxd_tensor *grad_output, const mxd_tensor *value,
                                                        const mxd_tensor *shapes, const mxd_tensor *starts,
                                                        const mxd_tensor *reference, const mxd_tensor *window,
                                                        const mxd_tensor *logits, const mxd_tensor *grad_value,
                                                        const mxd_tensor *grad_logits, int num_threads) {
    mxd::Call call = mxd::call_with_window(value, shapes, starts, reference, window, logits, num_threads);
    mxd::set_gradients(call, grad_output, grad_value, nullptr, grad_logits);
    return mxd::run(call);
}

int mxd_describe_plan(const char *name, const mxd_tensor *const *arguments, int num_threads, char *text, int64_t size) {
    mxd::Operator op;
    bool backward, with_logits;
    if (!mxd::find_function(name, op, backward, with_logits)) return MXD_BAD_NAME;
    mxd::Call call = with_logits ? mxd::call_with_logits(op, backward, arguments, num_threads)
                                 : mxd::call_of_function(op, backward, arguments, num_threads);
    return mxd::out_of_memory_if_thrown([&] {
        std::string plan;
        const int status = mxd::checked_description(call, plan);
        if (status == MXD_OK && size > 0) text[plan.copy(text, size_t(size - 1))] = 0;
        return status;
    });
}

const char *mxd_version(void) { return MXD_VERSION; }

const char *mxd_isa(void) { return mxd::chosen_isa().load()->name; }

int mxd_use_isa(const char *name) {
    for (const mxd::Isa &isa : mxd::ISAS)
        if (std::strcmp(isa.name, name) == 0 && isa.supported()) {
            mxd::chosen_isa() = &isa;
            return 0;
        }
    return -1;
}

const char *mxd_threads(void) { return mxd::threads_in_use(); }

void mxd_use_own_threads(int own) { mxd::use_own_threads(own != 0); }
}
