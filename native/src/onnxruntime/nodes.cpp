#include "onnxruntime/nodes.h"

#include <algorithm>

#include "call/words.h"
#include "onnxruntime/api.h"

namespace mxd {
namespace {

constexpr Elements FLOATING = Elements::FLOATING, INDEX = Elements::INDEX;
constexpr char ON_TWO_AXES[] = "bs, num_queries, num_heads, num_levels, num_points";
constexpr char ON_ONE_AXIS[] = "bs, num_queries, num_heads, num_levels * num_points";
constexpr char PLACES[] = "num_levels * num_points";
constexpr char OF_SAMPLES[] = "bs, num_queries, num_heads, num_levels, num_points, 2";
constexpr char REFERENCES[] = "bs, num_queries, R, 2 or 4";

constexpr NodeInput VALUE{"value", "bs, num_keys, num_heads, embed_dims", FLOATING, true, false};
constexpr NodeInput FEATURES{"feature_maps", "bs, num_feat, c", FLOATING, true, false};
constexpr NodeInput MAPS{"spatial_shape", "cam, scale, 2", INDEX, false, false};
constexpr NodeInput MAP_STARTS{"scale_start_index", "cam, scale", INDEX, true, false};

constexpr NodeInput shapes_of_levels(const char *name) { return {name, "num_levels, 2", INDEX, true, false}; }
constexpr NodeInput starts_of_levels(const char *name) { return {name, "num_levels", INDEX, false, false}; }
constexpr NodeInput defining(const char *name, const char *axes, Elements elements = FLOATING) {
    return {name, axes, elements, true, false};
}
constexpr NodeInput following(const char *name, const char *axes) { return {name, axes, FLOATING, false, false}; }
constexpr NodeInput optional(const char *name, const char *axes) { return {name, axes, FLOATING, false, true}; }

} // namespace

Node::Node(const char *of, std::initializer_list<NodeInput> given) : name(of), inputs(given) {
    find_function(name, function);
    weights = function.with_logits ? 5 : 4;
}

const std::vector<Node> &nodes() {
    static const std::vector<Node> all{
        {"multi_scale_deformable_attn",
         {VALUE, shapes_of_levels("value_spatial_shapes"), starts_of_levels("value_level_start_index"),
          defining("sampling_locations", OF_SAMPLES), following("attention_weights", ON_TWO_AXES)}},
        {"deformable_aggregation",
         {FEATURES, MAPS, MAP_STARTS, defining("sample_locations", "bs, anchor, pts, cam, 2"),
          defining("weight", "bs, anchor, pts, cam, scale, group")}},
        {"geometric_kernel_attention",
         {VALUE, shapes_of_levels("spatial_shapes"), starts_of_levels("level_start_index"),
          defining("sampling_locations", OF_SAMPLES, Elements::LOCATIONS), following("attention_weights", ON_TWO_AXES)}},
        {"multi_scale_deformable_attn_with_logits",
         {VALUE, shapes_of_levels("value_spatial_shapes"), starts_of_levels("value_level_start_index"),
          following("reference_points", REFERENCES), defining("sampling_offsets", OF_SAMPLES),
          following("attention_logits", ON_ONE_AXIS)}},
        {"deformable_aggregation_with_logits",
         {FEATURES, MAPS, MAP_STARTS, defining("key_points", "bs, anchor, pts, 3"), following("projection", "bs, cam, 4, 4"),
          defining("logits", "bs, anchor, cam, scale, pts, group"), optional("image_size", "bs, cam, 2"),
          optional("pair_scale", "bs, anchor, cam, pts")}},
        {"geometric_kernel_attention_with_logits",
         {VALUE, shapes_of_levels("spatial_shapes"), starts_of_levels("level_start_index"),
          defining("reference_points", "bs, num_queries, num_heads, 2"), defining("window", "num_points, 2", INDEX),
          following("attention_logits", ON_ONE_AXIS)}},
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

// The inputs of one call, and what they say about the sizes of axes.
class Checker {
  public:
    Checker(const Node &n, const std::vector<Given> &given, bool by_point)
        : node(n), inputs(given), reference_by_point(by_point) {}

    std::string fault() {
        learn_sizes();
        for (size_t i = 0; found.empty() && i < inputs.size(); ++i) {
            if (i == FIRST_OF_SAMPLES) blame_value();
            if (found.empty() && inputs[i].there) need_shape(i);
            if (int(i) == node.weights) need_groups();
        }
        need_references();
        for (size_t i = 0; i < inputs.size(); ++i)
            if (inputs[i].there) need_type(i);
        return found;
    }

  private:
    static constexpr size_t FIRST_OF_SAMPLES = 3;
    const Node &node;
    const std::vector<Given> &inputs;
    const bool reference_by_point;
    AxisSizes known;
    std::string found;

    // The first fault is told.
    void refuse(size_t input, const std::string &rule, const std::string &fact) {
        if (found.empty()) found = sentence(node.inputs[input].name, rule, fact);
    }
    void refuse_shape(size_t input, const std::string &rule, const std::string &remark = "") {
        refuse(input, rule, text_of(inputs[input].shape) + remark);
    }

    void learn_sizes() {
        for (size_t i = 0; i < inputs.size(); ++i) {
            if (!node.inputs[i].defines) continue;
            const std::string axes = node.inputs[i].axes;
            if (size_t(std::count(axes.begin(), axes.end(), ',')) + 1 != inputs[i].shape.size())
                return refuse_shape(i, "have shape (" + axes + ")");
            known.tell_all(node.inputs[i].axes, inputs[i].shape.data());
        }
        known.tell(PLACES, known.of("num_levels") * known.of("num_points"));
    }

    void need_shape(size_t input) {
        const std::vector<int64_t> &shape = inputs[input].shape;
        const char *axes = node.inputs[input].axes;
        if (axes == REFERENCES) return;
        if (axes == ON_ONE_AXIS && shape.size() == 5) axes = ON_TWO_AXES;
        if (!known.fit(axes, shape.data(), shape.size())) refuse_shape(input, known.rule(axes));
    }

    // Names value if the samples' tensors agree with each other but not with value.
    void blame_value() {
        if (node.function.op == AGGREGATION) return;
        const size_t place = node.function.op == MULTI_SCALE && node.function.with_logits ? 4 : 3;
        const std::vector<int64_t> &value = inputs[0].shape, &samples = inputs[place].shape,
                                   &weights = inputs[size_t(node.weights)].shape;
        const size_t compared = node.function.with_logits ? 3 : weights.size();
        const bool agree = weights.size() >= compared && samples.size() >= compared + !node.function.with_logits &&
                           std::equal(weights.begin(), weights.begin() + int64_t(compared), samples.begin());
        if (!agree || compared < 3 || (value[BATCH] == samples[BATCH] && value[HEAD] == samples[HEAD])) return;
        const bool swapped = value[KEY] == samples[HEAD];
        AxisSizes of_samples;
        of_samples.tell("bs", samples[BATCH]);
        of_samples.tell("num_heads", samples[HEAD]);
        refuse_shape(0, of_samples.rule(VALUE.axes), swapped ? ", whose axes 1 and 2 look swapped" : "");
    }

    void need_groups() {
        const int64_t groups = known.of("group"), channels = known.of("c");
        if (node.function.op == AGGREGATION && found.empty() && (groups == 0 || channels % groups != 0))
            refuse(size_t(node.weights), "have a group count that divides c=" + std::to_string(channels),
                   std::to_string(groups));
    }

    void need_references() {
        if (!found.empty() || node.function.op != MULTI_SCALE || !node.function.with_logits) return;
        const std::vector<int64_t> &shape = inputs[3].shape;
        const int64_t bs = known.of("bs"), queries = known.of("num_queries"), levels = known.of("num_levels"),
                      points = known.of("num_points");
        const bool axes = shape.size() == 4 && shape[BATCH] == bs && shape[QUERY] == queries;
        if (axes && (shape[COORDINATE] == 2 || shape[COORDINATE] == 4) &&
            (reference_by_point ? shape[REFERENCE] > 0 && points % shape[REFERENCE] == 0
                                : shape[REFERENCE] == levels || shape[REFERENCE] == 1))
            return;
        const std::string count = reference_by_point ? "a divisor of num_points=" + std::to_string(points)
                                                     : "num_levels=" + std::to_string(levels) + " or 1";
        refuse_shape(3, "have shape (bs=" + std::to_string(bs) + ", num_queries=" + std::to_string(queries) + ", " + count +
                            ", 2 or 4)");
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
