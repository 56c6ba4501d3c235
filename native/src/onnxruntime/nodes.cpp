#include "onnxruntime/nodes.h"

#include <algorithm>
#include <sstream>

#include "onnxruntime/api.h"

namespace mxd {
namespace {

constexpr Elements FLOATING = Elements::FLOATING, INDEX = Elements::INDEX;
constexpr char ON_TWO_AXES[] = "bs, num_queries, num_heads, num_levels, num_points";
constexpr char ON_ONE_AXIS[] = "bs, num_queries, num_heads, num_levels * num_points";
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

const std::vector<Node> &nodes() {
    static const std::vector<Node> all{
        {"multi_scale_deformable_attn",
         MULTI_SCALE,
         false,
         4,
         {VALUE, shapes_of_levels("value_spatial_shapes"), starts_of_levels("value_level_start_index"),
          defining("sampling_locations", OF_SAMPLES), following("attention_weights", ON_TWO_AXES)}},
        {"deformable_aggregation",
         AGGREGATION,
         false,
         4,
         {FEATURES, MAPS, MAP_STARTS, defining("sample_locations", "bs, anchor, pts, cam, 2"),
          defining("weight", "bs, anchor, pts, cam, scale, group")}},
        {"geometric_kernel_attention",
         GEOMETRIC,
         false,
         4,
         {VALUE, shapes_of_levels("spatial_shapes"), starts_of_levels("level_start_index"),
          defining("sampling_locations", OF_SAMPLES, Elements::LOCATIONS),
          following("attention_weights", ON_TWO_AXES)}},
        {"multi_scale_deformable_attn_with_logits",
         MULTI_SCALE,
         true,
         5,
         {VALUE, shapes_of_levels("value_spatial_shapes"), starts_of_levels("value_level_start_index"),
          following("reference_points", REFERENCES), defining("sampling_offsets", OF_SAMPLES),
          following("attention_logits", ON_ONE_AXIS)}},
        {"deformable_aggregation_with_logits",
         AGGREGATION,
         true,
         5,
         {FEATURES, MAPS, MAP_STARTS, defining("key_points", "bs, anchor, pts, 3"),
          following("projection", "bs, cam, 4, 4"), defining("logits", "bs, anchor, cam, scale, pts, group"),
          optional("image_size", "bs, cam, 2"), optional("pair_scale", "bs, anchor, cam, pts")}},
        {"geometric_kernel_attention_with_logits",
         GEOMETRIC,
         true,
         5,
         {VALUE, shapes_of_levels("spatial_shapes"), starts_of_levels("level_start_index"),
          defining("reference_points", "bs, num_queries, num_heads, 2"), defining("window", "num_points, 2", INDEX),
          following("attention_logits", ON_ONE_AXIS)}},
    };
    return all;
}

namespace {

struct Axis {
    std::string name;
    int64_t size; // UNKNOWN: any
};
constexpr int64_t UNKNOWN = -1;

std::string sentence(const std::string &name, const std::string &rule, const std::string &fact) {
    return name + " must " + rule + "; got " + fact;
}

std::string text_of(const std::vector<int64_t> &shape) {
    std::string text;
    for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

std::string name_of_type(int type) {
    static const char *const NAMES[] = {"no type", "float32", "uint8",     "int8",       "uint16",  "int16",
                                        "int32",   "int64",   "string",    "bool",       "float16", "float64",
                                        "uint32",  "uint64",  "complex64", "complex128", "bfloat16"};
    const bool known = type >= 0 && size_t(type) < sizeof NAMES / sizeof *NAMES;
    return known ? NAMES[type] : "type " + std::to_string(type) + " of ONNX";
}

std::vector<std::string> split(const std::string &axes) {
    std::vector<std::string> names;
    std::istringstream text(axes);
    for (std::string name; std::getline(text >> std::ws, name, ',');) names.push_back(name);
    return names;
}

bool is_number(const std::string &name) { return name.find_first_not_of("0123456789") == std::string::npos; }

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
    std::vector<Axis> known;
    std::string found;

    // The first fault is told.
    void refuse(size_t input, const std::string &rule, const std::string &fact) {
        if (found.empty()) found = sentence(node.inputs[input].name, rule, fact);
    }
    void refuse_shape(size_t input, const std::vector<Axis> &axes, const std::string &remark = "") {
        std::string text;
        for (const Axis &axis : axes) {
            const bool name_alone = is_number(axis.name) || axis.size == UNKNOWN;
            text += (text.empty() ? "" : ", ") + axis.name + (name_alone ? "" : "=" + std::to_string(axis.size));
        }
        refuse(input, "have shape (" + text + ")", text_of(inputs[input].shape) + remark);
    }

    int64_t size_of(const std::string &name) const {
        if (is_number(name)) return std::stoll(name);
        for (const Axis &axis : known)
            if (axis.name == name) return axis.size;
        return UNKNOWN;
    }
    int64_t places() const { return size_of("num_levels") * size_of("num_points"); }

    void learn_sizes() {
        for (size_t i = 0; i < inputs.size(); ++i) {
            if (!node.inputs[i].defines) continue;
            const std::vector<std::string> names = split(node.inputs[i].axes);
            if (names.size() != inputs[i].shape.size())
                return refuse(i, "have shape (" + std::string(node.inputs[i].axes) + ")", text_of(inputs[i].shape));
            for (size_t a = 0; a < names.size(); ++a)
                if (size_of(names[a]) == UNKNOWN) known.push_back({names[a], inputs[i].shape[a]});
        }
        known.push_back({ON_ONE_AXIS + sizeof "bs, num_queries, num_heads,", places()});
    }

    void need_shape(size_t input) {
        const std::vector<int64_t> &shape = inputs[input].shape;
        const char *axes = node.inputs[input].axes;
        if (axes == REFERENCES) return;
        if (axes == ON_ONE_AXIS && shape.size() == 5) axes = ON_TWO_AXES;
        std::vector<Axis> expected;
        for (const std::string &name : split(axes)) expected.push_back({name, size_of(name)});
        const bool same =
            std::equal(shape.begin(), shape.end(), expected.begin(), expected.end(),
                       [](int64_t size, const Axis &axis) { return axis.size == UNKNOWN || size == axis.size; });
        if (!same) refuse_shape(input, expected);
    }

    // Names value if the samples' tensors agree with each other but not with value.
    void blame_value() {
        if (node.op == AGGREGATION) return;
        const size_t place = node.op == MULTI_SCALE && node.with_logits ? 4 : 3;
        const std::vector<int64_t> &value = inputs[0].shape, &samples = inputs[place].shape,
                                   &weights = inputs[size_t(node.weights)].shape;
        const size_t compared = node.with_logits ? 3 : weights.size();
        const bool agree = weights.size() >= compared && samples.size() >= compared + !node.with_logits &&
                           std::equal(weights.begin(), weights.begin() + int64_t(compared), samples.begin());
        if (!agree || compared < 3 || (value[0] == samples[0] && value[2] == samples[2])) return;
        const bool swapped = value[1] == samples[2];
        refuse_shape(0, {{"bs", samples[0]}, {"num_keys", UNKNOWN}, {"num_heads", samples[2]}, {"embed_dims", UNKNOWN}},
                     swapped ? ", whose axes 1 and 2 look swapped" : "");
    }

    void need_groups() {
        const int64_t groups = size_of("group"), channels = size_of("c");
        if (node.op == AGGREGATION && found.empty() && (groups == 0 || channels % groups != 0))
            refuse(size_t(node.weights), "have a group count that divides c=" + std::to_string(channels),
                   std::to_string(groups));
    }

    void need_references() {
        if (!found.empty() || node.op != MULTI_SCALE || !node.with_logits) return;
        const std::vector<int64_t> &shape = inputs[3].shape;
        const int64_t bs = size_of("bs"), queries = size_of("num_queries"), levels = size_of("num_levels"),
                      points = size_of("num_points");
        const bool axes = shape.size() == 4 && shape[BATCH] == bs && shape[QUERY] == queries;
        if (axes && (shape[COORDINATE] == 2 || shape[COORDINATE] == 4) &&
            (reference_by_point ? shape[REFERENCE] > 0 && points % shape[REFERENCE] == 0
                                : shape[REFERENCE] == levels || shape[REFERENCE] == 1))
            return;
        const std::string count = reference_by_point ? "a divisor of num_points=" + std::to_string(points)
                                                     : "num_levels=" + std::to_string(levels) + " or 1";
        refuse(3,
               "have shape (bs=" + std::to_string(bs) + ", num_queries=" + std::to_string(queries) + ", " + count +
                   ", 2 or 4)",
               text_of(shape));
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

int64_t number(const Given &table, int64_t place) {
    return table.type == ORT_INT32 ? static_cast<const int32_t *>(table.data)[place]
                                   : static_cast<const int64_t *>(table.data)[place];
}

// The rows that a level ends before, as text; it may have more than 64 bits can count.
std::string rows_needed(int64_t height, int64_t width, int64_t start) {
    int64_t rows;
    if (__builtin_mul_overflow(height, width, &rows) || __builtin_add_overflow(rows, start, &rows))
        return "2**63 or more";
    return std::to_string(rows);
}

} // namespace

std::string find_fault(const Node &node, const std::vector<Given> &inputs, bool by_point) {
    for (size_t i = 0; i < inputs.size(); ++i)
        if (!inputs[i].there && !node.inputs[i].optional) return sentence(node.inputs[i].name, "be given", "no tensor");
    return Checker(node, inputs, by_point).fault();
}

std::string find_fault_of_levels(const Node &node, const std::vector<Given> &inputs) {
    const Given &shapes = inputs[1], &starts = inputs[2];
    const int64_t keys = inputs[0].shape[KEY], last = starts.shape.back(),
                  of_cameras = int64_t(starts.shape.size()) == 2;
    const int64_t count = last * (of_cameras ? starts.shape.front() : 1);
    for (int64_t i = 0; i < count; ++i) {
        const std::string where = of_cameras ? "[" + std::to_string(i / last) + ", " + std::to_string(i % last) + "]"
                                             : "[" + std::to_string(i) + "]";
        const int64_t height = number(shapes, 2 * i), width = number(shapes, 2 * i + 1), start = number(starts, i);
        const std::string name = node.inputs[2].name + where;
        if (height <= 0 || width <= 0)
            return sentence(node.inputs[1].name + where, "be positive (H, W)", text_of({height, width}));
        if (start < 0) return sentence(name, "not be negative", std::to_string(start));
        if (start > keys || width > keys || height > (keys - start) / width)
            return sentence(name,
                            "leave room for " + std::to_string(height) + " x " + std::to_string(width) +
                                " rows among " + std::to_string(keys),
                            std::to_string(start) + " (needs " + rows_needed(height, width, start) + " rows)");
    }
    return "";
}

} // namespace mxd
