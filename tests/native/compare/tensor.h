// A tensor of any layout between two pages that nobody may touch: it ends at the second of them, or begins at the first.
#pragma once

#include "mx_driving.h"
#include "numbers.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>
#ifdef _WIN32
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace compare {

class GuardedMemory {
  public:
    static constexpr char CANARY = 0x5a;

    GuardedMemory(size_t wanted, bool at_end)
        : bytes(wanted), pages(std::max<size_t>(1, (wanted + PAGE - 1) / PAGE) * PAGE), mapped(map(pages + 2 * PAGE)),
          contents(mapped + PAGE + (at_end ? pages - bytes : 0)) {
        protect(mapped, PAGE, false);
        protect(mapped + PAGE + pages, PAGE, false);
        std::fill_n(mapped + PAGE, pages, CANARY);
    }
    GuardedMemory(const GuardedMemory &) = delete;

    char *data() const { return contents; }
    size_t size() const { return bytes; }
    void forbid_writing() { protect(mapped + PAGE, pages, true); }
    // Whether the bytes between the contents and the other guard page are untouched.
    bool rest_intact() const {
        const auto canary = [](char byte) { return byte == CANARY; };
        return std::all_of(mapped + PAGE, contents, canary) && std::all_of(contents + bytes, mapped + PAGE + pages, canary);
    }

  private:
    static constexpr size_t PAGE = 16384; // a multiple of every system's own: 16 KiB on Macs

    static void must(bool holds) {
        if (holds) return;
        std::fprintf(stderr, "compare: the system gives no memory\n");
        std::exit(3);
    }
#ifdef _WIN32
    static char *map(size_t bytes) {
        void *memory = VirtualAlloc(nullptr, bytes, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
        must(memory);
        return static_cast<char *>(memory);
    }
    static void protect(char *from, size_t bytes, bool readable) {
        DWORD before;
        must(VirtualProtect(from, bytes, readable ? PAGE_READONLY : PAGE_NOACCESS, &before));
    }

  public:
    ~GuardedMemory() { VirtualFree(mapped, 0, MEM_RELEASE); }
#else
    static char *map(size_t bytes) {
        void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        must(memory != MAP_FAILED);
        return static_cast<char *>(memory);
    }
    static void protect(char *from, size_t bytes, bool readable) {
        must(mprotect(from, bytes, readable ? PROT_READ : PROT_NONE) == 0);
    }

  public:
    ~GuardedMemory() { munmap(mapped, pages + 2 * PAGE); }
#endif

  private:
    const size_t bytes, pages; // pages: bytes of whole pages between the guards
    char *const mapped, *const contents;
};

using Dtype = mxd_dtype;
inline const char *name_of(Dtype dtype) {
    switch (dtype) {
    case MXD_FLOAT32: return "float32";
    case MXD_FLOAT64: return "float64";
    case MXD_FLOAT16: return "float16";
    case MXD_BFLOAT16: return "bfloat16";
    case MXD_INT32: return "int32";
    default: return "int64";
    }
}

enum class Layout {
    CONTIGUOUS,
    LAST_AXIS_STAYS, // the others are permuted
    ANY,             // all axes are permuted, and perhaps every other element is left out
    EXPANDED         // contiguous, but one axis, not the last, repeats the same elements; for inputs
};

class Tensor {
  public:
    Tensor(Dtype type, std::vector<int64_t> dims, Layout layout, Random &random)
        : dtype(type), shape(std::move(dims)), strides(draw_strides(shape, layout, random)),
          memory(elements() * element_bytes(), !random.one_in(8)) {}

    const Dtype dtype;
    const std::vector<int64_t> shape;

    int64_t count() const { return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>()); }

    // `flat`: the place of an element in a contiguous tensor of this shape.
    double get(int64_t flat) const {
        const char *from = at(flat);
        switch (dtype) {
        case MXD_FLOAT32: return load<float>(from);
        case MXD_FLOAT64: return load<double>(from);
        case MXD_FLOAT16: return from_float16(load<uint16_t>(from));
        case MXD_BFLOAT16: return from_bfloat16(load<uint16_t>(from));
        case MXD_INT32: return load<int32_t>(from);
        default: return double(load<int64_t>(from));
        }
    }
    void set(int64_t flat, double number) {
        char *to = at(flat);
        switch (dtype) {
        case MXD_FLOAT32: return store(to, float(number));
        case MXD_FLOAT64: return store(to, number);
        case MXD_FLOAT16: return store(to, to_float16(number));
        case MXD_BFLOAT16: return store(to, to_bfloat16(float(number)));
        case MXD_INT32: return store(to, to_integer<int32_t>(number));
        default: return store(to, to_integer<int64_t>(number));
        }
    }
    void fill(double from, double to, Random &random) {
        for (int64_t i = 0; i < count(); ++i) set(i, random.between(from, to));
    }
    void clear() { std::fill_n(memory.data(), memory.size(), GuardedMemory::CANARY); } // every byte as at first
    void forbid_writing() { memory.forbid_writing(); }

    mxd_tensor described() const {
        mxd_tensor t{memory.data(), dtype, {}, {}};
        std::copy(shape.begin(), shape.end(), t.shape);
        std::copy(strides.begin(), strides.end(), t.strides);
        return t;
    }
    // Whether no byte beside the elements was written.
    bool gaps_intact() const {
        std::vector<char> mine(memory.size(), 0);
        for (int64_t i = 0; i < count(); ++i) std::fill_n(mine.begin() + (at(i) - memory.data()), element_bytes(), 1);
        for (size_t byte = 0; byte < mine.size(); ++byte)
            if (!mine[byte] && memory.data()[byte] != GuardedMemory::CANARY) return false;
        return memory.rest_intact();
    }

  private:
    const std::vector<int64_t> strides;
    GuardedMemory memory;

    size_t element_bytes() const {
        if (dtype == MXD_FLOAT64 || dtype == MXD_INT64) return 8;
        return dtype == MXD_FLOAT32 || dtype == MXD_INT32 ? 4 : 2;
    }
    char *at(int64_t flat) const {
        int64_t place = 0;
        for (size_t axis = shape.size(); axis-- > 0; flat /= shape[axis]) place += flat % shape[axis] * strides[axis];
        return memory.data() + place * int64_t(element_bytes());
    }
    size_t elements() const {
        int64_t last = 0;
        for (size_t axis = 0; axis < shape.size(); ++axis) last += (shape[axis] - 1) * strides[axis];
        return count() ? size_t(last) + 1 : 0;
    }
    static std::vector<int64_t> draw_strides(const std::vector<int64_t> &shape, Layout layout, Random &random) {
        std::vector<size_t> order(shape.size()); // of the axes in memory, the innermost last
        std::iota(order.begin(), order.end(), 0);
        const bool permuted = layout == Layout::ANY || layout == Layout::LAST_AXIS_STAYS;
        size_t left = permuted ? shape.size() - (layout == Layout::LAST_AXIS_STAYS) : 0;
        for (; left > 1; --left) std::swap(order[left - 1], order[size_t(random.below(int64_t(left)))]);
        const int64_t repeated = layout == Layout::EXPANDED ? random.below(int64_t(shape.size()) - 1) : -1;
        int64_t stride = layout == Layout::ANY ? 1 + random.below(2) : 1;
        std::vector<int64_t> strides(shape.size());
        for (size_t i = order.size(); i-- > 0;) {
            const bool repeats = int64_t(order[i]) == repeated;
            strides[order[i]] = repeats ? 0 : stride;
            stride *= repeats ? 1 : shape[order[i]];
        }
        return strides;
    }
};

} // namespace compare
