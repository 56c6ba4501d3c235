// Streams: a queue and a thread for each, and the default stream.
#include "cann/stream.h"

#include "cann/handles.h"

namespace acl {

Stream::~Stream() {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        closing = true;
    }
    arrived.notify_one();
    worker.join();
}

void Stream::push(std::function<void()> task) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        tasks.push_back(std::move(task));
        ++pushed;
    }
    arrived.notify_one();
}

Outcome Stream::synchronize() {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t mine = pushed;
    finished.wait(lock, [&] { return done >= mine; });
    Outcome first;
    std::swap(first, failure);
    return first;
}

void Stream::work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        arrived.wait(lock, [&] { return closing || !tasks.empty(); });
        if (tasks.empty()) return;
        std::function<void()> task = std::move(tasks.front());
        tasks.pop_front();
        lock.unlock();
        Outcome outcome = outcome_of(task);
        task = nullptr; // free what the task holds before synchronize() can return
        lock.lock();
        if (failure.status == ACL_SUCCESS) failure = std::move(outcome);
        ++done;
        finished.notify_all();
    }
}

namespace {

typedef std::shared_ptr<Stream> Shared;

Handles<Shared> &streams() {
    static Handles<Shared> handles;
    return handles;
}

// Leaks a stream that a forked child inherited. Its destructor would wait for a thread that the child does not have.
void forget(Shared &stream) { new Shared(std::move(stream)); }

struct Default {
    std::mutex mutex;
    Shared stream;

    Shared &here() {
        if (stream && !stream->works_here()) forget(stream);
        return stream;
    }
    ~Default() { here(); }
};

Default &the_default() {
    static Default stream;
    return stream;
}

[[noreturn]] void refuse_stream() {
    throw Refusal(ACL_ERROR_INVALID_PARAM, "stream", "come from aclrtCreateStream in this process and not be destroyed",
                  "a pointer that is no stream");
}

} // namespace

Shared stream_of(aclrtStream handle) {
    if (handle) {
        Shared stream;
        if (!streams().copy(handle, stream) || !stream->works_here()) refuse_stream();
        return stream;
    }
    Default &held = the_default();
    const std::lock_guard<std::mutex> lock(held.mutex);
    Shared &stream = held.here();
    if (!stream) stream = std::make_shared<Stream>();
    return stream;
}

Outcome finish_default_stream() {
    Default &held = the_default();
    Shared stream;
    {
        const std::lock_guard<std::mutex> lock(held.mutex);
        stream = held.here();
    }
    return stream ? stream->synchronize() : Outcome{};
}

} // namespace acl

extern "C" {

aclError aclrtCreateStream(aclrtStream *stream) {
    return acl::guarded([&] {
        if (!stream) throw acl::Refusal(ACL_ERROR_INVALID_PARAM, "stream", "point to a stream", "NULL");
        auto made = std::make_unique<acl::Shared>(std::make_shared<acl::Stream>());
        *stream = acl::streams().add(std::move(made));
    });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    acl::Outcome outcome;
    const aclError status = acl::guarded([&] { outcome = acl::stream_of(stream)->synchronize(); });
    return status ? status : acl::report(outcome);
}

aclError aclrtDestroyStream(aclrtStream stream) {
    acl::Outcome outcome;
    const aclError status = acl::guarded([&] {
        const std::unique_ptr<acl::Shared> last = stream ? acl::streams().remove(stream) : nullptr;
        if (last && !(*last)->works_here()) acl::forget(*last);
        if (!last || !*last) acl::refuse_stream();
        outcome = (*last)->synchronize();
    });
    return status ? status : acl::report(outcome);
}
}
