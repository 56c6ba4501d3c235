// Threads of our own, which sleep between calls.
#include "threads/pool.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif

namespace mxd {
namespace {

std::atomic<Pool *> the_pool{nullptr};

// Keeps this library loaded, because threads of the pool sleep in its code.
void keep_library() {
#ifdef _WIN32
    HMODULE module;
    GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                       reinterpret_cast<LPCSTR>(&the_pool), &module);
#else
    Dl_info here;
    if (dladdr(&the_pool, &here)) dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
#endif
}

int allowed_processors() {
#ifdef __linux__ // hardware_concurrency() of some standard libraries ignores taskset and containers
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
#endif
    return int(std::thread::hardware_concurrency());
}

} // namespace

int processors() {
    const char *variable = std::getenv("OMP_NUM_THREADS");
    const int number = variable ? std::atoi(variable) : 0;
    return number > 0 ? number : std::max(1, allowed_processors());
}

// A forked child has a copy of the pool without its threads, and with locks in any state. So the child makes another pool.
Pool &Pool::here() {
    Pool *pool = the_pool.load(std::memory_order_acquire);
    if (pool && pool->process == this_process()) return *pool;
    if (!pool) keep_library();
    std::unique_ptr<Pool> made(new Pool);
    if (!the_pool.compare_exchange_strong(pool, made.get(), std::memory_order_acq_rel)) return *pool;
    return *made.release();
}

void Pool::grow(int threads) {
    try {
        while (int(workers.size()) < threads) {
            workers.reserve(workers.size() + 1);
            std::unique_ptr<Event> made(new Event);
            std::thread([this, woken = made.get(), index = int(workers.size()) + 1] { work(*woken, index); }).detach();
            workers.push_back(std::move(made));
        }
    } catch (const std::exception &) { // the system has no more threads, so use only the existing threads
    }
}

void Pool::work(Event &woken, int index) {
    for (int64_t calls = 0;; ++calls) {
        woken.wait_past(calls);
        body(context, index);
        if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) finished.raise();
    }
}

void Pool::run(int threads, Body *new_body, void *new_context) {
    if (in_use.exchange(true, std::memory_order_acquire)) return new_body(new_context, 0);
    grow(threads - 1);
    body = new_body;
    context = new_context;
    const int woken = std::min(threads - 1, int(workers.size()));
    working.store(woken, std::memory_order_relaxed);
    const int64_t seen = finished.number();
    for (int w = 0; w < woken; ++w) workers[size_t(w)]->raise();
    body(context, 0);
    if (woken > 0) finished.wait_past(seen);
    in_use.store(false, std::memory_order_release);
}

} // namespace mxd
