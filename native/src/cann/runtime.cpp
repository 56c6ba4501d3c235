// The runtime of the CANN-style interface: devices, memory, streams, descriptions of tensors and error messages. Every device
// is the host, and all memory is host memory.
#include "cann/runtime.h"
#include "cann/tensor.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace acl {
namespace {

constexpr std::align_val_t ALIGNMENT{64};

enum Phase { BEFORE, INITIALISED, FINALISED };
std::atomic<Phase> phase(BEFORE);

struct Recent {
    std::string sentence, handed_out;
};
thread_local Recent recent;

void check(bool holds, const char *name, const char *rule, const std::string &fact) {
    require(holds, ACL_ERROR_INVALID_PARAM, name, rule, fact);
}

void require_device(int32_t id) { check(id >= 0, "deviceId", "be 0 or more", std::to_string(id)); }

// System parameters have no effect here, so this function only checks them.
void check_parameter(aclSysParamOpt opt, int64_t value) {
    check(opt >= ACL_OPT_DETERMINISTIC && opt <= ACL_OPT_STRONG_CONSISTENCY, "opt", "be an aclSysParamOpt",
          std::to_string(int(opt)));
    check(value == 0 || value == 1, "value", "be 0 or 1", std::to_string(value));
}

typedef std::shared_ptr<Stream> Shared;

// Returns the default stream. A forked child makes its own stream: the lock of the parent's stream may be held.
Shared default_stream() {
    static std::mutex mutex;
    static Shared stream;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!stream || stream->process != mxd::this_process()) stream = std::make_shared<Stream>();
    return stream;
}

void check_stream(bool is_alive) {
    check(is_alive, "stream", "come from aclrtCreateStream and not be destroyed", "a pointer that is no stream");
}

void read_axes(const char *name, const int64_t *numbers, uint64_t count, int64_t *to) {
    require(count <= ACL_MOST_AXES, ACL_ERROR_INVALID_PARAM, name, "be at most 8", std::to_string(count));
    require(numbers || !count, ACL_ERROR_INVALID_PARAM, name, "be 0 without numbers", std::to_string(count));
    std::copy_n(numbers, count, to);
}

// Sets the strides of a contiguous tensor. Returns its number of elements, at most MOST_ELEMENTS, or 0 if an axis is <= 0.
int64_t set_strides(const int64_t *shape, int axes, int64_t *strides) {
    int64_t count = 1;
    for (int a = axes; a-- > 0;) {
        strides[a] = count;
        if (__builtin_mul_overflow(count, std::max<int64_t>(1, shape[a]), &count)) count = MOST_ELEMENTS;
        count = std::min(count, MOST_ELEMENTS);
    }
    return std::all_of(shape, shape + axes, [](int64_t size) { return size > 0; }) ? count : 0;
}

} // namespace

Shared find_stream(aclrtStream handle) {
    if (!handle) return default_stream();
    Shared stream;
    check_stream(registry<Shared>().copy(handle, stream));
    return stream;
}

aclError report(const Outcome &outcome) noexcept {
    if (outcome.status == ACL_SUCCESS) return ACL_SUCCESS;
    try {
        recent.sentence = outcome.status == ACL_ERROR_BAD_ALLOC ? "out of memory" : outcome.sentence;
    } catch (const std::bad_alloc &) {
    }
    return outcome.status;
}

} // namespace acl

extern "C" {

const char *aclGetRecentErrMsg(void) {
    acl::recent.handed_out = std::exchange(acl::recent.sentence, {});
    return acl::recent.handed_out.empty() ? nullptr : acl::recent.handed_out.c_str();
}

aclError aclInit(const char *) {
    return acl::guarded([] {
        acl::require(acl::phase.exchange(acl::INITIALISED) != acl::INITIALISED, ACL_ERROR_REPEAT_INITIALIZE, "aclInit",
                     "be called once", "a second call");
    });
}

aclError aclFinalize(void) {
    return acl::guarded([] {
        acl::Phase expected = acl::INITIALISED;
        const bool once = acl::phase.compare_exchange_strong(expected, acl::FINALISED), early = expected == acl::BEFORE;
        acl::require(once, early ? ACL_ERROR_UNINITIALIZE : ACL_ERROR_REPEAT_FINALIZE, "aclFinalize",
                     "be called once after aclInit", early ? "no aclInit" : "a second call");
        acl::default_stream()->synchronize();
    });
}

aclError aclrtSetDevice(int32_t deviceId) {
    return acl::guarded([&] { acl::require_device(deviceId); });
}

aclError aclrtResetDevice(int32_t deviceId) {
    return acl::guarded([&] {
        acl::require_device(deviceId);
        acl::default_stream()->synchronize();
    });
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
    return acl::guarded([&] { acl::check_parameter(opt, value); });
}

aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value) { return aclrtCtxSetSysParamOpt(opt, value); }

aclError aclrtCreateStream(aclrtStream *stream) {
    return acl::guarded([&] {
        acl::check(stream, "stream", "point to a stream", "NULL");
        *stream = acl::registry<acl::Shared>().add(std::make_unique<acl::Shared>(std::make_shared<acl::Stream>()));
    });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    return acl::guarded([&] { acl::find_stream(stream)->synchronize(); });
}

aclError aclrtDestroyStream(aclrtStream stream) {
    return acl::guarded([&] {
        const std::unique_ptr<acl::Shared> last = acl::registry<acl::Shared>().remove(stream);
        acl::check_stream(bool(last));
        (*last)->synchronize();
    });
}

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy) {
    return acl::guarded([&] {
        acl::check(devPtr, "devPtr", "point to a pointer", "NULL");
        acl::check(size > 0, "size", "be positive", "0");
        void *memory = ::operator new(size, acl::ALIGNMENT,
                                      std::nothrow); // nothrow, because a sanitizer ends the program if new throws
        if (!memory) throw std::bad_alloc();
        *devPtr = memory;
    });
}

aclError aclrtFree(void *devPtr) {
    return acl::guarded([&] {
        acl::check(devPtr, "devPtr", "come from aclrtMalloc", "NULL");
        ::operator delete(devPtr, acl::ALIGNMENT);
    });
}

aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind) {
    return acl::guarded([&] {
        acl::check(dst, "dst", "be memory", "NULL");
        acl::check(src, "src", "be memory", "NULL");
        acl::check(count <= destMax, "count", "be at most destMax", std::to_string(count) + " for " + std::to_string(destMax));
        acl::check(kind >= ACL_MEMCPY_HOST_TO_HOST && kind <= ACL_MEMCPY_DEFAULT, "kind", "be an aclrtMemcpyKind",
                   std::to_string(int(kind)));
        std::memmove(dst, src, count);
    });
}

aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t *stride,
                           int64_t offset, aclFormat format, const int64_t *storageDims, uint64_t storageDimsNum,
                           void *tensorData) {
    aclTensor *made = nullptr;
    acl::guarded([&] {
        auto tensor = std::make_unique<aclTensor>();
        acl::read_axes("viewDimsNum", viewDims, viewDimsNum, tensor->shape);
        tensor->axes = int(viewDimsNum);
        acl::set_strides(tensor->shape, tensor->axes, tensor->strides);
        if (stride) std::copy_n(stride, viewDimsNum, tensor->strides);
        tensor->storage = acl::UNKNOWN_STORAGE;
        if (storageDims && storageDimsNum) {
            int64_t storage[ACL_MOST_AXES], strides[ACL_MOST_AXES];
            acl::read_axes("storageDimsNum", storageDims, storageDimsNum, storage);
            tensor->storage = acl::set_strides(storage, int(storageDimsNum), strides);
        }
        tensor->offset = offset;
        tensor->dtype = dataType;
        tensor->format = format;
        tensor->data = tensorData;
        made = acl::registry<aclTensor>().add(std::move(tensor));
    });
    return made;
}

aclnnStatus aclDestroyTensor(const aclTensor *tensor) {
    return acl::guarded([&] {
        acl::require(tensor, ACLNN_ERR_PARAM_NULLPTR, "tensor", "be a tensor", "NULL");
        acl::require(bool(acl::registry<aclTensor>().remove(tensor)), ACLNN_ERR_PARAM_INVALID, "tensor",
                     "come from aclCreateTensor and be destroyed once", "a pointer that is no tensor");
    });
}
}
