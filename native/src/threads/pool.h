// Threads of our own, for processes without an OpenMP runtime: programs in C, torch built without OpenMP, forked
// children.
#pragma once

#include "threads/event.h"
#include "threads/threads.h"

#include <memory>
#include <vector>

namespace mxd {

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
