// What doors say of arguments that do not fit: *name* must *rule*; got *fact*.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "call/call.h"

namespace mxd {

std::string sentence(const std::string &name, const std::string &rule, const std::string &fact);

// "(1, 2, 3)"
std::string text_of(const int64_t *numbers, size_t count);

// How large axes are, by their names. The axes of a tensor are a text, "num_levels, 2"; a number is its own size.
class AxisSizes {
  public:
    static constexpr int64_t UNKNOWN = -1;
    int64_t of(std::string_view axis) const;
    // The first to tell a size is right.
    void tell(std::string_view axis, int64_t size);
    // The sizes of a tensor that has so many axes.
    void tell_all(std::string_view axes, const int64_t *shape);
    bool fit(std::string_view axes, const int64_t *shape, size_t count) const;
    // "have shape (num_levels=4, 2)"
    std::string rule(std::string_view axes) const;

  private:
    struct Axis {
        std::string_view name;
        int64_t size;
    };
    std::vector<Axis> known;
};

// What is wrong with the first level that does not fit; empty if all do. `shapes` and `starts` name the tables.
std::string fault_of_levels(const Call &call, const std::string &shapes, const std::string &starts);

} // namespace mxd
