// Reads the text that describes the operators, once.
#include "call/description.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <numeric>

namespace mxd {

namespace {

// ---- what the text does not say: kernels, and where a call keeps what the text names

struct Kernel {
    std::string_view name;
    Operator op;
};
constexpr Kernel KERNELS[] = {{"multi_scale_deformable_attn", MULTI_SCALE},
                              {"deformable_aggregation", AGGREGATION},
                              {"geometric_kernel_attention", GEOMETRIC},
                              {"bev_pool_v3", POOLING},
                              {"", MULTI_SCALE}};

struct Name {
    std::string_view name;
    Tensor Call::*input, Call::*gradient;
};
constexpr Name TENSORS[] = {{"value", &Call::value, &Call::grad_value},
                            {"feature_maps", &Call::value, &Call::grad_value},
                            {"feat", &Call::value, &Call::grad_value},
                            {"value_spatial_shapes", &Call::shapes, nullptr},
                            {"spatial_shapes", &Call::shapes, nullptr},
                            {"spatial_shape", &Call::shapes, nullptr},
                            {"value_level_start_index", &Call::starts, nullptr},
                            {"level_start_index", &Call::starts, nullptr},
                            {"scale_start_index", &Call::starts, nullptr},
                            {"sampling_locations", &Call::locations, &Call::grad_locations},
                            {"sample_locations", &Call::locations, &Call::grad_locations},
                            {"sampling_offsets", &Call::locations, &Call::grad_locations},
                            {"key_points", &Call::locations, &Call::grad_locations},
                            {"attention_weights", &Call::weights, &Call::grad_weights},
                            {"weight", &Call::weights, &Call::grad_weights},
                            {"attention_logits", &Call::weights, &Call::grad_weights},
                            {"logits", &Call::weights, &Call::grad_weights},
                            {"reference_points", &Call::reference, &Call::grad_reference},
                            {"window", &Call::window, nullptr},
                            {"projection", &Call::projection, &Call::grad_projection},
                            {"image_size", &Call::image_size, nullptr},
                            {"pair_scale", &Call::pair_scale, nullptr},
                            {"depth", &Call::depth, &Call::grad_depth},
                            {"ranks_feat", &Call::ranks_feat, nullptr},
                            {"ranks_depth", &Call::ranks_depth, nullptr},
                            {"ranks_bev", &Call::ranks_bev, nullptr},
                            {"output", &Call::output, &Call::grad_output},
                            {"", nullptr, nullptr}};

// In the order in which axes.h has them.
struct Size {
    std::string_view name;
    int64_t Sizes::*size;
};
constexpr Size SIZES[] = {{"bs", &Sizes::batch},
                          {"num_keys", &Sizes::keys},
                          {"num_feat", &Sizes::keys},
                          {"num_queries", &Sizes::queries},
                          {"anchor", &Sizes::queries},
                          {"num_heads", &Sizes::heads},
                          {"num_levels", &Sizes::scales},
                          {"R", &Sizes::references},
                          {"num_points", &Sizes::points},
                          {"pts", &Sizes::points},
                          {"cam", &Sizes::cameras},
                          {"scale", &Sizes::scales},
                          {"group", &Sizes::groups},
                          {"embed_dims", &Sizes::channels},
                          {"c", &Sizes::channels},
                          {"n", &Sizes::points},
                          {"", nullptr}};

// The entry of a name; the last one, which has none, if it is not there.
template <class Table> const auto &entry_of(const Table &table, std::string_view name) {
    return *std::find_if(std::begin(table), std::end(table) - 1, [&](const auto &each) { return each.name == name; });
}

// ---- words of the text

std::string_view trimmed(std::string_view text) {
    const size_t first = text.find_first_not_of(' ');
    return first == text.npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// What lies between separators; nothing is empty.
std::vector<std::string_view> parts(std::string_view text, std::string_view separator) {
    std::vector<std::string_view> found;
    for (size_t end = 0; end != text.npos; text.remove_prefix(end == text.npos ? 0 : end + separator.size())) {
        end = text.find(separator);
        const std::string_view part = trimmed(text.substr(0, end));
        if (!part.empty()) found.push_back(part);
    }
    return found;
}

bool is_number(std::string_view text) { return text.find_first_not_of("0123456789") == text.npos; }
int64_t number(std::string_view text) { return std::stoll(std::string(text)); }

int place_of(std::vector<std::string_view> &sizes, std::string_view name) {
    const auto found = std::find(sizes.begin(), sizes.end(), name);
    if (found != sizes.end()) return int(found - sizes.begin());
    sizes.push_back(name);
    return int(sizes.size()) - 1;
}

NamedAxis axis_of(std::string_view text, Description &op) {
    NamedAxis axis;
    axis.text = text;
    const auto either = parts(text, " or "), factors = parts(text, " * ");
    if (is_number(either.front())) {
        axis.number = number(either.front());
        axis.other = number(either.back());
    } else {
        axis.size = place_of(op.sizes, factors.front());
        if (factors.size() > 1) axis.times = place_of(op.sizes, factors.back());
    }
    return axis;
}

// ---- one line, one argument

// Where a number stands behind the named sizes, once all of these are known.
int place_behind(const NamedAxis &axis, Description &op) {
    const bool is_either = axis.number != axis.other;
    int place = int(op.sizes.size());
    while (place < MOST_SIZES - 1 && op.at_first.of[place] >= 0 && (is_either || op.at_first.of[place] != axis.number)) ++place;
    if (is_either) {
        op.either = MOST_SIZES - 1;
        op.either_of[0] = axis.number;
        op.either_of[1] = axis.other;
        return op.either;
    }
    op.at_first.of[place] = axis.number;
    return place;
}

OfAxes<int> layout_of(const Argument &argument, const Description &op) {
    const OfAxes<NamedAxis> &split = argument.split;
    std::vector<int> layout(size_t(split.count));
    std::iota(layout.begin(), layout.end(), 0);
    std::stable_sort(layout.begin(), layout.end(),
                     [&](int a, int b) { return &entry_of(SIZES, split[a].text) < &entry_of(SIZES, split[b].text); });
    const bool is_table = argument.tensor == &Call::shapes || argument.tensor == &Call::starts;
    if (is_table && op.size("cam") < 0) layout.insert(layout.begin() + MAP_CAMERA, -1);
    for (Tensor Call::*of_rows : {&Call::value, &Call::output, &Call::grad_value, &Call::grad_output}) {
        if (argument.tensor != of_rows) continue;
        if (layout.size() < 3) layout.insert(layout.begin() + BATCH, -1);
        if (layout.size() < 4) layout.insert(layout.begin() + HEAD, -1);
    }
    OfAxes<int> found;
    for (int from : layout) found.push_back(from);
    return found;
}

Elements elements_of(std::string_view word) {
    return word == "floating" ? Elements::FLOATING
           : word == "index"  ? Elements::INDEX
           : word == "number" ? Elements::NUMBER
                              : Elements::OF_VALUE;
}

struct Line {
    std::string_view name, elements, axes, rest;
};

Argument argument_of(const Line &line, Description &op) {
    Argument argument;
    argument.name = line.name;
    argument.elements = elements_of(line.elements);
    argument.required = line.rest != "optional";
    for (std::string_view text : parts(line.axes, ", ")) {
        argument.axes.push_back(axis_of(text, op));
        for (std::string_view factor : parts(text, " * ")) argument.split.push_back(axis_of(factor, op));
    }
    argument.tensor = entry_of(TENSORS, line.name).input;
    return argument;
}

Argument gradient_of(const Argument &of) {
    Argument gradient = of;
    gradient.name = "grad_" + of.name;
    gradient.elements = Elements::FLOATING;
    gradient.required = false;
    gradient.tensor = entry_of(TENSORS, of.name).gradient;
    return gradient;
}

// ---- an operator

struct Text {
    std::list<Description> operators;
    std::vector<Function> functions;

    Text() {
        for (std::string_view paragraph : parts(DESCRIPTIONS, "\n\n")) add(paragraph);
    }

  private:
    void add(std::string_view paragraph) {
        Description &op = operators.emplace_back();
        std::vector<Argument> inputs, outputs, gradients;
        for (std::string_view line : parts(paragraph, "\n")) {
            const auto words = parts(line, "  ");
            const std::string_view first = words.front(), last = words.back();
            if (words.size() == 1) op.name = op.bare = first;
            if (words.size() < 3 && first == "built on") op.bare = last;
            if (words.size() < 3 && first == "divides") {
                op.divisor = op.size(parts(last, ", ").front());
                op.divided = op.size(parts(last, ", ").back());
            }
            if (first == "sizes")
                for (std::string_view size : parts(last, ", ")) op.given.push_back(op.size(size));
            if (first == "option") {
                op.option = words[1];
                op.choices = parts(last, ", ");
            } else if (words.size() > 2) {
                const Line found{first, words[1], words[2], last};
                (first == "output" ? outputs : inputs).push_back(argument_of(found, op));
                if (last == "gradient") gradients.push_back(gradient_of(inputs.back()));
            }
        }
        const Kernel &kernel = entry_of(KERNELS, op.bare);
        if (kernel.name.empty()) return; // an operator of others
        std::fill(std::begin(op.at_first.of), std::end(op.at_first.of), -1);
        for (std::vector<Argument> *all : {&inputs, &outputs, &gradients})
            for (Argument &each : *all) {
                for (const NamedAxis &axis : each.split)
                    each.places.push_back(axis.size >= 0 ? axis.size : place_behind(axis, op));
                each.layout = layout_of(each, op);
                each.in_layout =
                    each.layout.count == each.split.count && std::is_sorted(each.layout.begin(), each.layout.end());
            }
        op.references = op.size("R");
        op.levels = op.size("num_levels");
        op.points = op.size("num_points");
        op.rows = inputs.front().axes[std::min(int(KEY), inputs.front().axes.count - 2)].size;
        for (std::string_view name : op.sizes) op.members.push_back(entry_of(SIZES, name).size);
        Function forward{&op,    kernel.op, std::string(op.name), op.bare != op.name, false,
                         inputs, 0,         int(inputs.size()),   int(inputs.size())};
        Function backward = forward;
        forward.arguments.push_back(outputs.front());
        backward.name += "_backward";
        backward.backward = true;
        ++backward.first_input;
        ++backward.first_written;
        backward.arguments.insert(backward.arguments.begin(), gradient_of(outputs.front()));
        backward.arguments.front().required = true;
        backward.arguments.insert(backward.arguments.end(), gradients.begin(), gradients.end());
        functions.push_back(forward);
        functions.push_back(backward);
    }
};

} // namespace

int Description::size(std::string_view of) const {
    const auto found = std::find(sizes.begin(), sizes.end(), of);
    return found == sizes.end() ? -1 : int(found - sizes.begin());
}

const std::vector<Function> &functions() {
    static const Text text;
    return text.functions;
}

const Function *find_function(std::string_view name) {
    for (const Function &each : functions())
        if (each.name == name) return &each;
    return nullptr;
}

} // namespace mxd
