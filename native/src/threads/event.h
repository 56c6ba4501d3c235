// How threads wait for each other: Event, a number that grows.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdint.h>

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

} // namespace mxd
