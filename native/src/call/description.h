// What each operator takes and gives: src/mx_driving/_descriptions.py, which CMake copies into the library, as tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "call/call.h"

namespace mxd {

constexpr int MOST_ARGUMENTS = 16, MOST_AXES = 6, MOST_SIZES = 16;

enum class Elements { FLOATING, INDEX, NUMBER, OF_VALUE }; // OF_VALUE: the dtype of the operator's first input

// An axis has a size with a name, or the product of two, or is a number, or either of two.
struct NamedAxis {
    std::string_view text;     // "num_levels", "num_levels * num_points", "2 or 4"
    int size = -1, times = -1; // places among the operator's sizes; -1: none
    int64_t number = 0, other = 0;
};

// One thing for each axis of a tensor, in place: checks go through these at every call.
template <class T> struct OfAxes {
    T all[MOST_AXES];
    int count = 0;

    void push_back(const T &one) { all[count++] = one; }
    const T *begin() const { return all; }
    const T *end() const { return all + count; }
    const T &operator[](int axis) const { return all[axis]; }
};

struct Argument {
    std::string name;
    Elements elements{};
    OfAxes<NamedAxis> axes;  // as they are described
    OfAxes<NamedAxis> split; // as the C interface has them: both factors of a product
    bool required = false;
    Tensor Call::*tensor = nullptr;
    OfAxes<int> places;     // of `split` among AxisSizes; numbers and `2 or 4` have places, too
    OfAxes<int> layout;     // the axes of `tensor`, which axes.h names, among `split`; -1: one element
    bool in_layout = false; // they are those of `split`

    // `axes` or `split`, whichever has so many; null: neither.
    const OfAxes<NamedAxis> *axes_of(int number) const {
        return number == split.count ? &split : number == axes.count ? &axes : nullptr;
    }
};

// How large axes are, by the places of their names in Description::sizes; behind these, numbers. -1: not known.
struct AxisSizes {
    int64_t of[MOST_SIZES];
};

struct Description {
    std::string_view name, bare;           // bare: the operator that this one is built on, or its own name
    std::vector<std::string_view> sizes;   // names
    std::vector<int64_t Sizes::*> members; // of a call; null: it has none for this
    int divisor = -1, divided = -1;        // sizes: the first divides the second
    int references = -1, levels, points;   // sizes, where the number of reference points depends on the option
    int rows;                              // the size of the axis of value's rows
    std::vector<int> given;                // sizes that no input has: bindings without an output have them as numbers
    std::vector<std::string_view> choices; // of its option, if it has one
    std::string_view option;

    AxisSizes at_first; // only numbers are known
    int either = -1;    // the place of the axis that is either of two numbers
    int64_t either_of[2];

    int size(std::string_view of) const; // its place, or -1
};

// One direction of an operator.
struct Function {
    const Description *op;
    Operator kernel;
    std::string name; // "multi_scale_deformable_attn_backward"
    bool with_logits, backward;
    // In the order of the C function. Forward: inputs, output. Backward: grad_output, inputs, gradients.
    std::vector<Argument> arguments;
    int first_input, num_inputs;
    int first_written; // the output or the gradients, which come last
};

// The text; CMake makes text.cpp of it.
extern const char DESCRIPTIONS[];

// Every operator forward and backward, in the order of the text.
const std::vector<Function> &functions();

// The function of this name, or null.
const Function *find_function(std::string_view name);

} // namespace mxd
