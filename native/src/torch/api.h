// The functions of torch's stable C interface that we use (torch/csrc/stable/c/shim.h, torch 2.10 and later). We find them in
// the process at run time, so one library serves all these versions, and building the library needs no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mxd::torch {

// An argument or a result on a kernel's stack: a number, a handle, or the address of an optional argument's value.
typedef uint64_t Value;
typedef struct TensorObject *TensorHandle;
typedef struct LibraryObject *LibraryHandle;
typedef struct StringObject *StringHandle;
typedef struct ListObject *ListHandle;
typedef int32_t Status; // 0 means success
typedef void Kernel(Value *stack, uint64_t arguments, uint64_t results);

constexpr uint64_t VERSION = uint64_t(2) << 56 | uint64_t(10) << 48; // the version whose conventions our kernels follow

// Expands to X(result, name, parameters) for each function.
#define MXD_TORCH_FUNCTIONS(X)                                                                                                 \
    X(Status, aoti_torch_get_dim, (TensorHandle, int64_t *))                                                                   \
    X(Status, aoti_torch_get_sizes, (TensorHandle, int64_t **))                                                                \
    X(Status, aoti_torch_is_defined, (TensorHandle, bool *))                                                                   \
    X(Status, aoti_torch_get_strides, (TensorHandle, int64_t **))                                                              \
    X(Status, aoti_torch_get_dtype, (TensorHandle, int32_t *))                                                                 \
    X(Status, aoti_torch_get_device_type, (TensorHandle, int32_t *))                                                           \
    X(Status, aoti_torch_get_device_index, (TensorHandle, int32_t *))                                                          \
    X(Status, torch_get_const_data_ptr, (TensorHandle, const void **))                                                         \
    X(Status, torch_get_mutable_data_ptr, (TensorHandle, void **))                                                             \
    X(Status, aoti_torch_delete_tensor_object, (TensorHandle))                                                                 \
    X(Status, aoti_torch_empty_strided,                                                                                        \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, TensorHandle *))                                  \
    X(Status, torch_call_dispatcher, (const char *, const char *, Value *, uint64_t))                                          \
    X(Status, torch_list_size, (ListHandle, size_t *))                                                                         \
    X(Status, torch_list_get_item, (ListHandle, size_t, Value *))                                                              \
    X(Status, torch_delete_list, (ListHandle))                                                                                 \
    X(Status, torch_string_length, (StringHandle, size_t *))                                                                   \
    X(Status, torch_string_c_str, (StringHandle, const char **))                                                               \
    X(Status, torch_delete_string, (StringHandle))                                                                             \
    X(Status, torch_get_num_threads, (uint32_t *))                                                                             \
    X(Status, aoti_torch_library_init_fragment, (const char *, const char *, uint32_t, LibraryHandle *))                       \
    X(Status, aoti_torch_library_init_impl, (const char *, const char *, const char *, uint32_t, LibraryHandle *))             \
    X(Status, aoti_torch_library_def, (LibraryHandle, const char *))                                                           \
    X(Status, torch_library_impl, (LibraryHandle, const char *, Kernel *, uint64_t))                                           \
    X(Status, aoti_torch_delete_library_object, (LibraryHandle))                                                               \
    X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))                                      \
    X(int32_t, aoti_torch_device_type_cpu, ())                                                                                 \
    X(int32_t, aoti_torch_device_type_meta, ())                                                                                \
    X(int32_t, aoti_torch_dtype_float32, ())                                                                                   \
    X(int32_t, aoti_torch_dtype_int64, ())

struct Api {
#define MXD_MEMBER(result, name, parameters) result(*name) parameters;
    MXD_TORCH_FUNCTIONS(MXD_MEMBER)
#undef MXD_MEMBER
    Status (*torch_library_def_with_tags)(LibraryHandle, const char *, const int32_t *, int32_t); // null before torch 2.12
    int32_t (*torch_tag_pt2_compliant_tag)();                                                     // unset before torch 2.12
    const char *(*torch_exception_get_what)(); // the message without a backtrace; null before torch 2.13
    void (*free_optional)(Value *);            // frees the memory of an optional argument's value
};

// Returns null if the process has no suitable torch, and writes the reason to `why`. A result that is not null never changes.
const Api *find_api(std::string &why);

} // namespace mxd::torch
