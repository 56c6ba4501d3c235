// aclTensor is a program's description of a view. The functions below answer questions about it.
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
    int64_t storage; // elements in memory from data on, or UNKNOWN_STORAGE
    void *data;
};

namespace acl {

// More elements than any memory holds, yet few enough that sums of such numbers, in bytes, do not overflow.
constexpr int64_t MOST_ELEMENTS = int64_t(1) << 47, UNKNOWN_STORAGE = MOST_ELEMENTS + 1;

// Copies a live tensor. False: the handle is no live tensor.
bool copy_tensor(const aclTensor *handle, aclTensor &to);

// Bytes of an element; 0 for a dtype that the operators do not take.
int64_t element_size(aclDataType dtype);
std::string dtype_name(aclDataType dtype);

bool is_empty(const aclTensor &t);
// First and last element of a view that is not empty, counted from data. False: memory has no such addresses.
bool find_elements(const aclTensor &t, int64_t &first, int64_t &last);

} // namespace acl
