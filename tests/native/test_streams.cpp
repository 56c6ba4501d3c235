// The two phases: a known answer, who owns what, what a stream remembers, and what may happen at once.
#include "problem.h"

#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"

#include <atomic>
#include <climits>
#include <cstring>
#include <string>
#include <thread>

namespace {

const Sizes SMALL{1, 4, 2, 8, 2, {{3, 4}, {2, 2}}};

bool last_message_is(const char *sentence) {
    const char *message = aclGetRecentErrMsg();
    const bool same = message && std::strcmp(message, sentence) == 0;
    if (!same) std::fprintf(stderr, "message: %s\n", message ? message : "none");
    return same;
}

} // namespace

// CANN's own example: one pixel of ones, which every sample reads a quarter of.
void known_answer() {
    Problem p({1, 32, 1, 8, 1, {{1, 1}}}, 0);
    for (View<float> *view : {&p.value, &p.weight, &p.grad_output}) view->fill(1);
    p.location.fill(0);
    p.run(nullptr);
    CHECK(p.output.count == 256 && p.output.all_are(0.25f));
    CHECK(p.grad_value.count == 8 && p.grad_value.all_are(8));
    CHECK(p.grad_location.count == 64 && p.grad_location.all_are(4));
    CHECK(p.grad_weight.count == 32 && p.grad_weight.all_are(2));
}

void handles() {
    CHECK(aclDestroyTensor(nullptr) == ACLNN_ERR_PARAM_NULLPTR);
    const int64_t two = 2;
    float data[2];
    aclTensor *tensor = aclCreateTensor(&two, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, &two, 1, data);
    CHECK(tensor && aclDestroyTensor(tensor) == ACL_SUCCESS);
    CHECK(aclDestroyTensor(tensor) == ACLNN_ERR_PARAM_INVALID);
    CHECK(last_message_is("tensor must come from aclCreateTensor and be destroyed once; got a pointer that is no tensor"));
    CHECK(!aclGetRecentErrMsg());
    const int64_t many[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    CHECK(!aclCreateTensor(many, 9, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, many, 1, data));
    CHECK(last_message_is("viewDimsNum must be at most 8; got 9"));
    CHECK(!aclCreateTensor(nullptr, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, many, 1, data));

    Problem p(SMALL, 1);
    View<float> gone({1, 4, 2, 8});
    uint64_t bytes = 99;
    aclOpExecutor *executor = nullptr;
    aclTensor *kept = gone.handle;
    CHECK(aclDestroyTensor(kept) == ACL_SUCCESS);
    CHECK(aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
              p.value.handle, p.shapes.handle, p.starts.handle, p.location.handle, p.weight.handle, kept, p.grad_value.handle,
              p.grad_location.handle, p.grad_weight.handle, &bytes, &executor) == ACLNN_ERR_PARAM_INVALID);
    CHECK(bytes == 99 && !executor);
    gone.handle = aclCreateTensor(&two, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, &two, 1, data);

    void *memory = nullptr;
    CHECK(aclrtMalloc(&memory, 0, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtMalloc(nullptr, 8, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtMalloc(&memory, SIZE_MAX / 2, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_BAD_ALLOC);
    CHECK(aclrtMalloc(&memory, 8, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
    CHECK(reinterpret_cast<uintptr_t>(memory) % 64 == 0);
    CHECK(aclrtMemcpy(memory, 8, "12345678", 9, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_ERROR_INVALID_PARAM);
    CHECK(last_message_is("count must be at most destMax; got 9 for 8"));
    CHECK(aclrtMemcpy(memory, 8, "12345678", 8, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
    CHECK(std::memcmp(memory, "12345678", 8) == 0);
    CHECK(aclrtMemcpy(memory, 8, nullptr, 8, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtFree(memory) == ACL_SUCCESS);
    CHECK(aclrtFree(nullptr) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1) == ACL_SUCCESS);
    CHECK(aclrtSetSysParamOpt(aclSysParamOpt(12345), 1) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtSetDevice(-1) == ACL_ERROR_INVALID_PARAM && aclrtSetDevice(7) == ACL_SUCCESS);
}

// A program may pass any number as an enumeration. One that names nothing is refused, and a sanitizer finds no mistake.
void any_number() {
    Problem p(SMALL, 1);
    const int64_t shape[] = {1, 16, 2, 8};
    float data[1 * 16 * 2 * 8];
    const auto refused = [&](int dtype, int format, const std::string &sentence) {
        aclTensor *value = aclCreateTensor(shape, 4, aclDataType(dtype), nullptr, 0, aclFormat(format), shape, 4, data);
        uint64_t bytes = 0;
        aclOpExecutor *executor = nullptr;
        CHECK(aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(value, p.shapes.handle, p.starts.handle, p.location.handle,
                                                                    p.weight.handle, p.output.handle, &bytes,
                                                                    &executor) == ACLNN_ERR_PARAM_INVALID);
        CHECK(last_message_is(sentence.c_str()));
        CHECK(aclDestroyTensor(value) == ACL_SUCCESS);
    };
    for (int number : {-2, 64, 12345, INT_MAX, INT_MIN}) {
        const std::string text = std::to_string(number);
        refused(number, ACL_FORMAT_ND, "value must have dtype ACL_FLOAT, ACL_FLOAT16 or ACL_BF16; got aclDataType " + text);
        refused(ACL_FLOAT, number, "value must have format ACL_FORMAT_ND (2); got " + text);
    }
    void *memory = nullptr;
    const aclError status = aclrtMalloc(&memory, 8, aclrtMemMallocPolicy(12345));
    CHECK(status == ACL_SUCCESS && aclrtFree(memory) == ACL_SUCCESS);
}

void executors() {
    Problem p(SMALL, 2);
    uint64_t bytes;
    aclOpExecutor *executor;
    const auto backward = aclnnMultiScaleDeformableAttentionGrad;
    CHECK(p.plan(&bytes, &executor) == ACLNN_SUCCESS && bytes > 0);
    Workspace workspace(bytes);
    char *memory = workspace.data();

    CHECK(aclDestroyAclOpExecutor(executor) == ACLNN_SUCCESS); // never gets to phase two
    CHECK(aclDestroyAclOpExecutor(executor) == ACLNN_ERR_PARAM_INVALID);
    CHECK(aclDestroyAclOpExecutor(nullptr) == ACLNN_ERR_PARAM_NULLPTR);
    CHECK(backward(memory, bytes, executor, nullptr) == ACLNN_ERR_PARAM_INVALID);
    CHECK(last_message_is("executor must come from phase one and be run once; got a pointer that is no executor"));
    CHECK(backward(memory, bytes, nullptr, nullptr) == ACLNN_ERR_PARAM_NULLPTR);

    // CANN's phase two destroys an executor that is not repeatable, also if it refuses the call: programs never destroy such
    // executors, so they would leak. A repeatable executor can run after a refused call.
    const auto refuses = [&](const auto &call, aclnnStatus status, const char *message) {
        for (bool repeatable : {false, true}) {
            CHECK(p.plan(&bytes, &executor) == ACLNN_SUCCESS);
            CHECK(!repeatable || aclSetAclOpExecutorRepeatable(executor) == ACLNN_SUCCESS);
            CHECK(call() == status && last_message_is(message));
            CHECK(backward(memory, bytes, executor, nullptr) == (repeatable ? ACLNN_SUCCESS : ACLNN_ERR_PARAM_INVALID));
            CHECK(repeatable ||
                  last_message_is("executor must come from phase one and be run once; got a pointer that is no executor"));
            CHECK(aclDestroyAclOpExecutor(executor) == (repeatable ? ACLNN_SUCCESS : ACLNN_ERR_PARAM_INVALID));
        }
    };
    refuses([&] { return backward(nullptr, bytes, executor, nullptr); }, ACLNN_ERR_PARAM_NULLPTR,
            "workspace must be memory; got NULL");
    refuses([&] { return backward(memory, bytes - 1, executor, nullptr); }, ACLNN_ERR_PARAM_INVALID,
            "workspaceSize must be at least 48; got 47");
    refuses([&] { return backward(memory + 1, bytes, executor, nullptr); }, ACLNN_ERR_PARAM_INVALID,
            "workspace must be aligned to 8 bytes; got an address that is not");
    refuses([&] { return aclnnMultiScaleDeformableAttnFunction(memory, bytes, executor, nullptr); }, ACLNN_ERR_PARAM_INVALID,
            "executor must come from this operator's phase one; got another operator's");
    refuses([&] { return backward(memory, bytes, executor, memory); }, ACLNN_ERR_PARAM_INVALID,
            "stream must come from aclrtCreateStream and not be destroyed; got a pointer that is no stream");

    CHECK(p.plan(&bytes, &executor) == ACLNN_SUCCESS);
    CHECK(aclSetAclOpExecutorRepeatable(executor) == ACLNN_SUCCESS);
    for (int i = 0; i < 3; ++i) CHECK(backward(memory, bytes, executor, nullptr) == ACLNN_SUCCESS);
    CHECK(aclrtSynchronizeStream(nullptr) == ACL_SUCCESS);
    CHECK(aclDestroyAclOpExecutor(executor) == ACLNN_SUCCESS);
    CHECK(aclSetAclOpExecutorRepeatable(executor) == ACLNN_ERR_PARAM_INVALID);
}

void streams() {
    CHECK(aclrtCreateStream(nullptr) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtDestroyStream(nullptr) == ACL_ERROR_INVALID_PARAM);
    aclrtStream first, second;
    CHECK(aclrtCreateStream(&first) == ACL_SUCCESS && aclrtCreateStream(&second) == ACL_SUCCESS);

    Problem p(SMALL, 3);
    uint64_t bytes;
    aclOpExecutor *executor;
    // An error stays with its stream and is returned once: by a synchronise, or when the stream is destroyed.
    p.starts.data[1] = 1000;
    CHECK(p.plan(&bytes, &executor) == ACLNN_SUCCESS);
    Workspace workspace(bytes);
    CHECK(aclnnMultiScaleDeformableAttentionGrad(workspace.data(), bytes, executor, first) == ACLNN_SUCCESS);
    CHECK(aclrtSynchronizeStream(second) == ACL_SUCCESS);
    CHECK(aclrtDestroyStream(first) == ACL_ERROR_RT_AICORE_EXCEPTION);
    CHECK(aclrtSynchronizeStream(first) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtDestroyStream(first) == ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtDestroyStream(second) == ACL_SUCCESS);
}

void many_threads() {
    std::vector<std::thread> threads;
    aclrtStream shared;
    CHECK(aclrtCreateStream(&shared) == ACL_SUCCESS);
    for (unsigned t = 0; t < 6; ++t)
        threads.emplace_back([t, shared] {
            for (unsigned round = 0; round < 6; ++round) {
                Problem p(SMALL, 100 * t + round), alone(SMALL, 100 * t + round);
                aclrtStream own;
                CHECK(aclrtCreateStream(&own) == ACL_SUCCESS);
                p.run(round % 3 == 0 ? shared : round % 3 == 1 ? own : nullptr);
                alone.run(own);
                CHECK(p.results() == alone.results());
                CHECK(aclrtDestroyStream(own) == ACL_SUCCESS);
            }
        });
    for (std::thread &thread : threads) thread.join();
    CHECK(aclrtDestroyStream(shared) == ACL_SUCCESS);

    // A stream runs one task after the other: a repeatable executor has one workspace.
    Problem again(SMALL, 8), once(SMALL, 8);
    uint64_t size;
    aclOpExecutor *repeatable;
    CHECK(again.plan(&size, &repeatable) == ACLNN_SUCCESS && aclSetAclOpExecutorRepeatable(repeatable) == ACLNN_SUCCESS);
    Workspace of_all(size);
    threads.clear();
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&] {
            for (int i = 0; i < 10; ++i)
                CHECK(aclnnMultiScaleDeformableAttentionGrad(of_all.data(), size, repeatable, nullptr) == ACLNN_SUCCESS);
        });
    for (std::thread &thread : threads) thread.join();
    once.run(nullptr);
    CHECK(again.grad_value.numbers() == once.grad_value.numbers() && aclDestroyAclOpExecutor(repeatable) == ACLNN_SUCCESS);

    // Many threads run the same executor: one of them may.
    Problem p(SMALL, 9);
    uint64_t bytes;
    aclOpExecutor *executor;
    CHECK(p.plan(&bytes, &executor) == ACLNN_SUCCESS);
    Workspace workspace(bytes);
    std::atomic<int> taken(0);
    threads.clear();
    for (int t = 0; t < 4; ++t)
        threads.emplace_back(
            [&] { taken += aclnnMultiScaleDeformableAttentionGrad(workspace.data(), bytes, executor, nullptr) == 0; });
    for (std::thread &thread : threads) thread.join();
    CHECK(taken == 1);
    CHECK(aclrtSynchronizeStream(nullptr) == ACL_SUCCESS);
}
