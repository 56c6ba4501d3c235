// The known answer of CANN's sample: one pixel of ones, looked at by 32 queries from its corner.
//
//     c++ -std=c++17 known_answer.cpp $(python -m mx_driving.config --cflags --libs) -o known_answer && ./known_answer
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"

namespace {

template <class T> constexpr aclDataType DTYPE = ACL_FLOAT;
template <> constexpr aclDataType DTYPE<int32_t> = ACL_INT32;

// Device memory with its aclTensor, filled with one number.
template <class T> class DeviceTensor {
  public:
    DeviceTensor(std::vector<int64_t> shape, T number) {
        const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<int64_t>());
        const std::vector<T> host(size_t(count), number);
        size_ = host.size() * sizeof(T);
        if (aclrtMalloc(&data_, size_, ACL_MEM_MALLOC_HUGE_FIRST) != ACL_SUCCESS) return;
        aclrtMemcpy(data_, size_, host.data(), size_, ACL_MEMCPY_HOST_TO_DEVICE);
        tensor_ =
            aclCreateTensor(shape.data(), shape.size(), DTYPE<T>, nullptr, 0, ACL_FORMAT_ND, shape.data(), shape.size(), data_);
    }
    ~DeviceTensor() {
        aclDestroyTensor(tensor_);
        aclrtFree(data_);
    }
    DeviceTensor(const DeviceTensor &) = delete;
    DeviceTensor &operator=(const DeviceTensor &) = delete;

    aclTensor *get() const { return tensor_; }
    std::vector<T> read() const {
        std::vector<T> host(size_ / sizeof(T));
        aclrtMemcpy(host.data(), size_, data_, size_, ACL_MEMCPY_DEVICE_TO_HOST);
        return host;
    }

  private:
    size_t size_ = 0;
    void *data_ = nullptr;
    aclTensor *tensor_ = nullptr;
};

bool all_are(const char *name, const std::vector<float> &numbers, float expected) {
    const bool right = std::all_of(numbers.begin(), numbers.end(), [&](float x) { return x == expected; });
    std::printf("%-14s = %g, %s\n", name, double(numbers[0]), right ? "as expected" : "WRONG");
    return right;
}

int fail(const char *what, int status) {
    const char *sentence = aclGetRecentErrMsg();
    std::fprintf(stderr, "%s: %d (%s)\n", what, status, sentence ? sentence : "no message");
    return 1;
}

int run(aclrtStream stream) {
    const DeviceTensor<float> value({1, 1, 1, 8}, 1), location({1, 32, 1, 1, 1, 2}, 0), weight({1, 32, 1, 1, 1}, 1);
    const DeviceTensor<float> gradOutput({1, 32, 8}, 1);
    const DeviceTensor<int32_t> shapes({1, 2}, 1), starts({1}, 0);
    const DeviceTensor<float> gradValue({1, 1, 1, 8}, -1), gradLocation({1, 32, 1, 1, 1, 2}, -1);
    const DeviceTensor<float> gradWeight({1, 32, 1, 1, 1}, -1);

    uint64_t size = 0;
    aclOpExecutor *executor = nullptr;
    aclnnStatus status = aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
        value.get(), shapes.get(), starts.get(), location.get(), weight.get(), gradOutput.get(), gradValue.get(),
        gradLocation.get(), gradWeight.get(), &size, &executor);
    if (status != ACLNN_SUCCESS) return fail("phase one", status);
    void *workspace = nullptr;
    if (size > 0 && aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST) != ACL_SUCCESS) return 1;
    status = aclnnMultiScaleDeformableAttentionGrad(workspace, size, executor, stream);
    if (status != ACLNN_SUCCESS) return fail("phase two", status);
    status = aclrtSynchronizeStream(stream);
    if (workspace) aclrtFree(workspace);
    if (status != ACL_SUCCESS) return fail("synchronise", status);

    const bool right = all_are("gradValue", gradValue.read(), 8) & all_are("gradLocation", gradLocation.read(), 4) &
                       all_are("gradAttnWeight", gradWeight.read(), 2);
    return right ? 0 : 1;
}

} // namespace

int main() {
    aclrtStream stream = nullptr;
    if (aclInit(nullptr) || aclrtSetDevice(0) || aclrtCreateStream(&stream)) return fail("start", 1);
    const int result = run(stream);
    return aclrtDestroyStream(stream) || aclrtResetDevice(0) || aclFinalize() ? 1 : result;
}
