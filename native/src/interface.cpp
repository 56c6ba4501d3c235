// The C interface: a call is checked, prepared and planned, and goes to the kernels of the best instruction set that
// this machine has.
#include "interface.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <string>

#include "call/check.h"
#include "call/make_call.h"
#include "call/make_plan.h"
#include "call/prepare.h"
#include "call/tensor.h"
#include "kernels/kernels.h"
#ifdef MXD_HAVE_AVX2
#include "processor.h"
#endif
#include "threads/threads.h"

namespace mxd {

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
    for (const Tensor *result : {&call.output, &call.grad_value, &call.grad_locations, &call.grad_weights, &call.grad_reference,
                                 &call.grad_projection})
        if (result->data && !is_empty(*result)) return false;
    return true;
}

int checked_run(Call &call) {
    Prepared prepared;
    PlanLists lists;
    int status = check(call);
    if (status == MXD_OK) status = prepare_levels(call, prepared);
    if (status != MXD_OK || nothing_to_do(call)) return status;
    status = prepare_memory(call, prepared);
    if (status != MXD_OK) return status;
    const Plan plan = make_plan(call, lists);
    const Kernels &kernels = chosen_isa().load()->kernels[call.op];
    return (call.backward ? kernels.backward : kernels.forward)(call, plan) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

int checked_description(Call &call, std::string &text) {
    Prepared prepared;
    PlanLists lists;
    int status = check(call);
    if (status == MXD_OK) status = prepare_levels(call, prepared);
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

int run_function(const char *c_name, std::initializer_list<const mxd_tensor *> arguments, int num_threads,
                 int reference_axis = 0) {
    if (reference_axis != 0 && reference_axis != 1) return MXD_BAD_SHAPE;
    Function function;
    if (!find_function(c_name + std::strlen("mxd_"), function)) return MXD_BAD_NAME;
    Call call = make_call(function, arguments.begin(), num_threads);
    call.reference_by_point = reference_axis == 1;
    return run(call);
}

} // namespace

int run(Call &call) {
    return out_of_memory_if_thrown([&] { return checked_run(call); });
}

} // namespace mxd

using mxd::run_function;
typedef const mxd_tensor *Argument;

extern "C" {

// A function's tensors are an array in the order of make_call.cpp, which knows the function by its name.
int mxd_multi_scale_deformable_attn(Argument value, Argument shapes, Argument starts, Argument locations, Argument weights,
                                    Argument output, int num_threads) {
    return run_function(__func__, {value, shapes, starts, locations, weights, output}, num_threads);
}

int mxd_multi_scale_deformable_attn_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                             Argument locations, Argument weights, Argument grad_value, Argument grad_locations,
                                             Argument grad_weights, int num_threads) {
    return run_function(__func__,
                        {grad_output, value, shapes, starts, locations, weights, grad_value, grad_locations, grad_weights},
                        num_threads);
}

int mxd_multi_scale_deformable_attn_with_logits(Argument value, Argument shapes, Argument starts, Argument reference,
                                                Argument offsets, Argument logits, Argument output, int reference_axis,
                                                int num_threads) {
    return run_function(__func__, {value, shapes, starts, reference, offsets, logits, output}, num_threads, reference_axis);
}

int mxd_multi_scale_deformable_attn_with_logits_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                                         Argument reference, Argument offsets, Argument logits,
                                                         Argument grad_value, Argument grad_reference, Argument grad_offsets,
                                                         Argument grad_logits, int reference_axis, int num_threads) {
    return run_function(
        __func__,
        {grad_output, value, shapes, starts, reference, offsets, logits, grad_value, grad_reference, grad_offsets, grad_logits},
        num_threads, reference_axis);
}

int mxd_deformable_aggregation(Argument features, Argument shapes, Argument starts, Argument locations, Argument weights,
                               Argument output, int num_threads) {
    return run_function(__func__, {features, shapes, starts, locations, weights, output}, num_threads);
}

int mxd_deformable_aggregation_backward(Argument grad_output, Argument features, Argument shapes, Argument starts,
                                        Argument locations, Argument weights, Argument grad_features, Argument grad_locations,
                                        Argument grad_weights, int num_threads) {
    return run_function(
        __func__, {grad_output, features, shapes, starts, locations, weights, grad_features, grad_locations, grad_weights},
        num_threads);
}

int mxd_deformable_aggregation_with_logits(Argument features, Argument shapes, Argument starts, Argument key_points,
                                           Argument projection, Argument logits, Argument image_size, Argument pair_scale,
                                           Argument output, int num_threads) {
    return run_function(__func__, {features, shapes, starts, key_points, projection, logits, image_size, pair_scale, output},
                        num_threads);
}

int mxd_deformable_aggregation_with_logits_backward(Argument grad_output, Argument features, Argument shapes, Argument starts,
                                                    Argument key_points, Argument projection, Argument logits,
                                                    Argument image_size, Argument pair_scale, Argument grad_features,
                                                    Argument grad_key_points, Argument grad_projection, Argument grad_logits,
                                                    int num_threads) {
    return run_function(__func__,
                        {grad_output, features, shapes, starts, key_points, projection, logits, image_size, pair_scale,
                         grad_features, grad_key_points, grad_projection, grad_logits},
                        num_threads);
}

int mxd_geometric_kernel_attention(Argument value, Argument shapes, Argument starts, Argument locations, Argument weights,
                                   Argument output, int num_threads) {
    return run_function(__func__, {value, shapes, starts, locations, weights, output}, num_threads);
}

int mxd_geometric_kernel_attention_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                            Argument locations, Argument weights, Argument grad_value, Argument grad_weights,
                                            int num_threads) {
    return run_function(__func__, {grad_output, value, shapes, starts, locations, weights, grad_value, grad_weights},
                        num_threads);
}

int mxd_geometric_kernel_attention_with_logits(Argument value, Argument shapes, Argument starts, Argument reference,
                                               Argument window, Argument logits, Argument output, int num_threads) {
    return run_function(__func__, {value, shapes, starts, reference, window, logits, output}, num_threads);
}

int mxd_geometric_kernel_attention_with_logits_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                                        Argument reference, Argument window, Argument logits,
                                                        Argument grad_value, Argument grad_logits, int num_threads) {
    return run_function(__func__, {grad_output, value, shapes, starts, reference, window, logits, grad_value, grad_logits},
                        num_threads);
}

int mxd_describe_plan(const char *name, const mxd_tensor *const *arguments, int num_threads, char *text, int64_t size) {
    return mxd::out_of_memory_if_thrown([&] {
        mxd::Function function;
        if (!name || !mxd::find_function(name, function)) return int(MXD_BAD_NAME);
        if (!arguments || (!text && size > 0)) return int(MXD_BAD_MEMORY);
        mxd::Call call = mxd::make_call(function, arguments, num_threads);
        // which axis reference points belong to makes no difference to a plan: the one that fits
        call.reference_by_point = call.sizes.references != 1 && call.sizes.references != call.sizes.levels;
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
        if (name && std::strcmp(isa.name, name) == 0 && isa.supported()) {
            mxd::chosen_isa() = &isa;
            return 0;
        }
    return -1;
}

const char *mxd_threads(void) { return mxd::threads_in_use(); }

void mxd_use_own_threads(int own) { mxd::use_own_threads(own != 0); }
}
