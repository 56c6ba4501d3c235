// A place where the threads of one call wait for each other.
#pragma once

#include "event.h"

namespace mxd {

class Meeting {
  public:
    void wait_for(int count) {
        const int64_t round = rounds.number(); // before this thread arrives, after which the round may end
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return rounds.wait_past(round);
        arrived.store(0, std::memory_order_relaxed);
        rounds.raise();
    }

  private:
    std::atomic<int> arrived{0};
    Event rounds;
};

} // namespace mxd
