// Overlap of strided views, by their strides alone.
#include "call/memory.h"

#include <algorithm>
#include <cstdlib>

namespace mxd {
namespace {

struct Step {
    int64_t bytes, count;
};

// A view whose axes of one element are left out, and whose strides are made positive.
struct Footprint {
    int64_t first, element, length; // bytes; `length` of them from the first to the last
    Step steps[View::MOST_AXES];    // the smallest first
    int axes = 0;

    explicit Footprint(const View &v)
        : first(int64_t(reinterpret_cast<intptr_t>(v.data))), element(v.element), length(v.element) {
        for (int a = v.axes; a-- > 0;) { // of contiguous tensors the last axis has the smallest stride
            if (v.shape[a] <= 1) continue;
            const int64_t bytes = v.strides[a] * element;
            first += std::min<int64_t>(bytes, 0) * (v.shape[a] - 1);
            add({std::abs(bytes), v.shape[a]});
        }
    }

    void add(const Step &step) {
        int place = axes++;
        for (; place > 0 && steps[place - 1].bytes > step.bytes; --place) steps[place] = steps[place - 1];
        steps[place] = step;
        length += step.bytes * (step.count - 1);
    }

    // Without the steps that come back to the same place modulo a period.
    Footprint modulo(int64_t period) const {
        Footprint rest = *this;
        rest.axes = 0;
        rest.length = element;
        for (int a = 0; a < axes; ++a)
            if (steps[a].bytes % period) rest.add(steps[a]);
        return rest;
    }
};

bool lie_apart(const Footprint &a, const Footprint &b);

// Addresses modulo a period that both fit into: the second has two places beside the first.
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

bool find_extent(const View &v, Extent &extent) {
    int64_t first = int64_t(reinterpret_cast<intptr_t>(v.data)), last, length;
    if (__builtin_add_overflow(first, v.element, &last)) return false;
    for (int a = 0; a < v.axes; ++a) {
        if (v.shape[a] == 0) return extent = Extent(), true;
        if (v.shape[a] == 1) continue;
        int64_t reach;
        if (__builtin_mul_overflow(v.strides[a], v.element, &reach) || __builtin_mul_overflow(reach, v.shape[a] - 1, &reach))
            return false;
        int64_t &end = reach < 0 ? first : last;
        if (__builtin_add_overflow(end, reach, &end)) return false;
    }
    extent.first = first;
    extent.last = last - 1;
    return !__builtin_sub_overflow(last, first, &length);
}

bool has_distinct_elements(const View &view) {
    const Footprint all(view);
    int64_t covered = all.element;
    for (int a = 0; a < all.axes; ++a) {
        if (all.steps[a].bytes < covered) return false;
        covered += all.steps[a].bytes * (all.steps[a].count - 1);
    }
    return true;
}

bool lie_apart(const View &a, const View &b) { return lie_apart(Footprint(a), Footprint(b)); }

} // namespace mxd
