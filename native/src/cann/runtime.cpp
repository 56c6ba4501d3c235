// Devices and memory of the CANN-style interface. Every device is the host, and all memory is the host's.
#include "cann/stream.h"

#include <atomic>
#include <cstring>

namespace acl {
namespace {

constexpr std::align_val_t ALIGNMENT{64};

enum Phase { BEFORE, INITIALISED, FINALISED };

std::atomic<Phase> &phase() {
    static std::atomic<Phase> now(BEFORE);
    return now;
}

void require(bool holds, const char *name, const char *rule, const std::string &fact) {
    if (!holds) throw Refusal(ACL_ERROR_INVALID_PARAM, name, rule, fact);
}

void require_device(int32_t id) { require(id >= 0, "deviceId", "be 0 or more", std::to_string(id)); }

} // namespace
} // namespace acl

extern "C" {

aclError aclInit(const char *) {
    return acl::guarded([] {
        if (acl::phase().exchange(acl::INITIALISED) == acl::INITIALISED)
            throw acl::Refusal(ACL_ERROR_REPEAT_INITIALIZE, "aclInit", "be called once", "a second call");
    });
}

aclError aclFinalize(void) {
    const aclError status = acl::guarded([] {
        acl::Phase expected = acl::INITIALISED;
        if (acl::phase().compare_exchange_strong(expected, acl::FINALISED)) return;
        const bool early = expected == acl::BEFORE;
        throw acl::Refusal(early ? ACL_ERROR_UNINITIALIZE : ACL_ERROR_REPEAT_FINALIZE, "aclFinalize",
                           "be called once after aclInit", early ? "no aclInit" : "a second call");
    });
    return status ? status : acl::report(acl::finish_default_stream());
}

aclError aclrtSetDevice(int32_t deviceId) {
    return acl::guarded([&] { acl::require_device(deviceId); });
}

aclError aclrtResetDevice(int32_t deviceId) {
    const aclError status = acl::guarded([&] { acl::require_device(deviceId); });
    return status ? status : acl::report(acl::finish_default_stream());
}

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy) {
    return acl::guarded([&] {
        acl::require(devPtr, "devPtr", "point to a pointer", "NULL");
        acl::require(size > 0, "size", "be positive", "0");
        void *memory = ::operator new(size, acl::ALIGNMENT, std::nothrow);
        if (!memory) throw std::bad_alloc();
        *devPtr = memory;
    });
}

aclError aclrtFree(void *devPtr) {
    return acl::guarded([&] {
        acl::require(devPtr, "devPtr", "come from aclrtMalloc", "NULL");
        ::operator delete(devPtr, acl::ALIGNMENT);
    });
}

aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind) {
    return acl::guarded([&] {
        acl::require(dst, "dst", "be memory", "NULL");
        acl::require(src, "src", "be memory", "NULL");
        acl::require(count <= destMax, "count", "be at most destMax",
                     std::to_string(count) + " for " + std::to_string(destMax));
        acl::require(kind >= ACL_MEMCPY_HOST_TO_HOST && kind <= ACL_MEMCPY_DEFAULT, "kind", "be an aclrtMemcpyKind",
                     std::to_string(int(kind)));
        std::memmove(dst, src, count);
    });
}
}
