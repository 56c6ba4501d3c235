// A stream: a queue of tasks and the thread that runs them in order.
#pragma once

#include "acl_error.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace acl {

class Stream {
  public:
    Stream() : process(this_process()), worker([this] { work(); }) {}
    ~Stream();
    // Not in a forked child: the thread is the parent's. Such a stream can neither be used nor be destroyed.
    bool works_here() const { return process == this_process(); }
    void push(std::function<void()> task);
    // Waits for what was pushed before; the first failure since the last call, which it forgets.
    Outcome synchronize();

  private:
    const int64_t process;
    std::mutex mutex;
    std::condition_variable arrived, finished;
    std::deque<std::function<void()>> tasks;
    uint64_t pushed = 0, done = 0;
    bool closing = false;
    Outcome failure;
    std::thread worker; // last: it uses all of the above

    void work();
    static int64_t this_process();
};

// The stream behind a handle; null: the default stream, which is made when it is first asked for.
std::shared_ptr<Stream> stream_of(aclrtStream handle);
// Waits for the default stream where there is one.
Outcome finish_default_stream();

} // namespace acl
