// A tensor of any layout in guarded memory.
#pragma once

#include "memory.h"
#include "mx_driving.h"
#include "random.h"

#include <cstdint>
#include <vector>

namespace compare {

using Dtype = mxd_dtype;
const char *name_of(Dtype dtype);

enum class Layout {
    CONTIGUOUS,
    LAST_AXIS_STAYS, // the others are permuted
    ANY,             // all axes are permuted, and perhaps every other element is left out
    EXPANDED         // contiguous, but one axis, not the last, repeats the same elements; for inputs
};

class Tensor {
  public:
    Tensor(Dtype dtype, std::vector<int64_t> shape, Layout layout, Random &random);

    const Dtype dtype;
    const std::vector<int64_t> shape;

    int64_t count() const;
    double get(int64_t flat) const; // flat: place in a contiguous tensor of this shape
    void set(int64_t flat, double number);
    void fill(double from, double to, Random &random);
    mxd_tensor described() const;
    void clear(); // every byte as at first
    void forbid_writing() { memory.forbid_writing(); }
    // All that is not an element holds what it was filled with.
    bool gaps_intact() const;

  private:
    const std::vector<int64_t> strides;
    GuardedMemory memory;

    char *at(int64_t flat) const;
    size_t elements() const;
};

} // namespace compare
