// How a call is laid out in memory before a kernel runs: levels read from their tables, packed copies, which levels get
// memory of their own, and the bands the gradient of value is cut into.
#pragma once

#include <memory>
#include <vector>

#include "call.h"

namespace mxd {

enum Operator { MULTI_SCALE, AGGREGATION, GEOMETRIC };

// Owns what `call` points to after prepare().
class Layout {
  public:
    // Shapes and dtypes of the call have been checked; the levels are checked here. Returns a status.
    int prepare(Call &call, Operator op, bool backward, const mxd_tensor &shapes, const mxd_tensor &starts);

  private:
    std::vector<Level> levels;
    std::unique_ptr<char[]> packed;
    std::vector<int64_t> copy_offset, sums_offset, bands;
};

// The number at an offset of an index tensor.
int64_t element(const mxd_tensor &index, int64_t offset);

// Kernels want the channels of value, its last axis, to be adjacent. Where they are not, a Layout holds a packed copy,
// unless the caller has packed value itself; of doubles, where another input is double and value is not.
bool needs_packing(const mxd_tensor &t, int axes);
int64_t packed_bytes(const mxd_tensor &t, int axes);
void pack_into(mxd_tensor &t, int axes, char *memory);

} // namespace mxd
