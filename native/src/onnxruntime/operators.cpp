// The operators as custom operators of onnxruntime, which loads this library and calls RegisterCustomOps.
//
// Each operator is registered once for each dtype of value, which is also the dtype of the output. onnxruntime accepts any
// dtype for the other inputs; we check their dtypes when the node runs.
#include <atomic>
#include <cstdio>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "call/make_plan.h"
#include "call/prepare.h"
#include "onnxruntime/api.h"
#include "run.h"
#include "threads/threads.h"

namespace mxd {
namespace {

struct Runtime;

struct NodeKernel : OrtCustomOp { // an operator that is registered with onnxruntime
    const Runtime *runtime;
    const Function *function; // a forward function
    OrtType dtype;
};

// A copy of onnxruntime in this process. onnxruntime keeps pointers to these members, so a Runtime is never deleted.
struct Runtime {
    const OrtApi *api;
    bool has_parallel_for;
    OrtCustomOpDomain *domain;
    std::list<NodeKernel> kernels;
};

// An exception. Its status is returned to the runtime.
struct Failure {
    OrtStatus *status;
};

void need(OrtStatus *status) {
    if (status) throw Failure{status};
}

[[noreturn]] void refuse(const OrtApi *api, const std::string &sentence, OrtErrorCode code = ORT_INVALID_ARGUMENT) {
    throw Failure{ort::create_status(api, code, sentence.c_str())};
}

// Runs fn and converts its exception to a status, because exceptions must not pass through the runtime.
template <class Fn> OrtStatus *status_of(const OrtApi *api, Fn &&fn) {
    try {
        fn();
        return nullptr;
    } catch (const Failure &failure) {
        return failure.status;
    } catch (const std::exception &error) {
        return ort::create_status(api, ORT_RUNTIME_EXCEPTION, error.what());
    }
}

// ---- a node of a graph

struct Instance {
    const Runtime &runtime;
    const Function &function;
    int64_t option;               // the value of reference_axis
    std::vector<int64_t> numbers; // the sizes that no input has, from attributes; -1 if the attribute is missing
    std::atomic<int> threads{0};  // the largest number of threads that worked in one call so far
};

// Returns whether a node has an attribute, of any type. Asks for a list of whole numbers: onnxruntime returns an error if the
// attribute is missing, and an empty list if it has another type.
bool has_attribute(const OrtApi *api, const OrtKernelInfo *info, const char *name) {
    size_t count = 0;
    OrtStatus *status = ort::int_list_attribute(api, info, name, nullptr, &count);
    if (status) ort::release_status(api, status);
    return !status;
}

// Returns the option of a node. If the attribute is missing, returns the default.
int64_t option_of(const Function &op, const OrtApi *api, const OrtKernelInfo *info) {
    const std::string name(op.option);
    if (name.empty() || !has_attribute(api, info, name.c_str())) return 0;
    char word[16] = {};
    size_t size = sizeof word;
    OrtStatus *status = ort::string_attribute(api, info, name.c_str(), word, &size);
    std::string rule = "be ", fact = "'" + std::string(word) + "'";
    for (int i = 0; i < op.choices.count; ++i) {
        if (!status && op.choices[i] == word) return int64_t(i);
        rule += (i ? " or '" : "'") + std::string(op.choices[i]) + "'";
    }
    if (status) { // the word is too long, or the attribute is not a string
        const bool too_long = ort::error_code(api, status) == ORT_INVALID_ARGUMENT;
        fact = too_long ? std::to_string(size - 1) + " letters" : "an attribute of another type";
        ort::release_status(api, status);
    }
    refuse(api, sentence(name, rule, fact));
}

std::string name_of_number(const Function &op, size_t i) { return SIZE_NAMES[op.numbers[int(i)]]; }

std::vector<int64_t> numbers_of(const Function &op, const OrtApi *api, const OrtKernelInfo *info) {
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < size_t(op.numbers.count); ++i) {
        int64_t number = -1;
        OrtStatus *status = ort::int_attribute(api, info, name_of_number(op, i).c_str(), &number);
        if (!status && number < 0)
            refuse(api, sentence(name_of_number(op, i), "be an attribute, a whole number", std::to_string(number)));
        if (status) ort::release_status(api, status);
        numbers.push_back(status ? -1 : number);
    }
    return numbers;
}

// A contiguous tensor. info.shape is null for an optional input that is not given.
struct NodeTensor {
    TensorInfo info{};
    std::vector<int64_t> shape, strides;

    // Fills `info`. `shape` must have at least one entry, even for a scalar, so that its address is not null.
    void describe(int axes, int64_t dtype, const char *dtype_name, const void *data) {
        strides.assign(shape.size(), 1);
        for (int a = axes - 1; a-- > 0;) strides[size_t(a)] = strides[size_t(a) + 1] * shape[size_t(a) + 1];
        info = {shape.data(), axes, dtype, data, strides.data(), -1, dtype_name};
    }
};

// Names and mxd_dtypes of element types, indexed by OrtType. Operators accept only types with an mxd_dtype.
constexpr const char *TYPE_NAMES[] = {"no type", "float32", "uint8",     "int8",       "uint16",  "int16",
                                      "int32",   "int64",   "string",    "bool",       "float16", "float64",
                                      "uint32",  "uint64",  "complex64", "complex128", "bfloat16"};
constexpr int64_t DTYPES[] = {-1, MXD_FLOAT32, -1,          -1, -1, -1, MXD_INT32, MXD_INT64,   -1,
                              -1, MXD_FLOAT16, MXD_FLOAT64, -1, -1, -1, -1,        MXD_BFLOAT16};
static_assert(std::size(DTYPES) == std::size(TYPE_NAMES), "both have every type");

void read_input(const OrtApi *api, const OrtKernelContext *context, size_t index, NodeTensor &to) {
    const OrtValue *value = nullptr;
    need(ort::input(api, context, index, &value));
    if (!value) return;
    OrtTensorInfo *info = nullptr;
    need(ort::tensor_info(api, value, &info));
    const auto release = [api](OrtTensorInfo *i) { ort::release_tensor_info(api, i); };
    const std::unique_ptr<OrtTensorInfo, decltype(release)> owner(info, release);
    OrtType type;
    size_t axes;
    void *data;
    need(ort::element_type(api, info, &type));
    need(ort::number_of_axes(api, info, &axes));
    to.shape.resize(std::max<size_t>(axes, 1));
    need(ort::sizes(api, info, to.shape.data(), axes));
    need(ort::tensor_data(api, const_cast<OrtValue *>(value), &data));
    const bool known = size_t(type) < std::size(TYPE_NAMES);
    to.describe(int(axes), known ? DTYPES[type] : -1, known ? TYPE_NAMES[type] : "another type", data);
}

// Returns the sizes that no input has. Reads them from attributes, or from an additional last input.
std::vector<int64_t> read_numbers(const Instance &instance, const OrtKernelContext *context, size_t count) {
    const OrtApi *api = instance.runtime.api;
    const Function &op = instance.function;
    std::vector<int64_t> numbers = instance.numbers;
    NodeTensor input;
    if (count > size_t(instance.function.num_inputs)) read_input(api, context, size_t(instance.function.num_inputs), input);
    if (input.info.shape) {
        const std::string dtype = input.info.dtype_name, shape = text_of(input.shape.data(), size_t(input.info.axes));
        if (input.info.dtype != MXD_INT64 || input.info.axes != 1 || input.shape.front() != int64_t(numbers.size()))
            refuse(api, sentence("sizes", "have dtype int64 and shape (" + std::to_string(numbers.size()) + ",)",
                                 dtype + " and " + shape));
        const int64_t *elements = static_cast<const int64_t *>(input.info.data);
        numbers.assign(elements, elements + numbers.size());
    }
    for (size_t i = 0; i < numbers.size(); ++i)
        if (numbers[i] < 0)
            refuse(api, sentence(name_of_number(op, i), "be a whole number, an attribute or an element of sizes",
                                 input.info.shape ? std::to_string(numbers[i]) : "none"));
    return numbers;
}

Call call_of_node(const Instance &instance, OrtKernelContext *context) {
    const OrtApi *api = instance.runtime.api;
    const Function &function = instance.function;
    const int inputs = function.num_inputs;
    NodeTensor tensors[MOST_ARGUMENTS]; // inputs, then the output
    TensorInfo infos[MOST_ARGUMENTS] = {};
    size_t count;
    need(ort::number_of_inputs(api, context, &count));
    for (int i = 0; i < inputs; ++i) {
        if (size_t(i) < count) read_input(api, context, size_t(i), tensors[i]);
        infos[i] = tensors[i].info;
    }
    AxisSizes sizes;
    if (!fits(function, infos, inputs, instance.option, sizes))
        refuse(api, sentence(function, refusal_of(function, infos, inputs, instance.option)));
    if (!instance.numbers.empty()) {
        const std::vector<int64_t> numbers = read_numbers(instance, context, count);
        for (size_t i = 0; i < numbers.size(); ++i) sizes.of[function.numbers[int(i)]] = numbers[i];
    }
    const List<int64_t, MOST_AXES> shape = output_shape(function, sizes);
    const std::string fault = fault_of_output(shape);
    if (!fault.empty()) refuse(api, fault);
    OrtValue *output = nullptr;
    void *data = nullptr;
    need(ort::output(api, context, 0, shape.begin(), size_t(shape.count), &output));
    need(ort::tensor_data(api, output, &data));
    tensors[inputs].shape.assign(shape.begin(), shape.end());
    tensors[inputs].describe(shape.count, infos[0].dtype, nullptr, data);
    infos[inputs] = tensors[inputs].info;
    return make_call(function, infos, sizes, instance.option, 1);
}

// ---- threads of the session; onnxruntime does not tell their number

struct Lender {
    const OrtApi *api;
    const OrtKernelContext *context;
    OrtStatus *status;
};

void run_on_session(void *lender, int count, Body *body, void *context) {
    struct Bodies {
        Body *body;
        void *context;
    } bodies{body, context};
    Lender &from = *static_cast<Lender *>(lender);
    from.status = ort::parallel_for(
        from.api, from.context,
        [](void *pointer, size_t i) {
            const Bodies &b = *static_cast<const Bodies *>(pointer);
            b.body(b.context, int(i));
        },
        size_t(count), 0, &bodies);
}

// Runs a call on the threads of the session. Plans for the largest number of threads that worked in an earlier call. The first
// call plans for all threads that pay.
int run_on_lent_threads(Instance &instance, const OrtKernelContext *context, Call &call) {
    const int most = threads_that_pay(call, int(std::thread::hardware_concurrency())), seen = instance.threads.load();
    if (most == 1 || !instance.runtime.has_parallel_for) return run(call);
    call.num_threads = seen == 0 ? most : std::min(seen, most);
    Lender lender{instance.runtime.api, context, nullptr};
    LentThreads lent{run_on_session, &lender, most, 0};
    const Lending lending(lent);
    const int status = run(call);
    need(lender.status);
    if (lent.used > seen) instance.threads = lent.used;
    return status;
}

// ---- running a node

void compute(Instance &instance, OrtKernelContext *context) {
    Call call = call_of_node(instance, context);
    const int status = run_on_lent_threads(instance, context, call);
    if (status == MXD_OK) return;
    refuse(instance.runtime.api, sentence_of(status, instance.function, call),
           status == MXD_OUT_OF_MEMORY ? ORT_RUNTIME_EXCEPTION : ORT_INVALID_ARGUMENT);
}

// ---- the operators

const NodeKernel &kernel_of(const OrtCustomOp *op) { return *static_cast<const NodeKernel *>(op); }

OrtStatus *create(const OrtCustomOp *op, const OrtApi *, const OrtKernelInfo *info, void **made) {
    const NodeKernel &kernel = kernel_of(op);
    const OrtApi *api = kernel.runtime->api;
    return status_of(api, [&] {
        const Function &op = *kernel.function;
        *made = new Instance{*kernel.runtime, *kernel.function, option_of(op, api, info), numbers_of(op, api, info)};
    });
}

NodeKernel kernel_for(const Runtime &runtime, const Function &function, OrtType dtype) {
    NodeKernel k{};
    k.version = 16;
    k.runtime = &runtime;
    k.function = &function;
    k.dtype = dtype;
    k.name = [](const OrtCustomOp *op) { return kernel_of(op).function->name; };
    k.execution_provider = [](const OrtCustomOp *) -> const char * { return nullptr; };
    k.number_of_inputs = [](const OrtCustomOp *op) {
        const Function &function = *kernel_of(op).function;
        return size_t(function.num_inputs) + (function.numbers.count != 0); // plus the input "sizes"
    };
    k.input_type = [](const OrtCustomOp *op, size_t i) { return i == 0 ? kernel_of(op).dtype : ORT_ANY; };
    k.input_presence = [](const OrtCustomOp *op, size_t i) {
        const Function &function = *kernel_of(op).function;
        return i < size_t(function.num_inputs) && function.arguments[int(i)].required ? ORT_REQUIRED : ORT_OPTIONAL;
    };
    k.input_memory = [](const OrtCustomOp *, size_t) { return 0; };
    k.number_of_outputs = [](const OrtCustomOp *) { return size_t(1); };
    k.output_type = [](const OrtCustomOp *op, size_t) { return kernel_of(op).dtype; };
    k.output_presence = [](const OrtCustomOp *, size_t) { return ORT_REQUIRED; };
    k.create_kernel_v2 = create;
    k.compute_v2 = [](void *instance, OrtKernelContext *context) {
        Instance &i = *static_cast<Instance *>(instance);
        return status_of(i.runtime.api, [&] { compute(i, context); });
    };
    k.destroy = [](void *instance) { delete static_cast<Instance *>(instance); };
    return k;
}

// ---- registration

void open(Runtime &runtime) {
    need(ort::create_domain(runtime.api, "mx_driving", &runtime.domain));
    for (const Function &function : functions())
        for (OrtType dtype : {ORT_FLOAT32, ORT_FLOAT16, ORT_BFLOAT16, ORT_FLOAT64}) {
            if (function.backward) break;
            runtime.kernels.push_back(kernel_for(runtime, function, dtype));
            need(ort::add_to_domain(runtime.api, runtime.domain, &runtime.kernels.back()));
        }
}

Runtime &runtime_of(const OrtApi *api, bool has_parallel_for) {
    static std::mutex mutex;
    static std::list<Runtime> &runtimes = *new std::list<Runtime>;
    const std::lock_guard<std::mutex> lock(mutex);
    for (Runtime &runtime : runtimes)
        if (runtime.api == api) return runtime;
    runtimes.push_back({api, has_parallel_for, nullptr, {}});
    try {
        open(runtimes.back());
    } catch (...) {
        runtimes.pop_back();
        throw;
    }
    return runtimes.back();
}

// Returns the version of the interface to request: 17, 16, or 0 if the runtime is too old. A runtime that does not have the
// requested version would write to standard error.
uint32_t interface_of(const OrtApiBase *base) {
    int major = 0, minor = 0;
    std::sscanf(base->version(), "%d.%d", &major, &minor);
    return major > 1 || minor >= 17 ? 17 : minor == 16 ? 16 : 0;
}

} // namespace
} // namespace mxd

extern "C" MXD_API mxd::OrtStatus *RegisterCustomOps(mxd::OrtSessionOptions *options, const mxd::OrtApiBase *base) {
    const uint32_t version = mxd::interface_of(base);
    if (version == 0) {
        const std::string sentence = std::string("onnxruntime must be 1.16 or later; got ") + base->version();
        return mxd::ort::create_status(base->api(1), mxd::ORT_FAIL, sentence.c_str());
    }
    const mxd::OrtApi *api = base->api(version);
    return mxd::status_of(api,
                          [&] { mxd::need(mxd::ort::add_domain(api, options, mxd::runtime_of(api, version > 16).domain)); });
}
