// How far the results of one case are from those of another instruction set, compiler or processor.
#pragma once

#include "call.h"

#include <map>

namespace compare {

struct Results {
    int status;
    uint64_t fingerprint;                     // of the inputs
    std::vector<std::vector<double>> numbers; // of each result; empty: not wanted
};

// Runs a case on the instruction set in use.
Results results_of(Call &call);

// An ulp of float32, of float64 where all tensors have that, at the largest number of a result, and at 1 or more:
// inputs are below 1, and a result that cancels keeps the errors of its terms. Results of 16 bits may be one number
// apart. Seen in 24,000 cases: 62.
constexpr double MOST_ULPS = 128;

class Comparison {
  public:
    // A line to stdout for each result of the last run of `call` that is too far from `want`, or around which a byte
    // was written. `who`: whose results they are.
    void add(const std::string &who, const Call &call, const Results &want, const Results &got);
    int64_t findings() const { return found; }
    // A line for each result: how far it was from the other one at most, and in which case.
    void print_summary() const;

  private:
    struct Worst {
        double ulps = 0;
        int64_t number = 0, elements = 0;
    };
    std::map<std::string, Worst> worst;
    int64_t found = 0;

    void report(const std::string &who, const Case &c, const std::string &what);
    void compare(const std::string &who, const Case &c, const Argument &result, const std::vector<double> &want,
                 const std::vector<double> &got);
};

} // namespace compare
