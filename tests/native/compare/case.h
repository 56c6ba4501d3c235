// The sizes of one comparison. A number names it: the same number is the same case, inputs and all, on every machine.
#pragma once

#include "tensor.h"

#include <cstdint>
#include <string>
#include <vector>

namespace compare {

enum Operator { MULTI_SCALE, MULTI_SCALE_LOGITS, AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS };
const char *name_of(Operator op);

struct Level {
    int64_t height, width, start;
};

struct Case {
    int64_t number;
    Operator op;
    Dtype dtype;
    bool mixed;          // some tensors have other dtypes
    bool strided;        // some tensors are not contiguous
    bool snapped;        // locations are multiples of a binary fraction, many of them just on a border
    bool special_places; // some locations and weights are NaN, infinite, huge or tiny
    bool special_values; // so are some elements of value
    int64_t bs, queries, heads, channels, num_levels, points;
    int64_t cameras, groups; // of aggregation, else 1
    std::vector<Level> levels;
    int64_t keys;
    unsigned wanted; // gradients, a bit for each
    int threads;

    bool aggregates() const { return op == AGGREGATION || op == AGGREGATION_LOGITS; }
    bool from_logits() const { return op == MULTI_SCALE_LOGITS || op == AGGREGATION_LOGITS || op == GEOMETRIC_LOGITS; }
};

// Numbers from 0 are drawn; -1 to -KNOWN are cases that were once wrong.
constexpr int64_t KNOWN = 5;
Case case_of(int64_t number, Random &random);
std::string text_of(const Case &c);

} // namespace compare
