// A band: a range of rows of the gradient of value. One worker owns the band and adds to its rows in the order of the queries.
// The worker adds in place if the gradient has type T and contiguous channels. Otherwise it adds in a buffer, which is
// converted once.
#pragma once

#include "call/plan.h"
#include "kernels/shared/parallel.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> class Band {
  public:
    int64_t begin = 0, end = 0;    // the band has rows begin..end-1
    int64_t address = 0, step = 0; // row i is at address + (i - begin) * step

    Band(const Call &c, const Plan &p, int64_t num_channels, Arena &arena)
        : call(c), plan(p), channels(num_channels),
          sums(p.band_is_buffered ? arena.take<T>(most_rows(p) * num_channels) : nullptr) {}

    void open(int64_t index, int64_t b, int64_t h) {
        const int64_t rows = call.grad_value.strides[KEY];
        begin = plan.band_starts[index];
        end = plan.band_starts[index + 1];
        first = offset_of(call.grad_value, b, begin, h);
        address = reinterpret_cast<int64_t>(sums ? reinterpret_cast<char *>(sums) : at(call.grad_value, first));
        step = (sums ? channels : rows) * int64_t(sizeof(T));
        for (int64_t r = 0; r < end - begin; ++r)
            memset(reinterpret_cast<char *>(address + r * step), 0, size_t(channels) * sizeof(T));
    }
    void close() {
        const Tensor &grad = call.grad_value;
        if (!sums) return;
        for (int64_t r = 0; r < end - begin; ++r)
            write_elements(sums + r * channels, at(grad, first + r * grad.strides[KEY]), grad.dtype, grad.strides[CHANNEL],
                           channels);
    }
    bool touches(const Level &level) const { return level.start < end && level.start + level.height * level.width > begin; }
    // Finds the smallest range of levels from..to-1 that contains all levels with rows in the band. The range may be empty.
    void levels_touched(int64_t &from, int64_t &to) const {
        from = call.sizes.levels, to = 0;
        for (int64_t l = 0; l < call.sizes.levels; ++l)
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
    int64_t first = 0; // element offset of row `begin` in grad_value

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
} // namespace mxd::MXD_ISA
