// The live objects behind the interface's pointers. Every function looks up the pointers that it gets: a pointer to a
// destroyed object is an error with a sentence, not a crash.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_set>

namespace acl {

template <class T> class Handles {
  public:
    T *add(std::unique_ptr<T> object) {
        const std::lock_guard<std::mutex> lock(mutex);
        keys.insert(key(object.get()));
        return object.release();
    }
    // Copies the object under the lock, because another thread may destroy it at any time. False: the object is not
    // live.
    bool copy(const void *handle, T &to) {
        return change(const_cast<void *>(handle), [&](const T &object) { to = object; });
    }
    template <class Fn> bool change(void *handle, Fn &&fn) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!keys.count(key(handle))) return false;
        fn(*static_cast<T *>(handle));
        return true;
    }
    std::unique_ptr<T> remove(const void *handle) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!keys.erase(key(handle))) return nullptr;
        return std::unique_ptr<T>(static_cast<T *>(const_cast<void *>(handle)));
    }

  private:
    std::mutex mutex;
    std::unordered_set<uintptr_t> keys;

    // The complement of the address. A leak checker would take plain addresses in this set for owners, and would not
    // report an object that a program forgot to destroy.
    static uintptr_t key(const void *handle) { return ~reinterpret_cast<uintptr_t>(handle); }
};

template <class T> Handles<T> &registry() {
    static Handles<T> handles;
    return handles;
}

} // namespace acl
