// Looks at all ranks before any is used.
#include "call/ranks.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "call/words.h"

namespace mxd {
namespace {

// Ranks, and what they count.
struct Table {
    const char *ranks, *of;
    const Tensor &tensor;
    int64_t rows;

    // The first point whose rank has no row, or `points`.
    int64_t first_wrong(int64_t points) const {
        return tensor.dtype == MXD_INT64 ? first_wrong_of<int64_t>(points) : first_wrong_of<int32_t>(points);
    }
    int64_t rank(int64_t point) const {
        const int64_t at = point * tensor.strides[LISTED];
        return tensor.dtype == MXD_INT64 ? static_cast<const int64_t *>(tensor.data)[at]
                                         : static_cast<const int32_t *>(tensor.data)[at];
    }

  private:
    // Blocks without a branch inside, of which compilers make vectors.
    template <class Rank> int64_t first_wrong_of(int64_t points) const {
        const Rank *const ranks = static_cast<const Rank *>(tensor.data);
        const int64_t stride = tensor.strides[LISTED], most = std::numeric_limits<Rank>::max();
        typedef std::make_unsigned_t<Rank> Unsigned;
        const Unsigned last = Unsigned(std::min(rows - 1, most));
        constexpr int64_t BLOCK = 1024;
        for (int64_t from = 0; from < points; from += BLOCK) {
            const int64_t to = std::min(points, from + BLOCK);
            Unsigned wrong = 0; // its first bit is set where a rank is negative or greater than the last
            if (stride == 1)
                for (int64_t i = from; i < to; ++i) wrong |= Unsigned(ranks[i]) | (last - Unsigned(ranks[i]));
            else
                for (int64_t i = from; i < to; ++i) wrong |= Unsigned(ranks[i * stride]) | (last - Unsigned(ranks[i * stride]));
            for (int64_t i = from; std::make_signed_t<Unsigned>(wrong) < 0 && i < to; ++i)
                if (rank(i) < 0 || rank(i) >= rows) return i;
        }
        return points;
    }
};

struct Tables {
    Table all[3];

    explicit Tables(const Call &call)
        : all{{"ranks_feat", "rows of feat", call.ranks_feat, call.sizes.keys},
              {"ranks_depth", "elements of depth", call.ranks_depth, call.depth.shape[LISTED]},
              {"ranks_bev", "cells", call.ranks_bev, call.sizes.cells}} {}
};

} // namespace

bool ranks_fit(const Call &call) {
    if (call.op != POOLING) return true;
    const Tables tables(call);
    for (const Table &table : tables.all)
        if (table.first_wrong(call.sizes.points) < call.sizes.points) return false;
    return true;
}

std::string fault_of_ranks(const Call &call) {
    const Tables tables(call);
    for (const Table &table : tables.all) {
        const int64_t point = table.first_wrong(call.sizes.points);
        if (point == call.sizes.points) continue;
        return sentence(std::string(table.ranks) + "[" + std::to_string(point) + "]",
                        "be one of the " + std::to_string(table.rows) + " " + table.of, std::to_string(table.rank(point)));
    }
    return "";
}

} // namespace mxd
