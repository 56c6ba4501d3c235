// Reads levels and ranks from their tables.
#include "call/tables.h"

#include <limits>
#include <type_traits>

#include "call/check.h"

namespace mxd {
namespace {

int64_t integer_at(const Tensor &t, int64_t element) {
    return t.dtype == MXD_INT64 ? static_cast<const int64_t *>(t.data)[element] : static_cast<const int32_t *>(t.data)[element];
}

// Returns the end of a level's rows as text, because 64 bits may not hold it.
std::string end_of(const Level &level) {
    int64_t rows;
    if (__builtin_mul_overflow(level.height, level.width, &rows) || __builtin_add_overflow(rows, level.start, &rows))
        return "2**63 or more";
    return std::to_string(rows);
}

std::string fault_of_level(const Level &level, int64_t keys, const std::string &shapes, const std::string &starts) {
    const int64_t size[] = {level.height, level.width};
    if (level.height <= 0 || level.width <= 0) return sentence(shapes, "be positive (H, W)", text_of(size, 2));
    if (level.start < 0) return sentence(starts, "not be negative", std::to_string(level.start));
    if (level_fits(level, keys)) return "";
    return sentence(starts,
                    "leave room for " + std::to_string(level.height) + " x " + std::to_string(level.width) + " rows among " +
                        std::to_string(keys),
                    std::to_string(level.start) + " (needs " + end_of(level) + " rows)");
}

struct Ranks {
    const char *name, *of;
    const Tensor &tensor;
    int64_t rows;
};

// Returns the first point whose rank is out of range, or `points`. The loop over a block has no branch, so that compilers
// vectorise it.
template <class Rank> int64_t first_wrong(const Ranks &table, int64_t points) {
    typedef std::make_unsigned_t<Rank> Unsigned;
    const Rank *const ranks = static_cast<const Rank *>(table.tensor.data);
    const int64_t stride = table.tensor.strides[LISTED], most = std::numeric_limits<Rank>::max();
    const Unsigned last = Unsigned(std::min(table.rows - 1, most));
    constexpr int64_t BLOCK = 1024;
    for (int64_t from = 0; from < points; from += BLOCK) {
        const int64_t to = std::min(points, from + BLOCK);
        Unsigned wrong = 0; // the sign bit is set if a rank is negative or greater than `last`
        if (stride == 1)
            for (int64_t i = from; i < to; ++i) wrong |= Unsigned(ranks[i]) | (last - Unsigned(ranks[i]));
        else
            for (int64_t i = from; i < to; ++i) wrong |= Unsigned(ranks[i * stride]) | (last - Unsigned(ranks[i * stride]));
        for (int64_t i = from; Rank(wrong) < 0 && i < to; ++i)
            if (ranks[i * stride] < 0 || ranks[i * stride] >= table.rows) return i;
    }
    return points;
}

// Checks the tables of ranks. At the first rank that is out of range, calls fn(table, index of the point) and returns false.
template <class Fn> bool each_table(const Call &call, Fn &&fn) {
    const Ranks tables[] = {{"ranks_feat", "rows of feat", call.ranks_feat, call.sizes.keys},
                            {"ranks_depth", "elements of depth", call.ranks_depth, call.depth.shape[LISTED]},
                            {"ranks_bev", "cells", call.ranks_bev, call.sizes.cells}};
    const int64_t points = call.sizes.points;
    for (const Ranks &each : tables) {
        const int64_t wrong =
            each.tensor.dtype == MXD_INT64 ? first_wrong<int64_t>(each, points) : first_wrong<int32_t>(each, points);
        if (wrong < points) return fn(each, wrong), false;
    }
    return true;
}

} // namespace

Level read_level(const Call &call, int64_t camera, int64_t scale) {
    const auto element = [&](const Tensor &t, int64_t axis) {
        return integer_at(t, camera * t.strides[MAP_CAMERA] + scale * t.strides[MAP_SCALE] + axis * t.strides[HEIGHT_WIDTH]);
    };
    return {element(call.shapes, 0), element(call.shapes, 1), element(call.starts, 0)};
}

bool level_fits(const Level &level, int64_t keys) {
    if (level.height <= 0 || level.width <= 0 || level.start < 0 || level.start > keys) return false;
    return level.width <= keys && level.height <= (keys - level.start) / level.width;
}

bool ranks_fit(const Call &call) {
    return call.op != POOLING || each_table(call, [](const Ranks &, int64_t) {});
}

std::string fault_of_levels(const Call &call, const std::string &shapes, const std::string &starts) {
    std::string fault;
    for (int64_t camera = 0; camera < call.sizes.cameras; ++camera)
        for (int64_t scale = 0; fault.empty() && scale < call.sizes.scales; ++scale) {
            const std::string camera_index = call.op == AGGREGATION ? std::to_string(camera) + ", " : "";
            const std::string index = "[" + camera_index + std::to_string(scale) + "]";
            fault = fault_of_level(read_level(call, camera, scale), call.sizes.keys, shapes + index, starts + index);
        }
    return fault;
}

std::string fault_of_ranks(const Call &call) {
    std::string fault;
    each_table(call, [&](const Ranks &table, int64_t point) {
        fault = sentence(std::string(table.name) + "[" + std::to_string(point) + "]",
                         "be one of the " + std::to_string(table.rows) + " " + table.of,
                         std::to_string(integer_at(table.tensor, point * table.tensor.strides[LISTED])));
    });
    return fault;
}

} // namespace mxd
