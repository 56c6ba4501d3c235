// Finds libraries that the process has already loaded, and their functions.
#pragma once

#include <cstring>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif
#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

namespace mxd {

#ifdef _WIN32

typedef HMODULE Library;

inline Library loaded(const char *file) { return GetModuleHandleA(file); }
inline void close(Library) {} // GetModuleHandle counts no reference
inline void *function(Library library, const char *name) { return reinterpret_cast<void *>(GetProcAddress(library, name)); }

#else

typedef void *Library;

#ifdef __APPLE__

inline Library loaded(const char *file) {
    for (uint32_t i = 0; i < _dyld_image_count(); ++i) {
        const char *path = _dyld_get_image_name(i), *last = path ? std::strrchr(path, '/') : nullptr;
        if (last && std::strcmp(last + 1, file) == 0) return dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    }
    return nullptr;
}

#else

// Finds the library by its SONAME, wherever its file is.
inline Library loaded(const char *file) { return dlopen(file, RTLD_LAZY | RTLD_NOLOAD); }

#endif

inline void close(Library library) { dlclose(library); }
inline void *function(Library library, const char *name) { return dlsym(library, name); }

#endif

// Returns false if the library has no function of this name.
template <class Fn> bool find(Library library, const char *name, Fn *&fn) {
    fn = reinterpret_cast<Fn *>(function(library, name));
    return fn;
}

#if defined(_WIN32)
constexpr char TORCH_LIBRARY[] = "torch_cpu.dll";
#elif defined(__APPLE__)
constexpr char TORCH_LIBRARY[] = "libtorch_cpu.dylib";
#else
constexpr char TORCH_LIBRARY[] = "libtorch_cpu.so";
#endif

} // namespace mxd
