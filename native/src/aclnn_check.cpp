#include "aclnn_check.h"

#include "acl_error.h"

#include <algorithm>

namespace acl {
namespace {

[[noreturn]] void invalid(const Argument &argument, const std::string &rule, const std::string &fact) {
    throw Refusal(ACLNN_ERR_PARAM_INVALID, argument.name, rule, fact);
}

void check_dtype(const Argument &argument, std::initializer_list<aclDataType> allowed, const char *rule) {
    if (argument.tensor.format != ACL_FORMAT_ND)
        invalid(argument, "have format ACL_FORMAT_ND (2)", std::to_string(int(argument.tensor.format)));
    if (std::find(allowed.begin(), allowed.end(), argument.tensor.dtype) == allowed.end())
        invalid(argument, rule, dtype_name(argument.tensor.dtype));
}

void check_index(const Argument &argument) {
    check_dtype(argument, {ACL_INT32, ACL_INT64}, "have dtype ACL_INT32 or ACL_INT64");
}

void check_limit(const Argument &argument, bool holds, const std::string &rule, int64_t fact) {
    if (!holds) invalid(argument, "have " + rule, std::to_string(fact));
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

std::string layout(const aclTensor &t) {
    return "shape " + list(t.shape, t.axes) + ", strides " + list(t.strides, t.axes) + ", offset " +
           std::to_string(t.offset);
}

} // namespace

void check_handles(Argument *arguments, int count) {
    for (Argument *a = arguments; a != arguments + count; ++a)
        if (!a->handle) throw Refusal(ACLNN_ERR_PARAM_NULLPTR, a->name, "be a tensor", "NULL");
    for (Argument *a = arguments; a != arguments + count; ++a)
        if (!copy_tensor(a->handle, a->tensor))
            invalid(*a, "come from aclCreateTensor and not be destroyed", "a pointer that is no tensor");
}

void check_floating(const Argument &argument) {
    check_dtype(argument, {ACL_FLOAT, ACL_FLOAT16, ACL_BF16}, "have dtype ACL_FLOAT, ACL_FLOAT16 or ACL_BF16");
}

void check_shape(const Argument &argument, std::initializer_list<Axis> axes) {
    const aclTensor &t = argument.tensor;
    if (!fits(t, axes)) invalid(argument, "have shape " + sizes_of(axes), list(t.shape, t.axes));
}

AttentionSizes check_attention(const Argument *inputs) {
    const Argument &value = inputs[0], &shapes = inputs[1], &starts = inputs[2], &location = inputs[3],
                   &weight = inputs[4];
    check_floating(value);
    check_index(shapes);
    check_index(starts);
    check_floating(location);
    check_floating(weight);
    check_shape(value, {{"bs", ANY}, {"num_keys", ANY}, {"num_heads", ANY}, {"channels", ANY}});
    check_shape(shapes, {{"num_levels", ANY}, {nullptr, 2}});
    const int64_t *v = value.tensor.shape, *l = location.tensor.shape;
    AttentionSizes n{v[0], v[1], v[2], v[3], 0, shapes.tensor.shape[0], 0};
    check_shape(starts, {{"num_levels", n.levels}});
    check_shape(location, {{"bs", n.batch},
                           {"num_queries", ANY},
                           {"num_heads", n.heads},
                           {"num_levels", n.levels},
                           {"num_points", ANY},
                           {nullptr, 2}});
    n.queries = l[1];
    n.points = l[4];
    check_shape(weight, {{"bs", n.batch},
                         {"num_queries", n.queries},
                         {"num_heads", n.heads},
                         {"num_levels", n.levels},
                         {"num_points", n.points}});
    check_limit(value, n.channels % CHANNELS_MULTIPLE == 0 && n.channels <= MOST_CHANNELS,
                "channels a multiple of 8 and <= 256", n.channels);
    check_limit(value, n.heads <= MOST_HEADS, "num_heads <= 16", n.heads);
    check_limit(value, n.keys < KEYS_BELOW, "num_keys < 2147483647", n.keys);
    check_limit(shapes, n.levels <= MOST_LEVELS, "num_levels <= 16", n.levels);
    check_limit(location, n.queries < QUERIES_BELOW, "num_queries < 500000", n.queries);
    check_limit(location, n.points <= MOST_POINTS, "num_points <= 16", n.points);
    return n;
}

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
    if (argument.output && !distinct_elements(t))
        invalid(argument, "have strides that keep its elements apart", list(t.strides, t.axes));
}

// The stride of an axis of one element may be any number, and is none that arithmetic should meet.
mxd_tensor native(const aclTensor &t) {
    mxd_tensor to{};
    to.dtype = t.dtype; // the numbers are the same
    to.data = static_cast<char *>(t.data) + t.offset * element_size(t.dtype);
    std::copy_n(t.shape, t.axes, to.shape);
    for (int a = 0; a < t.axes; ++a) to.strides[a] = t.shape[a] > 1 ? t.strides[a] : 0;
    return to;
}

} // namespace acl
