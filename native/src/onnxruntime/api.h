// The part of onnxruntime's C interface that we use, with its layout in memory, for version 16 and later. New versions only
// append functions. No file of onnxruntime is included or linked. tests/onnx/test_onnxruntime.py runs every function.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mxd {

// On 32-bit Windows these functions have a different calling convention.
#if defined(_WIN32)
static_assert(sizeof(void *) == 8, "onnxruntime's functions are called as C functions");
#endif

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorInfo;
struct OrtCustomOp;

enum OrtErrorCode : int { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2, ORT_RUNTIME_EXCEPTION = 6 };
enum OrtPresence : int { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };

// The element types of ONNX. ORT_ANY: a kernel accepts every type.
enum OrtType : int { ORT_ANY = 0, ORT_FLOAT32 = 1, ORT_FLOAT16 = 10, ORT_FLOAT64 = 11, ORT_BFLOAT16 = 16 };

// The table of functions. A Slot is an index into the table, with the function's type.
struct OrtApi {
    typedef void Function();
    Function *functions[1];
};

template <class Signature> struct Slot;
template <class Result, class... Arguments> struct Slot<Result(Arguments...)> {
    int index;

    Result operator()(const OrtApi *api, Arguments... arguments) const {
        return reinterpret_cast<Result (*)(Arguments...)>(api->functions[index])(arguments...);
    }
};

namespace ort {

constexpr Slot<OrtStatus *(OrtErrorCode, const char *)> create_status{0};
constexpr Slot<OrtErrorCode(const OrtStatus *)> error_code{1};
constexpr Slot<OrtStatus *(const char *, OrtCustomOpDomain **)> create_domain{26};
constexpr Slot<OrtStatus *(OrtCustomOpDomain *, const OrtCustomOp *)> add_to_domain{27};
constexpr Slot<OrtStatus *(OrtSessionOptions *, OrtCustomOpDomain *)> add_domain{28};
constexpr Slot<OrtStatus *(OrtValue *, void **)> tensor_data{51};
constexpr Slot<OrtStatus *(const OrtTensorInfo *, OrtType *)> element_type{60};
constexpr Slot<OrtStatus *(const OrtTensorInfo *, size_t *)> number_of_axes{61};
constexpr Slot<OrtStatus *(const OrtTensorInfo *, int64_t *, size_t)> sizes{62};
constexpr Slot<OrtStatus *(const OrtValue *, OrtTensorInfo **)> tensor_info{65};
constexpr Slot<OrtStatus *(const OrtKernelInfo *, const char *, int64_t *)> int_attribute{86};
constexpr Slot<OrtStatus *(const OrtKernelInfo *, const char *, char *, size_t *)> string_attribute{87};
constexpr Slot<OrtStatus *(const OrtKernelContext *, size_t *)> number_of_inputs{88};
constexpr Slot<OrtStatus *(const OrtKernelContext *, size_t, const OrtValue **)> input{90};
constexpr Slot<OrtStatus *(OrtKernelContext *, size_t, const int64_t *, size_t, OrtValue **)> output{91};
constexpr Slot<void(OrtStatus *)> release_status{93};
constexpr Slot<void(OrtTensorInfo *)> release_tensor_info{99};
constexpr Slot<OrtStatus *(const OrtKernelInfo *, const char *, int64_t *, size_t *)> int_list_attribute{163};
// Version 17 and later: runs body(argument, i) for i in 0..count-1 on the threads of the session. A thread may run several
// bodies one after the other, so no body may wait for another.
typedef void Body(void *, size_t);
constexpr Slot<OrtStatus *(const OrtKernelContext *, Body *, size_t, size_t, void *)> parallel_for{274};

} // namespace ort

struct OrtApiBase {
    const OrtApi *(*api)(uint32_t version); // null if the runtime is older than `version`
    const char *(*version)();               // such as "1.32.0"
};

// An operator and its kernel. With `version` 16 the runtime reads no fields after compute_v2.
struct OrtCustomOp {
    uint32_t version;
    void *(*create_kernel)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *); // unused: create_kernel_v2 replaces it
    const char *(*name)(const OrtCustomOp *);
    const char *(*execution_provider)(const OrtCustomOp *); // null means the CPU
    OrtType (*input_type)(const OrtCustomOp *, size_t);
    size_t (*number_of_inputs)(const OrtCustomOp *);
    OrtType (*output_type)(const OrtCustomOp *, size_t);
    size_t (*number_of_outputs)(const OrtCustomOp *);
    void (*compute)(void *, OrtKernelContext *); // unused: compute_v2 replaces it
    void (*destroy)(void *);
    OrtPresence (*input_presence)(const OrtCustomOp *, size_t);
    OrtPresence (*output_presence)(const OrtCustomOp *, size_t);
    int (*input_memory)(const OrtCustomOp *, size_t); // 0 means memory of the execution provider
    int (*variadic[4])(const OrtCustomOp *);          // called only for variadic inputs
    OrtStatus *(*create_kernel_v2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **);
    OrtStatus *(*compute_v2)(void *, OrtKernelContext *);
};
static_assert(sizeof(OrtCustomOp) == 19 * sizeof(void *), "a version, and 18 functions");

} // namespace mxd
