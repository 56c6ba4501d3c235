// Chooses the threads of a loop: those of the runtime if the process has one, else those of our pool.
#include "threads/threads.h"

#include "threads/openmp.h"
#include "threads/pool.h"

#include <string>
#include <thread>

#ifndef _WIN32
#include <unistd.h>
#endif

namespace mxd {

int64_t this_process() {
#ifdef _WIN32
    return 0; // Windows has no fork
#else
    return getpid();
#endif
}

namespace {

const int64_t loaded_in = this_process();
std::atomic<bool> own_threads{false};
thread_local LentThreads *lent = nullptr;

// Returns null if our own pool must be used. A forked child never uses the runtime: libgomp would wait forever for threads that
// only the parent has, such as those of torch's operators, and libgomp does not tell whether the parent had any.
const OpenMp *runtime() {
    const bool own = own_threads.load(std::memory_order_relaxed) || this_process() != loaded_in;
    return own ? nullptr : openmp();
}

} // namespace

void run_on_threads(int threads, Body *body, void *context) {
    if (threads <= 1) return body(context, 0);
    const OpenMp *openmp = runtime();
    return openmp ? openmp->run(threads, body, context) : Pool::here().run(threads, body, context);
}

// Spins first, because other threads are often done within microseconds. Then yields, because they may need this processor.
void wait_for(const int64_t *number, int64_t least) {
    for (int look = 0; __atomic_load_n(number, __ATOMIC_ACQUIRE) < least; ++look) {
        if (look < LOOKS)
            relax();
        else
            std::this_thread::yield();
    }
}

// Asks the runtime even in a forked child, which keeps the number that torch.set_num_threads set in the parent.
int usable_threads() {
    const OpenMp *runtime = openmp();
    return runtime ? runtime->get_max_threads() : processors();
}

const char *threads_in_use() {
    const OpenMp *openmp = runtime();
    if (!openmp) return "threads of its own";
    static const std::string sentence = std::string("threads of ") + openmp->name; // the runtime never changes
    return sentence.c_str();
}

LentThreads *lent_threads() { return lent; }
Lending::Lending(LentThreads &threads) { lent = &threads; }
Lending::~Lending() { lent = nullptr; }

void use_own_threads(bool own) { own_threads.store(own, std::memory_order_relaxed); }

} // namespace mxd
