// Checks tensors against an operator's description and against each other. Builds the error sentence.
#pragma once

#include <algorithm>
#include <string>

#include "call/description.h"

namespace mxd {

// A tensor must have fewer elements than this. No memory holds so many elements, and below this limit sums of the sizes of
// tensors, in bytes, fit in 64 bits.
constexpr int64_t TOO_MANY = int64_t(1) << 48;

inline int64_t floating_size(int64_t dtype) { return dtype == MXD_FLOAT64 ? 8 : dtype == MXD_FLOAT32 ? 4 : 2; }
inline int64_t element_size(int64_t dtype) { return dtype == MXD_INT64 ? 8 : dtype == MXD_INT32 ? 4 : floating_size(dtype); }
inline bool is_empty(const Tensor &t) { return std::count(t.shape, t.shape + t.axes, 0) > 0; }

// A tensor as the caller of the library describes it.
struct TensorInfo {
    const int64_t *shape; // null if the tensor is not given
    int axes;
    int64_t dtype;
    const void *data = nullptr;
    const int64_t *strides = nullptr; // in elements; check_memory and make_call need strides and data, `fits` does not
    int64_t side_by_side = -1;        // set by `fits`: the number of elements if the tensor is contiguous, else -1
    const char *dtype_name = nullptr; // the dtype's name in error sentences, if mxd_dtype does not have the dtype
};

// Returns whether the first `count` arguments have valid shapes and dtypes, and sets `sizes`. Every call runs this check.
bool fits(const Function &function, TensorInfo *tensors, int count, int64_t option, AxisSizes &sizes);

// An error, whose sentence is: NAME must RULE; got FACT. NAME is an argument's name.
struct Refusal {
    int status = MXD_OK; // MXD_OK if there is no error
    int argument = 0;
    std::string rule, fact;
    int other = -1; // the argument whose name ends the rule, or -1
};

std::string sentence(const std::string &name, const std::string &rule, const std::string &fact);
std::string sentence(const Function &function, const Refusal &why);

// Returns a tuple as text: "(1, 2, 3)".
std::string text_of(const int64_t *numbers, size_t count);

// Returns the error that made `fits` return false.
Refusal refusal_of(const Function &function, const TensorInfo *tensors, int count, int64_t option);

// Checks that every tensor of a function has memory for its elements, and that no element of a result shares memory with
// another element or another tensor.
Refusal check_memory(const Function &function, const TensorInfo *tensors);

List<int64_t, MOST_AXES> output_shape(const Function &function, const AxisSizes &sizes);

// Returns an error sentence if an output of this shape is too large, else an empty string. An axis of 0 counts as 1, because
// the strides of an empty output must fit in 64 bits, too.
std::string fault_of_output(const List<int64_t, MOST_AXES> &shape);

} // namespace mxd
