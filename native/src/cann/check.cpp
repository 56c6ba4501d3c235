#include "cann/check.h"

#include "call/memory.h"
#include "call/words.h"
#include "cann/error.h"

#include <algorithm>
#include <initializer_list>

namespace acl {
namespace {

// CANN's documented limits.
constexpr int64_t CHANNELS_MULTIPLE = 8, MOST_CHANNELS = 256, QUERIES_BELOW = 500000, MOST_LEVELS = 16, MOST_HEADS = 16,
                  MOST_POINTS = 16, KEYS_BELOW = INT32_MAX;

// The shapes that an input and its gradient share.
constexpr char OF_VALUE[] = "bs, num_keys, num_heads, channels";
constexpr char OF_LOCATION[] = "bs, num_queries, num_heads, num_levels, num_points, 2";
constexpr char OF_WEIGHT[] = "bs, num_queries, num_heads, num_levels, num_points";
constexpr char OF_OUTPUT[] = "bs, num_queries, num_heads * channels"; // gradOutput may have four axes instead

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

// A shape tells sizes that the next ones must have.
void check_shape(const Argument &argument, const char *axes, mxd::AxisSizes &known) {
    const aclTensor &t = argument.tensor;
    if (!known.fit(axes, t.shape, size_t(t.axes))) invalid(argument, known.rule(axes), list(t.shape, t));
    known.tell_all(axes, t.shape);
}

void check_limit(const Argument &argument, bool holds, const char *rule, int64_t fact) {
    if (!holds) invalid(argument, rule, std::to_string(fact));
}

void check_limits(const Arguments &a, const mxd::AxisSizes &known) {
    const int64_t channels = known.of("channels"), heads = known.of("num_heads"), keys = known.of("num_keys"),
                  levels = known.of("num_levels"), queries = known.of("num_queries"), points = known.of("num_points");
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

// Formats, dtypes, shapes and limits of the inputs. Returns the sizes that they tell.
mxd::AxisSizes check_inputs(const Arguments &a) {
    check_floating(a.value);
    check_index(a.spatial_shape);
    check_index(a.level_start_index);
    check_floating(a.location);
    check_floating(a.attn_weight);
    mxd::AxisSizes known;
    check_shape(a.value, OF_VALUE, known);
    check_shape(a.spatial_shape, "num_levels, 2", known);
    check_shape(a.level_start_index, "num_levels", known);
    check_shape(a.location, OF_LOCATION, known);
    check_shape(a.attn_weight, OF_WEIGHT, known);
    check_limits(a, known);
    return known;
}

void check_output(const Arguments &a, mxd::AxisSizes &known) {
    check_floating(a.output);
    if (a.output.tensor.dtype != a.value.tensor.dtype)
        invalid(a.output, "have value's dtype " + dtype_name(a.value.tensor.dtype), dtype_name(a.output.tensor.dtype));
    check_shape(a.output, OF_OUTPUT, known);
}

void check_gradients(const Arguments &a, mxd::AxisSizes &known) {
    for (const Argument *each : {&a.grad_output, &a.grad_value, &a.grad_location, &a.grad_attn_weight}) check_floating(*each);
    check_shape(a.grad_output, a.grad_output.tensor.axes == 3 ? OF_OUTPUT : "bs, num_queries, num_heads, channels", known);
    check_shape(a.grad_value, OF_VALUE, known);
    check_shape(a.grad_location, OF_LOCATION, known);
    check_shape(a.grad_attn_weight, OF_WEIGHT, known);
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

void check_phase_one(Arguments &arguments, const void *workspace_size, const void *executor) {
    check_handles(arguments);
    if (!workspace_size) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "workspaceSize", "point to a number", "NULL");
    if (!executor) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "point to an executor", "NULL");
    mxd::AxisSizes known = check_inputs(arguments);
    if (arguments.backward)
        check_gradients(arguments, known);
    else
        check_output(arguments, known);
    arguments.for_each(check_memory);
    arguments.for_each([&](const Argument &each) {
        if (each.written) arguments.for_each([&](const Argument &other) { check_overlap(each, other); });
    });
}

} // namespace acl
