// Cells of the bird's-eye view: their channels lie far apart in an output [bs, c, d, h, w], and side by side in a row.
#pragma once

#include "call/call.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

// Blocks of cells that follow each other in one batch.
class Cells {
  public:
    static constexpr int64_t BLOCK = 32;

    explicit Cells(const Tensor &of)
        : t(of), in_batch(t.shape[CELL_D] * t.shape[CELL_H] * t.shape[CELL_W]), blocks_of_batch((in_batch + BLOCK - 1) / BLOCK),
          side_by_side(steps(CELL_W, 1) && steps(CELL_H, t.shape[CELL_W]) && steps(CELL_D, t.shape[CELL_H] * t.shape[CELL_W])) {
    }

    int64_t blocks() const { return t.shape[BATCH] * blocks_of_batch; }
    // Of a block: its first cell, counted through all batches, and how many it has.
    int64_t first(int64_t block) const { return block / blocks_of_batch * in_batch + first_in_batch(block); }
    int64_t count(int64_t block) const {
        const int64_t rest = in_batch - first_in_batch(block);
        return rest < BLOCK ? rest : BLOCK;
    }

    // A block of the tensor from rows of `channels` side by side, and into them.
    template <class T> void write(int64_t block, const T *rows, int64_t channels) const {
        each_square<T>(block, channels, [&](auto *to, int64_t stride, auto square, int64_t place) {
            constexpr int N = square.value;
            Vec<T, N> lanes[N];
            for (int i = 0; i < N; ++i) lanes[i] = load<T, N>(rows + place + i * channels);
            if constexpr (N > 1) transpose<T, N>(lanes);
            for (int c = 0; c < N; ++c) store<T, N>(to + c * stride, lanes[c]);
        });
    }
    template <class T> void read(int64_t block, T *rows, int64_t channels) const {
        each_square<T>(block, channels, [&](auto *from, int64_t stride, auto square, int64_t place) {
            constexpr int N = square.value;
            Vec<T, N> lanes[N];
            for (int c = 0; c < N; ++c) lanes[c] = load<T, N>(from + c * stride);
            if constexpr (N > 1) transpose<T, N>(lanes);
            for (int i = 0; i < N; ++i) store<T, N>(rows + place + i * channels, lanes[i]);
        });
    }

  private:
    const Tensor &t;
    const int64_t in_batch, blocks_of_batch;
    const bool side_by_side; // cells of a batch

    bool steps(Axis axis, int64_t stride) const { return t.shape[axis] == 1 || t.strides[axis] == stride; }
    int64_t first_in_batch(int64_t block) const { return block % blocks_of_batch * BLOCK; }

    // fn(first element, stride of channels, Count<N>, place in rows) for squares of N cells and N channels; N is 1 where cells
    // do not lie side by side, and at the edges.
    template <class T, class Fn> void each_square(int64_t block, int64_t channels, Fn &&fn) const {
        constexpr int N = WIDTH<T> < 4 ? 4 : WIDTH<T>;
        const int64_t batch = block / blocks_of_batch * t.strides[BATCH], first = first_in_batch(block), n = count(block);
        const int64_t stride = t.strides[CELL_CHANNEL];
        const int64_t cells = side_by_side ? n / N * N : 0, whole = cells > 0 ? channels / N * N : 0;
        with_elements(static_cast<char *>(t.data), t.dtype, [&](auto *data) {
            for (int64_t c = 0; c < whole; c += N)
                for (int64_t i = 0; i < cells; i += N)
                    fn(data + batch + first + i + c * stride, stride, Count<N>(), i * channels + c);
            for (int64_t i = 0; i < n; ++i) {
                auto *const cell = data + batch + offset(first + i);
                for (int64_t c = i < cells ? whole : 0; c < channels; ++c)
                    fn(cell + c * stride, stride, Count<1>(), i * channels + c);
            }
        });
    }
    int64_t offset(int64_t cell) const {
        const int64_t w = cell % t.shape[CELL_W], line = cell / t.shape[CELL_W];
        const int64_t h = line % t.shape[CELL_H], d = line / t.shape[CELL_H];
        return d * t.strides[CELL_D] + h * t.strides[CELL_H] + w * t.strides[CELL_W];
    }
};

} // namespace
} // namespace mxd::MXD_ISA
