// Errors, streams and live objects of the CANN-style interface. Internal code throws an Outcome. C functions return its status
// and keep its sentence for aclGetRecentErrMsg.
#pragma once

#include "acl/acl.h"
#include "call/check.h"
#include "threads/threads.h"

#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <unordered_set>
#include <utility>

namespace acl {

// The result of a function: a status and an error sentence. Checks throw it.
struct Outcome {
    aclError status = ACL_SUCCESS;
    std::string sentence;
};

inline void require(bool holds, aclError status, const char *name, const std::string &rule, const std::string &fact) {
    if (!holds) throw Outcome{status, mxd::sentence(name, rule, fact)};
}

// Keeps the sentence for this thread's aclGetRecentErrMsg and returns the status.
aclError report(const Outcome &outcome) noexcept;

// Runs fn and returns its outcome: an exception becomes a status and a sentence.
template <class Fn> Outcome outcome_of(Fn &&fn) noexcept {
    try {
        fn();
        return {};
    } catch (const Outcome &refusal) {
        return refusal;
    } catch (const std::bad_alloc &) {
        return {ACL_ERROR_BAD_ALLOC, {}}; // no sentence, because a sentence could need memory; report() adds one
    } catch (const std::system_error &error) {
        return {ACL_ERROR_INTERNAL_ERROR, error.what()};
    }
}

// Runs the body of a C function. Converts an exception to the status that the function returns.
template <class Fn> aclError guarded(Fn &&fn) noexcept { return report(outcome_of(fn)); }

// Runs a task at once, on the caller's thread, and remembers the first failure until the next synchronize().
class Stream {
  public:
    const int64_t process = mxd::this_process();

    // Tasks of several threads run one after the other, as on a device.
    template <class Task> void run(Task &&task) {
        const std::lock_guard<std::mutex> lock(mutex);
        Outcome outcome = outcome_of(task);
        if (failure.status == ACL_SUCCESS) failure = std::move(outcome);
    }
    // Throws and forgets the first failure since the last synchronize().
    void synchronize() {
        const std::lock_guard<std::mutex> lock(mutex);
        Outcome outcome = std::exchange(failure, Outcome{});
        if (outcome.status != ACL_SUCCESS) throw outcome;
    }

  private:
    std::mutex mutex;
    Outcome failure;
};

// Returns the stream of a handle. NULL is the default stream.
std::shared_ptr<Stream> find_stream(aclrtStream handle);

// The live objects behind the interface's pointers. Every function looks up its pointers, so a pointer to a destroyed object
// causes an error message instead of a crash.
template <class T> class Handles {
  public:
    T *add(std::unique_ptr<T> object) {
        const std::lock_guard<std::mutex> lock(mutex);
        keys.insert(key(object.get()));
        return object.release();
    }
    // Copies the object under the lock, because another thread may destroy it. Returns false if the object is not live.
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

    // Returns the complement of the address. A leak checker would treat plain addresses in this set as references, and would
    // not report an object that a program forgot to destroy.
    static uintptr_t key(const void *handle) { return ~reinterpret_cast<uintptr_t>(handle); }
};

template <class T> Handles<T> &registry() {
    static Handles<T> handles;
    return handles;
}

} // namespace acl
