// Whether tensors fit an operator's description, and each other.
#pragma once

#include <string>

#include "call/description.h"

namespace mxd {

// More elements than any memory has, with room to spare for bytes and for sums of offsets.
constexpr int64_t TOO_MANY = int64_t(1) << 48;

// A tensor as a binding has it.
struct TensorInfo {
    const int64_t *shape; // null: there is none
    int axes;
    int64_t dtype;
    const void *data = nullptr;
    const int64_t *strides = nullptr; // what check_memory reads, and the data
    int64_t side_by_side = -1;        // elements of a contiguous tensor; `fits` sets it
    const char *dtype_name = nullptr; // of a dtype that mxd_dtype does not have
};

// Shapes and dtypes of a function's first `count` arguments. Every call runs this.
bool fits(const Function &function, TensorInfo *tensors, int count, int64_t option, AxisSizes &sizes);

// *name* must *rule*; got *fact*. The name is that of one of a function's arguments.
struct Refusal {
    int status = MXD_OK; // there is nothing to refuse
    int argument = 0;
    std::string rule, fact;
    int other = -1; // the argument whose name ends the rule
};

std::string sentence(const Function &function, const Refusal &why);

// What `fits` finds wrong: name, rule and fact.
Refusal refusal_of(const Function &function, const TensorInfo *tensors, int count, int64_t option);

// Every tensor of a function has memory for its elements, and one that is written has it for itself.
Refusal check_memory(const Function &function, const TensorInfo *tensors);

// Scratch memory that no machine has. A call whose queries have no samples is left without queries.
bool query_is_too_large(Call &call);

} // namespace mxd
