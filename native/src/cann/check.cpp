#include "cann/check.h"

#include "cann/error.h"

#include <algorithm>
#include <initializer_list>

namespace acl {
namespace {

// CANN's documented limits.
constexpr int64_t CHANNELS_MULTIPLE = 8, MOST_CHANNELS = 256, QUERIES_BELOW = 500000, MOST_LEVELS = 16, MOST_HEADS = 16,
                  MOST_POINTS = 16, KEYS_BELOW = INT32_MAX;

struct Axis {
    const char *name; // null: a sentence shows the size alone
    int64_t size;     // ANY: every size will do
};

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

std::string sizes_of(std::initializer_list<Axis> axes) {
    std::string text;
    for (const Axis &axis : axes) {
        text += (text.empty() ? "" : ", ") + std::string(axis.name ? axis.name : "");
        if (axis.size != ANY) text += (axis.name ? "=" : "") + std::to_string(axis.size);
    }
    return "(" + text + (axes.size() == 1 ? ",)" : ")");
}

bool fits(const aclTensor &t, std::initializer_list<Axis> axes) {
    if (t.axes != int(axes.size())) return false;
    const int64_t *size = t.shape;
    for (const Axis &axis : axes) {
        if (*size < 0 || (axis.size != ANY && *size != axis.size)) return false;
        ++size;
    }
    return true;
}

void check_shape(const Argument &argument, std::initializer_list<Axis> axes) {
    const aclTensor &t = argument.tensor;
    if (!fits(t, axes)) invalid(argument, "have shape " + sizes_of(axes), list(t.shape, t.axes));
}

// The three shapes that an input and its gradient share.
void check_shape_of_value(const Argument &argument, const mxd::Sizes &n) {
    check_shape(argument, {{"bs", n.batch}, {"num_keys", n.keys}, {"num_heads", n.heads}, {"channels", n.channels}});
}

void check_shape_of_location(const Argument &argument, const mxd::Sizes &n) {
    check_shape(argument, {{"bs", n.batch},
                           {"num_queries", n.queries},
                           {"num_heads", n.heads},
                           {"num_levels", n.levels},
                           {"num_points", n.points},
                           {nullptr, 2}});
}

void check_shape_of_weight(const Argument &argument, const mxd::Sizes &n) {
    check_shape(argument, {{"bs", n.batch},
                           {"num_queries", n.queries},
                           {"num_heads", n.heads},
                           {"num_levels", n.levels},
                           {"num_points", n.points}});
}

// output, and gradOutput when it has three axes.
void check_shape_of_output(const Argument &argument, const mxd::Sizes &n) {
    check_shape(argument,
                {{"bs", n.batch}, {"num_queries", n.queries}, {"num_heads * channels", n.heads * n.channels}});
}

void check_limit(const Argument &argument, bool holds, const char *rule, int64_t fact) {
    if (!holds) invalid(argument, rule, std::to_string(fact));
}

void check_limits(const Arguments &a, const mxd::Sizes &n) {
    check_limit(a.value, n.channels % CHANNELS_MULTIPLE == 0 && n.channels <= MOST_CHANNELS,
                "have channels a multiple of 8 and <= 256", n.channels);
    check_limit(a.value, n.heads <= MOST_HEADS, "have num_heads <= 16", n.heads);
    check_limit(a.value, n.keys < KEYS_BELOW, "have num_keys < 2147483647", n.keys);
    check_limit(a.spatial_shape, n.levels <= MOST_LEVELS, "have num_levels <= 16", n.levels);
    check_limit(a.location, n.queries < QUERIES_BELOW, "have num_queries < 500000", n.queries);
    check_limit(a.location, n.points <= MOST_POINTS, "have num_points <= 16", n.points);
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

// Formats, dtypes, shapes and limits of the inputs. Each shape tells sizes that the next ones must have.
mxd::Sizes check_inputs(const Arguments &a) {
    check_floating(a.value);
    check_index(a.spatial_shape);
    check_index(a.level_start_index);
    check_floating(a.location);
    check_floating(a.attn_weight);
    mxd::Sizes n{};
    n.batch = n.keys = n.heads = n.channels = n.queries = n.levels = n.points = ANY;
    check_shape_of_value(a.value, n);
    const int64_t *value = a.value.tensor.shape, *location = a.location.tensor.shape;
    n.batch = value[mxd::BATCH];
    n.keys = value[mxd::KEY];
    n.heads = value[mxd::HEAD];
    n.channels = value[mxd::CHANNEL];
    check_shape(a.spatial_shape, {{"num_levels", n.levels}, {nullptr, 2}});
    n.levels = *a.spatial_shape.tensor.shape;
    check_shape(a.level_start_index, {{"num_levels", n.levels}});
    check_shape_of_location(a.location, n);
    n.queries = location[mxd::QUERY];
    n.points = location[mxd::POINT];
    check_shape_of_weight(a.attn_weight, n);
    check_limits(a, n);
    return n;
}

void check_output(const Arguments &a, const mxd::Sizes &n) {
    check_floating(a.output);
    if (a.output.tensor.dtype != a.value.tensor.dtype)
        invalid(a.output, "have value's dtype " + dtype_name(a.value.tensor.dtype), dtype_name(a.output.tensor.dtype));
    check_shape_of_output(a.output, n);
}

void check_gradients(const Arguments &a, const mxd::Sizes &n) {
    for (const Argument *each : {&a.grad_output, &a.grad_value, &a.grad_location, &a.grad_attn_weight})
        check_floating(*each);
    if (a.grad_output.tensor.axes == 3)
        check_shape_of_output(a.grad_output, n);
    else
        check_shape(a.grad_output,
                    {{"bs", n.batch}, {"num_queries", n.queries}, {"num_heads", n.heads}, {"channels", n.channels}});
    check_shape_of_value(a.grad_value, n);
    check_shape_of_location(a.grad_location, n);
    check_shape_of_weight(a.grad_attn_weight, n);
}

std::string layout(const aclTensor &t) {
    return "shape " + list(t.shape, t.axes) + ", strides " + list(t.strides, t.axes) + ", offset " +
           std::to_string(t.offset);
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
    if (argument.written && !distinct_elements(t))
        invalid(argument, "have strides that keep its elements apart", list(t.strides, t.axes));
}

} // namespace

mxd::Sizes check_phase_one(Arguments &arguments, const void *workspace_size, const void *executor) {
    check_handles(arguments);
    if (!workspace_size) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "workspaceSize", "point to a number", "NULL");
    if (!executor) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, "executor", "point to an executor", "NULL");
    const mxd::Sizes n = check_inputs(arguments);
    if (arguments.backward)
        check_gradients(arguments, n);
    else
        check_output(arguments, n);
    arguments.for_each(check_memory);
    return n;
}

} // namespace acl
