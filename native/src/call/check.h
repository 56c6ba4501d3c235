// Whether tensors fit an operator's description, and each other; the sentence if not.
#pragma once

#include <algorithm>
#include <string>

#include "call/description.h"

namespace mxd {

// More elements than any memory has, with room to spare for bytes and for sums of offsets.
constexpr int64_t TOO_MANY = int64_t(1) << 48;

inline int64_t floating_size(int64_t dtype) { return dtype == MXD_FLOAT64 ? 8 : dtype == MXD_FLOAT32 ? 4 : 2; }
inline int64_t element_size(int64_t dtype) { return dtype == MXD_INT64 ? 8 : dtype == MXD_INT32 ? 4 : floating_size(dtype); }
inline bool is_empty(const Tensor &t) { return std::count(t.shape, t.shape + t.axes, 0) > 0; }

// A tensor as a binding has it. An axis of one element may have any stride.
struct TensorInfo {
    const int64_t *shape; // null: there is none
    int axes;
    int64_t dtype;
    const void *data = nullptr;
    const int64_t *strides = nullptr; // in elements; check_memory and make_call read them, and the data
    int64_t side_by_side = -1;        // elements of a contiguous tensor; `fits` sets it
    const char *dtype_name = nullptr; // of a dtype that mxd_dtype does not have
};

// Check shapes and dtypes of a function's first `count` arguments. Every call runs this.
bool fits(const Function &function, TensorInfo *tensors, int count, int64_t option, AxisSizes &sizes);

// *name* must *rule*; got *fact*. The name is that of one of a function's arguments.
struct Refusal {
    int status = MXD_OK; // there is nothing to refuse
    int argument = 0;
    std::string rule, fact;
    int other = -1; // the argument whose name ends the rule
};

std::string sentence(const std::string &name, const std::string &rule, const std::string &fact);
std::string sentence(const Function &function, const Refusal &why);

// "(1, 2, 3)"
std::string text_of(const int64_t *numbers, size_t count);

// What `fits` finds wrong: name, rule and fact.
Refusal refusal_of(const Function &function, const TensorInfo *tensors, int count, int64_t option);

// Check that every tensor of a function has memory for its elements, and each result memory that no other tensor has.
Refusal check_memory(const Function &function, const TensorInfo *tensors);

// The shape of a forward function's output.
List<int64_t, MOST_AXES> output_shape(const Function &function, const AxisSizes &sizes);

// The sentence about an output that no memory holds; empty where one might. Strides, too, must be numbers of 64 bits.
std::string fault_of_output(const List<int64_t, MOST_AXES> &shape);

} // namespace mxd
