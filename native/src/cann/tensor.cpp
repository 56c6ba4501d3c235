// Descriptions of tensors: made, destroyed, and what their strides reach.
#include "cann/tensor.h"

#include "cann/runtime.h"

#include <algorithm>

namespace acl {
namespace {

void read_axes(const char *name, const int64_t *numbers, uint64_t count, int64_t *to) {
    require(count <= ACL_MOST_AXES, ACL_ERROR_INVALID_PARAM, name, "be at most 8", std::to_string(count));
    require(numbers || !count, ACL_ERROR_INVALID_PARAM, name, "be 0 without numbers", std::to_string(count));
    std::copy_n(numbers, count, to);
}

// Returns the elements of a contiguous tensor, at most MOST_ELEMENTS; 0 where a size is 0 or negative.
int64_t set_strides(const int64_t *shape, int axes, int64_t *strides) {
    int64_t count = 1;
    for (int a = axes; a-- > 0;) {
        strides[a] = count;
        if (__builtin_mul_overflow(count, std::max<int64_t>(1, shape[a]), &count)) count = MOST_ELEMENTS;
        count = std::min(count, MOST_ELEMENTS);
    }
    return std::all_of(shape, shape + axes, [](int64_t size) { return size > 0; }) ? count : 0;
}

} // namespace

bool copy_tensor(const aclTensor *handle, aclTensor &to) { return registry<aclTensor>().copy(handle, to); }

std::string dtype_name(aclDataType dtype) {
    static const std::pair<aclDataType, const char *> NAMES[] = {
        {ACL_FLOAT, "ACL_FLOAT"}, {ACL_FLOAT16, "ACL_FLOAT16"}, {ACL_BF16, "ACL_BF16"}, {ACL_INT32, "ACL_INT32"},
        {ACL_INT64, "ACL_INT64"}, {ACL_DOUBLE, "ACL_DOUBLE"},   {ACL_INT8, "ACL_INT8"}, {ACL_INT16, "ACL_INT16"},
        {ACL_UINT8, "ACL_UINT8"}, {ACL_BOOL, "ACL_BOOL"}};
    for (const auto &[number, name] : NAMES)
        if (number == dtype) return name;
    return "aclDataType " + std::to_string(int(dtype));
}

bool is_empty(const aclTensor &t) { return std::count(t.shape, t.shape + t.axes, 0) > 0; }

bool find_elements(const aclTensor &t, int64_t &first, int64_t &last) {
    first = last = t.offset;
    int64_t elements = 1;
    for (int a = 0; a < t.axes; ++a) {
        int64_t reach;
        int64_t &end = t.strides[a] < 0 ? first : last;
        if (__builtin_mul_overflow(elements, t.shape[a], &elements) || elements > MOST_ELEMENTS) return false;
        if (__builtin_mul_overflow(t.shape[a] - 1, t.strides[a], &reach)) return false;
        if (__builtin_add_overflow(end, reach, &end)) return false;
    }
    return first >= -MOST_ELEMENTS && last < MOST_ELEMENTS;
}

} // namespace acl

extern "C" {

aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t *stride,
                           int64_t offset, aclFormat format, const int64_t *storageDims, uint64_t storageDimsNum,
                           void *tensorData) {
    aclTensor *made = nullptr;
    acl::guarded([&] {
        auto tensor = std::make_unique<aclTensor>();
        acl::read_axes("viewDimsNum", viewDims, viewDimsNum, tensor->shape);
        tensor->axes = int(viewDimsNum);
        acl::set_strides(tensor->shape, tensor->axes, tensor->strides);
        if (stride) std::copy_n(stride, viewDimsNum, tensor->strides);
        tensor->storage = acl::UNKNOWN_STORAGE;
        if (storageDims && storageDimsNum) {
            int64_t storage[ACL_MOST_AXES], strides[ACL_MOST_AXES];
            acl::read_axes("storageDimsNum", storageDims, storageDimsNum, storage);
            tensor->storage = acl::set_strides(storage, int(storageDimsNum), strides);
        }
        tensor->offset = offset;
        tensor->dtype = dataType;
        tensor->format = format;
        tensor->data = tensorData;
        made = acl::registry<aclTensor>().add(std::move(tensor));
    });
    return made;
}

aclnnStatus aclDestroyTensor(const aclTensor *tensor) {
    return acl::guarded([&] {
        acl::require(tensor, ACLNN_ERR_PARAM_NULLPTR, "tensor", "be a tensor", "NULL");
        acl::require(bool(acl::registry<aclTensor>().remove(tensor)), ACLNN_ERR_PARAM_INVALID, "tensor",
                     "come from aclCreateTensor and be destroyed once", "a pointer that is no tensor");
    });
}
}
