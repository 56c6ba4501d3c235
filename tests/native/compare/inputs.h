// The input tensors of a case, in the order in which its functions take them.
#pragma once

#include "case.h"

#include <memory>
#include <string>
#include <vector>

namespace compare {

struct Argument {
    std::string name;
    std::unique_ptr<Tensor> tensor; // null: an optional one that is left out, or a gradient that is not wanted
    bool has_gradient = false;
};

struct Inputs {
    std::vector<Argument> arguments;
    int reference_axis = 0; // of multi_scale_deformable_attn_with_logits
};

Inputs inputs_of(const Case &c, Random &random);
Dtype draw_floating(const Case &c, Random &random);
std::vector<int64_t> shape_of_output(const Case &c);

} // namespace compare
