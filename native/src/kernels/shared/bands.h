// A band: a range of rows of the gradient of value. The worker that owns it adds up its rows in the order of the
// queries. It adds in place, or, if the dtype is another or channels are not contiguous, in a buffer that is converted
// once.
#pragma once

#include "call/plan.h"
#include "kernels/shared/parallel.h"
#include "kernels/shared/tensor.h"

namespace mxd {
namespace MXD_ISA {
namespace {

template <class T> class Band {
  public:
    int64_t begin = 0, end = 0;    // rows of value
    int64_t address = 0, step = 0; // of row `begin`, and bytes from row to row

    static int64_t bytes(const Plan &plan, int64_t channels) {
        return plan.band_is_buffered ? Arena::bytes<T>(most_rows(plan) * channels) : 0;
    }
    Band(const Call &c, const Plan &p, int64_t num_channels, Arena &arena)
        : call(c), plan(p), channels(num_channels),
          sums(p.band_is_buffered ? arena.take<T>(most_rows(p) * num_channels) : nullptr) {}

    // `offset`: of row 0 of this (batch, head) in grad_value; `rows`: elements from row to row; channels are `unit`
    // apart.
    void open(int64_t index, int64_t offset, int64_t rows, int64_t unit) {
        begin = plan.band_starts[index];
        end = plan.band_starts[index + 1];
        first = offset + begin * rows;
        row_stride = rows;
        channel_stride = unit;
        address = reinterpret_cast<int64_t>(sums ? reinterpret_cast<char *>(sums) : at(call.grad_value, first));
        step = (sums ? channels : rows) * int64_t(sizeof(T));
        for (int64_t r = 0; r < end - begin; ++r)
            memset(reinterpret_cast<char *>(address + r * step), 0, size_t(channels) * sizeof(T));
    }
    void close() {
        if (!sums) return;
        for (int64_t r = 0; r < end - begin; ++r)
            write_elements(sums + r * channels, at(call.grad_value, first + r * row_stride), call.grad_value.dtype,
                           channel_stride, channels);
    }
    bool touches(const Level &level) const {
        return level.start < end && level.start + level.height * level.width > begin;
    }
    // The smallest range of levels from..to-1 that holds every level which reaches into the band; empty if none does.
    void levels_touched(int64_t &from, int64_t &to) const {
        from = call.num_levels, to = 0;
        for (int64_t l = 0; l < call.num_levels; ++l)
            if (touches(call.levels[l])) {
                from = from < l ? from : l;
                to = l + 1;
            }
    }

  private:
    const Call &call;
    const Plan &plan;
    int64_t channels;
    T *sums;
    int64_t first = 0, row_stride = 0, channel_stride = 0;

    static int64_t most_rows(const Plan &plan) {
        int64_t most = 0;
        for (int64_t i = 0; i < plan.num_bands; ++i) {
            const int64_t rows = plan.band_starts[i + 1] - plan.band_starts[i];
            most = rows > most ? rows : most;
        }
        return most;
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
