// Where the elements of a tensor lie in memory, and whether tensors share any of it.
#pragma once

#include <cstdint>

namespace mxd {

// An axis of one element may have any stride.
struct View {
    const void *data;
    int64_t element;                // bytes
    int axes;                       // at most MOST_AXES
    const int64_t *shape, *strides; // in elements

    static constexpr int MOST_AXES = 8;
};

// Addresses of a view's first and last byte; of one without elements, none that meets another.
struct Extent {
    int64_t first = INT64_MAX, last = INT64_MIN;

    Extent() = default;
    Extent(const void *data, int64_t bytes) : first(int64_t(reinterpret_cast<intptr_t>(data))), last(first + bytes - 1) {}
    bool exists() const { return first <= last; }
    bool meets(const Extent &other) const { return first <= other.last && other.first <= last; }
};

// False: memory has no such addresses.
bool find_extent(const View &view, Extent &extent);

// Below, views have elements and extents.

// Whether the strides alone prove that no two elements share memory: from the smallest stride to the largest, each axis
// must step over everything that the axes before it cover. True for every slice and permutation of a contiguous tensor.
bool has_distinct_elements(const View &view);

// Whether the strides alone prove that two views share no memory, though their extents meet. True for every two slices
// of a contiguous tensor that share no element.
bool lie_apart(const View &a, const View &b);

} // namespace mxd
