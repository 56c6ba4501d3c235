// Checks shapes, dtypes and sizes. `fits` only compares. If `fits` returns false, Judge finds the error and builds the
// sentence.
#include "call/check.h"

namespace mxd {
namespace {

constexpr uint64_t bit(int64_t dtype) { return uint64_t(1) << dtype; }
constexpr uint64_t FLOATING = bit(MXD_FLOAT32) | bit(MXD_FLOAT64) | bit(MXD_FLOAT16) | bit(MXD_BFLOAT16),
                   INDEX = bit(MXD_INT32) | bit(MXD_INT64);

constexpr AxisSizes sizes_of_numbers() {
    AxisSizes all{};
    for (int64_t &size : all.of) size = -1;
    all.of[sizes::TWO] = 2;
    all.of[sizes::THREE] = 3;
    all.of[sizes::FOUR] = 4;
    return all;
}
constexpr AxisSizes NUMBERS = sizes_of_numbers(); // only sizes with a fixed value are known

bool is_16_bits(int64_t dtype) { return dtype == MXD_FLOAT16 || dtype == MXD_BFLOAT16; }

bool dtype_fits(Elements elements, int64_t dtype, int64_t value_dtype) {
    if (elements == Elements::OF_VALUE) return dtype == value_dtype || (dtype == MXD_FLOAT32 && is_16_bits(value_dtype));
    const uint64_t allowed = elements == Elements::FLOATING ? FLOATING : elements == Elements::INDEX ? INDEX : FLOATING | INDEX;
    return dtype >= 0 && dtype < 64 && (allowed >> dtype & 1);
}

bool is_present(const TensorInfo &t) { return t.shape; }

// Returns whether the product of some sizes is TOO_MANY or more. A size of 0 counts as `empty`, which is 0 or 1.
bool too_many_elements(const int64_t *begin, const int64_t *end, int64_t empty = 1) {
    double elements = 1;
    for (const int64_t *size = begin; size < end; ++size) elements *= double(std::max(*size, empty));
    return elements >= double(TOO_MANY);
}

bool too_many_elements(const TensorInfo &t) { return too_many_elements(t.shape, t.shape + t.axes, 0); }

// Returns whether a shape agrees with the known sizes. Stores the sizes that were unknown.
bool shape_fits(const Argument &argument, const TensorInfo &t, AxisSizes &sizes) {
    const List<NamedAxis, MOST_AXES> *axes = argument.axes_of(t.axes);
    for (int a = 0; a < t.axes; ++a) {
        if (!axes || t.shape[a] < 0) return false;
        const NamedAxis &axis = (*axes)[a];
        const int64_t size = sizes.product(axis);
        if (size >= 0 && size != t.shape[a]) return false;
        if (axis.times == sizes::NONE) sizes.of[axis.size] = t.shape[a];
    }
    return axes;
}

bool groups_fit(const AxisSizes &sizes) {
    const int64_t groups = sizes.of[sizes::group];
    return groups < 0 || groups == 1 || (groups > 0 && sizes.of[sizes::c] % groups == 0);
}

// Returns whether the option allows the number R of reference points. Option 0 needs R == num_levels, or 1: sample (level,
// point) reads reference point `level`, or the only one. Option 1 needs an R that divides num_points: the sample reads
// reference point `point % R`.
bool references_fit(int64_t option, const AxisSizes &sizes) {
    const int64_t count = sizes.of[sizes::R], coordinates = sizes.of[sizes::TWO_OR_FOUR];
    if (count < 0) return true;
    if (coordinates != 2 && coordinates != 4) return false;
    return option == 1 ? count > 0 && sizes.of[sizes::num_points] % count == 0
                       : count == sizes.of[sizes::num_levels] || count == 1;
}

constexpr int64_t MOST_ROWS = INT32_MAX; // kernels number rows in int32, which must also hold the end of a range of rows

bool rows_fit(const AxisSizes &sizes) { return std::max(sizes.of[sizes::num_keys], sizes.of[sizes::num_feat]) < MOST_ROWS; }

} // namespace

bool fits(const Function &function, TensorInfo *tensors, int count, int64_t option, AxisSizes &sizes) {
    sizes = NUMBERS;
    const int64_t value_dtype = tensors[function.first_input].dtype;
    const Argument *argument = function.arguments.begin();
    int64_t signs = 0;
    for (int i = 0; i < count; ++i, ++argument) {
        TensorInfo &t = tensors[i];
        if (!is_present(t) && !argument->required) continue;
        if (!is_present(t) || !dtype_fits(argument->elements, t.dtype, value_dtype)) return false;
        // An axis of this tensor is the product of two sizes (heads * channels), or the tensor has a wrong number of axes. The
        // next loop checks such a tensor, after other tensors have given both sizes.
        if (t.axes != argument->split.count) continue;
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
    const bool may_be_too_many =
        too_many_elements(sizes.of, sizes.of + sizes::COUNT); // no tensor has more elements than the product of all sizes
    for (int i = 0; may_be_too_many && i < count; ++i)
        if (too_many_elements(tensors[i])) return false;
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

std::string with_size(const NamedAxis &axis, const AxisSizes &sizes) {
    const int64_t size = axis.size < sizes::TWO ? sizes.product(axis) : -1;
    std::string text = SIZE_NAMES[axis.size];
    if (axis.times != sizes::NONE) text += std::string(" * ") + SIZE_NAMES[axis.times];
    return size < 0 ? text : text + "=" + std::to_string(size);
}

// Finds the error of a call for which `fits` returned false: the first tensor that disagrees with earlier tensors. Inputs are
// checked first.
struct Judge {
    const Function &function;
    const TensorInfo *tensors;
    int count;
    int64_t option;

    Refusal refusal() const {
        for (int i = 0; i < count; ++i)
            if (function.arguments[i].required && !is_present(tensors[i])) return {MXD_BAD_MEMORY, i, "be given", "no tensor"};
        AxisSizes sizes = NUMBERS;
        for (int k = 0; k < count; ++k) {
            const int i = (function.first_input + k) % count; // grad_output precedes the inputs and is checked last
            if (!is_present(tensors[i])) continue;
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
        for (int k = 0; k < count; ++k) {
            const int i = (function.first_input + k) % count;
            const Elements elements = function.arguments[i].elements;
            if (is_present(tensors[i]) && !dtype_fits(elements, tensors[i].dtype, value().dtype))
                return {MXD_BAD_DTYPE, i, rule_of(elements), name_of(tensors[i])};
        }
        return {};
    }

    const TensorInfo &value() const { return tensors[function.first_input]; }

    int first_with(sizes::Name size) const {
        const auto has_size = [&](const Argument &argument) {
            return std::any_of(argument.split.begin(), argument.split.end(),
                               [&](const NamedAxis &a) { return a.size == size; });
        };
        const Argument *const inputs = function.arguments.begin() + function.first_input;
        return int(std::find_if(inputs, inputs + function.num_inputs, has_size) - function.arguments.begin());
    }

    Refusal refuse_shape(int i) const {
        AxisSizes others = NUMBERS; // sizes of the other inputs; if two inputs disagree, the first one counts
        for (int other = function.first_input; other < function.first_input + function.num_inputs; ++other)
            if (other != i && is_present(tensors[other])) shape_fits(function.arguments[other], tensors[other], others);
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

    std::string rule_of(Elements elements) const {
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
    return Judge{function, tensors, count, option}.refusal();
}

std::string sentence(const std::string &name, const std::string &rule, const std::string &fact) {
    return name + " must " + rule + "; got " + fact;
}

std::string sentence(const Function &function, const Refusal &why) {
    const auto name = [&](int argument) { return std::string(function.arguments[argument].name); };
    return sentence(name(why.argument), why.other < 0 ? why.rule : why.rule + " " + name(why.other), why.fact);
}

std::string text_of(const int64_t *numbers, size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
    return "(" + text + (count == 1 ? ",)" : ")");
}

List<int64_t, MOST_AXES> output_shape(const Function &function, const AxisSizes &sizes) {
    List<int64_t, MOST_AXES> shape;
    for (const NamedAxis &axis : function.arguments[function.first_written].axes) shape.push_back(sizes.product(axis));
    return shape;
}

std::string fault_of_output(const List<int64_t, MOST_AXES> &shape) {
    if (!too_many_elements(shape.begin(), shape.end())) return "";
    const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    return sentence("output", std::string("have fewer than 2**48 elements") + (empty ? ", an axis of 0 counted as 1" : ""),
                    text_of(shape.begin(), size_t(shape.count)));
}

} // namespace mxd
