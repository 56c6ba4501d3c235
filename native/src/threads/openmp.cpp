// Finds the OpenMP runtime among the loaded libraries, and calls it as compiled code does.
#include "threads/openmp.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>

#include "threads/loaded_library.h"
#if !defined(_WIN32) && !defined(__APPLE__)
#include <link.h>
#endif

namespace mxd {
namespace {

// ---- a number that grows when libraries are loaded

#ifdef _WIN32

// Windows has no such number. So each call returns a new number, and openmp() searches each time, which is cheap there.
uint64_t libraries_loaded() {
    static std::atomic<uint64_t> calls{0};
    return ++calls;
}

#elif defined(__APPLE__)

uint64_t libraries_loaded() { return _dyld_image_count(); }

#else

uint64_t libraries_loaded() {
    uint64_t count = 0;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
            *static_cast<uint64_t *>(to) = info->dlpi_adds;
            return 1; // every entry has the same dlpi_adds, so stop after the first
        },
        &count);
    return count;
}

#endif

// ---- finding the runtime

bool find_functions(Library library, OpenMp &runtime) {
    if (!find(library, "omp_get_thread_num", runtime.get_thread_num) ||
        !find(library, "omp_get_max_threads", runtime.get_max_threads))
        return false;
    return find(library, "GOMP_parallel", runtime.gomp_parallel) ||
           (find(library, "__kmpc_fork_call", runtime.fork_call) &&
            find(library, "__kmpc_push_num_threads", runtime.push_num_threads) &&
            find(library, "__kmpc_global_thread_num", runtime.global_thread_num));
}

#ifdef _WIN32

// torch's wheels ship the first file, or the third on ARM. Visual Studio's Clang and LLVM ship the others. vcomp140.dll of
// Visual C++ is missing here, because that runtime has another interface.
const char *const FILES[] = {"libiomp5md.dll", "libomp140.x86_64.dll", "libomp140.aarch64.dll", "libomp.dll"};

bool look(OpenMp &runtime) {
    for (const char *file : FILES)
        if (const Library library = loaded(file)) {
            runtime.name = file;
            if (find_functions(library, runtime)) return true;
        }
    return false;
}

#else

#ifdef __APPLE__
const char *const FILES[] = {"libomp.dylib", "libiomp5.dylib", "libgomp.1.dylib"};
#else
const char *const FILES[] = {"libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so"};
#endif

void *entry(Library library) {
    void *const gcc = function(library, "GOMP_parallel");
    return gcc ? gcc : function(library, "__kmpc_fork_call");
}

// Returns the function that starts a parallel region in the runtime of torch's loops. Searches as the loader does for
// libtorch_cpu: on Linux first the global symbols, such as those of a preloaded libiomp5, then the dependencies of
// libtorch_cpu, whose files may have any name (libgomp-a34b3233.so.1). Without torch, searches the runtimes with a usual file
// name.
void *torchs_entry() {
#ifndef __APPLE__ // on macOS a library calls the runtime that it was linked to, whatever symbols are global
    if (void *const address = entry(RTLD_DEFAULT)) return address;
#endif
    const char *files[1 + sizeof FILES / sizeof *FILES] = {TORCH_LIBRARY};
    std::copy(std::begin(FILES), std::end(FILES), files + 1);
    for (const char *file : files)
        if (const Library library = loaded(file)) {
            void *const address = entry(library);
            close(library);
            if (address) return address;
        }
    return nullptr;
}

// Finds all functions in the library that has torchs_entry(). Keeps the library's handle, so that nobody can unload the
// library.
bool look(OpenMp &runtime) {
    Dl_info info;
    void *const address = torchs_entry();
    if (!address || !dladdr(address, &info)) return false;
    const Library library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return false;
    const char *last = std::strrchr(info.dli_fname, '/');
    runtime.name = last ? last + 1 : info.dli_fname;
    if (find_functions(library, runtime)) return true;
    close(library);
    return false;
}

#endif

// ---- parallel regions of the two interfaces: GCC's and Clang's

struct Call {
    const OpenMp &runtime;
    Body *body;
    void *context;
};

void region(void *data) {
    Call &call = *static_cast<Call *>(data);
    call.body(call.context, call.runtime.get_thread_num());
}

void clang_region(int32_t *, int32_t *, void *data) { region(data); }

// The source location of a parallel region. OpenMP runtimes read it.
struct Location {
    int32_t reserved_1 = 0, flags = 2, reserved_2 = 0, reserved_3 = 0; // flag 2: the caller is Clang's code
    const char *source = ";unknown;unknown;0;0;;";
};

} // namespace

void OpenMp::run(int threads, Body *body, void *context) const {
    Call call{*this, body, context};
    if (gomp_parallel) return gomp_parallel(region, &call, unsigned(threads), 0);
    static Location location;
    push_num_threads(&location, global_thread_num(&location), threads);
    typedef void Region(int32_t *, int32_t *, ...);
    fork_call(&location, 1, reinterpret_cast<Region *>(clang_region), &call);
}

const OpenMp *openmp() {
    static std::atomic<const OpenMp *> runtime{nullptr};
    static std::atomic<uint64_t> looked_at{0};
    if (const OpenMp *earlier = runtime.load(std::memory_order_acquire)) return earlier;
    const uint64_t libraries = libraries_loaded();
    if (looked_at.load(std::memory_order_relaxed) == libraries) return nullptr;
    std::unique_ptr<OpenMp> made(new OpenMp{});
    if (!look(*made)) return looked_at.store(libraries, std::memory_order_relaxed), nullptr;
    const OpenMp *other = nullptr; // the runtime that another thread found meanwhile
    return runtime.compare_exchange_strong(other, made.get(), std::memory_order_acq_rel) ? made.release() : other;
}

} // namespace mxd
