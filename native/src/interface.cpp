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
#include "call/words.h"
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

int prepared_run(Call &call) {
    if (query_is_too_large(call)) return MXD_OUT_OF_MEMORY;
    Prepared prepared;
    PlanLists lists;
    const int status = prepare(call, prepared, true);
    if (status != MXD_OK || nothing_to_do(call)) return status;
    const Plan plan = make_plan(call, lists);
    const Kernels &kernels = chosen_isa().load()->kernels[call.op];
    return (call.backward ? kernels.backward : kernels.forward)(call, plan) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

template <class Fn> int out_of_memory_if_thrown(Fn &&fn) {
    try {
        return fn();
    } catch (const std::exception &) { // a list of levels that is too long
        return MXD_OUT_OF_MEMORY;
    }
}

std::string &last_error() {
    thread_local std::string sentence;
    return sentence;
}

int refuse(int status, const std::string &sentence) {
    last_error() = sentence;
    return status;
}

int refuse(const Function &function, const Refusal &why) {
    return refuse(why.status, sentence(function.arguments[size_t(why.argument)].name, why.rule, why.fact));
}

// The tensors of one call, in order.
struct Request {
    const Function &function;
    const mxd_tensor *tensors[MOST_ARGUMENTS]; // null: not given
    Given given[MOST_ARGUMENTS] = {};
    AxisSizes sizes;

    // tensor(i): argument i. Memory for a gradient may be left out, too.
    template <class Of> Request(const Function &f, Of &&tensor) : function(f) {
        for (int i = 0; i < count(); ++i) {
            const Argument &argument = f.arguments[size_t(i)];
            const mxd_tensor *t = tensor(i);
            if (t && !t->data && i >= f.first_written && !argument.required) t = nullptr;
            tensors[i] = t;
            if (t) given[i] = {t->shape, argument.split.count, t->dtype, t->data, t->strides};
        }
    }
    int count() const { return int(function.arguments.size()); }

    // Returns a status.
    int check(int64_t option) {
        const Description &op = *function.op;
        if (option != 0 && (option < 0 || option >= int64_t(op.choices.size())))
            return refuse(MXD_BAD_SHAPE, sentence(std::string(op.option), "be 0 or 1", std::to_string(option)));
        if (!fits(function, given, count(), option, sizes))
            return refuse(function, refusal_of(function, given, count(), option));
        const Refusal memory = check_memory(function, given);
        return memory.status == MXD_OK ? MXD_OK : refuse(function, memory);
    }
    Call call(int64_t option, int num_threads) const { return make_call(function, tensors, sizes, option, num_threads); }
};

int run_call(const Function &function, Call &call) {
    const int status = prepared_run(call);
    return status == MXD_OK ? MXD_OK : refuse(status, sentence_of(status, function, call));
}

// A function of this interface, looked for at its first call.
struct Entry {
    const char *name;
    std::atomic<const Function *> found{nullptr};

    explicit constexpr Entry(const char *of) : name(of) {}
    const Function &function() {
        const Function *known = found.load(std::memory_order_acquire);
        if (!known) found.store(known = find_function(name), std::memory_order_release);
        return *known;
    }
};

int run_function(Entry &entry, std::initializer_list<const mxd_tensor *> tensors, int num_threads, int option = 0) {
    return out_of_memory_if_thrown([&] {
        Request request(entry.function(), [&](int i) { return tensors.begin()[i]; });
        const int status = request.check(option);
        if (status != MXD_OK) return status;
        Call call = request.call(option, num_threads);
        return run_call(request.function, call);
    });
}

int bad_name(const char *name) {
    return refuse(MXD_BAD_NAME, sentence("name", "be a function's, such as multi_scale_deformable_attn_backward",
                                         name ? "'" + std::string(name) + "'" : "NULL"));
}

int run_by_name(const char *name, const mxd_tensor *tensors, int count, const int64_t *options, int num_threads) {
    const Function *function = name ? find_function(name) : nullptr;
    if (!function) return bad_name(name);
    if (!tensors) return refuse(MXD_BAD_MEMORY, sentence("tensors", "be an array", "NULL"));
    const int wanted = int(function->arguments.size());
    if (count != wanted)
        return refuse(MXD_BAD_SHAPE,
                      sentence("count", "be the " + std::to_string(wanted) + " of " + function->name, std::to_string(count)));
    Request request(*function, [&](int i) { return tensors[i].dtype == MXD_NOT_GIVEN ? nullptr : &tensors[i]; });
    const int64_t option = options && !function->op->option.empty() ? options[0] : 0;
    const int status = request.check(option);
    if (status != MXD_OK) return status;
    Call call = request.call(option, 1);
    call.num_threads = threads_that_pay(call, num_threads);
    return run_call(*function, call);
}

// Which axis reference points belong to makes no difference to a plan: the one that fits.
int64_t fitting_option(const Function &function, Request &request) {
    return !function.op->option.empty() && !fits(function, request.given, request.count(), 0, request.sizes) &&
           fits(function, request.given, request.count(), 1, request.sizes);
}

int describe_by_name(const char *name, const mxd_tensor *const *tensors, int num_threads, std::string &text) {
    const Function *function = name ? find_function(name) : nullptr;
    if (!function) return bad_name(name);
    if (!tensors) return refuse(MXD_BAD_MEMORY, sentence("arguments", "be an array", "NULL"));
    Request request(*function, [&](int i) { return tensors[i]; });
    const int64_t option = fitting_option(*function, request);
    int status = request.check(option);
    if (status != MXD_OK) return status;
    Call call = request.call(option, num_threads);
    if (num_threads < 0) call.num_threads = threads_that_pay(call, -num_threads);
    Prepared prepared;
    PlanLists lists;
    status = query_is_too_large(call) ? int(MXD_OUT_OF_MEMORY) : prepare(call, prepared, false);
    if (status != MXD_OK) return refuse(status, sentence_of(status, *function, call));
    text = describe(call, make_plan(call, lists));
    return MXD_OK;
}

} // namespace

int run(Call &call) {
    return out_of_memory_if_thrown([&] { return prepared_run(call); });
}

std::string sentence_of(int status, const Function &function, const Call &call) {
    const auto name = [&](int input) { return function.arguments[size_t(function.first_input + input)].name; };
    if (status == MXD_BAD_LEVEL) return fault_of_levels(call, name(1), name(2));
    return "the native kernel of " + std::string(function.op->name) + " was given not enough memory for its scratch buffers";
}

} // namespace mxd

using mxd::Entry;
using mxd::run_function;
typedef const mxd_tensor *Argument;

extern "C" {

int mxd_multi_scale_deformable_attn(Argument value, Argument shapes, Argument starts, Argument locations, Argument weights,
                                    Argument output, int num_threads) {
    static Entry entry("multi_scale_deformable_attn");
    return run_function(entry, {value, shapes, starts, locations, weights, output}, num_threads);
}

int mxd_multi_scale_deformable_attn_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                             Argument locations, Argument weights, Argument grad_value, Argument grad_locations,
                                             Argument grad_weights, int num_threads) {
    static Entry entry("multi_scale_deformable_attn_backward");
    return run_function(
        entry, {grad_output, value, shapes, starts, locations, weights, grad_value, grad_locations, grad_weights}, num_threads);
}

int mxd_multi_scale_deformable_attn_with_logits(Argument value, Argument shapes, Argument starts, Argument reference,
                                                Argument offsets, Argument logits, Argument output, int reference_axis,
                                                int num_threads) {
    static Entry entry("multi_scale_deformable_attn_with_logits");
    return run_function(entry, {value, shapes, starts, reference, offsets, logits, output}, num_threads, reference_axis);
}

int mxd_multi_scale_deformable_attn_with_logits_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                                         Argument reference, Argument offsets, Argument logits,
                                                         Argument grad_value, Argument grad_reference, Argument grad_offsets,
                                                         Argument grad_logits, int reference_axis, int num_threads) {
    static Entry entry("multi_scale_deformable_attn_with_logits_backward");
    return run_function(
        entry,
        {grad_output, value, shapes, starts, reference, offsets, logits, grad_value, grad_reference, grad_offsets, grad_logits},
        num_threads, reference_axis);
}

int mxd_deformable_aggregation(Argument features, Argument shapes, Argument starts, Argument locations, Argument weights,
                               Argument output, int num_threads) {
    static Entry entry("deformable_aggregation");
    return run_function(entry, {features, shapes, starts, locations, weights, output}, num_threads);
}

int mxd_deformable_aggregation_backward(Argument grad_output, Argument features, Argument shapes, Argument starts,
                                        Argument locations, Argument weights, Argument grad_features, Argument grad_locations,
                                        Argument grad_weights, int num_threads) {
    static Entry entry("deformable_aggregation_backward");
    return run_function(
        entry, {grad_output, features, shapes, starts, locations, weights, grad_features, grad_locations, grad_weights},
        num_threads);
}

int mxd_deformable_aggregation_with_logits(Argument features, Argument shapes, Argument starts, Argument key_points,
                                           Argument projection, Argument logits, Argument image_size, Argument pair_scale,
                                           Argument output, int num_threads) {
    static Entry entry("deformable_aggregation_with_logits");
    return run_function(entry, {features, shapes, starts, key_points, projection, logits, image_size, pair_scale, output},
                        num_threads);
}

int mxd_deformable_aggregation_with_logits_backward(Argument grad_output, Argument features, Argument shapes, Argument starts,
                                                    Argument key_points, Argument projection, Argument logits,
                                                    Argument image_size, Argument pair_scale, Argument grad_features,
                                                    Argument grad_key_points, Argument grad_projection, Argument grad_logits,
                                                    int num_threads) {
    static Entry entry("deformable_aggregation_with_logits_backward");
    return run_function(entry,
                        {grad_output, features, shapes, starts, key_points, projection, logits, image_size, pair_scale,
                         grad_features, grad_key_points, grad_projection, grad_logits},
                        num_threads);
}

int mxd_geometric_kernel_attention(Argument value, Argument shapes, Argument starts, Argument locations, Argument weights,
                                   Argument output, int num_threads) {
    static Entry entry("geometric_kernel_attention");
    return run_function(entry, {value, shapes, starts, locations, weights, output}, num_threads);
}

int mxd_geometric_kernel_attention_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                            Argument locations, Argument weights, Argument grad_value, Argument grad_weights,
                                            int num_threads) {
    static Entry entry("geometric_kernel_attention_backward");
    return run_function(entry, {grad_output, value, shapes, starts, locations, weights, grad_value, grad_weights}, num_threads);
}

int mxd_geometric_kernel_attention_with_logits(Argument value, Argument shapes, Argument starts, Argument reference,
                                               Argument window, Argument logits, Argument output, int num_threads) {
    static Entry entry("geometric_kernel_attention_with_logits");
    return run_function(entry, {value, shapes, starts, reference, window, logits, output}, num_threads);
}

int mxd_geometric_kernel_attention_with_logits_backward(Argument grad_output, Argument value, Argument shapes, Argument starts,
                                                        Argument reference, Argument window, Argument logits,
                                                        Argument grad_value, Argument grad_logits, int num_threads) {
    static Entry entry("geometric_kernel_attention_with_logits_backward");
    return run_function(entry, {grad_output, value, shapes, starts, reference, window, logits, grad_value, grad_logits},
                        num_threads);
}

int mxd_run(const char *name, const mxd_tensor *tensors, int count, const int64_t *options, int num_threads) {
    return mxd::out_of_memory_if_thrown([&] { return mxd::run_by_name(name, tensors, count, options, num_threads); });
}

const char *mxd_last_error(void) { return mxd::last_error().c_str(); }

int mxd_describe_plan(const char *name, const mxd_tensor *const *arguments, int num_threads, char *text, int64_t size) {
    return mxd::out_of_memory_if_thrown([&] {
        if (!text && size > 0) return mxd::refuse(MXD_BAD_MEMORY, mxd::sentence("text", "be memory for it", "NULL"));
        std::string plan;
        const int status = mxd::describe_by_name(name, arguments, num_threads, plan);
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

void mxd_set_work_of_a_thread(int64_t elements) { mxd::set_work_of_a_thread(elements); }
}
