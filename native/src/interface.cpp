// The C functions: each collects its tensors in an array, checks them and runs the call.
#include <climits>
#include <initializer_list>

#include "call/make_plan.h"
#include "call/prepare.h"
#include "run.h"
#include "threads/threads.h"

namespace mxd {
namespace {

std::string &last_error() {
    thread_local std::string sentence;
    return sentence;
}

int refuse(int status, const std::string &sentence) {
    last_error() = sentence;
    return status;
}

int refuse(const Function &function, const Refusal &why) { return refuse(why.status, sentence(function, why)); }

// The tensors of one call, in the order of the function's arguments.
struct Request {
    const Function &function;
    TensorInfo infos[MOST_ARGUMENTS] = {}; // the shape is null if a tensor is not given
    AxisSizes sizes;

    // tensor(i) returns argument i, or null. A gradient without data is not wanted.
    template <class Of> Request(const Function &f, Of &&tensor) : function(f) {
        for (int i = 0; i < count(); ++i) {
            const mxd_tensor *t = tensor(i);
            if (t && (t->data || i < f.first_written || f.arguments[i].required))
                infos[i] = {t->shape, f.arguments[i].split.count, t->dtype, t->data, t->strides};
        }
    }
    int count() const { return function.arguments.count; }

    // Returns an mxd_status.
    int check(int64_t option) {
        if (option != 0 && (option < 0 || option >= function.choices.count))
            return refuse(MXD_BAD_SHAPE, sentence(std::string(function.option), "be 0 or 1", std::to_string(option)));
        if (!fits(function, infos, count(), option, sizes))
            return refuse(function, refusal_of(function, infos, count(), option));
        const Refusal memory = check_memory(function, infos);
        return memory.status == MXD_OK ? MXD_OK : refuse(function, memory);
    }
    Call call(int64_t option, int num_threads) const { return make_call(function, infos, sizes, option, num_threads); }
};

int run_call(const Function &function, Call &call) {
    const int status = run(call);
    return status == MXD_OK ? MXD_OK : refuse(status, sentence_of(status, function, call));
}

int run_function(const Function &function, std::initializer_list<const mxd_tensor *> tensors, int num_threads, int option = 0) {
    return out_of_memory_if_thrown([&] {
        Request request(function, [&](int i) { return tensors.begin()[i]; });
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
    const int arguments = function->arguments.count;
    if (count != arguments)
        return refuse(MXD_BAD_SHAPE, sentence("count", "be the " + std::to_string(arguments) + " of " + function->name,
                                              std::to_string(count)));
    Request request(*function, [&](int i) { return tensors[i].dtype == MXD_NOT_GIVEN ? nullptr : &tensors[i]; });
    const int64_t option = options && !function->option.empty() ? options[0] : 0;
    const int status = request.check(option);
    if (status != MXD_OK) return status;
    Call call = request.call(option, 1);
    call.num_threads = threads_that_pay(call, num_threads);
    return run_call(*function, call);
}

// Returns the option's value, 0 or 1, with which `fits` accepts the tensors. mxd_describe_plan needs it, because its caller
// gives no option. If `fits` accepts both values, both have the same plan.
int64_t fitting_option(const Function &function, Request &request) {
    return !function.option.empty() && !fits(function, request.infos, request.count(), 0, request.sizes) &&
           fits(function, request.infos, request.count(), 1, request.sizes);
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
    if (num_threads < 0) call.num_threads = threads_that_pay(call, -std::max(num_threads, -INT_MAX));
    Prepared prepared;
    PlanLists lists;
    status = prepare(call, prepared, nullptr);
    if (status != MXD_OK) return refuse(status, sentence_of(status, *function, call));
    text = describe(call, make_plan(call, lists));
    return MXD_OK;
}

} // namespace

} // namespace mxd

typedef const mxd_tensor *T;

// Defines a C function. The tensors are in the order of Function::arguments. `option` is 0 if the function has no option.
#define FUNCTION(name, parameters, option, ...)                                                                                \
    int mxd_##name parameters {                                                                                                \
        static const mxd::Function &function = *mxd::find_function(#name);                                                     \
        return mxd::run_function(function, {__VA_ARGS__}, threads, option);                                                    \
    }

extern "C" {

FUNCTION(multi_scale_deformable_attn, (T a, T b, T c, T d, T e, T f, int threads), 0, a, b, c, d, e, f)
FUNCTION(multi_scale_deformable_attn_backward, (T a, T b, T c, T d, T e, T f, T g, T h, T i, int threads), 0, a, b, c, d, e, f,
         g, h, i)
FUNCTION(multi_scale_deformable_attn_with_logits, (T a, T b, T c, T d, T e, T f, T g, int axis, int threads), axis, a, b, c, d,
         e, f, g)
FUNCTION(multi_scale_deformable_attn_with_logits_backward,
         (T a, T b, T c, T d, T e, T f, T g, T h, T i, T j, T k, int axis, int threads), axis, a, b, c, d, e, f, g, h, i, j, k)
FUNCTION(deformable_aggregation, (T a, T b, T c, T d, T e, T f, int threads), 0, a, b, c, d, e, f)
FUNCTION(deformable_aggregation_backward, (T a, T b, T c, T d, T e, T f, T g, T h, T i, int threads), 0, a, b, c, d, e, f, g, h,
         i)
FUNCTION(deformable_aggregation_with_logits, (T a, T b, T c, T d, T e, T f, T g, T h, T i, int threads), 0, a, b, c, d, e, f, g,
         h, i)
FUNCTION(deformable_aggregation_with_logits_backward,
         (T a, T b, T c, T d, T e, T f, T g, T h, T i, T j, T k, T l, T m, int threads), 0, a, b, c, d, e, f, g, h, i, j, k, l,
         m)
FUNCTION(geometric_kernel_attention, (T a, T b, T c, T d, T e, T f, int threads), 0, a, b, c, d, e, f)
FUNCTION(geometric_kernel_attention_backward, (T a, T b, T c, T d, T e, T f, T g, T h, int threads), 0, a, b, c, d, e, f, g, h)
FUNCTION(geometric_kernel_attention_with_logits, (T a, T b, T c, T d, T e, T f, T g, int threads), 0, a, b, c, d, e, f, g)
FUNCTION(geometric_kernel_attention_with_logits_backward, (T a, T b, T c, T d, T e, T f, T g, T h, T i, int threads), 0, a, b,
         c, d, e, f, g, h, i)

FUNCTION(bev_pool_v3, (T a, T b, T c, T d, T e, T f, int threads), 0, a, b, c, d, e, f)
FUNCTION(bev_pool_v3_backward, (T a, T b, T c, T d, T e, T f, T g, T h, int threads), 0, a, b, c, d, e, f, g, h)

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

const char *mxd_isa(void) { return mxd::isa_in_use(); }

int mxd_use_isa(const char *name) { return mxd::use_isa(name) ? 0 : -1; }

const char *mxd_threads(void) { return mxd::threads_in_use(); }

void mxd_use_own_threads(int own) { mxd::use_own_threads(own != 0); }

void mxd_set_work_of_a_thread(int64_t elements) { mxd::set_work_of_a_thread(elements); }
}
