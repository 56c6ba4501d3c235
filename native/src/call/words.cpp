// Sentences about arguments that do not fit, and about levels.
#include "call/words.h"

#include <algorithm>

#include "call/check.h"
#include "call/prepare.h"

namespace mxd {
namespace {

// The rows that a level ends before, as text; it may have more than 64 bits can count.
std::string rows_needed(const Level &level) {
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
                    std::to_string(level.start) + " (needs " + rows_needed(level) + " rows)");
}

} // namespace

std::string sentence(const std::string &name, const std::string &rule, const std::string &fact) {
    return name + " must " + rule + "; got " + fact;
}

std::string text_of(const int64_t *numbers, size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
    return "(" + text + (count == 1 ? ",)" : ")");
}

std::string fault_of_output(const int64_t *shape, size_t axes) {
    const bool empty = std::find(shape, shape + axes, 0) != shape + axes;
    double elements = 1;
    for (size_t a = 0; a < axes; ++a) elements *= double(std::max<int64_t>(shape[a], 1));
    if (elements < double(TOO_MANY)) return "";
    const std::string rule = "have fewer than 2**48 elements";
    return sentence("output", rule + (empty ? ", an axis of 0 counted as 1" : ""), text_of(shape, axes));
}

std::string fault_of_levels(const Call &call, const std::string &shapes, const std::string &starts) {
    std::string fault;
    for (int64_t camera = 0; camera < call.sizes.cameras; ++camera)
        for (int64_t scale = 0; fault.empty() && scale < call.sizes.scales; ++scale) {
            const std::string of_camera = call.op == AGGREGATION ? std::to_string(camera) + ", " : "";
            const std::string place = "[" + of_camera + std::to_string(scale) + "]";
            fault = fault_of_level(read_level(call, camera, scale), call.sizes.keys, shapes + place, starts + place);
        }
    return fault;
}

} // namespace mxd
