// The nodes of the domain mx_driving: the operators, with names as in _operators.py.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "call/make_call.h"

namespace mxd {

enum class Elements { FLOATING, INDEX, LOCATIONS }; // LOCATIONS: floating or integer

struct NodeInput {
    const char *name, *axes; // "num_levels, 2"
    Elements elements;
    bool optional;
};

struct Node {
    const char *name;
    std::vector<NodeInput> inputs;
    Function function{}; // of this name
    int weights;         // the place of weights or logits

    Node(const char *of, std::initializer_list<NodeInput> given);
};

const std::vector<Node> &nodes();

// A tensor that a node is given. `there` is false for an optional one that is not.
struct Given {
    bool there;
    int type; // of ONNX
    std::vector<int64_t> shape;
    void *data;
};

// What is wrong with the inputs, in the words of _check.py; empty when nothing is. Levels are not looked at.
std::string find_fault(const Node &node, const std::vector<Given> &inputs, bool by_point);

} // namespace mxd
