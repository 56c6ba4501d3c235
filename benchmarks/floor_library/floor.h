// What the gather floor is given. The floor is a library of its own, for measurements alone.
#pragma once

#include "mx_driving.h"

namespace mxd {

// output[b, q, h] = sum of the rows of value[b, :, h] listed in rows[b, h, q]. With grad_value, output[b, q, h] is read
// and added to the same rows of grad_value[b, :, h].
//
// value and grad_value [bs, num_keys, num_heads, channels], output [bs, num_queries, num_heads, channels], of one dtype
// and with adjacent channels. rows: int32 [bs, num_heads, num_queries, count], contiguous, count a multiple of
// 4. num_keys stands for a row of zeros; four times -1 end a list that is shorter than count. Rows are not checked.
//
// Lists of very different lengths lie one after the other instead, in rows [1, 1, 1, all of them]: list q begins at starts[q]
// and ends at starts[q + 1]. starts: int64 [num_queries + 1], contiguous. Forward alone.
struct Floor {
    mxd_tensor value, rows, starts, output, grad_value; // starts.data, grad_value.data == nullptr: none; forward
    int num_threads;
};

} // namespace mxd
