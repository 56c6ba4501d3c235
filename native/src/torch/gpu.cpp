// Launches kernels that Triton has compiled. Python finds the driver's functions and hands compiled kernels over.
#include "torch/gpu.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "mx_driving_torch.h"
#include "torch/tensors.h"

namespace mxd::torch {
namespace {

// Functions of CUDA's driver and of torch, in the order of _FUNCTIONS in from_cpp.py.
struct Driver {
    int (*cuLaunchKernel)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                          void *stream, void **parameters, void **extra);
    int (*cuCtxGetDevice)(int *device);
    int (*cuMemsetD32Async)(const void *numbers, unsigned value, size_t count, void *stream);
    Status (*aoti_torch_get_current_cuda_stream)(int32_t device, void **stream);
    void *(*global_context)();
    bool (*deterministic)(void *context);
};
Driver driver;
std::atomic<bool> in_use{false};

// The numbers for which a kernel is compiled: function, variant, device, heads, channels, levels, points, reference points of a
// query, coordinates of a reference point, and the dtypes of the inputs.
typedef std::array<int64_t, 15> Key;
// These two objects are never destroyed, because other threads may still launch kernels as the process ends.
std::mutex &mutex = *new std::mutex;
std::map<Key, GpuKernel> &kernels = *new std::map<Key, GpuKernel>;
thread_local Key wanted;
thread_local bool waiting = false; // true while Python compiles the kernel of `wanted`

void check_driver(int error, const char *name) {
    if (error) throw Refused{std::string(name) + " failed with error " + std::to_string(error)};
}

// Returns the number of elements, or -1 if the tensor is not contiguous.
int64_t contiguous_elements(const TensorInfo &t) {
    int64_t elements = 1;
    for (int a = t.axes; a-- > 0; elements *= t.shape[a])
        if (t.shape[a] != 1 && t.strides[a] != elements) return t.shape[a] ? -1 : 0;
    return elements;
}

} // namespace

GpuCall::GpuCall(const Function &of, TensorInfo *tensors, const AxisSizes &known, int on, int64_t which)
    : function(of), infos(tensors), sizes(known), device(on), variant(which) {}

// Returns value's strides between batches, pixels and heads, counted in channels. An axis of one element has stride 0.
std::array<int64_t, 3> GpuCall::strides_of_value() const {
    const int64_t head = size(sizes::embed_dims), row = size(sizes::num_heads) * head, keys = size(sizes::num_keys);
    return {size(sizes::bs) > 1 ? keys * row : 0, keys > 1 ? row : 0, size(sizes::num_heads) > 1 ? head : 0};
}

// Returns false if Python must serve the call: launches from C++ are off, another device is current, a tensor is empty, not
// contiguous or not aligned to 16 bytes, a number is too large for the kernels, or torch asks for deterministic sums.
bool GpuCall::is_usual() const {
    int current;
    if (!in_use || driver.cuCtxGetDevice(&current) || current != device) return false;
    if (function.backward && driver.deterministic(driver.global_context())) return false;
    int64_t numbers = size(sizes::num_queries) + size(sizes::num_keys);
    uintptr_t addresses = 0;
    for (int i = 0; i < function.first_written; ++i) {
        if (contiguous_elements(infos[i]) <= 0) return false;
        addresses |= uintptr_t(infos[i].data);
    }
    for (int64_t stride : strides_of_value()) numbers += stride;
    return !(addresses & 15) && numbers >> 31 == 0 && size(sizes::num_keys) <= int64_t(1) << 30;
}

bool GpuCall::find_kernel() {
    if (!is_usual()) return false;
    Key key{&function - functions().data(),
            variant,
            device,
            size(sizes::num_heads),
            size(sizes::embed_dims),
            size(sizes::num_levels),
            size(sizes::num_points)};
    const TensorInfo &reference = infos[3];
    if (function.with_logits) key[7] = size(sizes::R), key[8] = reference.shape[reference.axes - 1];
    for (int i = 0; i < function.first_written; ++i) key[size_t(9 + i)] = infos[i].dtype;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto entry = kernels.find(key);
        waiting = entry == kernels.end();
        if (!waiting) kernel = entry->second;
    }
    wanted = key;
    programs = size(sizes::bs) * size(sizes::num_heads) * ((size(sizes::num_queries) - 1) / kernel.rows + 1);
    return !waiting && programs >> 31 == 0;
}

void GpuCall::launch() {
    const int count = function.arguments.count, output = function.first_written;
    void *stream = nullptr;
    need(driver.aoti_torch_get_current_cuda_stream(device, &stream), "tell its stream");
    if (function.backward && infos[output].data)
        check_driver(driver.cuMemsetD32Async(infos[output].data, 0, size_t(contiguous_elements(infos[1])), stream),
                     "cuMemsetD32Async");

    void *parameters[MOST_ARGUMENTS + 10], **next = parameters, *none = nullptr;
    for (int i = 0; i < count; ++i) {
        if (i == output - 2 && !function.with_logits) *next++ = &infos[i].data; // A placeholder for reference points.
        *next++ = &infos[i].data;
    }
    for (int i = 0; function.backward && i < 2; ++i)
        *next++ = &infos[output].data; // Placeholders for two parameters that only deterministic sums read.
    int32_t queries = int32_t(size(sizes::num_queries)), keys = int32_t(size(sizes::num_keys));
    *next++ = &queries;
    *next++ = &keys;
    std::array<int64_t, 3> strides = strides_of_value();
    for (int64_t &stride : strides) {
        stride /= kernel.lane;
        *next++ = &stride;
    }
    for (int i = 0; i < 2; ++i) *next++ = &none; // Triton's scratch memory is empty.
    check_driver(driver.cuLaunchKernel(kernel.function, unsigned(programs), 1, 1, kernel.threads, 1, 1, kernel.shared, stream,
                                       parameters, nullptr),
                 "cuLaunchKernel");
}

void stop_waiting() { waiting = false; }

} // namespace mxd::torch

// Takes the functions of Driver. If `functions` is null, Python serves every call. Returns null, or an error sentence.
const char *mxd_launch_on_gpu(const void *const *functions) {
    using namespace mxd::torch;
    return why_not([&] {
        in_use = false;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            kernels.clear();
        }
        if (!functions) return;
        driver = *reinterpret_cast<const Driver *>(functions);
        register_gpu_kernels();
        in_use = true;
    });
}

// Keeps a kernel for later calls with the key `wanted`. Does nothing if this thread does not wait for a kernel.
void mxd_keep_gpu_kernel(void *function, unsigned threads, unsigned shared, int64_t rows, int64_t lane) {
    using namespace mxd::torch;
    if (!waiting) return;
    const std::lock_guard<std::mutex> lock(mutex);
    kernels[wanted] = {function, threads, shared, rows, lane};
}
