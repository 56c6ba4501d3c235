// Threads that the caller of this library lends for a call: those of a runtime with a pool of its own.
#pragma once

#include "threads/threads.h"

namespace mxd {

struct LentThreads {
    // Runs body(context, i) for each i of 0..count-1, on one thread or on several. One may begin when another has
    // ended, so none may wait for one that has not begun.
    void (*run)(void *lender, int count, Body *body, void *context);
    void *lender;
    int most; // there is no use in a greater count
    int used; // how many of a loop's bodies had work, at most; set by loops
};

// What this thread was lent, or null.
LentThreads *lent_threads();

// Loops that this thread runs use these threads while this object lives.
class Lending {
  public:
    explicit Lending(LentThreads &threads);
    ~Lending();
    Lending(const Lending &) = delete;
    Lending &operator=(const Lending &) = delete;
};

} // namespace mxd
