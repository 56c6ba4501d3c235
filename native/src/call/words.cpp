#include "call/words.h"

#include "call/prepare.h"

namespace mxd {
namespace {

bool is_number(std::string_view axis) { return axis.find_first_not_of("0123456789") == axis.npos; }

// fn(name) for each axis of a text.
template <class Fn> void for_each_axis(std::string_view axes, Fn &&fn) {
    for (size_t end = 0; end != axes.npos; axes.remove_prefix(end == axes.npos ? 0 : end + 2)) {
        end = axes.find(", ");
        fn(axes.substr(0, end));
    }
}

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

int64_t AxisSizes::of(std::string_view axis) const {
    if (is_number(axis)) return std::stoll(std::string(axis));
    for (const Axis &each : known)
        if (each.name == axis) return each.size;
    const size_t times = axis.find(" * ");
    if (times == axis.npos) return UNKNOWN;
    const int64_t first = of(axis.substr(0, times)), second = of(axis.substr(times + 3));
    return first == UNKNOWN || second == UNKNOWN ? UNKNOWN : first * second;
}

void AxisSizes::tell(std::string_view axis, int64_t size) {
    if (of(axis) == UNKNOWN) known.push_back({axis, size});
}

void AxisSizes::tell_all(std::string_view axes, const int64_t *shape) {
    for_each_axis(axes, [&](std::string_view axis) { tell(axis, *shape++); });
}

bool AxisSizes::fit(std::string_view axes, const int64_t *shape, size_t count) const {
    size_t a = 0;
    bool same = true;
    for_each_axis(axes, [&](std::string_view axis) {
        same = same && a < count && shape[a] >= 0 && (of(axis) == UNKNOWN || of(axis) == shape[a]);
        ++a;
    });
    return same && a == count;
}

std::string AxisSizes::rule(std::string_view axes) const {
    std::string text;
    for_each_axis(axes, [&](std::string_view axis) {
        const bool name_alone = is_number(axis) || of(axis) == UNKNOWN;
        text += (text.empty() ? "" : ", ") + std::string(axis) + (name_alone ? "" : "=" + std::to_string(of(axis)));
    });
    return "have shape (" + text + ")";
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
