// Registers the operators with PyTorch, with or without Python: schemas, CPU kernels, and meta kernels for tracing.
//
// torch passes arguments on a stack, where the kernel leaves its results. The kernel owns the arguments; torch owns the
// results.
#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "call/make_plan.h"
#include "call/prepare.h"
#include "mx_driving_torch.h"
#include "run.h"
#include "torch/api.h"

namespace mxd::torch {
namespace {

const Api *api; // set before a kernel is registered

template <class Handle> Handle handle_of(Value value) { return reinterpret_cast<Handle>(uintptr_t(value)); }
Value value_of(void *handle) { return Value(reinterpret_cast<uintptr_t>(handle)); }

// An error, which becomes an exception of torch.
struct Refused {
    std::string why;
};

void need(Status status, const char *what) {
    if (status) throw Refused{std::string("torch could not ") + what};
}

// ---- dtypes, by c10::ScalarType, on whose order torch's files rely

constexpr const char *DTYPE_NAMES[] = {"uint8",           "int8",
                                       "int16",           "int32",
                                       "int64",           "float16",
                                       "float32",         "float64",
                                       "complex32",       "complex64",
                                       "complex128",      "bool",
                                       "qint8",           "quint8",
                                       "qint32",          "bfloat16",
                                       "quint4x2",        "quint2x4",
                                       "bits1x8",         "bits2x4",
                                       "bits4x2",         "bits8",
                                       "bits16",          "float8_e5m2",
                                       "float8_e4m3fn",   "float8_e5m2fnuz",
                                       "float8_e4m3fnuz", "uint16",
                                       "uint32",          "uint64"};
constexpr int64_t NARROW = -2; // an integer that is converted to int64
constexpr int64_t DTYPES[] = {NARROW, NARROW, NARROW, MXD_INT32, MXD_INT64, MXD_FLOAT16, MXD_FLOAT32, MXD_FLOAT64,
                              -1,     -1,     -1,     -1,        -1,        -1,          -1,          MXD_BFLOAT16};

// ---- tensors

struct DeleteTensor {
    void operator()(TensorHandle tensor) const { api->aoti_torch_delete_tensor_object(tensor); }
};
typedef std::unique_ptr<TensorObject, DeleteTensor> Tensor;

template <class Answer> Answer ask(Status (*question)(TensorHandle, Answer *), const Tensor &tensor) {
    Answer answer;
    need(question(tensor.get(), &answer), "read a tensor's sizes, dtype, device or address");
    return answer;
}

// Describes a tensor. Shape and strides point into the tensor.
TensorInfo info_of(const Tensor &tensor) {
    static const int64_t no_axes = 0;
    const int axes = int(ask(api->aoti_torch_get_dim, tensor));
    const int64_t *shape = ask(api->aoti_torch_get_sizes, tensor), *strides = ask(api->aoti_torch_get_strides, tensor);
    const size_t type = size_t(ask(api->aoti_torch_get_dtype, tensor));
    const int64_t dtype = type < std::size(DTYPES) ? DTYPES[type] : -1; // -1: no operator takes it
    const char *name = type < std::size(DTYPE_NAMES) ? DTYPE_NAMES[type] : "another dtype";
    return {axes ? shape : &no_axes, axes, dtype, nullptr, axes ? strides : &no_axes, -1, name};
}

// Makes a contiguous tensor on the device of `like`.
Tensor made(const std::string &name, const Tensor &like, int32_t dtype, const int64_t *shape, int axes) {
    int64_t strides[MOST_AXES];
    for (int64_t a = axes, stride = 1; a-- > 0; stride *= std::max<int64_t>(shape[a], 1)) strides[a] = stride;
    TensorHandle handle;
    const int32_t device = ask(api->aoti_torch_get_device_type, like), index = ask(api->aoti_torch_get_device_index, like);
    if (api->aoti_torch_empty_strided(axes, shape, strides, dtype, device, index, &handle))
        throw Refused{sentence(name, "fit in memory", "shape " + text_of(shape, size_t(axes)))};
    return Tensor(handle);
}

// Converts int8, int16 and uint8, which kernels cannot read, to int64.
Tensor as_int64(Tensor &&narrow) {
    Value stack[] = {value_of(narrow.release()), Value(uint32_t(api->aoti_torch_dtype_int64())), false, false, 0};
    need(api->torch_call_dispatcher("aten::to", "dtype", stack, VERSION), "convert a tensor to int64");
    return Tensor(handle_of<TensorHandle>(stack[0]));
}

// ---- a call

enum class Device { CPU, META };

// The dtype of the output: value's dtype. AUTOCAST is for `<operator>_autocast`: float32 if value has 16 bits.
enum class OutputDtype { OF_VALUE, AUTOCAST };
constexpr const char *AUTOCAST_SUFFIX = "_autocast";

class BoxedCall {
  public:
    // Takes ownership of all arguments, also of invalid ones.
    BoxedCall(const Function &of, OutputDtype output, Value *arguments) : function(of), kind(output) {
        for (int i = 0; i < function.first_written; ++i) take_tensor(i, *arguments++);
        for (int i = 0; i < function.numbers.count; ++i) numbers.push_back(int64_t(*arguments++));
        if (!function.option.empty()) take_option(handle_of<StringHandle>(*arguments++));
        if (function.backward) take_mask(handle_of<ListHandle>(*arguments));
    }

    void run(Device device, Value *results) {
        for (int i = 0; i < function.first_written; ++i)
            if (tensors[i]) describe(i, device);
        check_option();
        if (!fits(function, infos, function.first_written, option, sizes))
            refuse(refusal_of(function, infos, function.first_written, option));
        // This checks only the inputs. Results do not exist yet and will have new memory.
        const Refusal memory = device == Device::CPU ? check_memory(function, infos) : Refusal{};
        if (memory.status != MXD_OK) refuse(memory);
        take_sizes();
        if (function.backward)
            make_gradients();
        else
            make_output();
        if (device == Device::CPU) compute();
        for (int i = function.first_written; i < count(); ++i) *results++ = value_of(tensors[i].release());
    }

  private:
    const Function &function;
    const OutputDtype kind;
    Tensor tensors[MOST_ARGUMENTS];
    TensorInfo infos[MOST_ARGUMENTS] = {};
    AxisSizes sizes;
    std::vector<int64_t> numbers; // the values of function.numbers
    std::string word;             // the value of the option
    int64_t option = 0;
    size_t mask_size = 0;
    bool mask[MOST_ARGUMENTS] = {};

    int count() const { return function.arguments.count; }
    const Argument &argument(int i) const { return function.arguments[i]; }

    // Takes the sizes that no input has. In the backward grad_output has them, so they must agree.
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
    void take_option(StringHandle text) {
        const char *letters = "";
        size_t length = 0;
        if (!api->torch_string_length(text, &length) && !api->torch_string_c_str(text, &letters)) word.assign(letters, length);
        api->torch_delete_string(text);
    }
    void take_mask(ListHandle list) {
        Value entry;
        api->torch_list_size(list, &mask_size);
        for (size_t i = 0; i < mask_size && i < MOST_ARGUMENTS; ++i)
            mask[i] = !api->torch_list_get_item(list, i, &entry) && (entry & 0xff);
        api->torch_delete_list(list);
    }

    [[noreturn]] void refuse(const Refusal &why) const { throw Refused{sentence(function, why)}; }

    void describe(int i, Device device) {
        const bool cpu = device == Device::CPU;
        bool defined = false;
        if (api->aoti_torch_is_defined(tensors[i].get(), &defined) || !defined)
            throw Refused{sentence(argument(i).name, "be a tensor", "an undefined tensor")};
        if (ask(api->aoti_torch_get_device_type, tensors[i]) !=
            (cpu ? api->aoti_torch_device_type_cpu() : api->aoti_torch_device_type_meta()))
            throw Refused{sentence(argument(i).name, cpu ? "be on the CPU" : "be a meta tensor", "another device")};
        infos[i] = info_of(tensors[i]);
        if (cpu && argument(i).elements == Elements::NUMBER && infos[i].dtype == NARROW) {
            tensors[i] = as_int64(std::move(tensors[i]));
            infos[i] = info_of(tensors[i]);
        }
        if (cpu) infos[i].data = ask(api->torch_get_const_data_ptr, tensors[i]);
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

    // Makes a tensor for the gradient of each differentiable input. A gradient that is not wanted is an empty tensor.
    void make_gradients() {
        const size_t gradients = size_t(count() - function.first_written);
        if (mask_size != gradients)
            throw Refused{sentence("output_mask", "have " + std::to_string(gradients) + " entries, one for each gradient",
                                   std::to_string(mask_size))};
        int input = function.first_input;
        const int64_t nothing = 0;
        for (size_t i = 0; i < gradients; ++i, ++input) {
            const int result = function.first_written + int(i);
            while (std::string_view(argument(result).name).substr(5) != argument(input).name) ++input; // skip "grad_"
            const std::string name = argument(result).name;
            const int32_t dtype = ask(api->aoti_torch_get_dtype, tensors[input]);
            tensors[result] = mask[i] ? made(name, tensors[input], dtype, infos[input].shape, infos[input].axes)
                                      : made(name, tensors[input], dtype, &nothing, 1);
            if (mask[i]) infos[result] = info_of(tensors[result]);
        }
    }

    void compute() {
        for (int i = function.first_written; i < count(); ++i)
            if (infos[i].shape) infos[i].data = ask(api->torch_get_mutable_data_ptr, tensors[i]);
        Call call = make_call(function, infos, sizes, option, 1);
        uint32_t threads = 1;
        need(api->torch_get_num_threads(&threads), "count its threads");
        call.num_threads = threads_that_pay(call, int(threads));
        const int status = mxd::run(call);
        if (status != MXD_OK) throw Refused{sentence_of(status, function, call)};
    }
};

// ---- kernels: torch passes no name of the operator, so each operator has its own function

uint64_t arguments_of(const Function &f) {
    return uint64_t(f.first_written + f.numbers.count + !f.option.empty() + f.backward);
}

// Runs fn. Returns null, or an error sentence, which is valid until this thread's next error.
template <class Fn> const char *why_not(Fn &&fn) {
    thread_local std::string why;
    try {
        fn();
        return nullptr;
    } catch (const Refused &refused) {
        why = refused.why;
    } catch (const std::exception &error) {
        why = std::string("mx_driving could not go on: ") + error.what();
    }
    return why.c_str();
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

// aoti_torch_check throws through this function, so it must have no objects with destructors.
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

// The libraries that are registered in this process. torch withdraws their operators when they are deleted.
struct Registered {
    LibraryHandle kernels = nullptr, schemas = nullptr, shapes = nullptr;
};

template <Device device> void add_kernels(LibraryHandle &to, const char *key) {
    const Kernels &kernels = KERNELS<device, OutputDtype::OF_VALUE>, &autocast = KERNELS<device, OutputDtype::AUTOCAST>;
    need(api->aoti_torch_library_init_impl("mx_driving", key, "mx_driving", 0, &to), "open the library mx_driving");
    const auto add = [&](const std::string &name, Kernel *kernel) {
        need(api->torch_library_impl(to, name.c_str(), kernel, VERSION), "register a kernel");
    };
    for (size_t i = 0; i < functions().size(); ++i) {
        add(functions()[i].name, kernels[i]);
        if (!functions()[i].backward) add(std::string(functions()[i].name) + AUTOCAST_SUFFIX, autocast[i]);
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
    static bool by_others = false; // true if the Python package has schemas and shapes
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
} // namespace mxd::torch

extern "C" const char *mxd_register_with_torch(int what) {
    using namespace mxd::torch;
    static std::mutex mutex;
    static Registered registered;
    const std::lock_guard<std::mutex> lock(mutex);
    return why_not([&] {
        std::string missing;
        if (!api) api = find_api(missing);
        if (!api) throw Refused{missing};
        try {
            set(registered, what);
        } catch (...) { // withdraw what was registered before the error
            for (LibraryHandle *each : {&registered.kernels, &registered.schemas, &registered.shapes}) withdraw(*each);
            throw;
        }
    });
}
