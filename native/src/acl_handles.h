// The objects behind the interface's pointers. Every pointer that comes in is looked up, so that one that was destroyed
// is an error with a sentence and not a crash.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>

namespace acl {

template <class T> class Handles {
  public:
    T *add(std::unique_ptr<T> object) {
        const std::lock_guard<std::mutex> lock(mutex);
        known.insert(key(object.get()));
        return object.release();
    }
    // A copy, taken under the lock: another thread may destroy the object meanwhile. False: not a live object.
    bool copy(const void *handle, T &to) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!known.count(key(handle))) return false;
        to = *static_cast<const T *>(handle);
        return true;
    }
    template <class Fn> bool change(void *handle, Fn &&fn) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!known.count(key(handle))) return false;
        fn(*static_cast<T *>(handle));
        return true;
    }
    std::unique_ptr<T> remove(const void *handle) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!known.erase(key(handle))) return nullptr;
        return std::unique_ptr<T>(static_cast<T *>(const_cast<void *>(handle)));
    }

  private:
    std::mutex mutex;
    std::unordered_set<uintptr_t> known;

    // Complemented, so that a leak checker does not take this table for an owner: what a program forgets to destroy
    // shows up as its leak.
    static uintptr_t key(const void *handle) { return ~reinterpret_cast<uintptr_t>(handle); }
};

} // namespace acl
