// The OpenMP runtime of the process. We find it among the loaded libraries, and call the functions that compiled code calls. So
// this library neither links nor ships a runtime.
#pragma once

#include "threads/threads.h"

namespace mxd {

struct OpenMp {
    const char *name; // the name of the runtime's file
    void (*gomp_parallel)(void (*region)(void *), void *data, unsigned threads, unsigned flags);
    // The functions that Clang calls. We call them if the runtime has no GOMP_parallel, as on Windows, or in a libomp without
    // GCC's names.
    void (*fork_call)(void *location, int32_t arguments, void (*region)(int32_t *, int32_t *, ...), ...);
    void (*push_num_threads)(void *location, int32_t thread, int32_t threads);
    int32_t (*global_thread_num)(void *location);
    int (*get_thread_num)(), (*get_max_threads)();

    void run(int threads, Body *body, void *context) const;
};

// Returns null if the process has no runtime. Searches again after libraries were loaded, because torch may be among them.
const OpenMp *openmp();

} // namespace mxd
