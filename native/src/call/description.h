// What each operator takes and gives, as tables: src/mx_driving/_operator/description.py in C++.
// tests/native/test_description.py compares the two.
#pragma once

#include <array>
#include <initializer_list>
#include <string_view>

#include "call/call.h"

namespace mxd {

constexpr int MOST_ARGUMENTS = 16, MOST_AXES = 6, FUNCTIONS = 14;

// A list whose memory is its own.
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

// Names of sizes, and where a call keeps them. A tensor's axes are laid out in this order: see Axis.
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

// Numbers are sizes, too, whose values are known.
namespace sizes {
#define MXD_NAME(name, member) name,
enum Name : int { NONE = -1, MXD_SIZES(MXD_NAME) TWO, THREE, FOUR, TWO_OR_FOUR, COUNT };
#undef MXD_NAME
} // namespace sizes

// "num_levels", "2 or 4"
extern const char *const SIZE_NAMES[sizes::COUNT];
// Null: a call has no member for this size.
extern int64_t Sizes::*const SIZE_MEMBERS[sizes::TWO];

// A size, or the product of two.
struct NamedAxis {
    sizes::Name size = sizes::NONE, times = sizes::NONE;

    constexpr NamedAxis() = default;
    constexpr NamedAxis(sizes::Name one, sizes::Name other = sizes::NONE) : size(one), times(other) {}
};

// By sizes::Name; -1: not known.
struct AxisSizes {
    int64_t of[sizes::COUNT];

    int64_t product(const NamedAxis &axis) const {
        const int64_t first = of[axis.size], second = axis.times == sizes::NONE ? 1 : of[axis.times];
        int64_t product;
        if (first < 0 || second < 0) return -1;
        return __builtin_mul_overflow(first, second, &product) ? INT64_MAX : product;
    }
};
extern const AxisSizes NUMBERS; // only numbers are known

enum class Elements { FLOATING, INDEX, NUMBER, OF_VALUE }; // OF_VALUE: the dtype of the operator's first input

struct Argument {
    const char *name = "";
    Elements elements{};
    bool required = false;
    Tensor Call::*tensor = nullptr;
    List<NamedAxis, MOST_AXES> axes;  // as they are described
    List<NamedAxis, MOST_AXES> split; // as the C interface has them: both factors of a product
    List<int, MOST_AXES> layout;      // the axes of `tensor`, which Axis names, among `split`; -1: one element

    // `axes` or `split`, whichever has so many; null: neither.
    const List<NamedAxis, MOST_AXES> *axes_of(int number) const {
        return number == split.count ? &split : number == axes.count ? &axes : nullptr;
    }
};

// One direction of an operator.
struct Function {
    const char *name = "", *op = ""; // "multi_scale_deformable_attn_backward", "multi_scale_deformable_attn"
    Operator kernel{};
    bool with_logits = false, backward = false;
    // In the order of the C function. Forward: inputs, output. Backward: grad_output, inputs, gradients.
    List<Argument, MOST_ARGUMENTS> arguments;
    int first_input = 0, num_inputs = 0;
    int first_written = 0;                // the output or the gradients, which come last
    List<sizes::Name, MOST_AXES> numbers; // sizes that no input has: bindings without an output have their numbers
    std::string_view option;              // or none
    List<std::string_view, 2> choices;    // of the option
};

// Every operator forward and backward, in the order of the text.
const std::array<Function, FUNCTIONS> &functions();

// The function of this name, or null.
const Function *find_function(std::string_view name);

} // namespace mxd
