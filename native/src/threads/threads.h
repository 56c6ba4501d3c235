// Threads that run a function at once: those of the OpenMP runtime that the process has, else those of our own pool.
// Compiled once; the kernels of every instruction set call it.
#pragma once

#include <stdint.h>

namespace mxd {

typedef void Body(void *context, int index);

// Runs body(context, i) for different i of 0..threads-1, each on a thread of its own, of which the calling thread is
// one. There may be fewer threads: a runtime has limits, a nested call gets one, and the pool serves one call at a
// time.
void run_on_threads(int threads, Body *body, void *context);

// Wait until a number that other threads add to is at least `least`.
void wait_for(const int64_t *number, int64_t least);

// The default number of threads: the OpenMP runtime's if there is one, else the number of processors.
int usable_threads();

// "threads of libgomp.so.1", which names the runtime's file, or "threads of its own". Starts no thread.
const char *threads_in_use();

// true: use our pool; false: use the threads of the OpenMP runtime if the process has one.
void use_own_threads(bool own);

// A number of this process. A forked child has another one.
int64_t this_process();

// Threads that the caller of this library lends for a call: those of a runtime with a pool of its own.
struct LentThreads {
    // Runs body(context, i) for each i of 0..count-1, on one thread or on several. One may begin when another has
    // ended, so none may wait for one that has not begun.
    void (*run)(void *lender, int count, Body *body, void *context);
    void *lender;
    int most; // there is no use in a greater count
    int used; // how many of a loop's bodies had work, at most; set by loops
};

// What this thread was lent, or null.
LentThreads *lent_threads();

// Loops that this thread runs use these threads while this object lives.
class Lending {
  public:
    explicit Lending(LentThreads &threads);
    ~Lending();
    Lending(const Lending &) = delete;
    Lending &operator=(const Lending &) = delete;
};

} // namespace mxd
