// Runs functions on the threads of the process's OpenMP runtime. If the process has no runtime, uses our own pool of threads.
// This code is compiled once, and the kernels of every instruction set call it.
#pragma once

#include <stdint.h>

namespace mxd {

typedef void Body(void *context, int index);

// Runs body(context, i) on up to `threads` threads, each with its own i of 0..threads-1. One of them is the calling thread.
// There may be fewer threads than requested: a runtime has limits, a nested call gets one thread, and the pool serves one call
// at a time.
void run_on_threads(int threads, Body *body, void *context);

// Waits until a number that other threads increase is at least `least`.
void wait_for(const int64_t *number, int64_t least);

// Returns the default number of threads: the OpenMP runtime's number, or processors() if there is no runtime.
int usable_threads();

// Returns "threads of libgomp.so.1", with the file name of the runtime, or "threads of its own". Starts no thread.
const char *threads_in_use();

// true: always use our pool; false: use the OpenMP runtime if the process has one.
void use_own_threads(bool own);

// Returns a number that differs between a process and its forked children.
int64_t this_process();

// Threads that a caller lends for a call, such as the threads of a session of onnxruntime.
struct LentThreads {
    // Runs body(context, i) for each i of 0..count-1, on one or several threads. One thread may run bodies one after the other,
    // so a body must not wait for a body that has not begun.
    void (*run)(void *lender, int count, Body *body, void *context);
    void *lender;
    int most; // the largest `count` of run() that is useful
    int used; // set by loops: the largest number of bodies that had work in one loop
};

// Returns the threads that this thread was lent, or null.
LentThreads *lent_threads();

// While this object lives, loops of this thread use the lent threads.
class Lending {
  public:
    explicit Lending(LentThreads &threads);
    ~Lending();
    Lending(const Lending &) = delete;
    Lending &operator=(const Lending &) = delete;
};

} // namespace mxd
