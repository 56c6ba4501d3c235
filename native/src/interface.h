// What the C interfaces share below their own signatures.
#pragma once

#include "call.h"

namespace mxd {

// value, locations, weights and output (backward: its gradient) are set, and the wanted gradients; the rest is filled
// in here.
int attention(bool geometric, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts);
int aggregation(bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts);

// The number at an offset of an index tensor.
int64_t element(const mxd_tensor &index, int64_t offset);

// Kernels want the channels of value, its last axis, to be adjacent. Where they are not, attention() and aggregation()
// work on a packed copy in memory of their own, unless the caller has packed value itself.
bool needs_packing(const mxd_tensor &t, int axes);
int64_t packed_bytes(const mxd_tensor &t, int axes);
void pack_into(mxd_tensor &t, int axes, char *memory);

} // namespace mxd
