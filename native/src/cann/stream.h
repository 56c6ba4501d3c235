// A stream is a queue of tasks and the thread that runs them in order.
#pragma once

#include "cann/error.h"
#include "threads/threads.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace acl {

class Stream {
  public:
    Stream() : process(mxd::this_process()), worker([this] { work(); }) {}
    ~Stream();
    // False in a forked child, which does not have the stream's thread: it can neither use nor destroy the stream.
    bool works_here() const { return process == mxd::this_process(); }
    void push(std::function<void()> task);
    // Waits for every task pushed so far. Returns the first failure since the last call, and forgets it.
    Outcome synchronize();

  private:
    const int64_t process;
    std::mutex mutex;
    std::condition_variable arrived, finished;
    std::deque<std::function<void()>> tasks;
    uint64_t pushed = 0, done = 0;
    bool closing = false;
    Outcome failure;
    std::thread worker; // last: it starts at once and uses all of the above

    void work();
};

// The stream behind a handle. Null stands for the default stream, which the first call makes.
std::shared_ptr<Stream> stream_of(aclrtStream handle);
// Synchronizes the default stream, if there is one.
Outcome finish_default_stream();

} // namespace acl
