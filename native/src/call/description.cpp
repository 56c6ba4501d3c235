// The tables of the operators. They are constants: the compiler computes them.
#include "call/description.h"

namespace mxd {
namespace {

struct Input {
    const char *name, *gradient_name; // gradient_name is null if the input is not differentiable
    Elements elements;
    bool required;
    Tensor Call::*tensor, Call::*gradient;
    List<NamedAxis, MOST_AXES> axes;
};

struct Description {
    const char *name, *backward_name;
    Operator kernel;
    bool with_logits;
    List<NamedAxis, MOST_AXES> output;
    List<Input, 8> inputs;
    List<sizes::Name, MOST_AXES> numbers = {};
    std::string_view option = {};
    List<std::string_view, 2> choices = {};
};

using namespace sizes;

#define MXD_OPERATOR(name) #name, #name "_backward"
// Kinds of inputs. A LEARNED input is floating and differentiable. A READ input is not differentiable. An OPTIONAL input is
// floating and not differentiable, and may be left out. `member` is the member of Call that holds the input.
#define MXD_LEARNED(name, member, ...)                                                                                         \
    Input {                                                                                                                    \
        #name, "grad_" #name, Elements::FLOATING, true, &Call::member, &Call::grad_##member, { __VA_ARGS__ }                   \
    }
#define MXD_READ(name, elements, member, ...)                                                                                  \
    Input {                                                                                                                    \
        #name, nullptr, Elements::elements, true, &Call::member, nullptr, { __VA_ARGS__ }                                      \
    }
#define MXD_OPTIONAL(name, member, ...)                                                                                        \
    Input {                                                                                                                    \
        #name, nullptr, Elements::FLOATING, false, &Call::member, nullptr, { __VA_ARGS__ }                                     \
    }

// clang-format off
constexpr Description DESCRIPTIONS[] = {
    {MXD_OPERATOR(multi_scale_deformable_attn), MULTI_SCALE, false, {bs, num_queries, {num_heads, embed_dims}},
     {MXD_LEARNED(value, value, bs, num_keys, num_heads, embed_dims),
      MXD_READ(value_spatial_shapes, INDEX, shapes, num_levels, TWO),
      MXD_READ(value_level_start_index, INDEX, starts, num_levels),
      MXD_LEARNED(sampling_locations, locations, bs, num_queries, num_heads, num_levels, num_points, TWO),
      MXD_LEARNED(attention_weights, weights, bs, num_queries, num_heads, num_levels, num_points)}},

    {MXD_OPERATOR(deformable_aggregation), AGGREGATION, false, {bs, anchor, c},
     {MXD_LEARNED(feature_maps, value, bs, num_feat, c),
      MXD_READ(spatial_shape, INDEX, shapes, cam, scale, TWO),
      MXD_READ(scale_start_index, INDEX, starts, cam, scale),
      MXD_LEARNED(sample_locations, locations, bs, anchor, pts, cam, TWO),
      MXD_LEARNED(weight, weights, bs, anchor, pts, cam, scale, group)}},

    {MXD_OPERATOR(geometric_kernel_attention), GEOMETRIC, false, {bs, num_queries, {num_heads, embed_dims}},
     {MXD_LEARNED(value, value, bs, num_keys, num_heads, embed_dims),
      MXD_READ(spatial_shapes, INDEX, shapes, num_levels, TWO),
      MXD_READ(level_start_index, INDEX, starts, num_levels),
      MXD_READ(sampling_locations, NUMBER, locations, bs, num_queries, num_heads, num_levels, num_points, TWO),
      MXD_LEARNED(attention_weights, weights, bs, num_queries, num_heads, num_levels, num_points)}},

    {MXD_OPERATOR(multi_scale_deformable_attn_with_logits), MULTI_SCALE, true, {bs, num_queries, {num_heads, embed_dims}},
     {MXD_LEARNED(value, value, bs, num_keys, num_heads, embed_dims),
      MXD_READ(value_spatial_shapes, INDEX, shapes, num_levels, TWO),
      MXD_READ(value_level_start_index, INDEX, starts, num_levels),
      MXD_LEARNED(reference_points, reference, bs, num_queries, R, TWO_OR_FOUR),
      MXD_LEARNED(sampling_offsets, locations, bs, num_queries, num_heads, num_levels, num_points, TWO),
      MXD_LEARNED(attention_logits, weights, bs, num_queries, num_heads, {num_levels, num_points})},
     {}, "reference_axis", {"level", "point"}},

    {MXD_OPERATOR(deformable_aggregation_with_logits), AGGREGATION, true, {bs, anchor, c},
     {MXD_LEARNED(feature_maps, value, bs, num_feat, c),
      MXD_READ(spatial_shape, INDEX, shapes, cam, scale, TWO),
      MXD_READ(scale_start_index, INDEX, starts, cam, scale),
      MXD_LEARNED(key_points, locations, bs, anchor, pts, THREE),
      MXD_LEARNED(projection, projection, bs, cam, FOUR, FOUR),
      MXD_LEARNED(logits, weights, bs, anchor, cam, scale, pts, group),
      MXD_OPTIONAL(image_size, image_size, bs, cam, TWO),
      MXD_OPTIONAL(pair_scale, pair_scale, bs, anchor, cam, pts)}},

    {MXD_OPERATOR(geometric_kernel_attention_with_logits), GEOMETRIC, true, {bs, num_queries, {num_heads, embed_dims}},
     {MXD_LEARNED(value, value, bs, num_keys, num_heads, embed_dims),
      MXD_READ(spatial_shapes, INDEX, shapes, num_levels, TWO),
      MXD_READ(level_start_index, INDEX, starts, num_levels),
      MXD_READ(reference_points, FLOATING, reference, bs, num_queries, num_heads, TWO),
      MXD_READ(window, INDEX, window, num_points, TWO),
      MXD_LEARNED(attention_logits, weights, bs, num_queries, num_heads, {num_levels, num_points})}},

    {MXD_OPERATOR(bev_pool_v3), POOLING, false, {bs, c, d, h, w},
     {MXD_LEARNED(feat, value, num_feat, c),
      MXD_LEARNED(depth, depth, num_depth),
      MXD_READ(ranks_feat, INDEX, ranks_feat, n),
      MXD_READ(ranks_depth, INDEX, ranks_depth, n),
      MXD_READ(ranks_bev, INDEX, ranks_bev, n)},
     {bs, d, h, w}}};
// clang-format on

// Sorts axes in the order of MXD_SIZES. Inserts an axis of one element where only another operator's tensor has an axis.
constexpr List<int, MOST_AXES> layout_of(Tensor Call::*tensor, const List<NamedAxis, MOST_AXES> &axes) {
    List<int, MOST_AXES> layout;
    const auto insert = [&](int at, int axis) {
        for (int a = layout.count++; a > at; --a) layout.all[a] = layout.all[a - 1];
        layout.all[at] = axis;
    };
    for (int axis = 0; axis < axes.count; ++axis) {
        int at = axis;
        while (at > 0 && axes[layout[at - 1]].size > axes[axis].size) --at;
        insert(at, axis);
    }
    const bool is_table = tensor == &Call::shapes || tensor == &Call::starts;
    if (is_table && axes[0].size != cam) insert(MAP_CAMERA, -1);
    for (Tensor Call::*rows : {&Call::value, &Call::output, &Call::grad_value, &Call::grad_output})
        if (tensor == rows) {
            if (layout.count < 3) insert(BATCH, -1);
            if (layout.count < 4) insert(HEAD, -1);
        }
    return layout;
}

constexpr Argument argument_of(const char *name, Elements elements, bool required, Tensor Call::*tensor,
                               const List<NamedAxis, MOST_AXES> &axes) {
    Argument argument{name, elements, required, tensor, axes, {}, {}};
    for (const NamedAxis &axis : axes) {
        argument.split.push_back(axis.size);
        if (axis.times != NONE) argument.split.push_back(axis.times);
    }
    argument.layout = layout_of(tensor, argument.split);
    return argument;
}

constexpr Function function_of(const Description &op, bool backward) {
    Function f;
    f.name = backward ? op.backward_name : op.name;
    f.op = op.name;
    f.kernel = op.kernel;
    f.with_logits = op.with_logits;
    f.backward = backward;
    if (backward) f.arguments.push_back(argument_of("grad_output", Elements::FLOATING, true, &Call::grad_output, op.output));
    f.first_input = f.arguments.count;
    for (const Input &i : op.inputs) f.arguments.push_back(argument_of(i.name, i.elements, i.required, i.tensor, i.axes));
    f.num_inputs = op.inputs.count;
    f.first_written = f.arguments.count;
    if (!backward) f.arguments.push_back(argument_of("output", Elements::OF_VALUE, true, &Call::output, op.output));
    for (const Input &i : op.inputs)
        if (backward && i.gradient_name)
            f.arguments.push_back(argument_of(i.gradient_name, Elements::FLOATING, false, i.gradient, i.axes));
    f.numbers = op.numbers;
    f.option = op.option;
    f.choices = op.choices;
    return f;
}

static_assert(FUNCTIONS == 2 * std::size(DESCRIPTIONS));

constexpr std::array<Function, FUNCTIONS> all_functions() {
    std::array<Function, FUNCTIONS> all;
    for (int i = 0; i < FUNCTIONS; ++i) all[size_t(i)] = function_of(DESCRIPTIONS[i / 2], i % 2);
    return all;
}

constexpr std::array<Function, FUNCTIONS> ALL = all_functions();

constexpr AxisSizes sizes_of_numbers() {
    AxisSizes all{};
    for (int64_t &size : all.of) size = -1;
    all.of[TWO] = 2;
    all.of[THREE] = 3;
    all.of[FOUR] = 4;
    return all;
}

} // namespace

#define MXD_TEXT(name, member) #name,
const char *const SIZE_NAMES[COUNT] = {MXD_SIZES(MXD_TEXT) "2", "3", "4", "2 or 4"};
#define MXD_MEMBER(name, member) member,
int64_t Sizes::*const SIZE_MEMBERS[TWO] = {MXD_SIZES(MXD_MEMBER)};
constexpr AxisSizes NUMBERS = sizes_of_numbers();

const std::array<Function, FUNCTIONS> &functions() { return ALL; }

const Function *find_function(std::string_view name) {
    for (const Function &each : ALL)
        if (each.name == name) return &each;
    return nullptr;
}

} // namespace mxd
