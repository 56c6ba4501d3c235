// What memory safety needs of a call's tensors. The good path is a loop of comparisons; a sentence is made only when
// one of them fails.
#include "call/check.h"

#include <algorithm>

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

bool is_given(const Given &t) { return t.shape; }

bool too_many_elements(const Given &t) {
    double elements = 1;
    for (int a = 0; a < t.axes; ++a) elements *= double(t.shape[a]);
    return elements >= double(TOO_MANY);
}

// -1: a factor is not known.
int64_t product_of(const NamedAxis &axis, const AxisSizes &sizes) {
    const int64_t first = sizes.of[axis.size], second = axis.times < 0 ? 1 : sizes.of[axis.times];
    if (first < 0 || second < 0) return -1;
    int64_t product;
    return __builtin_mul_overflow(first, second, &product) ? INT64_MAX : product;
}

// Learns sizes that are not known yet.
bool shape_fits(const Argument &argument, const Given &t, AxisSizes &sizes) {
    const OfAxes<NamedAxis> *axes = argument.axes_of(t.axes);
    if (!axes) return false;
    const int64_t *shape = t.shape;
    for (const NamedAxis &axis : *axes) {
        const int64_t size = *shape++;
        if (size < 0) return false;
        if (axis.size < 0) {
            if (size != axis.number && size != axis.other) return false;
        } else if (axis.times >= 0) {
            const int64_t product = product_of(axis, sizes);
            if (product >= 0 && size != product) return false;
        } else if (sizes.of[axis.size] < 0) {
            sizes.of[axis.size] = size;
        } else if (size != sizes.of[axis.size]) {
            return false;
        }
    }
    return true;
}

bool groups_fit(const Description &op, const AxisSizes &sizes) {
    const int64_t groups = op.divisor < 0 ? 1 : sizes.of[op.divisor];
    return groups == 1 || (groups > 0 && sizes.of[op.divided] % groups == 0);
}

// Sample (level, point) belongs to reference point `level`, or the only one; with option 1 to `point % R`.
bool references_fit(const Description &op, int64_t option, const AxisSizes &sizes) {
    if (op.references < 0) return true;
    const int64_t count = sizes.of[op.references];
    return option == 1 ? count > 0 && sizes.of[op.points] % count == 0 : count == sizes.of[op.levels] || count == 1;
}

constexpr int64_t MOST_ROWS = INT32_MAX; // a bound is a row more

bool sizes_fit(const Description &op, const AxisSizes &sizes) {
    const int64_t either = op.either < 0 ? 0 : sizes.of[op.either];
    return (op.either < 0 || either == op.either_of[0] || either == op.either_of[1]) && sizes.of[op.rows] < MOST_ROWS &&
           groups_fit(op, sizes);
}

// Whether a tensor of all axes at once would not be too large.
bool all_are_small(const Description &op, const AxisSizes &sizes) {
    double elements = 64; // axes that are numbers
    for (size_t size = 0; size < op.sizes.size(); ++size) elements *= double(std::max<int64_t>(sizes.of[size], 1));
    return elements < double(TOO_MANY);
}

} // namespace

bool fits(const Function &function, Given *given, int count, int64_t option, AxisSizes &sizes) {
    const Description &op = *function.op;
    sizes = op.at_first;
    const int64_t of_value = given[function.first_input].dtype;
    const Argument *argument = function.arguments.data();
    int64_t signs = 0;
    for (int i = 0; i < count; ++i, ++argument) {
        Given &t = given[i];
        if (!is_given(t) && !argument->required) continue;
        if (!is_given(t) || !dtype_fits(argument->elements, t.dtype, of_value)) return false;
        if (t.axes != argument->places.count) continue; // looked at below, when factors of products are known
        const int64_t *const shape = t.shape, *const strides = t.strides ? t.strides : shape;
        uint64_t elements = 1;
        bool side_by_side = t.strides;
        for (int a = t.axes; a-- > 0;) {
            int64_t &size = sizes.of[argument->places[a]];
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
        if (is_given(given[i]) && given[i].axes != function.arguments[size_t(i)].places.count &&
            !shape_fits(function.arguments[size_t(i)], given[i], sizes))
            return false;
    if (!all_are_small(op, sizes) && std::any_of(given, given + count, too_many_elements)) return false;
    return sizes_fit(op, sizes) && references_fit(op, option, sizes);
}

namespace {

std::string text_of_shape(const Given &t) { return text_of(t.shape, size_t(t.axes)); }

std::string name_of(const Given &t) {
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

// The tensors of a call that does not fit.
class Judge {
  public:
    Judge(const Function &f, const Given *g, int c, int64_t o) : function(f), op(*f.op), given(g), count(c), option(o) {}

    Refusal refusal() {
        for (int i = 0; i < count; ++i)
            if (argument(i).required && !is_given(given[i])) return refuse(MXD_BAD_MEMORY, i, "be given", "no tensor");
        agreed = sizes_but(-1);
        const std::vector<int> all = in_order();
        for (int i : all) {
            Refusal found = wrong_shape(i);
            if (found.status != MXD_OK) return found;
        }
        const Refusal found = wrong_size();
        if (found.status != MXD_OK) return found;
        for (int i : all)
            if (!dtype_fits(argument(i).elements, given[i].dtype, value().dtype))
                return refuse(MXD_BAD_DTYPE, i, dtypes(argument(i).elements), name_of(given[i]));
        return {};
    }

  private:
    const Function &function;
    const Description &op;
    const Given *given;
    const int count;
    const int64_t option;
    AxisSizes agreed;

    const Argument &argument(int i) const { return function.arguments[size_t(i)]; }
    const Given &value() const { return given[function.first_input]; }
    bool is_input(int i) const { return i >= function.first_input && i < function.first_input + function.num_inputs; }

    // The tensors that are given: inputs first.
    std::vector<int> in_order() const {
        std::vector<int> all;
        for (bool inputs : {true, false})
            for (int i = 0; i < count; ++i)
                if (is_input(i) == inputs && is_given(given[i])) all.push_back(i);
        return all;
    }

    Refusal refuse(int status, int i, const std::string &rule, const std::string &fact) const {
        return {status, i, rule, fact};
    }

    // The size that a tensor gives an axis, or -1.
    int64_t given_by(int i, int size) const {
        const OfAxes<NamedAxis> *axes = is_given(given[i]) ? argument(i).axes_of(given[i].axes) : nullptr;
        for (int a = 0; axes && a < axes->count; ++a)
            if ((*axes)[a].size == size && (*axes)[a].times < 0) return given[i].shape[a];
        return -1;
    }

    // The size that most inputs but one give an axis.
    int64_t most_give(int size, int but = -1) const {
        std::vector<int64_t> found;
        for (int i = 0; i < count; ++i)
            if (i != but && is_input(i) && given_by(i, size) >= 0) found.push_back(given_by(i, size));
        const auto times = [&](int64_t one) { return std::count(found.begin(), found.end(), one); };
        const auto most =
            std::max_element(found.begin(), found.end(), [&](int64_t a, int64_t b) { return times(a) < times(b); });
        return most == found.end() ? -1 : *most;
    }
    AxisSizes sizes_but(int i) const {
        AxisSizes sizes;
        for (size_t size = 0; size < op.sizes.size(); ++size) sizes.of[size] = most_give(int(size), i);
        return sizes;
    }

    std::string with_size(const NamedAxis &axis, const AxisSizes &sizes) const {
        if (axis.size >= 0 && axis.size == op.references)
            return option == 1 ? "a divisor of " + with_size(op.sizes[size_t(op.points)], sizes.of[op.points])
                               : with_size(op.sizes[size_t(op.levels)], sizes.of[op.levels]) + " or 1";
        return with_size(axis.text, axis.size < 0 ? -1 : product_of(axis, sizes));
    }
    static std::string with_size(std::string_view name, int64_t size) {
        return std::string(name) + (size < 0 ? "" : "=" + std::to_string(size));
    }

    // Adjacent axes that would fit the other way round; -1: none.
    int swapped_axis(int i, const AxisSizes &others) const {
        std::vector<int64_t> shape(given[i].shape, given[i].shape + given[i].axes);
        for (size_t a = 0; a + 1 < shape.size(); ++a) {
            std::swap(shape[a], shape[a + 1]);
            if (all_fit(i, {shape.data(), given[i].axes, given[i].dtype}, others)) return int(a);
            std::swap(shape[a], shape[a + 1]);
        }
        return -1;
    }

    // Another input that would fit in this shape of two axes or more; -1: none.
    int look_alike(int i, const AxisSizes &others) const {
        for (int j = 0; j < count && is_input(i) && given[i].axes > 1; ++j)
            if (j != i && is_input(j) && is_given(given[j]) && all_fit(j, given[i], others)) return j;
        return -1;
    }

    bool all_fit(int i, const Given &t, AxisSizes sizes) const {
        const int64_t levels = op.references < 0 ? -1 : sizes.of[op.levels];
        if (op.references >= 0 && is_input(i)) sizes.of[op.references] = -1;
        if (!shape_fits(argument(i), t, sizes)) return false;
        return levels < 0 || sizes.of[op.points] < 0 || sizes.of[op.references] < 0 || references_fit(op, option, sizes);
    }

    Refusal refuse_shape(int i) const {
        const Given &t = given[i];
        const AxisSizes others = sizes_but(i);
        const OfAxes<NamedAxis> *axes = argument(i).axes_of(t.axes);
        std::string text;
        for (const NamedAxis &axis : axes ? *axes : argument(i).axes)
            text += (text.empty() ? "" : ", ") + with_size(axis, others);
        const int at = swapped_axis(i, others);
        const std::string places = std::to_string(at) + " and " + std::to_string(at + 1);
        const int like = look_alike(i, others);
        const std::string name = like < 0 ? "" : ", which looks like " + argument(like).name;
        const std::string remark = at < 0 ? name : ", whose axes " + places + " look swapped";
        const char *end = (axes ? *axes : argument(i).axes).count == 1 ? ",)" : ")";
        return refuse(MXD_BAD_SHAPE, i, "have shape (" + text + end, text_of_shape(t) + remark);
    }

    Refusal wrong_shape(int i) const {
        if (!all_fit(i, given[i], agreed)) return refuse_shape(i);
        if (too_many_elements(given[i]))
            return refuse(MXD_BAD_SHAPE, i, "have fewer than 2**48 elements", "shape " + text_of_shape(given[i]));
        return {};
    }

    // What is wrong with sizes that agree.
    Refusal wrong_size() const {
        const auto name = [&](int size) { return std::string(op.sizes[size_t(size)]); };
        if (!groups_fit(op, agreed)) {
            int i = function.first_input;
            while (given_by(i, op.divisor) < 0) ++i;
            return refuse(MXD_BAD_SHAPE, i,
                          "have a " + name(op.divisor) + " count that divides " +
                              with_size(name(op.divided), agreed.of[op.divided]),
                          std::to_string(agreed.of[op.divisor]));
        }
        if (agreed.of[op.rows] >= MOST_ROWS)
            return refuse(MXD_BAD_SHAPE, function.first_input, "have " + name(op.rows) + " < " + std::to_string(MOST_ROWS),
                          std::to_string(agreed.of[op.rows]));
        return {};
    }

    std::string dtypes(Elements elements) const {
        switch (elements) {
        case Elements::FLOATING: return "have dtype float32, float64, float16 or bfloat16";
        case Elements::INDEX: return "have dtype int32 or int64";
        case Elements::NUMBER: return "have a floating dtype, int32 or int64";
        default:
            return "have " + argument(function.first_input).name + "'s dtype " + name_of(value()) +
                   (is_16_bits(value().dtype) ? ", or float32" : "");
        }
    }
};

} // namespace

Refusal refusal_of(const Function &function, const Given *given, int count, int64_t option) {
    return Judge(function, given, count, option).refusal();
}

std::string sentence(const Function &function, const Refusal &why) {
    const auto name = [&](int argument) { return function.arguments[size_t(argument)].name; };
    return sentence(name(why.argument), why.other < 0 ? why.rule : why.rule + " " + name(why.other), why.fact);
}

Refusal check_memory(const Function &function, const Given *given) {
    const int all = int(function.arguments.size());
    Extent extents[MOST_ARGUMENTS];
    const auto view = [&](int i) {
        return View{given[i].data, element_size(given[i].dtype), given[i].axes, given[i].shape, given[i].strides};
    };
    const auto strides = [&](int i) { return text_of(given[i].strides, size_t(given[i].axes)); };
    for (int i = 0; i < all; ++i) {
        const Given &t = given[i];
        if (!is_given(t) || t.side_by_side == 0) continue;
        if (t.side_by_side > 0)
            extents[i] = Extent(t.data, t.side_by_side * element_size(t.dtype));
        else if (!find_extent(view(i), extents[i]))
            return {MXD_BAD_MEMORY, i, "lie in memory that has addresses", "strides " + strides(i)};
        if (!t.data && extents[i].exists()) return {MXD_BAD_MEMORY, i, "have memory for its elements", "NULL"};
    }
    for (int i = function.first_written; i < all; ++i) {
        if (!extents[i].exists()) continue;
        if (given[i].side_by_side < 0 && !has_distinct_elements(view(i)))
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

// Backward without samples: value's gradient is zero for any number of queries, so the kernel is given no query.
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
