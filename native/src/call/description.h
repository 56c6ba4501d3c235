// Tables of each operator's inputs and outputs. describe.py writes them while the library is built, from
// src/mx_driving/_operator/description.py.
#pragma once

#include <array>
#include <initializer_list>
#include <string_view>

#include "call/call.h"

namespace mxd {

constexpr int MOST_ARGUMENTS = 16, MOST_AXES = 6, FUNCTIONS = 14;

// A list with a fixed capacity, which allocates no memory.
template <class T, int MOST> struct List {
    T all[MOST]{};
    int count = 0;

    constexpr List() = default;
    constexpr List(std::initializer_list<T> items) {
        for (const T &item : items) push_back(item);
    }
    constexpr void push_back(const T &item) { all[count++] = item; }
    constexpr const T *begin() const { return all; }
    constexpr const T *end() const { return all + count; }
    constexpr const T &operator[](int index) const { return all[index]; }
};

// SIZE(name, member): the name of a size, and the member of Sizes with its value; nullptr if Sizes has no such member.
#define MXD_SIZES(SIZE)                                                                                                        \
    SIZE(bs, &Sizes::batch)                                                                                                    \
    SIZE(num_keys, &Sizes::keys)                                                                                               \
    SIZE(num_feat, &Sizes::keys)                                                                                               \
    SIZE(num_queries, &Sizes::queries)                                                                                         \
    SIZE(anchor, &Sizes::queries)                                                                                              \
    SIZE(num_heads, &Sizes::heads)                                                                                             \
    SIZE(num_levels, &Sizes::scales)                                                                                           \
    SIZE(R, &Sizes::references)                                                                                                \
    SIZE(num_points, &Sizes::points)                                                                                           \
    SIZE(pts, &Sizes::points)                                                                                                  \
    SIZE(cam, &Sizes::cameras)                                                                                                 \
    SIZE(scale, &Sizes::scales)                                                                                                \
    SIZE(group, &Sizes::groups)                                                                                                \
    SIZE(embed_dims, &Sizes::channels)                                                                                         \
    SIZE(c, &Sizes::channels)                                                                                                  \
    SIZE(n, &Sizes::points)                                                                                                    \
    SIZE(num_depth, nullptr)                                                                                                   \
    SIZE(d, nullptr)                                                                                                           \
    SIZE(h, nullptr)                                                                                                           \
    SIZE(w, nullptr)

// The names of sizes. TWO, THREE and FOUR are sizes with a fixed value.
namespace sizes {
#define MXD_NAME(name, member) name,
enum Name : int { NONE = -1, MXD_SIZES(MXD_NAME) TWO, THREE, FOUR, TWO_OR_FOUR, COUNT };
#undef MXD_NAME
} // namespace sizes

#define MXD_TEXT(name, member) #name,
constexpr const char *SIZE_NAMES[sizes::COUNT] = {MXD_SIZES(MXD_TEXT) "2", "3", "4", "2 or 4"};
#undef MXD_TEXT

// A size, or the product of two sizes.
struct NamedAxis {
    sizes::Name size = sizes::NONE, times = sizes::NONE;

    constexpr NamedAxis() = default;
    constexpr NamedAxis(sizes::Name one, sizes::Name other = sizes::NONE) : size(one), times(other) {}
};

// The values of sizes, indexed by sizes::Name. -1 means not known.
struct AxisSizes {
    int64_t of[sizes::COUNT];

    int64_t product(const NamedAxis &axis) const {
        const int64_t first = of[axis.size], second = axis.times == sizes::NONE ? 1 : of[axis.times];
        int64_t product;
        if (first < 0 || second < 0) return -1;
        return __builtin_mul_overflow(first, second, &product) ? INT64_MAX : product;
    }
};
enum class Elements {
    FLOATING,
    INDEX,
    NUMBER,
    OF_VALUE
}; // OF_VALUE: the dtype of the operator's first input. If that dtype has 16 bits, float32 is allowed, too.

struct Argument {
    const char *name = "";
    Elements elements{};
    bool required = false;
    Tensor Call::*tensor = nullptr;
    List<NamedAxis, MOST_AXES> axes;  // as the description lists them; an axis may be the product of two sizes
    List<NamedAxis, MOST_AXES> split; // as the C interface has them: the product of two sizes is two axes
    List<int, MOST_AXES> layout;      // for each axis of `tensor`, its index in `split`, or -1 if `split` has no such axis

    // Returns `split` or `axes`, the one with this number of axes. Returns null if neither has it.
    const List<NamedAxis, MOST_AXES> *axes_of(int number) const {
        return number == split.count ? &split : number == axes.count ? &axes : nullptr;
    }
};

// The forward or the backward of an operator.
struct Function {
    const char *name = "", *op = ""; // name: "multi_scale_deformable_attn_backward"; op: "multi_scale_deformable_attn"
    Operator kernel{};
    bool with_logits = false, backward = false;
    // The arguments, in the order of the C function. Forward: inputs, output. Backward: grad_output, inputs, gradients.
    List<Argument, MOST_ARGUMENTS> arguments;
    int first_input = 0, num_inputs = 0;
    int first_written = 0;                // the index of the first result: the output, or the first gradient
    List<sizes::Name, MOST_AXES> numbers; // sizes of output axes that no input has; a binding that makes the output needs them
    std::string_view option;              // the option's name, or empty
    List<std::string_view, 2> choices;    // the option's values
};

// Returns every operator, forward and backward, in the order of the descriptions.
const std::array<Function, FUNCTIONS> &functions();

// Returns the function with this name, or null.
inline const Function *find_function(std::string_view name) {
    for (const Function &function : functions())
        if (function.name == name) return &function;
    return nullptr;
}

} // namespace mxd
