// Results as bytes, for a program of another compiler or processor. Both processors must have the same byte order.
#pragma once

#include "difference.h"

#include <cstdio>

namespace compare {

void write(std::FILE *to, int64_t number, const Results &results);
bool read(std::FILE *from, int64_t &number, Results &results); // false: no more

} // namespace compare
