// The operators as custom operators of onnxruntime, which loads this library and calls RegisterCustomOps.
//
// A runtime is given each operator once for each dtype of value, which is the output's. Its other inputs may have any
// dtype that the operator takes, and all checks are made when the node runs.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "call/words.h"
#include "interface.h"
#include "onnxruntime/api.h"
#include "onnxruntime/nodes.h"
#include "threads/lent_threads.h"

namespace mxd {
namespace {

struct Runtime;

struct NodeKernel : OrtCustomOp { // what onnxruntime knows an operator by
    const Runtime *runtime;
    const Node *node;
    OrtType dtype;
};

// A copy of onnxruntime in this process. It keeps pointers to all this, so nothing of it is ever deleted.
struct Runtime {
    const OrtApi *api;
    bool has_parallel_for;
    OrtCustomOpDomain *domain;
    std::list<NodeKernel> kernels;
};

// A status that is to be returned to the runtime.
struct Failure {
    OrtStatus *status;
};

void need(OrtStatus *status) {
    if (status) throw Failure{status};
}

[[noreturn]] void refuse(const OrtApi *api, const std::string &sentence, OrtErrorCode code = ORT_INVALID_ARGUMENT) {
    throw Failure{ort::create_status(api, code, sentence.c_str())};
}

// What fn throws becomes a status: the runtime is not to be unwound.
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
    const Node &node;
    bool by_point;               // reference_axis
    std::atomic<int> threads{0}; // that were seen to work; 0: none yet
};

// A node without the attribute has the operator's default. onnxruntime has one code for that and for an attribute of
// another type, but all its versions name the type then.
bool reads_by_point(const OrtApi *api, const OrtKernelInfo *info) {
    char word[16] = "level";
    size_t size = sizeof word;
    OrtStatus *status = ort::string_attribute(api, info, "reference_axis", word, &size);
    const bool too_long = status && ort::error_code(api, status) == ORT_INVALID_ARGUMENT;
    const bool no_word = status && !too_long && std::strstr(ort::error_message(api, status), "type");
    if (status) ort::release_status(api, status);
    if (no_word) refuse(api, "reference_axis must be 'level' or 'point'; got an attribute of another type");
    if (!too_long && std::strcmp(word, "level") == 0) return false;
    if (!too_long && std::strcmp(word, "point") == 0) return true;
    refuse(api, "reference_axis must be 'level' or 'point'; got " +
                    (too_long ? std::to_string(size - 1) + " letters" : "'" + std::string(word) + "'"));
}

Given given_input(const OrtApi *api, const OrtKernelContext *context, size_t place) {
    const OrtValue *value = nullptr;
    need(ort::input(api, context, place, &value));
    Given given{};
    if (!value) return given;
    OrtTensorInfo *info = nullptr;
    need(ort::tensor_info(api, value, &info));
    const auto release = [api](OrtTensorInfo *i) { ort::release_tensor_info(api, i); };
    const std::unique_ptr<OrtTensorInfo, decltype(release)> owner(info, release);
    OrtType type;
    size_t axes;
    need(ort::element_type(api, info, &type));
    need(ort::number_of_axes(api, info, &axes));
    given.there = true;
    given.type = type;
    given.shape.resize(axes);
    need(ort::sizes(api, info, given.shape.data(), axes));
    need(ort::tensor_data(api, const_cast<OrtValue *>(value), &given.data));
    return given;
}

std::vector<Given> given_inputs(const Instance &instance, const OrtKernelContext *context) {
    const OrtApi *api = instance.runtime.api;
    size_t count;
    need(ort::number_of_inputs(api, context, &count));
    std::vector<Given> inputs(instance.node.inputs.size());
    for (size_t i = 0; i < inputs.size() && i < count; ++i) inputs[i] = given_input(api, context, i);
    return inputs;
}

int64_t dtype_of(int type) {
    static constexpr struct {
        OrtType type;
        mxd_dtype dtype;
    } OTHERS[] = {{ORT_FLOAT16, MXD_FLOAT16},
                  {ORT_BFLOAT16, MXD_BFLOAT16},
                  {ORT_FLOAT64, MXD_FLOAT64},
                  {ORT_INT32, MXD_INT32},
                  {ORT_INT64, MXD_INT64}};
    for (const auto &each : OTHERS)
        if (each.type == type) return each.dtype;
    return MXD_FLOAT32;
}

mxd_tensor contiguous(void *data, int type, const std::vector<int64_t> &shape) {
    mxd_tensor t{data, dtype_of(type), {}, {}};
    int64_t stride = 1;
    for (size_t a = shape.size(); a-- > 0; stride *= shape[a]) t.shape[a] = shape[a], t.strides[a] = stride;
    return t;
}

// [bs, num_queries, channels of all heads] for the runtime. The kernels see the axes of value.
mxd_tensor make_output(const OrtApi *api, OrtKernelContext *context, const std::vector<Given> &inputs) {
    const Given &value = inputs[0];
    std::vector<int64_t> shape = value.shape;
    shape[QUERY] = inputs[3].shape[QUERY];
    int64_t flat[] = {shape[BATCH], shape[QUERY], 1};
    for (size_t a = HEAD; a < shape.size(); ++a) flat[HEAD] *= shape[a];
    OrtValue *output = nullptr;
    void *data = nullptr;
    need(ort::output(api, context, 0, flat, 3, &output));
    need(ort::tensor_data(api, output, &data));
    return contiguous(data, value.type, shape);
}

// Logits of levels and points on one axis are seen on two.
std::vector<mxd_tensor> tensors_of(const Node &node, std::vector<Given> inputs) {
    std::vector<int64_t> &weights = inputs[size_t(node.weights)].shape;
    if (node.function.with_logits && weights.size() == 4) {
        const int64_t levels = inputs[2].shape.front();
        const int64_t points = node.function.op == GEOMETRIC ? inputs[4].shape[PLACE] : inputs[4].shape[POINT];
        weights[LEVEL] = levels;
        weights.push_back(points);
    }
    std::vector<mxd_tensor> tensors;
    for (const Given &given : inputs) tensors.push_back(contiguous(given.data, given.type, given.shape));
    return tensors;
}

Call call_of_node(const Instance &instance, const std::vector<mxd_tensor> &tensors, const std::vector<Given> &inputs,
                  const mxd_tensor &output) {
    std::vector<const mxd_tensor *> arguments;
    for (size_t i = 0; i < tensors.size(); ++i) arguments.push_back(inputs[i].there ? &tensors[i] : nullptr);
    arguments.push_back(&output);
    Call call = make_call(instance.node.function, arguments.data(), 1);
    call.reference_by_point = instance.by_point;
    return call;
}

// ---- threads: those of the session, which lends them and does not say how many

// Waking a thread pays for about so many elements of rows: WORK_OF_A_THREAD of _native.py.
constexpr double WORK_OF_A_THREAD = 1 << 16;

// Elements of rows that are read. In deformable_aggregation each point is taken to be seen by one camera.
double elements_read(const Call &call) {
    const Sizes &n = call.sizes;
    const double samples = double(n.batch) * double(n.queries * n.heads) * double(n.scales * n.points);
    return samples * (call.op == GEOMETRIC ? 1 : 4) * double(n.channels);
}

int threads_that_pay(const Call &call) {
    const double pay = elements_read(call) / WORK_OF_A_THREAD;
    return int(std::max(1.0, std::min(pay, double(std::thread::hardware_concurrency()))));
}

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
        [](void *given, size_t i) {
            const Bodies &b = *static_cast<const Bodies *>(given);
            b.body(b.context, int(i));
        },
        size_t(count), 0, &bodies);
}

// A plan depends on the number of threads. It is made for as many as have worked in one of the calls before.
int run_on_lent_threads(Instance &instance, const OrtKernelContext *context, Call &call) {
    const int most = threads_that_pay(call), seen = instance.threads.load();
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

// ---- what a node does

void compute(Instance &instance, OrtKernelContext *context) {
    const OrtApi *api = instance.runtime.api;
    const std::vector<Given> inputs = given_inputs(instance, context);
    const std::string fault = find_fault(instance.node, inputs, instance.by_point);
    if (!fault.empty()) refuse(api, fault);
    const mxd_tensor output = make_output(api, context, inputs);
    Call call = call_of_node(instance, tensors_of(instance.node, inputs), inputs, output);
    switch (run_on_lent_threads(instance, context, call)) {
    case MXD_OK: return;
    case MXD_BAD_LEVEL: refuse(api, fault_of_levels(call, instance.node.inputs[1].name, instance.node.inputs[2].name));
    case MXD_BAD_SHAPE:
        refuse(api, std::string("the native kernel of ") + instance.node.name +
                        " was given 2**31 - 1 rows, 2**48 elements, or more");
    default:
        refuse(api,
               std::string("the native kernel of ") + instance.node.name +
                   " was given not enough memory for its scratch buffers",
               ORT_RUNTIME_EXCEPTION);
    }
}

// ---- the operators

const NodeKernel &kernel_of(const OrtCustomOp *op) { return *static_cast<const NodeKernel *>(op); }

OrtStatus *create(const OrtCustomOp *op, const OrtApi *, const OrtKernelInfo *info, void **made) {
    const NodeKernel &kernel = kernel_of(op);
    const OrtApi *api = kernel.runtime->api;
    return status_of(api, [&] {
        const bool has_axis = kernel.node->function.op == MULTI_SCALE && kernel.node->function.with_logits;
        const bool by_point = has_axis && reads_by_point(api, info);
        *made = new Instance{*kernel.runtime, *kernel.node, by_point};
    });
}

NodeKernel kernel_for(const Runtime &runtime, const Node &node, OrtType dtype) {
    NodeKernel k{};
    k.version = 16;
    k.runtime = &runtime;
    k.node = &node;
    k.dtype = dtype;
    k.name = [](const OrtCustomOp *op) { return kernel_of(op).node->name; };
    k.execution_provider = [](const OrtCustomOp *) -> const char * { return nullptr; };
    k.number_of_inputs = [](const OrtCustomOp *op) { return kernel_of(op).node->inputs.size(); };
    k.input_type = [](const OrtCustomOp *op, size_t i) { return i == 0 ? kernel_of(op).dtype : ORT_ANY; };
    k.input_presence = [](const OrtCustomOp *op, size_t i) {
        return kernel_of(op).node->inputs[i].optional ? ORT_OPTIONAL : ORT_REQUIRED;
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
    for (const Node &node : nodes())
        for (OrtType dtype : {ORT_FLOAT32, ORT_FLOAT16, ORT_BFLOAT16, ORT_FLOAT64}) {
            runtime.kernels.push_back(kernel_for(runtime, node, dtype));
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

// The newest version of the interface, of those that are used here, that a runtime has; 0: none. The runtime writes to
// standard error when it is asked for one that it does not have.
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
