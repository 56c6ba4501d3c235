// Threads of our own, for processes without an OpenMP runtime: programs in C, torch built without OpenMP, forked
// children.
#pragma once

#include "threads/threads.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

namespace mxd {

// How often a thread looks whether it may go on, before it lets others run.
constexpr int LOOKS = 2000;

// Between two looks.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How threads wait for each other: a number that grows.
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
    // Wait until the number is not `seen`. Spins for some microseconds, because a call's other threads are often done
    // by then, and then sleeps, because other threads may need this processor.
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

// How many processors this process may use; OMP_NUM_THREADS, where it is a number, goes first.
int processors();

// Its threads are made when a call first needs them. They sleep between calls and are never joined: a pool lives as
// long as the process, and a child forked from it makes another pool.
class Pool {
  public:
    // This process's.
    static Pool &here();

    // As run_on_threads. The pool serves one call at a time. A second call meanwhile runs on its caller's thread alone:
    // it does not wait, and it starts no threads.
    void run(int threads, Body *body, void *context);

  private:
    const int64_t process = this_process();
    std::atomic<bool> in_use{false};
    std::vector<std::unique_ptr<Event>> workers; // one for each thread: only those that a call needs are woken
    // The current call. Its caller sets body and context before it wakes the workers.
    Body *body = nullptr;
    void *context = nullptr;
    std::atomic<int> working{0};
    Event finished; // raised by the last worker of each call

    void grow(int threads);
    void work(Event &woken, int index);
};

} // namespace mxd
