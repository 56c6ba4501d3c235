// The OpenMP runtime that the process has. It is found among the loaded libraries and called by the names that
// compilers call, so this library needs none at build time and brings none.
#pragma once

#include "threads/threads.h"

namespace mxd {

struct OpenMp {
    const char *name; // its file's
    void (*gomp_parallel)(void (*region)(void *), void *data, unsigned threads, unsigned flags);
    // Where there is no GOMP_parallel (Windows, and libomp without GCC's names): the names that Clang calls.
    void (*fork_call)(void *location, int32_t arguments, void (*region)(int32_t *, int32_t *, ...), ...);
    void (*push_num_threads)(void *location, int32_t thread, int32_t threads);
    int32_t (*global_thread_num)(void *location);
    int (*get_thread_num)(), (*get_max_threads)();

    void run(int threads, Body *body, void *context) const;
};

// Null if the process has no runtime. Each call looks again if libraries were loaded since the last look: a program may
// load torch after its first call.
const OpenMp *openmp();

} // namespace mxd
