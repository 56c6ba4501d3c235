// Threads of our own, for processes without an OpenMP runtime: C programs, torch built without OpenMP, forked children.
#pragma once

#include "threads/threads.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

namespace mxd {

// How often a waiting thread checks its condition before it lets other threads run.
constexpr int LOOKS = 2000;

// Pauses between two checks.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A counter on which threads wait. raise() increments the counter and wakes the threads.
class Event {
  public:
    int64_t number() const { return raised.load(std::memory_order_acquire); }
    void raise() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            raised.fetch_add(1, std::memory_order_release);
        }
        changed.notify_all();
    }
    // Waits until the number is not `seen`. Spins for some microseconds, because the other threads of a call are often done in
    // this time. Then sleeps, because other threads may need this processor.
    void wait_past(int64_t seen) {
        for (int look = 0; look < LOOKS; ++look) {
            if (number() != seen) return;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return number() != seen; });
    }

  private:
    std::atomic<int64_t> raised{0};
    std::mutex mutex;
    std::condition_variable changed;
};

// Returns OMP_NUM_THREADS if it is a positive number, else the number of processors that this process may use.
int processors();

// Threads that sleep between calls. A thread starts when a call first needs it. Threads are never joined, because the pool
// lives as long as the process. A forked child makes its own pool.
class Pool {
  public:
    static Pool &here();

    // Runs bodies like run_on_threads. While the pool serves a call, a second call runs on its caller's thread alone.
    void run(int threads, Body *body, void *context);

  private:
    const int64_t process = this_process();
    std::atomic<bool> in_use{false};
    std::vector<std::unique_ptr<Event>>
        workers; // an event for each thread, because a call wakes only the threads that it needs
    // The current call. The caller sets body and context before it wakes workers.
    Body *body = nullptr;
    void *context = nullptr;
    std::atomic<int> working{0};
    Event finished; // the last worker of each call raises it

    void grow(int threads);
    void work(Event &woken, int index);
};

} // namespace mxd
