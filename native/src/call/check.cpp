// What memory safety needs of a call's tensors. The good path is a loop of comparisons; a sentence is made only when
// one of them fails.
#include "call/check.h"

#include <algorithm>
#include <vector>

#include "call/memory.h"
#include "call/tensor.h"
#include "call/words.h"

namespace mxd {
namespace {

constexpr uint64_t bit(int64_t dtype) { return uint64_t(1) << dtype; }
constexpr uint64_t FLOATING = bit(MXD_FLOAT32) | bit(MXD_FLOAT64) | bit(MXD_FLOAT16) | bit(MXD_BFLOAT16),
                   INDEX = bit(MXD_INT32) | bit(MXD_INT64);

bool is_16_bits(int64_t dtype) { return dtype == MXD_FLOAT16 || dtype == MXD_BFLOAT16; }

bool dtype_fits(Elements elements, int64_t dtype, int64_t of_value) {
    if (elements == Elements::OF_VALUE) return dtype == of_value || (dtype == MXD_FLOAT32 && is_16_bits(of_value));
    const uint64_t allowed = elements == Elements::FLOATING ? FLOATING : elements == Elements::INDEX ? INDEX : FLOATING | INDEX;
    return dtype >= 0 && dtype < 64 && (allowed >> dtype & 1);
}

bool is_present(const TensorInfo &t) { return t.shape; }

bool too_many_elements(const TensorInfo &t) {
    double elements = 1;
    for (int a = 0; a < t.axes; ++a) elements *= double(t.shape[a]);
    return elements >= double(TOO_MANY);
}

// -1: a factor is not known.
int64_t product_of(const NamedAxis &axis, const AxisSizes &sizes) {
    const int64_t first = sizes.of[axis.size], second = axis.times == sizes::NONE ? 1 : sizes.of[axis.times];
    if (first < 0 || second < 0) return -1;
    int64_t product;
    return __builtin_mul_overflow(first, second, &product) ? INT64_MAX : product;
}

// Learns sizes that are not known yet.
bool shape_fits(const Argument &argument, const TensorInfo &t, AxisSizes &sizes) {
    const List<NamedAxis, MOST_AXES> *axes = argument.axes_of(t.axes);
    for (int a = 0; a < t.axes; ++a) {
        if (!axes || t.shape[a] < 0) return false;
        const NamedAxis &axis = (*axes)[a];
        const int64_t size = product_of(axis, sizes);
        if (size >= 0 && size != t.shape[a]) return false;
        if (axis.times == sizes::NONE) sizes.of[axis.size] = t.shape[a];
    }
    return axes;
}

bool groups_fit(const AxisSizes &sizes) {
    const int64_t groups = sizes.of[sizes::group];
    return groups < 0 || groups == 1 || (groups > 0 && sizes.of[sizes::c] % groups == 0);
}

// Sample (level, point) belongs to reference point `level`, or the only one; with option 1 to `point % R`.
bool references_fit(int64_t option, const AxisSizes &sizes) {
    const int64_t count = sizes.of[sizes::R], coordinates = sizes.of[sizes::TWO_OR_FOUR];
    if (count < 0) return true;
    if (coordinates != 2 && coordinates != 4) return false;
    return option == 1 ? count > 0 && sizes.of[sizes::num_points] % count == 0
                       : count == sizes.of[sizes::num_levels] || count == 1;
}

constexpr int64_t MOST_ROWS = INT32_MAX; // a bound is a row more

bool rows_fit(const AxisSizes &sizes) { return std::max(sizes.of[sizes::num_keys], sizes.of[sizes::num_feat]) < MOST_ROWS; }

// Whether a tensor of all axes at once would not be too large.
bool all_are_small(const AxisSizes &sizes) {
    double elements = 1;
    for (int64_t size : sizes.of) elements *= double(std::max<int64_t>(size, 1));
    return elements < double(TOO_MANY);
}

} // namespace

bool fits(const Function &function, TensorInfo *tensors, int count, int64_t option, AxisSizes &sizes) {
    sizes = NUMBERS;
    const int64_t of_value = tensors[function.first_input].dtype;
    const Argument *argument = function.arguments.begin();
    int64_t signs = 0;
    for (int i = 0; i < count; ++i, ++argument) {
        TensorInfo &t = tensors[i];
        if (!is_present(t) && !argument->required) continue;
        if (!is_present(t) || !dtype_fits(argument->elements, t.dtype, of_value)) return false;
        if (t.axes != argument->split.count) continue; // looked at below, when factors of products are known
        const int64_t *const shape = t.shape, *const strides = t.strides ? t.strides : shape;
        uint64_t elements = 1;
        bool side_by_side = t.strides;
        for (int a = t.axes; a-- > 0;) {
            int64_t &size = sizes.of[argument->split[a].size];
            if (size < 0) size = shape[a];
            if (size != shape[a]) return false;
            side_by_side &= uint64_t(strides[a]) == elements;
            elements *= uint64_t(size);
            signs |= size;
        }
        t.side_by_side = side_by_side ? int64_t(elements) : -1;
    }
    if (signs < 0) return false;
    for (int i = 0; i < count; ++i)
        if (is_present(tensors[i]) && tensors[i].axes != function.arguments[i].split.count &&
            !shape_fits(function.arguments[i], tensors[i], sizes))
            return false;
    if (!all_are_small(sizes) && std::any_of(tensors, tensors + count, too_many_elements)) return false;
    return rows_fit(sizes) && groups_fit(sizes) && references_fit(option, sizes);
}

namespace {

std::string text_of_shape(const TensorInfo &t) { return text_of(t.shape, size_t(t.axes)); }

std::string name_of(const TensorInfo &t) {
    switch (t.dtype) {
    case MXD_FLOAT32: return "float32";
    case MXD_FLOAT64: return "float64";
    case MXD_FLOAT16: return "float16";
    case MXD_BFLOAT16: return "bfloat16";
    case MXD_INT32: return "int32";
    case MXD_INT64: return "int64";
    default: return t.dtype_name ? t.dtype_name : "dtype " + std::to_string(t.dtype);
    }
}

// The tensors of a call that does not fit. Inputs are looked at in order, then the output or gradients; a tensor that
// disagrees with those before it is refused.
class Judge {
  public:
    Judge(const Function &f, const TensorInfo *g, int c, int64_t o) : function(f), tensors(g), count(c), option(o) {}

    Refusal refusal() const {
        for (int i = 0; i < count; ++i)
            if (function.arguments[i].required && !is_present(tensors[i])) return {MXD_BAD_MEMORY, i, "be given", "no tensor"};
        AxisSizes sizes = NUMBERS;
        for (int i : in_order()) {
            if (!shape_fits(function.arguments[i], tensors[i], sizes)) return refuse_shape(i);
            if (too_many_elements(tensors[i]))
                return {MXD_BAD_SHAPE, i, "have fewer than 2**48 elements", "shape " + text_of_shape(tensors[i])};
        }
        if (!references_fit(option, sizes)) return refuse_shape(first_with(sizes::R));
        if (!groups_fit(sizes))
            return {MXD_BAD_SHAPE, first_with(sizes::group),
                    "have a group count that divides c=" + std::to_string(sizes.of[sizes::c]),
                    std::to_string(sizes.of[sizes::group])};
        if (!rows_fit(sizes)) {
            const sizes::Name rows = sizes.of[sizes::num_keys] < 0 ? sizes::num_feat : sizes::num_keys;
            return {MXD_BAD_SHAPE, first_with(rows),
                    "have " + std::string(SIZE_NAMES[rows]) + " < " + std::to_string(MOST_ROWS),
                    std::to_string(sizes.of[rows])};
        }
        for (int i : in_order())
            if (!dtype_fits(function.arguments[i].elements, tensors[i].dtype, value().dtype))
                return {MXD_BAD_DTYPE, i, dtypes(function.arguments[i].elements), name_of(tensors[i])};
        return {};
    }

  private:
    const Function &function;
    const TensorInfo *tensors;
    const int count;
    const int64_t option;

    const TensorInfo &value() const { return tensors[function.first_input]; }
    bool is_input(int i) const { return i >= function.first_input && i < function.first_input + function.num_inputs; }

    // The tensors that are given: inputs first.
    std::vector<int> in_order() const {
        std::vector<int> all;
        for (bool inputs : {true, false})
            for (int i = 0; i < count; ++i)
                if (is_input(i) == inputs && is_present(tensors[i])) all.push_back(i);
        return all;
    }

    int first_with(sizes::Name size) const {
        const auto has = [&](int i) {
            const auto &split = function.arguments[i].split;
            return std::any_of(split.begin(), split.end(), [&](const NamedAxis &axis) { return axis.size == size; });
        };
        int i = function.first_input;
        while (!has(i)) ++i;
        return i;
    }

    // The sizes that the other inputs have; of as many that disagree, the first.
    AxisSizes sizes_but(int i) const {
        AxisSizes sizes = NUMBERS;
        for (int other = 0; other < count; ++other) {
            if (other == i || !is_input(other) || !is_present(tensors[other])) continue;
            const List<NamedAxis, MOST_AXES> *axes = function.arguments[other].axes_of(tensors[other].axes);
            for (int a = 0; axes && a < axes->count; ++a) {
                int64_t &size = sizes.of[(*axes)[a].size];
                if ((*axes)[a].times == sizes::NONE && size < 0) size = tensors[other].shape[a];
            }
        }
        return sizes;
    }

    static std::string with_size(const NamedAxis &axis, const AxisSizes &sizes) {
        const int64_t size = axis.size < sizes::TWO ? product_of(axis, sizes) : -1;
        std::string text = SIZE_NAMES[axis.size];
        if (axis.times != sizes::NONE) text += std::string(" * ") + SIZE_NAMES[axis.times];
        return size < 0 ? text : text + "=" + std::to_string(size);
    }

    Refusal refuse_shape(int i) const {
        const AxisSizes others = sizes_but(i);
        const Argument &argument = function.arguments[i];
        const List<NamedAxis, MOST_AXES> *axes = argument.axes_of(tensors[i].axes);
        std::string text;
        for (const NamedAxis &axis : axes ? *axes : argument.axes) {
            text += text.empty() ? "" : ", ";
            if (axis.size != sizes::R)
                text += with_size(axis, others);
            else if (option == 1)
                text += "a divisor of " + with_size(sizes::num_points, others);
            else
                text += with_size(sizes::num_levels, others) + " or 1";
        }
        return {MXD_BAD_SHAPE, i, "have shape (" + text + (argument.axes.count == 1 ? ",)" : ")"), text_of_shape(tensors[i])};
    }

    std::string dtypes(Elements elements) const {
        switch (elements) {
        case Elements::FLOATING: return "have dtype float32, float64, float16 or bfloat16";
        case Elements::INDEX: return "have dtype int32 or int64";
        case Elements::NUMBER: return "have a floating dtype, int32 or int64";
        default:
            return "have " + std::string(function.arguments[function.first_input].name) + "'s dtype " + name_of(value()) +
                   (is_16_bits(value().dtype) ? ", or float32" : "");
        }
    }
};

} // namespace

Refusal refusal_of(const Function &function, const TensorInfo *tensors, int count, int64_t option) {
    return Judge(function, tensors, count, option).refusal();
}

std::string sentence(const Function &function, const Refusal &why) {
    const auto name = [&](int argument) { return std::string(function.arguments[argument].name); };
    return sentence(name(why.argument), why.other < 0 ? why.rule : why.rule + " " + name(why.other), why.fact);
}

Refusal check_memory(const Function &function, const TensorInfo *tensors) {
    const int all = function.arguments.count;
    Extent extents[MOST_ARGUMENTS];
    const auto view = [&](int i) {
        return View{tensors[i].data, element_size(tensors[i].dtype), tensors[i].axes, tensors[i].shape, tensors[i].strides};
    };
    const auto strides = [&](int i) { return text_of(tensors[i].strides, size_t(tensors[i].axes)); };
    for (int i = 0; i < all; ++i) {
        const TensorInfo &t = tensors[i];
        if (!is_present(t) || t.side_by_side == 0) continue;
        if (t.side_by_side > 0)
            extents[i] = Extent(t.data, t.side_by_side * element_size(t.dtype));
        else if (!find_extent(view(i), extents[i]))
            return {MXD_BAD_MEMORY, i, "lie in memory that has addresses", "strides " + strides(i)};
        if (!t.data && extents[i].exists()) return {MXD_BAD_MEMORY, i, "have memory for its elements", "NULL"};
    }
    for (int i = function.first_written; i < all; ++i) {
        if (!extents[i].exists()) continue;
        if (tensors[i].side_by_side < 0 && !has_distinct_elements(view(i)))
            return {MXD_BAD_MEMORY, i, "have strides that keep its elements apart", strides(i)};
        for (int other = 0; other < i; ++other)
            if (extents[i].meets(extents[other]) && !lie_apart(view(i), view(other)))
                return {MXD_BAD_MEMORY, i, "share no memory with", "addresses that both have", other};
    }
    return {};
}

namespace {

// Kernels have scratch memory for all that a query reads, some 300 bytes a sample.
constexpr int64_t MOST_SAMPLES = int64_t(1) << 32;
// A list of points has 32 bits for each.
constexpr int64_t MOST_POINTS = UINT32_MAX;

bool too_many_samples(const Call &call, const Tensor &t) {
    if (is_empty(t)) return false;
    int64_t samples = 1;
    for (int a = call.op == AGGREGATION ? KEY_POINT : LEVEL; a < t.axes; ++a) samples *= t.shape[a];
    return samples > MOST_SAMPLES;
}

// With logits, no tensor has the pairs (point, camera) of an anchor where there is no scale.
bool too_many_pairs(const Call &call) {
    int64_t pairs;
    return call.op == AGGREGATION && call.with_logits &&
           (__builtin_mul_overflow(call.sizes.points, call.sizes.cameras, &pairs) || pairs > MOST_SAMPLES);
}

// Backward without samples: value's gradient is zero for any number of queries, so the kernel gets no query.
void forget_queries_without_samples(Call &call) {
    if (!call.backward || !is_empty(call.weights)) return;
    for (const Tensor *wanted : {&call.grad_locations, &call.grad_reference})
        if (wanted->data && !is_empty(*wanted)) return;
    const int point = call.op == AGGREGATION ? KEY_POINT : POINT;
    for (Tensor *t : {&call.locations, &call.weights}) t->shape[QUERY] = t->shape[point] = 0;
    call.sizes.queries = call.sizes.points = 0;
}

} // namespace

bool query_is_too_large(Call &call) {
    if (call.op == POOLING) return call.sizes.points > MOST_POINTS || call.sizes.cells >= TOO_MANY;
    forget_queries_without_samples(call);
    return too_many_samples(call, call.locations) || too_many_samples(call, call.weights) || too_many_pairs(call);
}

} // namespace mxd
