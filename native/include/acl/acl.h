/* The part of CANN's runtime interface that programs around aclnnMultiScaleDeformableAttentionGrad use, on the host.
 *
 * Names, signatures and numeric values are CANN's, so that a program written for an NPU builds and runs here unchanged.
 * Device memory is host memory. Comments of functions say what differs from a device. In short: aclInit and aclrtSetDevice are
 * not required, every device id works, a task runs when it is queued, and some mistakes that may crash on a device are
 * reported: a handle used after it was destroyed, a view that leaves its storage, an executor run twice.
 *
 * Functions may be called from several threads at once. A function that fails leaves a sentence for its thread:
 * see aclGetRecentErrMsg.
 */
#ifndef MX_DRIVING_ACL_H
#define MX_DRIVING_ACL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A program may pass any int as an enumeration; functions refuse an int without a name. In C an enumeration holds every int; in
 * C++ only an enumeration with an underlying type does. */
#if defined(__cplusplus) && __cplusplus >= 201103L
#define ACL_ANY_INT : int
#else
#define ACL_ANY_INT
#endif

#if defined(_WIN32) && defined(mx_driving_EXPORTS) /* the library itself is being built */
#define ACL_FUNC_VISIBILITY __declspec(dllexport)
#elif defined(__GNUC__)
#define ACL_FUNC_VISIBILITY __attribute__((visibility("default")))
#else
#define ACL_FUNC_VISIBILITY
#endif

typedef int aclError;
typedef int32_t aclnnStatus;
typedef void *aclrtStream;
typedef uint16_t aclFloat16;
typedef struct aclTensor aclTensor;
typedef struct aclOpExecutor aclOpExecutor;

static const int ACL_SUCCESS = 0;
static const int ACL_ERROR_NONE = 0;
static const int ACL_ERROR_INVALID_PARAM = 100000;       /* an argument breaks a rule of its function */
static const int ACL_ERROR_UNINITIALIZE = 100001;        /* aclFinalize without aclInit */
static const int ACL_ERROR_REPEAT_INITIALIZE = 100002;   /* aclInit a second time */
static const int ACL_ERROR_REPEAT_FINALIZE = 100037;     /* aclFinalize a second time */
static const int ACL_ERROR_BAD_ALLOC = 200000;           /* no memory */
static const int ACL_ERROR_INTERNAL_ERROR = 500000;      /* the system refused, for example a lock */
static const int ACL_ERROR_RT_AICORE_EXCEPTION = 507015; /* a kernel met invalid data in index tables */

static const aclnnStatus ACLNN_SUCCESS = 0;
static const aclnnStatus ACLNN_ERR_PARAM_NULLPTR = 161001; /* a tensor, workspaceSize, executor or memory is null */
static const aclnnStatus ACLNN_ERR_PARAM_INVALID = 161002; /* a wrong dtype or shape, a broken limit, a bad handle */

typedef enum ACL_ANY_INT {
    ACL_DT_UNDEFINED = -1,
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT16 = 6,
    ACL_UINT16 = 7,
    ACL_UINT32 = 8,
    ACL_INT64 = 9,
    ACL_UINT64 = 10,
    ACL_DOUBLE = 11,
    ACL_BOOL = 12,
    ACL_STRING = 13,
    ACL_COMPLEX64 = 16,
    ACL_COMPLEX128 = 17,
    ACL_BF16 = 27,
    ACL_INT4 = 29,
    ACL_UINT1 = 30,
    ACL_COMPLEX32 = 33
} aclDataType;

typedef enum ACL_ANY_INT {
    ACL_FORMAT_UNDEFINED = -1,
    ACL_FORMAT_NCHW = 0,
    ACL_FORMAT_NHWC = 1,
    ACL_FORMAT_ND = 2,
    ACL_FORMAT_NC1HWC0 = 3,
    ACL_FORMAT_FRACTAL_Z = 4,
    ACL_FORMAT_NC1HWC0_C04 = 12,
    ACL_FORMAT_HWCN = 16,
    ACL_FORMAT_NDHWC = 27,
    ACL_FORMAT_FRACTAL_NZ = 29,
    ACL_FORMAT_NCDHW = 30,
    ACL_FORMAT_NDC1HWC0 = 32,
    ACL_FRACTAL_Z_3D = 33,
    ACL_FORMAT_NC = 35,
    ACL_FORMAT_NCL = 47
} aclFormat;

typedef enum aclrtMemMallocPolicy ACL_ANY_INT {
    ACL_MEM_MALLOC_HUGE_FIRST = 0,
    ACL_MEM_MALLOC_HUGE_ONLY = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY = 2,
    ACL_MEM_MALLOC_HUGE_FIRST_P2P = 3,
    ACL_MEM_MALLOC_HUGE_ONLY_P2P = 4,
    ACL_MEM_MALLOC_NORMAL_ONLY_P2P = 5,
    ACL_MEM_TYPE_LOW_BAND_WIDTH = 0x0100,
    ACL_MEM_TYPE_HIGH_BAND_WIDTH = 0x1000
} aclrtMemMallocPolicy;

typedef enum aclrtMemcpyKind ACL_ANY_INT {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
    ACL_MEMCPY_DEFAULT = 4
} aclrtMemcpyKind;

typedef enum aclSysParamOpt ACL_ANY_INT {
    ACL_OPT_DETERMINISTIC = 0,
    ACL_OPT_ENABLE_DEBUG_KERNEL = 1,
    ACL_OPT_STRONG_CONSISTENCY = 2
} aclSysParamOpt;

/* Returns and forgets the sentence of the last failure on this thread; NULL if there is none. The text is valid until this
 * thread calls aclGetRecentErrMsg again. Sentences read: NAME must RULE; got FACT. */
ACL_FUNC_VISIBILITY const char *aclGetRecentErrMsg(void);

/* configPath is ignored and may be NULL. Returns ACL_ERROR_REPEAT_INITIALIZE if already initialised. Not required here. */
ACL_FUNC_VISIBILITY aclError aclInit(const char *configPath);
/* Returns the default stream's pending error, ACL_ERROR_UNINITIALIZE before aclInit, or ACL_ERROR_REPEAT_FINALIZE for a
 * second call. */
ACL_FUNC_VISIBILITY aclError aclFinalize(void);

/* deviceId: any number from 0 on; every device is the host. Not required here. */
ACL_FUNC_VISIBILITY aclError aclrtSetDevice(int32_t deviceId);
/* Returns the default stream's pending error. */
ACL_FUNC_VISIBILITY aclError aclrtResetDevice(int32_t deviceId);

/* Set a parameter of the context or of the process. value is 0 or 1; other numbers return ACL_ERROR_INVALID_PARAM. Parameters
 * have no effect here: equal inputs always give equal bits. */
ACL_FUNC_VISIBILITY aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value);
ACL_FUNC_VISIBILITY aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value);

/* A stream runs a task at once, on the calling thread, and remembers its first error. NULL in place of a stream means the
 * default stream. Tasks of several threads on one stream run one after the other. */
ACL_FUNC_VISIBILITY aclError aclrtCreateStream(aclrtStream *stream);
/* Destroys a stream. Returns the first error that aclrtSynchronizeStream has not returned. */
ACL_FUNC_VISIBILITY aclError aclrtDestroyStream(aclrtStream stream);
/* Returns and forgets the first error since the last synchronise. The calling thread gets the error's sentence. Tasks
 * after a failed task have run, too. */
ACL_FUNC_VISIBILITY aclError aclrtSynchronizeStream(aclrtStream stream);

/* Allocates memory aligned to 64 bytes; the policy is ignored. Returns ACL_ERROR_INVALID_PARAM for devPtr NULL or size 0. */
ACL_FUNC_VISIBILITY aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
/* devPtr must come from aclrtMalloc and not be NULL. */
ACL_FUNC_VISIBILITY aclError aclrtFree(void *devPtr);
/* Copies count bytes. Returns ACL_ERROR_INVALID_PARAM and copies nothing if count > destMax or a pointer is NULL. */
ACL_FUNC_VISIBILITY aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind);

/* Describes a view of memory; copies no data and owns none.
 *
 * viewDims, viewDimsNum    shape of the view, at most 8 axes
 * dataType                 of the elements
 * stride                   viewDimsNum strides in elements, which may be 0 or negative; NULL for a contiguous view
 * offset                   in elements, from tensorData to the view's first element
 * format                   the operators here take ACL_FORMAT_ND
 * storageDims, storageDimsNum   shape of the memory at tensorData, at most 8 axes. Phase one refuses a view that leaves
 *                          this memory. With NULL or 0 axes the size is unknown and the view is not checked
 * tensorData               the memory; must live until phase two has returned
 *
 * Returns NULL if memory runs out, or for too many axes. The tensor may be destroyed after phase one. */
ACL_FUNC_VISIBILITY aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType,
                                               const int64_t *stride, int64_t offset, aclFormat format,
                                               const int64_t *storageDims, uint64_t storageDimsNum, void *tensorData);
/* Returns ACLNN_ERR_PARAM_NULLPTR for NULL, and ACLNN_ERR_PARAM_INVALID for a pointer that is not a live tensor. */
ACL_FUNC_VISIBILITY aclnnStatus aclDestroyTensor(const aclTensor *tensor);

/* Destroys a repeatable executor, or one that never runs. Phase two destroys other executors itself. */
ACL_FUNC_VISIBILITY aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);
/* Makes an executor repeatable: phase two does not destroy it, and it can run again on the same memory. */
ACL_FUNC_VISIBILITY aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);

#ifdef __cplusplus
}
#endif
#endif
