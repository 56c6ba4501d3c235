// The gradient of value, by bands: one worker at a time owns a range of rows of one (batch, head), adds up what falls
// there in the order of the queries, and leaves finished rows behind. Float and double are added up in place; for other
// storage types, and views whose channels are not adjacent, in a buffer of one band that is rounded and written once.
#pragma once

#include "parallel.h"
#include "tensor.h"

namespace mxd {
namespace MXD_ISA {
namespace {

template <class T> class Band {
  public:
    int64_t begin = 0, end = 0;    // rows of value
    int64_t address = 0, step = 0; // of row `begin`, and bytes from row to row

    static int64_t bytes(const Call &call, int64_t channels) {
        return call.grad_value_in_place ? 0 : Arena::bytes<T>(widest(call) * channels);
    }
    Band(const Call &c, int64_t num_channels, Arena &arena)
        : call(c), channels(num_channels),
          sums(c.grad_value_in_place ? nullptr : arena.take<T>(widest(c) * num_channels)) {}

    // `offset`: of row 0 of this (batch, head) in grad_value; `rows`: elements from row to row; channels are `unit`
    // apart.
    void open(int64_t index, int64_t offset, int64_t rows, int64_t unit) {
        begin = call.band_starts[index];
        end = call.band_starts[index + 1];
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
    // The smallest range of levels, from..to-1, with all that reach into it; an empty one where none does.
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
    int64_t channels;
    T *sums;
    int64_t first = 0, row_stride = 0, channel_stride = 0;

    static int64_t widest(const Call &call) {
        int64_t most = 0;
        for (int64_t i = 0; i < call.num_bands; ++i) {
            const int64_t rows = call.band_starts[i + 1] - call.band_starts[i];
            most = rows > most ? rows : most;
        }
        return most;
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
