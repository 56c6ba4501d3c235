// Decides how a call is computed, from sizes, levels, strides, dtypes and the number of threads, before any other element is
// read.
#pragma once

#include <string>
#include <vector>

#include "call/plan.h"

namespace mxd {

// Owns the arrays to which a plan points.
struct PlanLists {
    std::vector<int64_t> packed_value, packed_gradient, bands;
};

// Makes the plan of a checked and prepared call. Reads no data of value.
Plan make_plan(const Call &call, PlanLists &lists);

// Returns the number of threads, at most `most`, with which a call is fastest.
int threads_that_pay(const Call &call, int most);

// Sets the least work of a thread, in elements of rows. 0 restores the default.
void set_work_of_a_thread(int64_t elements);

// Returns a line "name: decision" for each decision of a plan.
std::string describe(const Call &call, const Plan &plan);

} // namespace mxd
