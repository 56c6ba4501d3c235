// Tensor handles, dtypes and errors of torch, for kernels that torch calls.
#pragma once

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <string>

#include "call/check.h"
#include "mx_driving.h"
#include "torch/api.h"

namespace mxd::torch {

extern const Api *api; // set before a kernel is registered

template <class Handle> Handle handle_of(Value value) { return reinterpret_cast<Handle>(uintptr_t(value)); }
inline Value value_of(void *handle) { return Value(reinterpret_cast<uintptr_t>(handle)); }

// An error, whose text becomes an exception of torch.
struct Refused {
    std::string why;
};

inline void need(Status status, const char *what) {
    if (status) throw Refused{std::string("torch could not ") + what};
}

// ---- dtypes in the order of c10::ScalarType, which never changes, because torch's files contain its numbers

// clang-format off
constexpr const char *DTYPE_NAMES[] = {
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64", "complex128",
    "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8",
    "bits16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64", "uint1",
    "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "float8_e8m0fnu", "float4_e2m1fn_x2"};
// clang-format on
constexpr int64_t NARROW = -2; // an integer dtype; its tensors are converted to int64
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

// Describes a tensor. `shape` and `strides` point into torch's tensor.
inline TensorInfo info_of(const Tensor &tensor) {
    static const int64_t no_axes = 0;
    const int axes = int(ask(api->aoti_torch_get_dim, tensor));
    const int64_t *shape = ask(api->aoti_torch_get_sizes, tensor), *strides = ask(api->aoti_torch_get_strides, tensor);
    const size_t type = size_t(ask(api->aoti_torch_get_dtype, tensor));
    const int64_t dtype = type < std::size(DTYPES) ? DTYPES[type] : -1; // -1: no operator takes this dtype
    const char *name = type < std::size(DTYPE_NAMES) ? DTYPE_NAMES[type] : "another dtype";
    return {axes ? shape : &no_axes, axes, dtype, nullptr, axes ? strides : &no_axes, -1, name};
}

inline Tensor made(const std::string &name, const Tensor &like, int32_t dtype, const int64_t *shape, int axes) {
    int64_t strides[MOST_AXES];
    for (int64_t a = axes, stride = 1; a-- > 0; stride *= std::max<int64_t>(shape[a], 1)) strides[a] = stride;
    TensorHandle handle;
    const int32_t device = ask(api->aoti_torch_get_device_type, like), index = ask(api->aoti_torch_get_device_index, like);
    if (api->aoti_torch_empty_strided(axes, shape, strides, dtype, device, index, &handle))
        throw Refused{sentence(name, "fit in memory", "shape " + text_of(shape, size_t(axes)))};
    return Tensor(handle);
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

} // namespace mxd::torch
