// Checks the arguments of phase one: handles, formats, dtypes, shapes, limits and memory.
#include "cann/runtime.h"
#include "cann/tensor.h"

#include <algorithm>
#include <cstdlib>

namespace acl {
namespace {

enum Role { VALUE, SPATIAL_SHAPE, LEVEL_START_INDEX, LOCATION }; // an argument's index, counted from the function's first input

// A documented limit of an input's size.
struct Limit {
    Role role;
    mxd::sizes::Name size;
    bool (*holds)(int64_t size);
    const char *rule;
};

// The limits of all products. Source: hicann/ops-nn, vfusion/*/docs, August 2026.
constexpr Limit LIMITS[] = {
    {VALUE, mxd::sizes::embed_dims, [](int64_t n) { return n % 8 == 0 && n <= 256; },
     "have channels a multiple of 8 and <= 256"},
    {VALUE, mxd::sizes::num_heads, [](int64_t n) { return n <= 16; }, "have num_heads <= 16"},
    {SPATIAL_SHAPE, mxd::sizes::num_levels, [](int64_t n) { return n <= 16; }, "have num_levels <= 16"},
    {LOCATION, mxd::sizes::num_queries, [](int64_t n) { return n < 500000; }, "have num_queries < 500000"},
    {LOCATION, mxd::sizes::num_points, [](int64_t n) { return n <= 16; }, "have num_points <= 16"}};

// Further limits of Atlas inference products (310P), from the same documents. 310P has no bfloat16.
constexpr Limit LIMITS_OF_310P[] = {
    {VALUE, mxd::sizes::embed_dims, [](int64_t n) { return n % 32 == 0; }, "have channels a multiple of 32 on 310P"},
    {VALUE, mxd::sizes::num_heads, [](int64_t n) { return n == 2 || n == 4 || n == 8; }, "have num_heads 2, 4 or 8 on 310P"},
    {LOCATION, mxd::sizes::num_points, [](int64_t n) { return n == 4 || n == 8; }, "have num_points 4 or 8 on 310P"}};

// CANN's forward needs at least this many queries on every product. If MX_DRIVING_CANN_PRODUCT is empty, fewer are allowed.
constexpr int64_t LEAST_QUERIES = 32;

// Returns the product whose documents a call must follow, or "".
std::string named_product() {
    const char *variable = std::getenv("MX_DRIVING_CANN_PRODUCT");
    const std::string product = variable ? variable : "";
    for (const char *known : {"", "A2", "A3", "950", "310P"})
        if (product == known) return product;
    throw Outcome{ACLNN_ERR_PARAM_INVALID, mxd::sentence("MX_DRIVING_CANN_PRODUCT", "be A2, A3, 950, 310P or empty", product)};
}

const char *const NAMES[] = {"value",      "spatialShape", "levelStartIndex", "location",      "attnWeight",
                             "gradOutput", "gradValue",    "gradLocation",    "gradAttnWeight"};

[[noreturn]] void refuse(const Arguments &a, int argument, const std::string &rule, const std::string &fact) {
    throw Outcome{ACLNN_ERR_PARAM_INVALID, mxd::sentence(a.names[size_t(argument)], rule, fact)};
}

[[noreturn]] void refuse(const Arguments &a, const mxd::Refusal &why) {
    std::string rule = why.rule;
    for (size_t at; (at = rule.find("embed_dims")) != rule.npos;) rule.replace(at, 10, "channels");
    refuse(a, why.argument, why.other < 0 ? rule : rule + " " + a.names[size_t(why.other)], why.fact);
}

std::string text_of(const int64_t *numbers, const aclTensor &t) { return mxd::text_of(numbers, size_t(t.axes)); }

void copy_tensors(Arguments &a, const std::vector<const aclTensor *> &handles) {
    for (size_t i = 0; i < handles.size(); ++i) require(handles[i], ACLNN_ERR_PARAM_NULLPTR, a.names[i], "be a tensor", "NULL");
    for (size_t i = 0; i < handles.size(); ++i)
        if (!registry<aclTensor>().copy(handles[i], a.tensors[i]))
            refuse(a, int(i), "come from aclCreateTensor and not be destroyed", "a pointer that is no tensor");
}

std::string dtype_name(aclDataType dtype) {
    static const std::pair<aclDataType, const char *> NAMES[] = {
        {ACL_FLOAT, "ACL_FLOAT"}, {ACL_FLOAT16, "ACL_FLOAT16"}, {ACL_BF16, "ACL_BF16"}, {ACL_INT32, "ACL_INT32"},
        {ACL_INT64, "ACL_INT64"}, {ACL_DOUBLE, "ACL_DOUBLE"},   {ACL_INT8, "ACL_INT8"}, {ACL_INT16, "ACL_INT16"},
        {ACL_UINT8, "ACL_UINT8"}, {ACL_BOOL, "ACL_BOOL"}};
    for (const auto &[number, name] : NAMES)
        if (number == dtype) return name;
    return "aclDataType " + std::to_string(int(dtype));
}

void check_dtype(const Arguments &a, int argument) {
    const auto is_floating = [](aclDataType dtype) { return dtype == ACL_FLOAT || dtype == ACL_FLOAT16 || dtype == ACL_BF16; };
    const aclTensor &t = a.tensors[size_t(argument)];
    const int role = argument - a.function.first_input;
    const aclDataType dtype_of_value = a.tensors[size_t(a.function.first_input)].dtype;
    if (t.format != ACL_FORMAT_ND) refuse(a, argument, "have format ACL_FORMAT_ND (2)", std::to_string(int(t.format)));
    if (role == SPATIAL_SHAPE || role == LEVEL_START_INDEX) {
        if (t.dtype != ACL_INT32 && t.dtype != ACL_INT64)
            refuse(a, argument, "have dtype ACL_INT32 or ACL_INT64", dtype_name(t.dtype));
    } else if (!is_floating(t.dtype)) {
        refuse(a, argument, "have dtype ACL_FLOAT, ACL_FLOAT16 or ACL_BF16", dtype_name(t.dtype));
    } else if (t.dtype != dtype_of_value && is_floating(dtype_of_value)) {
        refuse(a, argument, "have value's dtype " + dtype_name(dtype_of_value), dtype_name(t.dtype));
    }
}

// Checks shapes with the operator's description. mxd_dtype and aclDataType have the same numbers, so dtypes need no conversion.
void check_shapes(Arguments &a) {
    const int count = int(a.tensors.size());
    for (int i = 0; i < count; ++i)
        a.infos[i] = {a.tensors[size_t(i)].shape, a.tensors[size_t(i)].axes, a.tensors[size_t(i)].dtype};
    if (!mxd::fits(a.function, a.infos, count, 0, a.sizes)) refuse(a, mxd::refusal_of(a.function, a.infos, count, 0));
    const aclTensor &output = a.tensors.back();
    if (!a.backward && output.axes != 3)
        refuse(a, count - 1, "have 3 axes (bs, num_queries, num_heads * channels)", text_of(output.shape, output));
}

void check_limit(const Arguments &a, const Limit &limit) {
    const int64_t size = a.sizes.of[limit.size];
    if (!limit.holds(size)) refuse(a, a.function.first_input + limit.role, limit.rule, std::to_string(size));
}

void check_limits_of_310p(const Arguments &a) {
    if (a.backward) refuse(a, 0, "not be given on 310P, which has no gradient", "a tensor");
    if (a.tensors.front().dtype == ACL_BF16) refuse(a, VALUE, "have dtype ACL_FLOAT or ACL_FLOAT16 on 310P", "ACL_BF16");
    for (const Limit &limit : LIMITS_OF_310P) check_limit(a, limit);
}

void check_limits(const Arguments &a) {
    for (const Limit &limit : LIMITS) check_limit(a, limit);
    const std::string product = named_product();
    if (product.empty()) return;
    if (product == "310P") check_limits_of_310p(a);
    const int64_t queries = a.sizes.of[mxd::sizes::num_queries];
    if (!a.backward && queries < LEAST_QUERIES)
        refuse(a, LOCATION, "have num_queries >= " + std::to_string(LEAST_QUERIES) + " on " + product, std::to_string(queries));
    const aclTensor &first = a.tensors.front();
    if (a.backward && first.axes != 3)
        refuse(a, 0, "have 3 axes (bs, num_queries, num_heads * channels) on " + product, text_of(first.shape, first));
}

// Finds the first and last element of a view that is not empty, counted from `data`. Returns false if addresses overflow.
bool find_elements(const aclTensor &t, int64_t &first, int64_t &last) {
    first = last = t.offset;
    int64_t elements = 1;
    for (int a = 0; a < t.axes; ++a) {
        int64_t reach;
        int64_t &end = t.strides[a] < 0 ? first : last;
        if (__builtin_mul_overflow(elements, t.shape[a], &elements) || elements > MOST_ELEMENTS) return false;
        if (__builtin_mul_overflow(t.shape[a] - 1, t.strides[a], &reach)) return false;
        if (__builtin_add_overflow(end, reach, &end)) return false;
    }
    return first >= -MOST_ELEMENTS && last < MOST_ELEMENTS;
}

void check_view(Arguments &a, int argument) {
    aclTensor &t = a.tensors[size_t(argument)];
    a.infos[argument].strides = t.strides;
    if (is_empty(t)) return;
    const std::string layout =
        "shape " + text_of(t.shape, t) + ", strides " + text_of(t.strides, t) + ", offset " + std::to_string(t.offset);
    require(t.data, ACLNN_ERR_PARAM_NULLPTR, a.names[size_t(argument)], "have memory for its elements", "NULL");
    const int64_t element = mxd::element_size(t.dtype);
    if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(element))
        refuse(a, argument, "have memory aligned to its elements", "an address that is not");
    int64_t first, last;
    if (!find_elements(t, first, last)) refuse(a, argument, "lie in memory that has addresses", layout);
    if (first < 0 || last >= t.storage) {
        const std::string size = t.storage == UNKNOWN_STORAGE ? "" : " of " + std::to_string(t.storage) + " elements";
        refuse(a, argument, "lie in its storage" + size,
               "elements " + std::to_string(first) + " to " + std::to_string(last) + " of " + layout);
    }
    a.infos[argument].data = static_cast<char *>(t.data) + t.offset * element;
    // An axis of one element may have any stride, so replace strides that could overflow in sums.
    for (int axis = 0; axis < t.axes; ++axis)
        if (t.shape[axis] == 1) t.strides[axis] = 0;
}

} // namespace

Arguments check_phase_one(bool backward, std::vector<const aclTensor *> handles, const void *workspace_size,
                          const void *executor) {
    const mxd::Function &forward = *mxd::find_function("multi_scale_deformable_attn");
    const size_t count = handles.size();
    Arguments a{backward, backward ? *(&forward + 1) : forward, {NAMES, NAMES + count}, std::vector<aclTensor>(count), {}, {}};
    if (!backward) a.names.back() = "output";
    if (backward) std::rotate(handles.begin(), handles.begin() + 5, handles.begin() + 6); // mxd's order: gradOutput first
    if (backward) std::rotate(a.names.begin(), a.names.begin() + 5, a.names.begin() + 6);
    copy_tensors(a, handles);
    require(workspace_size, ACLNN_ERR_PARAM_NULLPTR, "workspaceSize", "point to a number", "NULL");
    require(executor, ACLNN_ERR_PARAM_NULLPTR, "executor", "point to an executor", "NULL");
    for (int i = 0; i < int(count); ++i) check_dtype(a, i);
    check_shapes(a);
    check_limits(a);
    for (int i = 0; i < int(count); ++i) check_view(a, i);
    const mxd::Refusal why = mxd::check_memory(a.function, a.infos);
    if (why.status != MXD_OK) refuse(a, why);
    return a;
}

} // namespace acl
