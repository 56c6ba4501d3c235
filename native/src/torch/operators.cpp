// Registers the operators with PyTorch, with or without Python: schemas, CPU kernels, and meta kernels for tracing.
//
// torch passes arguments on a stack, and the kernel writes its results there. The kernel owns the arguments; torch owns the
// results.
#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "call/make_plan.h"
#include "call/prepare.h"
#include "mx_driving_torch.h"
#include "run.h"
#include "torch/gpu.h"
#include "torch/tensors.h"

namespace mxd::torch {

const Api *api;

namespace {

Tensor converted(Tensor &&tensor, int32_t dtype) {
    Value stack[] = {value_of(tensor.release()), Value(uint32_t(dtype)), false, false, 0};
    need(api->torch_call_dispatcher("aten::to", "dtype", stack, VERSION), "convert a tensor to another dtype");
    return Tensor(handle_of<TensorHandle>(stack[0]));
}

// ---- a call

enum class Device { CPU, META, GPU };

// The dtype of the output. OF_VALUE is value's dtype. AUTOCAST, for `<operator>_autocast`, is float32 if value has 16 bits,
// else value's dtype.
enum class OutputDtype { OF_VALUE, AUTOCAST };
constexpr const char *AUTOCAST_SUFFIX = "_autocast";

constexpr int64_t NOTHING = 0; // the shape of a gradient that is not wanted

class BoxedCall {
  public:
    // Takes ownership of all arguments, even if some are invalid.
    BoxedCall(const Function &of, OutputDtype output, Value *arguments) : function(of), kind(output) {
        for (int i = 0; i < function.first_written; ++i) take_tensor(i, *arguments++);
        for (int i = 0; i < function.numbers.count; ++i) numbers.push_back(int64_t(*arguments++));
        if (!function.option.empty()) take_option(handle_of<StringHandle>(*arguments++));
        if (function.backward) take_mask(handle_of<ListHandle>(*arguments));
    }
    ~BoxedCall() {
        if (text) api->torch_delete_string(text);
        if (list) api->torch_delete_list(list);
    }

    void run(Device device, Value *results) {
        check(device);
        if (device == Device::GPU) return run_on_gpu(results);
        // Check only the inputs: results do not exist yet, and will have new memory.
        const Refusal memory = device == Device::CPU ? check_memory(function, infos) : Refusal{};
        if (memory.status != MXD_OK) refuse(memory);
        take_sizes();
        if (function.backward)
            make_gradients();
        else
            make_output();
        if (device == Device::CPU) compute();
        leave(results);
    }

  private:
    const Function &function;
    const OutputDtype kind;
    Tensor tensors[MOST_ARGUMENTS];
    TensorInfo infos[MOST_ARGUMENTS] = {};
    AxisSizes sizes;
    std::vector<int64_t> numbers; // the sizes that no input has, in the order of function.numbers
    std::string word;             // the value of the option
    int64_t option = 0;
    StringHandle text = nullptr; // torch's string that holds the option's value
    ListHandle list = nullptr;   // torch's list that holds the mask
    size_t mask_size = 0;
    bool mask[MOST_ARGUMENTS] = {};

    int count() const { return function.arguments.count; }
    const Argument &argument(int i) const { return function.arguments[i]; }

    // Takes the sizes that no input has. In the backward these must agree with the axes of grad_output.
    void take_sizes() {
        for (size_t i = 0; i < numbers.size(); ++i) {
            int64_t &size = sizes.of[function.numbers[int(i)]];
            const std::string name(SIZE_NAMES[function.numbers[int(i)]]);
            if (size >= 0 && size != numbers[i])
                throw Refused{sentence(name, "be " + std::to_string(size) + ", as in grad_output", std::to_string(numbers[i]))};
            if (numbers[i] < 0) throw Refused{sentence(name, "not be negative", std::to_string(numbers[i]))};
            size = numbers[i];
        }
    }

    void take_tensor(int i, Value value) {
        if (argument(i).required) {
            tensors[i] = Tensor(handle_of<TensorHandle>(value));
        } else if (Value *const optional = handle_of<Value *>(value)) {
            tensors[i] = Tensor(handle_of<TensorHandle>(*optional));
            api->free_optional(optional);
        }
    }
    void take_option(StringHandle handle) {
        const char *letters = "";
        size_t length = 0;
        text = handle;
        if (!api->torch_string_length(text, &length) && !api->torch_string_c_str(text, &letters)) word.assign(letters, length);
    }
    void take_mask(ListHandle mask_list) {
        Value entry;
        list = mask_list;
        api->torch_list_size(list, &mask_size);
        for (size_t i = 0; i < mask_size && i < MOST_ARGUMENTS; ++i)
            mask[i] = !api->torch_list_get_item(list, i, &entry) && (entry & 0xff);
    }

    [[noreturn]] void refuse(const Refusal &why) const { throw Refused{sentence(function, why)}; }

    void check(Device device) {
        for (int i = 0; i < function.first_written; ++i)
            if (tensors[i]) describe(i, device);
        check_option();
        if (!fits(function, infos, function.first_written, option, sizes))
            refuse(refusal_of(function, infos, function.first_written, option));
    }

    void take_memory() {
        for (int i = function.first_written; i < count(); ++i)
            if (infos[i].shape) infos[i].data = ask(api->torch_get_mutable_data_ptr, tensors[i]);
    }

    void leave(Value *results) {
        for (int i = function.first_written; i < count(); ++i) *results++ = value_of(tensors[i].release());
    }

    void describe(int i, Device device) {
        const bool cpu = device == Device::CPU;
        bool defined = false;
        if (api->aoti_torch_is_defined(tensors[i].get(), &defined) || !defined)
            throw Refused{sentence(argument(i).name, "be a tensor", "an undefined tensor")};
        if (device == Device::GPU) {
            for (auto question : {api->aoti_torch_get_device_type, api->aoti_torch_get_device_index})
                if (ask(question, tensors[i]) != ask(question, tensors[0]))
                    throw Refused{
                        sentence(argument(i).name, "be on the device of " + std::string(argument(0).name), "another")};
        } else if (ask(api->aoti_torch_get_device_type, tensors[i]) !=
                   (cpu ? api->aoti_torch_device_type_cpu() : api->aoti_torch_device_type_meta()))
            throw Refused{sentence(argument(i).name, cpu ? "be on the CPU" : "be a meta tensor", "another device")};
        infos[i] = info_of(tensors[i]);
        if (cpu && argument(i).elements == Elements::NUMBER && infos[i].dtype == NARROW) {
            // Kernels cannot read int8, int16 and uint8, so convert these to int64.
            tensors[i] = converted(std::move(tensors[i]), api->aoti_torch_dtype_int64());
            infos[i] = info_of(tensors[i]);
        }
        if (device != Device::META) infos[i].data = ask(api->torch_get_const_data_ptr, tensors[i]);
    }

    void check_option() {
        std::string rule;
        for (int i = 0; i < function.choices.count; ++i) {
            if (function.choices[i] == word) {
                option = int64_t(i);
                return;
            }
            rule += (i ? " or '" : "be '") + std::string(function.choices[i]) + "'";
        }
        if (!rule.empty()) throw Refused{sentence(std::string(function.option), rule, "'" + word + "'")};
    }

    void make_output() {
        const List<int64_t, MOST_AXES> shape = output_shape(function, sizes);
        const std::string fault = fault_of_output(shape);
        if (!fault.empty()) throw Refused{fault};
        Tensor &output = tensors[function.first_written];
        output = made("output", tensors[function.first_input], output_dtype(), shape.begin(), shape.count);
        infos[function.first_written] = info_of(output);
    }

    int32_t output_dtype() const {
        const int64_t dtype = infos[function.first_input].dtype;
        const bool widens = kind == OutputDtype::AUTOCAST && (dtype == MXD_FLOAT16 || dtype == MXD_BFLOAT16);
        return widens ? api->aoti_torch_dtype_float32() : ask(api->aoti_torch_get_dtype, tensors[function.first_input]);
    }

    // Makes a tensor for the gradient of each differentiable input. A gradient that is not wanted is an empty tensor. The
    // gradient of value has the dtype `of_value`, or value's dtype if `of_value` is -1.
    void make_gradients(int32_t of_value = -1) {
        const size_t gradients = size_t(count() - function.first_written);
        if (mask_size != gradients)
            throw Refused{sentence("output_mask", "have " + std::to_string(gradients) + " entries, one for each gradient",
                                   std::to_string(mask_size))};
        int input = function.first_input;
        for (size_t i = 0; i < gradients; ++i, ++input) {
            const int result = function.first_written + int(i);
            while (std::string_view(argument(result).name).substr(5) != argument(input).name) ++input; // skip "grad_"
            const std::string name = argument(result).name;
            const int32_t dtype = !i && mask[0] && of_value >= 0 ? of_value : ask(api->aoti_torch_get_dtype, tensors[input]);
            tensors[result] = mask[i] ? made(name, tensors[input], dtype, infos[input].shape, infos[input].axes)
                                      : made(name, tensors[input], dtype, &NOTHING, 1);
            if (mask[i]) infos[result] = info_of(tensors[result]);
        }
    }

    // Runs a call on the GPU. Only functions for which is_for_gpu is true have such calls.
    void run_on_gpu(Value *stack) {
        int64_t variant = 2 * option + int64_t(kind);
        for (size_t i = 0; i < mask_size; ++i) variant = 2 * variant + mask[i];
        GpuCall call(function, infos, sizes, ask(api->aoti_torch_get_device_index, tensors[0]), variant);
        if (!call.find_kernel()) return call_python(stack);
        const int32_t float32 = api->aoti_torch_dtype_float32();
        if (function.backward)
            make_gradients(float32); // Sums are in float32.
        else
            make_output();
        take_memory();
        call.launch();
        const int32_t dtype = ask(api->aoti_torch_get_dtype, tensors[function.first_input]);
        Tensor &first = tensors[function.first_written];
        if (function.backward && mask[0] && dtype != float32) first = converted(std::move(first), dtype);
        leave(stack);
    }

    // Calls the operator of the same name in torch.ops.mx_driving_triton. Python runs this operator, and hands over the kernel
    // that it compiles.
    void call_python(Value *stack) {
        for (int i = 0; i < function.first_written; ++i) stack[i] = value_of(tensors[i].release());
        if (text) stack[function.first_written] = value_of(std::exchange(text, nullptr));
        if (list) stack[function.first_written] = value_of(std::exchange(list, nullptr));
        std::string name = std::string("mx_driving_triton::") + function.name;
        if (kind == OutputDtype::AUTOCAST) name += AUTOCAST_SUFFIX;
        const Status status = api->torch_call_dispatcher(name.c_str(), "", stack, VERSION);
        stop_waiting();
        if (status) throw Refused{api->torch_exception_get_what ? api->torch_exception_get_what() : name + " failed"};
    }

    void compute() {
        take_memory();
        Call call = make_call(function, infos, sizes, option, 1);
        uint32_t threads = 1;
        need(api->torch_get_num_threads(&threads), "count its threads");
        call.num_threads = threads_that_pay(call, int(threads));
        const int status = mxd::run(call);
        if (status != MXD_OK) throw Refused{sentence_of(status, function, call)};
    }
};

// ---- kernels: torch does not pass the operator's name, so each operator has its own function

uint64_t arguments_of(const Function &f) {
    return uint64_t(f.first_written + f.numbers.count + !f.option.empty() + f.backward);
}

const char *why_refused(const Function &function, OutputDtype output, Device device, Value *stack, uint64_t arguments) {
    return why_not([&] {
        if (arguments != arguments_of(function))
            throw Refused{sentence(
                function.name, "have the schema of this library, with " + std::to_string(arguments_of(function)) + " arguments",
                std::to_string(arguments))};
        BoxedCall(function, output, stack).run(device, stack);
    });
}

// aoti_torch_check throws through this function. So this function must have no objects with destructors.
template <Device device, OutputDtype output, size_t i> void kernel(Value *stack, uint64_t arguments, uint64_t) {
    const char *const why = why_refused(functions()[i], output, device, stack, arguments);
    if (why) api->aoti_torch_check(false, "kernel", "mx_driving", __LINE__, why);
}

typedef std::array<Kernel *, FUNCTIONS> Kernels;
template <Device device, OutputDtype output, size_t... i> constexpr Kernels kernels(std::index_sequence<i...>) {
    return {kernel<device, output, i>...};
}
template <Device device, OutputDtype output>
constexpr Kernels KERNELS = kernels<device, output>(std::make_index_sequence<FUNCTIONS>());

// ---- registration

std::string schema(const Function &f, const char *suffix = "") {
    const std::string name = std::string(f.name) + suffix;
    std::string inputs, results;
    for (int i = 0; i < f.first_written; ++i)
        inputs += (i ? ", Tensor" : "Tensor") + std::string(f.arguments[i].required ? " " : "? ") + f.arguments[i].name;
    for (sizes::Name size : f.numbers) inputs += std::string(", SymInt ") + SIZE_NAMES[size];
    if (!f.option.empty()) inputs += ", str " + std::string(f.option);
    if (!f.backward) return name + "(" + inputs + ") -> Tensor";
    const int gradients = f.arguments.count - f.first_written;
    for (int i = 0; i < gradients; ++i) results += i ? ", Tensor" : "Tensor";
    return name + "(" + inputs + ", bool[" + std::to_string(gradients) + "] output_mask) -> (" + results + ")";
}

void need_api() {
    std::string missing;
    if (!api) api = find_api(missing);
    if (!api) throw Refused{missing};
}

// The libraries that are registered in this process; `shapes` has the meta kernels. When a library is deleted, torch withdraws
// its operators or kernels.
struct Registered {
    LibraryHandle kernels = nullptr, schemas = nullptr, shapes = nullptr;
};

// A backward with logits needs more than one kernel, so Python launches it.
bool is_for_gpu(const Function &f) {
    return (f.kernel == MULTI_SCALE || f.kernel == GEOMETRIC) && !(f.with_logits && f.backward);
}

template <Device device> void add_kernels(LibraryHandle &to, const char *key) {
    const Kernels &kernels = KERNELS<device, OutputDtype::OF_VALUE>, &autocast = KERNELS<device, OutputDtype::AUTOCAST>;
    need(api->aoti_torch_library_init_impl("mx_driving", key, "mx_driving", 0, &to), "open the library mx_driving");
    const auto add = [&](const std::string &name, Kernel *kernel) {
        need(api->torch_library_impl(to, name.c_str(), kernel, VERSION), "register a kernel");
    };
    for (size_t i = 0; i < functions().size(); ++i) {
        const Function &each = functions()[i];
        if (device == Device::GPU && !is_for_gpu(each)) continue;
        add(each.name, kernels[i]);
        if (!each.backward) add(std::string(each.name) + AUTOCAST_SUFFIX, autocast[i]);
    }
}

void define(LibraryHandle to, const std::string &text) {
    const int32_t tag = api->torch_library_def_with_tags ? api->torch_tag_pt2_compliant_tag() : 0;
    need(api->torch_library_def_with_tags ? api->torch_library_def_with_tags(to, text.c_str(), &tag, 1)
                                          : api->aoti_torch_library_def(to, text.c_str()),
         "define an operator that it may have already");
}

void define_all(LibraryHandle &to) {
    need(api->aoti_torch_library_init_fragment("mx_driving", "mx_driving", 0, &to), "open the library mx_driving");
    for (const Function &each : functions()) {
        define(to, schema(each));
        if (!each.backward) define(to, schema(each, AUTOCAST_SUFFIX));
    }
}

void withdraw(LibraryHandle &library) {
    if (library) api->aoti_torch_delete_library_object(std::exchange(library, nullptr));
}

void set(Registered &registered, int what) {
    static bool by_others = false; // true if the Python package registers schemas and meta kernels
    by_others |= what != MXD_TORCH_ALL;
    if (what == MXD_TORCH_NOTHING) withdraw(registered.kernels);
    if (by_others) {
        withdraw(registered.schemas);
        withdraw(registered.shapes);
    }
    if (what != MXD_TORCH_NOTHING && !registered.kernels) add_kernels<Device::CPU>(registered.kernels, "CPU");
    if (by_others || registered.schemas) return;
    define_all(registered.schemas);
    add_kernels<Device::META>(registered.shapes, "Meta");
}

} // namespace

void register_gpu_kernels() {
    static LibraryHandle library = nullptr;
    if (library) return;
    need_api();
    add_kernels<Device::GPU>(library, "CUDA");
}

} // namespace mxd::torch

extern "C" const char *mxd_register_with_torch(int what) {
    using namespace mxd::torch;
    static std::mutex mutex;
    static Registered registered;
    const std::lock_guard<std::mutex> lock(mutex);
    return why_not([&] {
        need_api();
        try {
            set(registered, what);
        } catch (...) { // withdraw what was registered before the error
            for (LibraryHandle *each : {&registered.kernels, &registered.schemas, &registered.shapes}) withdraw(*each);
            throw;
        }
    });
}
