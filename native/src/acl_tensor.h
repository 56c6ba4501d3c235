// aclTensor: what a program told about a view, and what can be asked of it.
#pragma once

#include "acl/acl.h"

#include <cstdint>
#include <string>

constexpr int ACL_MOST_AXES = 8;

struct aclTensor {
    int axes;
    int64_t shape[ACL_MOST_AXES];
    int64_t strides[ACL_MOST_AXES]; // in elements
    int64_t offset;
    aclDataType dtype;
    aclFormat format;
    int64_t storage; // elements behind data; UNKNOWN_STORAGE
    void *data;
};

namespace acl {

constexpr int64_t UNKNOWN_STORAGE = -1;

// A copy of a live tensor; false when it is none.
bool copy_tensor(const aclTensor *handle, aclTensor &to);

// Bytes; 0 for a dtype that no tensor of the operators can have.
int64_t element_size(aclDataType dtype);
std::string dtype_name(aclDataType dtype);
// "(1, 2, 3)"
std::string list(const int64_t *numbers, int count);

bool empty(const aclTensor &t);
// First and last element of a view with elements, counted from data. False: beyond what can be addressed.
bool extent(const aclTensor &t, int64_t &first, int64_t &last);
// Whether the strides by themselves show that no two elements share memory: each axis, from the tightest on, steps over
// all that the ones before it cover. True of every slice and permutation of a packed tensor.
bool distinct_elements(const aclTensor &t);

} // namespace acl
