// The sizes of one comparison. A number names it: the same number is the same case, inputs and all, on every machine.
#pragma once

#include "tensor.h"

#include <string>
#include <vector>

namespace compare {

enum Operator { MULTI_SCALE, MULTI_SCALE_LOGITS, AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS };
inline const char *name_of(Operator op) {
    static const char *const NAMES[] = {"multi_scale_deformable_attn", "multi_scale_deformable_attn_with_logits",
                                        "deformable_aggregation",      "deformable_aggregation_with_logits",
                                        "geometric_kernel_attention",  "geometric_kernel_attention_with_logits"};
    return NAMES[op];
}

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
constexpr unsigned ALL_GRADIENTS = ~0u;

// Rows of one vector and less, just beside the widths of vectors, and what models have.
inline int64_t draw_channels(Random &random) {
    return random.pick<int64_t>({1,  2,  3,  4,  5,  7,  8,  9,  12, 13, 15, 16, 17,  20,  24,  26,  31,  32,
                                 32, 32, 33, 40, 48, 56, 63, 64, 64, 65, 96, 99, 100, 128, 160, 200, 256, 300});
}

inline int64_t work(const Case &c) {
    return c.bs * c.queries * c.heads * c.cameras * c.num_levels * c.points * (c.channels + 12);
}

// Halves the largest of the sizes until the work is less than `most`.
inline void shrink(Case &c, std::initializer_list<int64_t *> sizes, int64_t most) {
    const auto less = [](const int64_t *a, const int64_t *b) { return *a < *b; };
    while (work(c) > most) {
        int64_t &largest = **std::max_element(sizes.begin(), sizes.end(), less);
        if (largest == 1) return;
        largest = (largest + 1) / 2;
    }
}

inline void draw_kind(Case &c, Random &random) {
    c.op = Operator(random.below(6));
    c.dtype = random.pick({MXD_FLOAT32, MXD_FLOAT64, MXD_FLOAT16, MXD_BFLOAT16});
    c.mixed = random.one_in(4);
    c.strided = random.one_in(4);
    c.snapped = random.one_in(3);
    c.special_places = c.snapped && random.one_in(2);
    c.special_values = c.snapped && random.one_in(8);
    c.wanted = random.one_in(3) ? 1 + unsigned(random.below(31)) : ALL_GRADIENTS;
    c.threads = 1 + int(random.below(4));
}

inline void draw_few_queries(Case &c, Random &random) {
    c.bs = 1 + random.below(2);
    c.queries = random.one_in(8) ? 100 + random.below(1000) : 1 + random.below(40);
    c.heads = random.one_in(3) ? 8 : 1 + random.below(9);
    c.num_levels = 1 + random.below(5);
    c.points = 1 + random.below(20);
    if (c.aggregates()) {
        c.heads = 1;
        c.cameras = 1 + random.below(6);
        c.groups = random.divisor_of(c.channels);
    }
    shrink(c, {&c.queries, &c.heads, &c.cameras, &c.points}, 60000);
    if (random.one_in(50)) c.queries = 0;
    if (random.one_in(50)) c.points = 0;
}

// So many that the rows of value are packed.
inline void draw_many_queries(Case &c, Random &random) {
    c.bs = 1;
    c.queries = 512 * c.threads + random.below(60);
    c.heads = random.one_in(4) ? 1 : 2 + random.below(3);
    c.num_levels = 1 + random.below(4);
    c.points = random.one_in(2) ? 4 : 1 + random.below(9);
    while (c.channels > 70) c.channels = draw_channels(random);
    shrink(c, {&c.heads, &c.num_levels, &c.points}, 250000);
}

// Rows that no level has lie between levels, behind them, or nowhere; rarely two levels share theirs.
inline void draw_levels(Case &c, bool gaps, Random &random) {
    c.keys = gaps && random.one_in(4) ? random.below(4) : 0;
    for (int64_t i = 0; i < c.cameras * c.num_levels; ++i) {
        const int64_t most = random.one_in(4) ? 24 : 9;
        int64_t height = 1 + random.below(most), width = 1 + random.below(most);
        if (c.snapped) height = int64_t(1) << random.below(5), width = int64_t(1) << random.below(5);
        c.levels.push_back({height, width, c.keys});
        c.keys += height * width + (gaps && random.one_in(6) ? random.below(3) : 0);
    }
    if (c.levels.size() > 1 && random.one_in(20)) c.levels.back().start = 0;
}

struct Known {
    Dtype dtype;
    bool mixed, strided;
    int64_t bs, queries, heads, channels, points;
    std::vector<Level> levels;
    int threads;
};

// On AVX-512 the gradient of attention_logits was wrong where GCC 12 had compiled it and the number of channels was
// odd.
inline Known known(int64_t which) {
    const Known all[KNOWN] = {
        {MXD_FLOAT16, false, false, 2, 10, 8, 9, 13, {{1, 1, 0}}, 3},
        {MXD_BFLOAT16, false, false, 2, 15, 1, 5, 14, {{4, 3, 0}, {2, 4, 12}, {2, 4, 20}}, 1},
        {MXD_FLOAT64, true, false, 1, 1046, 4, 3, 2, {{8, 8, 0}, {4, 4, 64}}, 2},
        {MXD_FLOAT32, true, false, 1, 190, 2, 3, 9, {{8, 8, 0}, {4, 4, 64}, {1, 2, 80}}, 2},
        {MXD_FLOAT64, false, true, 1, 536, 3, 9, 4, {{1, 3, 0}, {1, 2, 3}, {1, 1, 5}}, 1},
    };
    return all[which];
}

inline Case known_case(int64_t number) {
    const Known k = known(-1 - number);
    const Level &last = k.levels.back();
    Case c{};
    c.number = number;
    c.op = GEOMETRIC_LOGITS;
    c.dtype = k.dtype, c.mixed = k.mixed, c.strided = k.strided;
    c.bs = k.bs, c.queries = k.queries, c.heads = k.heads, c.channels = k.channels, c.points = k.points;
    c.cameras = c.groups = 1;
    c.levels = k.levels, c.num_levels = int64_t(k.levels.size());
    c.keys = last.start + last.height * last.width;
    c.wanted = ALL_GRADIENTS;
    c.threads = k.threads;
    return c;
}

inline Case case_of(int64_t number, Random &random) {
    if (number < 0) return known_case(number);
    Case c{};
    c.number = number;
    c.cameras = c.groups = 1;
    draw_kind(c, random);
    c.channels = draw_channels(random);
    const bool many = !c.aggregates() && random.one_in(4);
    many ? draw_many_queries(c, random) : draw_few_queries(c, random);
    draw_levels(c, !many, random);
    return c;
}

inline std::string text_of(const Case &c) {
    const auto size = [](const char *name, int64_t n) { return std::string(", ") + name + " " + std::to_string(n); };
    const auto flag = [](bool set, const char *name) { return set ? std::string(" ") + name : std::string(); };
    return std::string(name_of(c.op)) + " " + name_of(c.dtype) + flag(c.mixed, "mixed") + flag(c.strided, "strided") +
           flag(c.snapped, "snapped") + flag(c.special_places, "special_places") + flag(c.special_values, "special_values") +
           size("bs", c.bs) + size("queries", c.queries) + size("heads", c.heads) + size("levels", c.num_levels) +
           size("points", c.points) + size("channels", c.channels) + size("keys", c.keys) + size("cameras", c.cameras) +
           size("groups", c.groups) + size("threads", c.threads);
}

} // namespace compare
