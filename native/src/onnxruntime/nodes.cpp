#include "onnxruntime/nodes.h"

#include <algorithm>

#include "call/words.h"
#include "onnxruntime/api.h"

namespace mxd {
namespace {

constexpr Elements FLOATING = Elements::FLOATING, INDEX = Elements::INDEX;
constexpr char OF_WEIGHTS[] = "bs, num_queries, num_heads, num_levels, num_points";
constexpr char OF_LOGITS[] = "bs, num_queries, num_heads, num_levels * num_points";
constexpr char OF_SAMPLES[] = "bs, num_queries, num_heads, num_levels, num_points, 2";

constexpr NodeInput VALUE{"value", "bs, num_keys, num_heads, embed_dims", FLOATING, false};
constexpr NodeInput FEATURES{"feature_maps", "bs, num_feat, c", FLOATING, false};
constexpr NodeInput MAPS{"spatial_shape", "cam, scale, 2", INDEX, false};
constexpr NodeInput MAP_STARTS{"scale_start_index", "cam, scale", INDEX, false};

constexpr NodeInput shapes_of_levels(const char *name) { return {name, "num_levels, 2", INDEX, false}; }
constexpr NodeInput starts_of_levels(const char *name) { return {name, "num_levels", INDEX, false}; }
constexpr NodeInput floating(const char *name, const char *axes) { return {name, axes, FLOATING, false}; }
constexpr NodeInput optional(const char *name, const char *axes) { return {name, axes, FLOATING, true}; }

} // namespace

Node::Node(const char *of, std::initializer_list<NodeInput> given) : name(of), inputs(given) {
    find_function(name, function);
    weights = function.with_logits ? 5 : 4;
}

const std::vector<Node> &nodes() {
    static const std::vector<Node> all{
        {"multi_scale_deformable_attn",
         {VALUE, shapes_of_levels("value_spatial_shapes"), starts_of_levels("value_level_start_index"),
          floating("sampling_locations", OF_SAMPLES), floating("attention_weights", OF_WEIGHTS)}},
        {"deformable_aggregation",
         {FEATURES, MAPS, MAP_STARTS, floating("sample_locations", "bs, anchor, pts, cam, 2"),
          floating("weight", "bs, anchor, pts, cam, scale, group")}},
        {"geometric_kernel_attention",
         {VALUE, shapes_of_levels("spatial_shapes"), starts_of_levels("level_start_index"),
          NodeInput{"sampling_locations", OF_SAMPLES, Elements::LOCATIONS, false}, floating("attention_weights", OF_WEIGHTS)}},
        {"multi_scale_deformable_attn_with_logits",
         {VALUE, shapes_of_levels("value_spatial_shapes"), starts_of_levels("value_level_start_index"),
          floating("reference_points", "bs, num_queries, R, 2 or 4"), floating("sampling_offsets", OF_SAMPLES),
          floating("attention_logits", OF_LOGITS)}},
        {"deformable_aggregation_with_logits",
         {FEATURES, MAPS, MAP_STARTS, floating("key_points", "bs, anchor, pts, 3"), floating("projection", "bs, cam, 4, 4"),
          floating("logits", "bs, anchor, cam, scale, pts, group"), optional("image_size", "bs, cam, 2"),
          optional("pair_scale", "bs, anchor, cam, pts")}},
        {"geometric_kernel_attention_with_logits",
         {VALUE, shapes_of_levels("spatial_shapes"), starts_of_levels("level_start_index"),
          floating("reference_points", "bs, num_queries, num_heads, 2"), NodeInput{"window", "num_points, 2", INDEX, false},
          floating("attention_logits", OF_LOGITS)}},
    };
    return all;
}

namespace {

std::string text_of(const std::vector<int64_t> &shape) { return mxd::text_of(shape.data(), shape.size()); }

std::string name_of_type(int type) {
    static const char *const NAMES[] = {"no type", "float32", "uint8",     "int8",       "uint16",  "int16",
                                        "int32",   "int64",   "string",    "bool",       "float16", "float64",
                                        "uint32",  "uint64",  "complex64", "complex128", "bfloat16"};
    const bool known = type >= 0 && size_t(type) < sizeof NAMES / sizeof *NAMES;
    return known ? NAMES[type] : "type " + std::to_string(type) + " of ONNX";
}

bool is_name(std::string_view axis) { return axis.find_first_of(" 0123456789") == axis.npos; }

// Axes one by one; those of `a * b` apart where a tensor has them apart.
std::vector<std::string_view> axes_of(const char *text, size_t count) {
    const auto parts = [](std::string_view rest, std::string_view ending) {
        std::vector<std::string_view> found;
        for (size_t end = 0; end != rest.npos; rest.remove_prefix(end == rest.npos ? 0 : end + ending.size())) {
            end = rest.find(ending);
            found.push_back(rest.substr(0, end));
        }
        return found;
    };
    std::vector<std::string_view> whole = parts(text, ", "), apart;
    for (std::string_view axis : whole)
        for (std::string_view factor : parts(axis, " * ")) apart.push_back(factor);
    return apart.size() == count ? apart : whole;
}

// The inputs of one call. An axis has the size that most inputs give it, and the first input that has another is named.
class Checker {
  public:
    Checker(const Node &n, const std::vector<Given> &given, bool by_point)
        : node(n), inputs(given), reference_by_point(by_point), known(sizes_without(given.size())) {}

    std::string fault() {
        for (size_t i = 0; found.empty() && i < inputs.size(); ++i)
            if (inputs[i].there) need_shape(i);
        need_groups();
        for (size_t i = 0; i < inputs.size(); ++i)
            if (inputs[i].there) need_type(i);
        return found;
    }

  private:
    using Axes = std::vector<std::string_view>;
    const Node &node;
    const std::vector<Given> &inputs;
    const bool reference_by_point;
    const AxisSizes known;
    std::string found; // the first fault

    void refuse(size_t input, const std::string &rule, const std::string &fact) {
        if (found.empty()) found = sentence(node.inputs[input].name, rule, fact);
    }

    Axes axes(size_t input) const { return axes_of(node.inputs[input].axes, inputs[input].shape.size()); }

    // The size of each axis, the one that most inputs have, or the first of as many; `input` has no vote.
    AxisSizes sizes_without(size_t input) const {
        struct Vote {
            std::string_view axis;
            int64_t size;
            int count;
        };
        std::vector<Vote> votes;
        for (size_t i = 0; i < inputs.size(); ++i) {
            const Axes names = axes(i);
            if (i == input || !inputs[i].there || names.size() != inputs[i].shape.size()) continue;
            for (size_t a = 0; a < names.size(); ++a) {
                const auto same = [&](const Vote &vote) { return vote.axis == names[a] && vote.size == inputs[i].shape[a]; };
                const auto vote = std::find_if(votes.begin(), votes.end(), same);
                if (vote != votes.end())
                    ++vote->count;
                else if (is_name(names[a]))
                    votes.push_back({names[a], inputs[i].shape[a], 1});
            }
        }
        std::stable_sort(votes.begin(), votes.end(), [](const Vote &a, const Vote &b) { return a.count > b.count; });
        AxisSizes sizes;
        for (const Vote &vote : votes) sizes.tell(vote.axis, vote.size);
        return sizes;
    }

    bool size_fits(std::string_view axis, int64_t size, const AxisSizes &sizes) const {
        const int64_t levels = sizes.of("num_levels"), points = sizes.of("num_points");
        if (axis == "2 or 4") return size == 2 || size == 4;
        if (axis != "R") return sizes.of(axis) == AxisSizes::UNKNOWN || sizes.of(axis) == size;
        if (levels == AxisSizes::UNKNOWN || points == AxisSizes::UNKNOWN) return true;
        return reference_by_point ? size > 0 && points % size == 0 : size == levels || size == 1;
    }

    bool fits(const Axes &names, const std::vector<int64_t> &shape, const AxisSizes &sizes) const {
        bool all = names.size() == shape.size();
        for (size_t a = 0; all && a < names.size(); ++a) all = size_fits(names[a], shape[a], sizes);
        return all;
    }

    std::string with_size(std::string_view axis, const AxisSizes &sizes) const {
        if (axis == "R") {
            const std::string_view of = reference_by_point ? "num_points" : "num_levels";
            return (reference_by_point ? "a divisor of " : "") + with_size(of, sizes) + (reference_by_point ? "" : " or 1");
        }
        const int64_t size = axis.find_first_not_of("0123456789") == axis.npos ? AxisSizes::UNKNOWN : sizes.of(axis);
        return std::string(axis) + (size == AxisSizes::UNKNOWN ? "" : "=" + std::to_string(size));
    }

    // Two neighbouring axes whose exchange makes the shape right.
    std::string remark(const Axes &names, std::vector<int64_t> shape, const AxisSizes &sizes) const {
        for (size_t a = 0; a + 1 < shape.size(); ++a) {
            std::swap(shape[a], shape[a + 1]);
            if (fits(names, shape, sizes))
                return ", whose axes " + std::to_string(a) + " and " + std::to_string(a + 1) + " look swapped";
            std::swap(shape[a], shape[a + 1]);
        }
        return "";
    }

    void need_shape(size_t input) {
        const Axes names = axes(input);
        if (fits(names, inputs[input].shape, known)) return;
        const AxisSizes others = sizes_without(input);
        std::string rule;
        for (std::string_view axis : names) rule += (rule.empty() ? "" : ", ") + with_size(axis, others);
        refuse(input, "have shape (" + rule + ")", text_of(inputs[input].shape) + remark(names, inputs[input].shape, others));
    }

    void need_groups() {
        const int64_t groups = known.of("group"), channels = known.of("c");
        if (node.function.op == AGGREGATION && found.empty() && (groups == 0 || channels % groups != 0))
            refuse(size_t(node.weights), "have a group count that divides c=" + std::to_string(channels),
                   std::to_string(groups));
    }

    void need_type(size_t input) {
        const int type = inputs[input].type;
        const bool integer = type == ORT_INT32 || type == ORT_INT64;
        const bool floating = type == ORT_FLOAT32 || type == ORT_FLOAT64 || type == ORT_FLOAT16 || type == ORT_BFLOAT16;
        switch (node.inputs[input].elements) {
        case Elements::FLOATING:
            if (!floating) refuse(input, "have dtype float32, float64, float16 or bfloat16", name_of_type(type));
            break;
        case Elements::INDEX:
            if (!integer) refuse(input, "have dtype int32 or int64", name_of_type(type));
            break;
        case Elements::LOCATIONS:
            if (!floating && !integer) refuse(input, "have a floating dtype, int32 or int64", name_of_type(type));
        }
    }
};

} // namespace

std::string find_fault(const Node &node, const std::vector<Given> &inputs, bool by_point) {
    for (size_t i = 0; i < inputs.size(); ++i)
        if (!inputs[i].there && !node.inputs[i].optional) return sentence(node.inputs[i].name, "be given", "no tensor");
    return Checker(node, inputs, by_point).fault();
}

} // namespace mxd
