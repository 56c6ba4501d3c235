// Decides from strides alone whether tensors overlap in memory.
#include "call/check.h"

#include <cstdlib>

namespace mxd {
namespace {

// The addresses of a tensor's first and last byte. The default extent is that of a tensor without elements; it meets no other
// extent.
struct Extent {
    int64_t first = INT64_MAX, last = INT64_MIN;

    bool exists() const { return first <= last; }
    bool meets(const Extent &other) const { return first <= other.last && other.first <= last; }
};

int64_t address_of(const TensorInfo &t) { return int64_t(reinterpret_cast<intptr_t>(t.data)); }

// Finds the addresses of a tensor's first and last byte. Returns false if these addresses do not fit in 64 bits.
bool find_extent(const TensorInfo &t, Extent &extent) {
    const int64_t element = element_size(t.dtype);
    int64_t first = address_of(t), last, length;
    if (t.side_by_side >= 0) {
        if (t.side_by_side > 0) extent = {first, first + t.side_by_side * element - 1};
        return true;
    }
    if (__builtin_add_overflow(first, element, &last)) return false;
    for (int a = 0; a < t.axes; ++a) {
        if (t.shape[a] == 0) return true;
        if (t.shape[a] == 1) continue;
        int64_t reach;
        if (__builtin_mul_overflow(t.strides[a], element, &reach) || __builtin_mul_overflow(reach, t.shape[a] - 1, &reach))
            return false;
        int64_t &end = reach < 0 ? first : last;
        if (__builtin_add_overflow(end, reach, &end)) return false;
    }
    extent = {first, last - 1};
    return !__builtin_sub_overflow(last, first, &length);
}

// All functions below require tensors with elements, for which find_extent returned true.

struct Step {
    int64_t bytes, count;
};

// The memory of a tensor, without axes of one element, and with positive strides.
struct Footprint {
    // first: the address of the first byte. element: the bytes of an element. length: the bytes from the first to the last.
    int64_t first, element, length;
    Step steps[MOST_AXES]; // in ascending order of bytes
    int axes = 0;

    explicit Footprint(const TensorInfo &t) : first(address_of(t)), element(element_size(t.dtype)), length(element) {
        for (int a = t.axes; a-- > 0;) { // in nearly every tensor, strides ascend in this order, and add() moves nothing
            if (t.shape[a] <= 1) continue;
            const int64_t bytes = t.strides[a] * element;
            first += std::min<int64_t>(bytes, 0) * (t.shape[a] - 1);
            add({std::abs(bytes), t.shape[a]});
        }
    }

    void add(const Step &step) {
        int at = axes++;
        for (; at > 0 && steps[at - 1].bytes > step.bytes; --at) steps[at] = steps[at - 1];
        steps[at] = step;
        length += step.bytes * (step.count - 1);
    }

    // Returns the footprint without the steps whose bytes are a multiple of the period.
    Footprint modulo(int64_t period) const {
        Footprint rest = *this;
        rest.axes = 0;
        rest.length = element;
        for (int a = 0; a < axes; ++a)
            if (steps[a].bytes % period) rest.add(steps[a]);
        return rest;
    }
};

// Returns whether the strides prove that no two elements share memory: in ascending order, each stride must be at least the
// bytes that the axes before it cover. Every slice and permutation of a contiguous tensor has such strides.
bool has_distinct_elements(const TensorInfo &t) {
    const Footprint all(t);
    int64_t covered = all.element;
    for (int a = 0; a < all.axes; ++a) {
        if (all.steps[a].bytes < covered) return false;
        covered += all.steps[a].bytes * (all.steps[a].count - 1);
    }
    return true;
}

// Returns whether the strides prove that two tensors share no memory, though their extents meet. They prove it for any two
// slices of a contiguous tensor that share no element.
bool lie_apart(const Footprint &a, const Footprint &b);

// Returns whether lie_apart holds if addresses are taken modulo a period. Returns false if a footprint is longer than the
// period. Compares the second footprint twice: at its place after the first, and one period earlier.
bool lie_apart_modulo(const Footprint &a, const Footprint &b, int64_t period) {
    int64_t ahead;
    if (period == 0 || __builtin_sub_overflow(b.first, a.first, &ahead)) return false;
    const Footprint one = a.modulo(period);
    Footprint other = b.modulo(period);
    if (one.length > period || other.length > period) return false;
    other.first = one.first + (ahead % period + period) % period;
    if (!lie_apart(one, other)) return false;
    other.first -= period;
    return lie_apart(one, other);
}

bool lie_apart(const Footprint &a, const Footprint &b) {
    if (a.first + a.length <= b.first || b.first + b.length <= a.first) return true;
    for (const Footprint *each : {&a, &b})
        for (int axis = 0; axis < each->axes; ++axis)
            if (lie_apart_modulo(a, b, each->steps[axis].bytes)) return true;
    return false;
}

} // namespace

Refusal check_memory(const Function &function, const TensorInfo *tensors) {
    const int all = function.arguments.count;
    Extent extents[MOST_ARGUMENTS];
    const auto strides = [&](int i) { return text_of(tensors[i].strides, size_t(tensors[i].axes)); };
    for (int i = 0; i < all; ++i) {
        if (!tensors[i].shape) continue;
        if (!find_extent(tensors[i], extents[i]))
            return {MXD_BAD_MEMORY, i, "lie in memory that has addresses", "strides " + strides(i)};
        if (!tensors[i].data && extents[i].exists()) return {MXD_BAD_MEMORY, i, "have memory for its elements", "NULL"};
    }
    for (int i = function.first_written; i < all; ++i) {
        if (!extents[i].exists()) continue;
        if (tensors[i].side_by_side < 0 && !has_distinct_elements(tensors[i]))
            return {MXD_BAD_MEMORY, i, "have strides that keep its elements apart", strides(i)};
        for (int other = 0; other < i; ++other)
            if (extents[i].meets(extents[other]) && !lie_apart(Footprint(tensors[i]), Footprint(tensors[other])))
                return {MXD_BAD_MEMORY, i, "share no memory with", "addresses that both have", other};
    }
    return {};
}

} // namespace mxd
