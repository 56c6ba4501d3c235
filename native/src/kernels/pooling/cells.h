// Cells of the bird's-eye view. In an output [bs, c, d, h, w] the channels of a cell lie far apart; in a row, side by side.
#pragma once

#include "call/call.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

// read_elements, for floating dtypes, and write_elements, not inlined: each inlined copy would be 10 KB of code.
template <class T> __attribute__((noinline)) void read_run(const char *from, int64_t dtype, int64_t stride, int64_t n, T *to) {
    with_elements(const_cast<char *>(from), dtype, [&](auto *elements) { convert_run<T>(elements, stride, to, 1, n); });
}
template <class T> __attribute__((noinline)) void write_run(const T *from, char *to, int64_t dtype, int64_t stride, int64_t n) {
    write_elements(from, to, dtype, stride, n);
}

// Blocks of cells that follow each other in one batch.
class Cells {
  public:
    static constexpr int64_t BLOCK = 64;

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
        const int64_t n = count(block);
        if (!side_by_side)
            for (int64_t i = 0; i < n; ++i)
                write_run(rows + i * channels, cell(block, i), t.dtype, t.strides[CELL_CHANNEL], channels);
        for (int64_t c = 0; side_by_side && c < channels; c += SIDE<T>) {
            const int64_t some = channels - c < SIDE<T> ? channels - c : SIDE<T>;
            T lines[SIDE<T> * BLOCK]; // of another dtype
            const bool own = t.dtype == OWN<T>;
            T *const to = own ? reinterpret_cast<T *>(line(block, c)) : lines;
            transposed<T>(rows + c, channels, n, some, to, own ? t.strides[CELL_CHANNEL] : BLOCK);
            for (int64_t k = 0; !own && k < some; ++k) write_run(lines + k * BLOCK, line(block, c + k), t.dtype, 1, n);
        }
    }
    template <class T> void read(int64_t block, T *rows, int64_t channels) const {
        const int64_t n = count(block);
        if (!side_by_side)
            for (int64_t i = 0; i < n; ++i)
                read_run(cell(block, i), t.dtype, t.strides[CELL_CHANNEL], channels, rows + i * channels);
        for (int64_t c = 0; side_by_side && c < channels; c += SIDE<T>) {
            const int64_t some = channels - c < SIDE<T> ? channels - c : SIDE<T>;
            T lines[SIDE<T> * BLOCK]; // of another dtype
            const bool own = t.dtype == OWN<T>;
            for (int64_t k = 0; !own && k < some; ++k) read_run(line(block, c + k), t.dtype, 1, n, lines + k * BLOCK);
            const T *const from = own ? reinterpret_cast<const T *>(line(block, c)) : lines;
            transposed<T>(from, own ? t.strides[CELL_CHANNEL] : BLOCK, some, n, rows + c, channels);
        }
    }

  private:
    const Tensor &t;
    const int64_t in_batch, blocks_of_batch;
    const bool side_by_side; // cells of a batch

    bool steps(Axis axis, int64_t stride) const { return t.shape[axis] == 1 || t.strides[axis] == stride; }
    int64_t first_in_batch(int64_t block) const { return block % blocks_of_batch * BLOCK; }

    template <class T> static constexpr int SIDE = WIDTH<T> < 4 ? 4 : WIDTH<T>; // of the squares that are transposed

    // to[k * to_step + i] = from[i * step + k], for i below `lines` and k below `columns`, SIDE at most.
    template <class T> static void square(const T *from, int64_t step, int64_t lines, int64_t columns, T *to, int64_t to_step) {
        constexpr int N = SIDE<T>;
        if (lines == N && columns == N) {
            Vec<T, N> square[N];
            for (int i = 0; i < N; ++i) square[i] = load<T, N>(from + i * step);
            transpose<T, N>(square);
            for (int k = 0; k < N; ++k) store<T, N>(to + k * to_step, square[k]);
        } else {
            for (int64_t i = 0; i < lines; ++i)
                for (int64_t k = 0; k < columns; ++k) to[k * to_step + i] = from[i * step + k];
        }
    }

    // The same for any number of them, square by square. A function of its own, which reading and writing have in common.
    template <class T>
    __attribute__((noinline)) static void transposed(const T *from, int64_t step, int64_t lines, int64_t columns, T *to,
                                                     int64_t to_step) {
        constexpr int N = SIDE<T>;
        for (int64_t i = 0; i < lines; i += N)
            for (int64_t k = 0; k < columns; k += N)
                square<T>(from + i * step + k, step, lines - i < N ? lines - i : N, columns - k < N ? columns - k : N,
                          to + k * to_step + i, to_step);
    }

    // Where a block's cells begin in a channel; and one cell.
    char *line(int64_t block, int64_t channel) const {
        return at(t, block / blocks_of_batch * t.strides[BATCH] + first_in_batch(block) + channel * t.strides[CELL_CHANNEL]);
    }
    char *cell(int64_t block, int64_t i) const {
        return at(t, block / blocks_of_batch * t.strides[BATCH] + offset(first_in_batch(block) + i));
    }
    int64_t offset(int64_t cell) const {
        const int64_t w = cell % t.shape[CELL_W], line = cell / t.shape[CELL_W];
        const int64_t h = line % t.shape[CELL_H], d = line / t.shape[CELL_H];
        return d * t.strides[CELL_D] + h * t.strides[CELL_H] + w * t.strides[CELL_W];
    }
};

} // namespace
} // namespace mxd::MXD_ISA
