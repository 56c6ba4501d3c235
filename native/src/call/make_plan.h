// Decides how a call is done: from sizes, strides, dtypes and the number of threads, before any element is read.
#pragma once

#include <string>
#include <vector>

#include "call/plan.h"

namespace mxd {

// Owns what a plan points to.
struct PlanLists {
    std::vector<int64_t> packed_value, packed_gradient, bands;
};

// call: checked and prepared, but its value's data is not read.
Plan make_plan(const Call &call, PlanLists &lists);

// How many threads pay for a call, of those that it may use.
int threads_that_pay(const Call &call, int most);

// Elements of rows that one thread reads or writes before another is woken; 0: as many as pay for waking it.
void set_work_of_a_thread(int64_t elements);

// A line "name: what" for each decision.
std::string describe(const Call &call, const Plan &plan);

} // namespace mxd
