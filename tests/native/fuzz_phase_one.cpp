// Phase one of both operators with anything at all in its tensors: a status each time, and nothing written unless it is
// success. What phase one accepts is run, with any index tables, in memory of exactly the declared size.
//
// An input describes a sound call and then a few changes to it. LLVMFuzzerTestOneInput is libFuzzer's entry; without
// clang, fuzz_main.cpp calls it with random bytes.
#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"
#include "check.h"

#include <cstring>
#include <vector>

namespace {

constexpr int TENSORS = 9, MOST_AXES = 9;
constexpr uint64_t MOST_WORKSPACE = 1 << 20;

class Bytes {
  public:
    Bytes(const uint8_t *data, size_t size) : next(data), end(data + size) {}
    bool more() const { return next != end; }
    uint8_t byte() { return more() ? *next++ : 0; }
    int64_t below(int64_t limit) { return byte() % limit; }
    // Small, on an edge, or any 64 bits.
    int64_t number() {
        static const int64_t EDGES[] = {
            0,      1,         -1,        2,         8,         16,        17,        256,       264,          499999,
            500000, INT32_MAX, 1LL << 31, 1LL << 32, 1LL << 47, 1LL << 62, INT64_MAX, INT64_MIN, INT64_MIN + 1};
        switch (below(3)) {
        case 0: return int8_t(byte());
        case 1: return EDGES[below(sizeof(EDGES) / sizeof(EDGES[0]))];
        default: {
            uint64_t bits = 0;
            for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
            return int64_t(bits);
        }
        }
    }

  private:
    const uint8_t *next, *end;
};

struct Description {
    uint64_t axes = 0, storage_axes = 1;
    int64_t shape[MOST_AXES] = {}, strides[MOST_AXES] = {}, offset = 0, storage[1] = {};
    int dtype = ACL_FLOAT, format = ACL_FORMAT_ND;
    bool null = false, no_memory = false, no_strides = false, misaligned = false, honest = true;
    std::vector<char> memory;

    size_t element() const { return dtype == ACL_INT64 ? 8 : dtype == ACL_FLOAT || dtype == ACL_INT32 ? 4 : 2; }

    void set_shape(std::initializer_list<int64_t> sizes) {
        for (int64_t size : sizes) shape[axes++] = size;
        storage[0] = 1;
        for (uint64_t a = axes; a-- > 0; storage[0] *= shape[a]) strides[a] = storage[0];
        storage[0] += 3;
    }
    void allocate() { memory.assign(size_t(storage[0]) * 8 + 8, 0); }
    void fill(Bytes &bytes) {
        for (size_t i = 0; i < memory.size() && bytes.more(); ++i) memory[i] = char(bytes.byte());
    }
    // Shrinks memory to what is declared, so that a sanitizer sees an access beyond it.
    void settle() {
        const bool small = storage_axes && storage[0] >= 0 && size_t(storage[0]) <= memory.size() / element();
        honest = small && !misaligned;
        if (honest) std::vector<char>(memory.begin(), memory.begin() + storage[0] * int64_t(element())).swap(memory);
    }
    aclTensor *create() {
        if (null) return nullptr;
        char *data = no_memory ? nullptr : memory.data() + misaligned;
        return aclCreateTensor(shape, axes, aclDataType(dtype), no_strides ? nullptr : strides, offset, aclFormat(format),
                               storage, storage_axes, data);
    }
    void change(Bytes &bytes) {
        switch (bytes.below(12)) {
        case 0:
        case 1: shape[bytes.below(MOST_AXES)] = bytes.number(); break;
        case 2:
        case 3:
        case 4: strides[bytes.below(MOST_AXES)] = bytes.number(); break;
        case 5: offset = bytes.number(); break;
        case 6: dtype = int(bytes.below(2) ? bytes.below(42) - 1 : bytes.number()); break;
        case 7: format = int(bytes.below(2) ? bytes.below(49) - 1 : bytes.number()); break;
        case 8: axes = bytes.below(2) ? uint64_t(bytes.below(MOST_AXES + 1)) : uint64_t(bytes.number()) | 16; break;
        case 9:
            storage[0] = bytes.number();
            storage_axes = uint64_t(bytes.below(2));
            break;
        case 10: std::swap(strides[bytes.below(MOST_AXES)], strides[bytes.below(MOST_AXES)]); break;
        default: {
            bool *flags[] = {&null, &no_memory, &no_strides, &misaligned};
            *flags[bytes.below(4)] = true;
        }
        }
    }
};

// The gradient's nine arguments in order. The forward takes the first five, and the sixth as its output.
std::vector<Description> sound_call(Bytes &bytes, bool backward) {
    static const int DTYPES[] = {ACL_FLOAT, ACL_FLOAT16, ACL_BF16};
    const int64_t bs = bytes.below(3), queries = 1 + bytes.below(3), heads = 1 + bytes.below(2),
                  channels = 8 * (1 + bytes.below(3)), levels = 1 + bytes.below(3), points = 1 + bytes.below(3),
                  keys = 1 + bytes.below(20);
    std::vector<Description> d(TENSORS);
    const int dtype = DTYPES[bytes.below(3)];
    for (Description &each : d) each.dtype = dtype;
    d[1].dtype = bytes.below(2) ? ACL_INT32 : ACL_INT64;
    d[2].dtype = bytes.below(2) ? ACL_INT32 : ACL_INT64;
    for (int i : {0, 6}) d[size_t(i)].set_shape({bs, keys, heads, channels});
    d[1].set_shape({levels, 2});
    d[2].set_shape({levels});
    for (int i : {3, 7}) d[size_t(i)].set_shape({bs, queries, heads, levels, points, 2});
    for (int i : {4, 8}) d[size_t(i)].set_shape({bs, queries, heads, levels, points});
    if (backward && bytes.below(2))
        d[5].set_shape({bs, queries, heads, channels});
    else
        d[5].set_shape({bs, queries, heads * channels});
    return d;
}

void put(Description &index, int64_t place, int64_t number) {
    const int32_t narrow = int32_t(number);
    const bool wide = index.dtype == ACL_INT64;
    std::memcpy(index.memory.data() + size_t(place) * index.element(), wide ? static_cast<const void *>(&number) : &narrow,
                index.element());
}

// Levels of one pixel, which fit in any num_keys.
void put_small_levels(Description &shapes, Description &starts) {
    for (int64_t l = 0; l < starts.shape[0]; ++l) {
        put(shapes, 2 * l, 1);
        put(shapes, 2 * l + 1, 1);
        put(starts, l, 0);
    }
}

aclnnStatus phase_one(bool backward, aclTensor **t, uint64_t *size, aclOpExecutor **executor) {
    return backward ? aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7],
                                                                             t[8], size, executor)
                    : aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], size, executor);
}

void run_phase_two(bool backward, uint64_t size, aclOpExecutor *executor) {
    std::vector<char> workspace(size);
    const auto phase_two = backward ? aclnnMultiScaleDeformableAttentionGrad : aclnnMultiScaleDeformableAttnFunction;
    CHECK(phase_two(workspace.data(), size, executor, nullptr) == ACLNN_SUCCESS);
    const aclError status = aclrtSynchronizeStream(nullptr);
    CHECK(status == ACL_SUCCESS || status == ACL_ERROR_RT_AICORE_EXCEPTION || status == ACL_ERROR_BAD_ALLOC);
}

} // namespace

// Inputs that phase one accepted, and that were run.
extern "C" {
uint64_t fuzz_accepted = 0, fuzz_run = 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
    Bytes bytes(data, length);
    const bool backward = bytes.below(2);
    std::vector<Description> d = sound_call(bytes, backward);
    for (Description &each : d) each.allocate();
    const bool any_levels = bytes.below(4) == 0;
    if (!any_levels) put_small_levels(d[1], d[2]);
    for (int64_t changes = bytes.below(4); changes > 0; --changes) d[size_t(bytes.below(backward ? TENSORS : 6))].change(bytes);
    aclTensor *tensors[TENSORS];
    bool honest = true;
    for (int i = 0; i < TENSORS; ++i) {
        Description &each = d[size_t(i)];
        if (any_levels || (i != 1 && i != 2)) each.fill(bytes);
        each.settle();
        honest = honest && each.honest;
        tensors[i] = each.create();
    }
    const uint64_t untouched = 0x1234;
    uint64_t size = untouched;
    aclOpExecutor *executor = nullptr;
    const aclnnStatus status = phase_one(backward, tensors, &size, &executor);
    for (aclTensor *tensor : tensors)
        if (tensor) CHECK(aclDestroyTensor(tensor) == ACL_SUCCESS);
    if (status == ACLNN_SUCCESS) {
        ++fuzz_accepted;
        CHECK(executor);
        if (honest && size <= MOST_WORKSPACE) {
            ++fuzz_run;
            run_phase_two(backward, size, executor);
        } else
            CHECK(aclDestroyAclOpExecutor(executor) == ACLNN_SUCCESS);
    } else {
        CHECK(status == ACLNN_ERR_PARAM_NULLPTR || status == ACLNN_ERR_PARAM_INVALID);
        CHECK(size == untouched && !executor);
        CHECK(aclGetRecentErrMsg());
    }
    return 0;
}
