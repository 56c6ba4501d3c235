// Threads that run a function at once: those of the OpenMP runtime that the process has, else those of our own pool.
// Compiled once; the kernels of every instruction set call it.
#pragma once

#include <stdint.h>

namespace mxd {

class Meeting;

// One of the threads that run a function.
struct Member {
    int index, count; // 0..count-1; all members have the same count
    Meeting *meeting; // null where a member is alone
};

typedef void Body(void *context, const Member &member);

// Runs body(context, member) on up to `threads` threads at once, of which the calling thread is one. There may be
// fewer: a runtime has limits, a nested call gets one thread, and the pool serves one call at a time.
void run_on_threads(int threads, Body *body, void *context);

// Returns once every member has called it as often as this one.
void wait_for_members(const Member &member);

// How many threads a caller may use who has named no number: as many as the runtime would use, where there is one.
int usable_threads();

// "threads of libgomp.so.1", the file of the runtime; or "threads of its own". No thread is started for the answer.
const char *threads_in_use();

// From now on calls run on our own pool, or where a call finds threads.
void use_own_threads(bool own);

// A number of this process. A forked child has another one.
int64_t this_process();

} // namespace mxd
