// Phase one: handles, formats, dtypes, shapes, CANN's limits, memory.
#include "cann/check.h"

#include "call/memory.h"
#include "call/words.h"
#include "cann/error.h"

#include <algorithm>
#include <initializer_list>
#include <vector>

namespace acl {
namespace {

// CANN's documented limits.
constexpr int64_t CHANNELS_MULTIPLE = 8, MOST_CHANNELS = 256, QUERIES_BELOW = 500000, MOST_LEVELS = 16, MOST_HEADS = 16,
                  MOST_POINTS = 16, KEYS_BELOW = INT32_MAX;

std::string list(const int64_t *numbers, const aclTensor &t) { return mxd::text_of(numbers, size_t(t.axes)); }

[[noreturn]] void invalid(const Argument &argument, const std::string &rule, const std::string &fact) {
    throw Refusal(ACLNN_ERR_PARAM_INVALID, argument.name, rule, fact);
}

void check_dtype(const Argument &argument, std::initializer_list<aclDataType> allowed, const char *rule) {
    if (argument.tensor.format != ACL_FORMAT_ND)
        invalid(argument, "have format ACL_FORMAT_ND (2)", std::to_string(int(argument.tensor.format)));
    if (std::find(allowed.begin(), allowed.end(), argument.tensor.dtype) == allowed.end())
        invalid(argument, rule, dtype_name(argument.tensor.dtype));
}

void check_floating(const Argument &argument) {
    check_dtype(argument, {ACL_FLOAT, ACL_FLOAT16, ACL_BF16}, "have dtype ACL_FLOAT, ACL_FLOAT16 or ACL_BF16");
}

void check_index(const Argument &argument) {
    check_dtype(argument, {ACL_INT32, ACL_INT64}, "have dtype ACL_INT32 or ACL_INT64");
}

// Shapes by the operator's description, in CANN's names. mxd_dtype and aclDataType number their dtypes alike.
mxd::AxisSizes check_shapes(const Arguments &a) {
    const std::vector<const Argument *> arguments = in_order(a);
    mxd::Given given[mxd::MOST_ARGUMENTS] = {};
    for (size_t i = 0; i < arguments.size(); ++i) {
        const aclTensor &t = arguments[i]->tensor;
        given[i] = {t.shape, t.axes, t.dtype};
    }
    const mxd::Refusal why = mxd::refusal_of(function_of(a.backward), given, int(arguments.size()), 0);
    if (why.status != MXD_OK) {
        std::string rule = why.rule;
        for (size_t at; (at = rule.find("embed_dims")) != rule.npos;) rule.replace(at, 10, "channels");
        invalid(*arguments[size_t(why.argument)], rule, why.fact);
    }
    mxd::AxisSizes sizes;
    mxd::fits(function_of(false), given + a.backward, 5, 0, sizes); // the inputs
    return sizes;
}

void check_limit(const Argument &argument, bool holds, const char *rule, int64_t fact) {
    if (!holds) invalid(argument, rule, std::to_string(fact));
}

void check_limits(const Arguments &a, const mxd::AxisSizes &sizes) {
    const auto size = [&](const char *name) { return sizes.of[function_of(false).op->size(name)]; };
    const int64_t channels = size("embed_dims"), heads = size("num_heads"), keys = size("num_keys"),
                  levels = size("num_levels"), queries = size("num_queries"), points = size("num_points");
    check_limit(a.value, channels % CHANNELS_MULTIPLE == 0 && channels <= MOST_CHANNELS,
                "have channels a multiple of 8 and <= 256", channels);
    check_limit(a.value, heads <= MOST_HEADS, "have num_heads <= 16", heads);
    check_limit(a.value, keys < KEYS_BELOW, "have num_keys < 2147483647", keys);
    check_limit(a.spatial_shape, levels <= MOST_LEVELS, "have num_levels <= 16", levels);
    check_limit(a.location, queries < QUERIES_BELOW, "have num_queries < 500000", queries);
    check_limit(a.location, points <= MOST_POINTS, "have num_points <= 16", points);
}

// Looks up the handles, when none is null, and copies their tensors.
void check_handles(Arguments &arguments) {
    arguments.for_each([](const Argument &a) {
        if (!a.handle) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, a.name, "be a tensor", "NULL");
    });
    arguments.for_each([](Argument &a) {
        if (!copy_tensor(a.handle, a.tensor))
            invalid(a, "come from aclCreateTensor and not be destroyed", "a pointer that is no tensor");
    });
}

// All floating tensors of a call have one dtype.
void check_same_dtype(const Argument &argument, aclDataType dtype_of_value) {
    if (argument.tensor.dtype != dtype_of_value)
        invalid(argument, "have value's dtype " + dtype_name(dtype_of_value), dtype_name(argument.tensor.dtype));
}

// Formats and dtypes, then shapes and limits.
mxd::AxisSizes check_description(const Arguments &a) {
    const auto is_index = [&](const Argument *each) { return each == &a.spatial_shape || each == &a.level_start_index; };
    for (const Argument *each : in_order(a)) is_index(each) ? check_index(*each) : check_floating(*each);
    for (const Argument *each : in_order(a))
        if (!is_index(each)) check_same_dtype(*each, a.value.tensor.dtype);
    const mxd::AxisSizes sizes = check_shapes(a);
    check_limits(a, sizes);
    return sizes;
}

std::string layout(const aclTensor &t) {
    return "shape " + list(t.shape, t) + ", strides " + list(t.strides, t) + ", offset " + std::to_string(t.offset);
}

mxd::View view_of(const aclTensor &t) {
    const int64_t size = element_size(t.dtype);
    return {static_cast<const char *>(t.data) + t.offset * size, size, t.axes, t.shape, t.strides};
}

// A tensor with elements has aligned memory, and its view stays inside its storage. If the operator writes it, no two
// of its elements share memory.
void check_memory(const Argument &argument) {
    const aclTensor &t = argument.tensor;
    if (empty(t)) return;
    if (!t.data) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, argument.name, "have memory for its elements", "NULL");
    if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(element_size(t.dtype)))
        invalid(argument, "have memory aligned to its elements", "an address that is not");
    int64_t first, last;
    if (!extent(t, first, last)) invalid(argument, "lie in memory that has addresses", layout(t));
    if (first < 0 || (t.storage != UNKNOWN_STORAGE && last >= t.storage)) {
        const std::string room = t.storage == UNKNOWN_STORAGE ? "" : " of " + std::to_string(t.storage) + " elements";
        invalid(argument, "lie in its storage" + room,
                "elements " + std::to_string(first) + " to " + std::to_string(last) + " of " + layout(t));
    }
    if (argument.written && !mxd::has_distinct_elements(view_of(t)))
        invalid(argument, "have strides that keep its elements apart", list(t.strides, t));
}

// What the operator writes has memory of its own.
void check_overlap(const Argument &written, const Argument &other) {
    if (&written == &other || empty(written.tensor) || empty(other.tensor)) return;
    if (!mxd::lie_apart(view_of(written.tensor), view_of(other.tensor)))
        invalid(written, std::string("share no memory with ") + other.name, "addresses that both have");
}

} // namespace

const mxd::Function &function_of(bool backward) {
    static const mxd::Function &forward = *mxd::find_function("multi_scale_deformable_attn");
    return backward ? *(&forward + 1) : forward;
}

std::vector<const Argument *> in_order(const Arguments &a) {
    if (!a.backward) return {&a.value, &a.spatial_shape, &a.level_start_index, &a.location, &a.attn_weight, &a.output};
    return {&a.grad_output, &a.value,      &a.spatial_shape, &a.level_start_index, &a.location,
            &a.attn_weight, &a.grad_value, &a.grad_location, &a.grad_attn_weight};
}

mxd::AxisSizes check_phase_one(Arguments &arguments, const void *workspace_size, const void *executor) {
    check_handles(arguments);
    if (!workspace_size) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "workspaceSize", "point to a number", "NULL");
    if (!executor) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "point to an executor", "NULL");
    const mxd::AxisSizes sizes = check_description(arguments);
    arguments.for_each(check_memory);
    arguments.for_each([&](const Argument &each) {
        if (each.written) arguments.for_each([&](const Argument &other) { check_overlap(each, other); });
    });
    return sizes;
}

} // namespace acl
