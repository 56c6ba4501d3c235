// Descriptions of tensors: made, destroyed, and what their strides reach.
#include "cann/tensor.h"

#include "cann/error.h"
#include "cann/handles.h"

#include <algorithm>
#include <iterator>

namespace acl {
namespace {

// More elements than any memory holds, yet few enough that sums of such numbers, in bytes, do not overflow.
constexpr int64_t MOST_ELEMENTS = int64_t(1) << 47;

Handles<aclTensor> &tensors() {
    static Handles<aclTensor> handles;
    return handles;
}

void read_axes(const char *name, const int64_t *numbers, uint64_t count, int64_t *to) {
    if (count > ACL_MOST_AXES)
        throw Refusal(ACL_ERROR_INVALID_PARAM, name, "be at most " + std::to_string(ACL_MOST_AXES), std::to_string(count));
    if (count && !numbers) throw Refusal(ACL_ERROR_INVALID_PARAM, name, "be 0 without numbers", std::to_string(count));
    std::copy_n(numbers, count, to);
}

void contiguous_strides(aclTensor &t) {
    int64_t stride = 1;
    for (int a = t.axes - 1; a >= 0; --a) {
        t.strides[a] = stride;
        if (__builtin_mul_overflow(stride, std::max<int64_t>(1, t.shape[a]), &stride)) stride = INT64_MAX;
    }
}

// Elements of a storage, and at most MOST_ELEMENTS; 0 when a size is 0 or negative.
int64_t storage_elements(const int64_t *shape, int axes) {
    int64_t count = 1;
    for (int a = 0; a < axes; ++a) {
        if (shape[a] <= 0) return 0;
        if (__builtin_mul_overflow(count, shape[a], &count)) count = MOST_ELEMENTS;
        count = std::min(count, MOST_ELEMENTS);
    }
    return count;
}

struct Dtype {
    aclDataType number;
    const char *name;
    int64_t bytes; // 0: operators do not take it
};

const Dtype *known_dtype(aclDataType dtype) {
    static const Dtype ALL[] = {{ACL_FLOAT, "ACL_FLOAT", 4}, {ACL_FLOAT16, "ACL_FLOAT16", 2}, {ACL_BF16, "ACL_BF16", 2},
                                {ACL_INT32, "ACL_INT32", 4}, {ACL_INT64, "ACL_INT64", 8},     {ACL_DOUBLE, "ACL_DOUBLE", 0},
                                {ACL_INT8, "ACL_INT8", 0},   {ACL_INT16, "ACL_INT16", 0},     {ACL_UINT8, "ACL_UINT8", 0},
                                {ACL_BOOL, "ACL_BOOL", 0}};
    const Dtype *found = std::find_if(ALL, std::end(ALL), [&](const Dtype &each) { return each.number == dtype; });
    return found == std::end(ALL) ? nullptr : found;
}

} // namespace

bool copy_tensor(const aclTensor *handle, aclTensor &to) { return tensors().copy(handle, to); }

int64_t element_size(aclDataType dtype) {
    const Dtype *known = known_dtype(dtype);
    return known ? known->bytes : 0;
}

std::string dtype_name(aclDataType dtype) {
    const Dtype *known = known_dtype(dtype);
    return known ? known->name : "aclDataType " + std::to_string(int(dtype));
}

bool empty(const aclTensor &t) { return std::count(t.shape, t.shape + t.axes, 0) > 0; }

bool extent(const aclTensor &t, int64_t &first, int64_t &last) {
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
        acl::contiguous_strides(*tensor);
        if (stride) std::copy_n(stride, viewDimsNum, tensor->strides);
        tensor->storage = acl::UNKNOWN_STORAGE;
        if (storageDims && storageDimsNum) {
            int64_t storage[ACL_MOST_AXES];
            acl::read_axes("storageDimsNum", storageDims, storageDimsNum, storage);
            tensor->storage = acl::storage_elements(storage, int(storageDimsNum));
        }
        tensor->offset = offset;
        tensor->dtype = dataType;
        tensor->format = format;
        tensor->data = tensorData;
        made = acl::tensors().add(std::move(tensor));
    });
    return made;
}

aclnnStatus aclDestroyTensor(const aclTensor *tensor) {
    return acl::guarded([&] {
        if (!tensor) throw acl::Refusal(ACLNN_ERR_PARAM_NULLPTR, "tensor", "be a tensor", "NULL");
        if (!acl::tensors().remove(tensor))
            throw acl::Refusal(ACLNN_ERR_PARAM_INVALID, "tensor", "come from aclCreateTensor and be destroyed once",
                               "a pointer that is no tensor");
    });
}
}
