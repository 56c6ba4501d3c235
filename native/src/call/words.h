// Sentences about arguments that do not fit: *name* must *rule*; got *fact*.
#pragma once

#include <string>

#include "call/call.h"

namespace mxd {

std::string sentence(const std::string &name, const std::string &rule, const std::string &fact);

// "(1, 2, 3)"
std::string text_of(const int64_t *numbers, size_t count);

// The sentence about an output that no memory holds; empty where one might. Strides, too, must be numbers of 64 bits.
std::string fault_of_output(const int64_t *shape, size_t axes);

// What is wrong with the first level that does not fit; empty if all do. `shapes` and `starts` name the tables.
std::string fault_of_levels(const Call &call, const std::string &shapes, const std::string &starts);

} // namespace mxd
