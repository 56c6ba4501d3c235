// bev_pool_v3 on the CPU. Points are sorted by cell, and each cell is summed by one thread. The gradient of feat is the same
// sum with cells and rows of feat exchanged. The gradient of depth is the dot product of a cell's gradient and a row of feat.
#include "kernels/pooling/points.h"
#include "kernels/shared/job.h"

namespace mxd::MXD_ISA {
namespace {

// ---- cells of the bird's-eye view: copies between the layout [bs, c, d, h, w] and rows with contiguous channels

// read_run is read_elements for floating dtypes, and write_run is write_elements. They are not inlined, because each copy of
// the code would have 10 KB.
template <class T> __attribute__((noinline)) void read_run(const char *from, int64_t dtype, int64_t stride, int64_t n, T *to) {
    with_elements(const_cast<char *>(from), dtype, [&](auto *elements) { convert_run<T>(elements, stride, to, 1, n); });
}
template <class T> __attribute__((noinline)) void write_run(const T *from, char *to, int64_t dtype, int64_t stride, int64_t n) {
    write_elements(from, to, dtype, stride, n);
}

// Blocks of consecutive cells of one batch.
class Cells {
  public:
    static constexpr int64_t BLOCK = 64;

    explicit Cells(const Tensor &of)
        : t(of), in_batch(t.shape[CELL_D] * t.shape[CELL_H] * t.shape[CELL_W]), blocks_of_batch((in_batch + BLOCK - 1) / BLOCK),
          side_by_side(steps(CELL_W, 1) && steps(CELL_H, t.shape[CELL_W]) && steps(CELL_D, t.shape[CELL_H] * t.shape[CELL_W])) {
    }

    int64_t blocks() const { return t.shape[BATCH] * blocks_of_batch; }
    // first() returns a block's first cell, numbered through all batches. count() returns the number of the block's cells.
    int64_t first(int64_t block) const { return block / blocks_of_batch * in_batch + first_in_batch(block); }
    int64_t count(int64_t block) const {
        const int64_t rest = in_batch - first_in_batch(block);
        return rest < BLOCK ? rest : BLOCK;
    }

    // write() copies rows, which have contiguous channels, to a block of the tensor. read() copies a block to such rows.
    template <class T> void write(int64_t block, const T *rows, int64_t channels) const {
        const int64_t n = count(block);
        if (!side_by_side)
            for (int64_t i = 0; i < n; ++i)
                write_run(rows + i * channels, cell(block, i), t.dtype, t.strides[CELL_CHANNEL], channels);
        for (int64_t c = 0; side_by_side && c < channels; c += SIDE<T>) {
            const int64_t some = channels - c < SIDE<T> ? channels - c : SIDE<T>;
            T lines[SIDE<T> * BLOCK]; // SIDE channels of the block as T, if the tensor has another dtype
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
            T lines[SIDE<T> * BLOCK]; // SIDE channels of the block as T, if the tensor has another dtype
            const bool own = t.dtype == OWN<T>;
            for (int64_t k = 0; !own && k < some; ++k) read_run(line(block, c + k), t.dtype, 1, n, lines + k * BLOCK);
            const T *const from = own ? reinterpret_cast<const T *>(line(block, c)) : lines;
            transposed<T>(from, own ? t.strides[CELL_CHANNEL] : BLOCK, some, n, rows + c, channels);
        }
    }

  private:
    const Tensor &t;
    const int64_t in_batch, blocks_of_batch;
    const bool side_by_side; // true if the cells of a batch are contiguous in each channel

    bool steps(Axis axis, int64_t stride) const { return t.shape[axis] == 1 || t.strides[axis] == stride; }
    int64_t first_in_batch(int64_t block) const { return block % blocks_of_batch * BLOCK; }

    template <class T> static constexpr int SIDE = WIDTH<T> < 4 ? 4 : WIDTH<T>; // the side of the squares that are transposed

    // Transposes a square: to[k * to_step + i] = from[i * step + k] for i < lines and k < columns, both at most SIDE.
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

    // Transposes any number of lines and columns, square by square. This function is not inlined, so that read and write share
    // its code.
    template <class T>
    __attribute__((noinline)) static void transposed(const T *from, int64_t step, int64_t lines, int64_t columns, T *to,
                                                     int64_t to_step) {
        constexpr int N = SIDE<T>;
        for (int64_t i = 0; i < lines; i += N)
            for (int64_t k = 0; k < columns; k += N)
                square<T>(from + i * step + k, step, lines - i < N ? lines - i : N, columns - k < N ? columns - k : N,
                          to + k * to_step + i, to_step);
    }

    // line() returns the address of a block's first cell in a channel. cell() returns the address of the block's cell i in
    // channel 0.
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

// ---- forward

struct Forward {
    const Call &call;
    const Sorted &by_cell;
    const Cells cells;
    const Source feat;
    const bool side_by_side; // true if points are sorted and sum_points can read ranks and depth in place

    static bool are_side_by_side(const Call &call, const Sorted &by_cell) {
        const auto narrow = [](const Tensor &ranks) { return ranks.dtype == MXD_INT32 && ranks.strides[LISTED] == 1; };
        return !by_cell.order && narrow(call.ranks_feat) && narrow(call.ranks_depth) && call.depth.strides[LISTED] == 1 &&
               call.depth.dtype == call.value.dtype;
    }
};

template <class V, class T> class CellSums {
    static_assert(Cells::BLOCK <= MOST_RANKS, "over_windows goes through so many at once");

  public:
    CellSums(const Forward &f, Arena &arena)
        : args(f), channels(f.call.sizes.channels), window(arena), rows(arena.take<T>(Cells::BLOCK * channels)) {}

    void operator()(int64_t block) {
        const int64_t first = args.cells.first(block), count = args.cells.count(block);
        args.side_by_side ? sum_side_by_side(first, count) : sum_windows(first, count);
        if constexpr (same_type<V, BFloat16>)
            for (int64_t i = 0; i < count; ++i) order_row<V, T>(rows + i * channels, rows + i * channels, channels);
        args.cells.write(block, rows, channels);
    }

  private:
    const Forward &args;
    const int64_t channels;
    Window<T> window;
    T *const rows;

    void sum_side_by_side(int64_t first, int64_t count) {
        const Call &call = args.call;
        int64_t ends[Cells::BLOCK];
        const int64_t begin = args.by_cell.find_ends(first, first + count, ends);
        sum_points(static_cast<const V *>(call.value.data), call.value.strides[KEY],
                   static_cast<const int32_t *>(call.ranks_feat.data), static_cast<const V *>(call.depth.data),
                   static_cast<const int32_t *>(call.ranks_depth.data), begin, ends, count, channels, rows);
    }
    void sum_windows(int64_t first, int64_t count) {
        memset(static_cast<void *>(rows), 0, size_t(count * channels) * sizeof(T));
        over_windows(window, args.feat, args.by_cell, first, first + count, [&](int64_t cell, int64_t, int64_t at, int64_t n) {
            add_rows<V, T>(window.address + at, window.coefficient + at, n, channels, rows + (cell - first) * channels);
        });
    }
};

// ---- backward

template <class T> struct Backward {
    const Call &call;
    const Sorted &by_feat;
    const Cells cells;
    T *const rows; // grad_output as a row for each cell
    T *const dots; // the gradient of each point's depth; null if the gradient of depth is not wanted
    const Source cell_rows;
};

template <class T> struct CellRows {
    const Backward<T> &args;

    CellRows(const Backward<T> &b, Arena &) : args(b) {}
    void operator()(int64_t block) {
        const int64_t channels = args.call.sizes.channels;
        args.cells.read(block, args.rows + args.cells.first(block) * channels, channels);
    }
};

// Computes the gradient of a block of rows of feat, and the dot products for the gradient of depth.
template <class T> class FeatGradient {
  public:
    static constexpr int64_t BLOCK = 16;
    static_assert(BLOCK <= MOST_RANKS, "as in CellSums");

    FeatGradient(const Backward<T> &b, Arena &arena)
        : args(b), channels(b.call.sizes.channels), window(arena), sums(arena.take<T>(BLOCK * channels)),
          feat(arena.take<T>(channels)), dot(arena.take<T>(window.MOST + ROWS)) {}
    static int64_t blocks(const Call &call) { return (call.sizes.keys + BLOCK - 1) / BLOCK; }

    void operator()(int64_t block) {
        const Tensor &to = args.call.grad_value;
        const int64_t first = block * BLOCK, rest = args.call.sizes.keys - first, count = rest < BLOCK ? rest : BLOCK;
        memset(static_cast<void *>(sums), 0, size_t(count * channels) * sizeof(T));
        over_windows(
            window, args.cell_rows, args.by_feat, first, first + count, [&](int64_t row, int64_t start, int64_t at, int64_t n) {
                if (to.data)
                    add_rows<T, T>(window.address + at, window.coefficient + at, n, channels, sums + (row - first) * channels);
                if (args.dots) find_dots(row, start, at, n);
            });
        for (int64_t i = 0; to.data && i < count; ++i)
            write_run(sums + i * channels, at(to, (first + i) * to.strides[KEY]), to.dtype, to.strides[CHANNEL], channels);
    }

  private:
    const Backward<T> &args;
    const int64_t channels;
    Window<T> window;
    T *const sums, *const feat, *const dot;

    void find_dots(int64_t row, int64_t start, int64_t first, int64_t n) {
        const Tensor &value = args.call.value;
        const char *const from = at(value, row * value.strides[KEY]);
        const bool own = value.dtype == OWN<T> && value.strides[CHANNEL] == 1;
        if (!own) read_run(from, value.dtype, value.strides[CHANNEL], channels, feat);
        const T *const g = own ? reinterpret_cast<const T *>(from) : feat;
        if (channels == 0) memset(static_cast<void *>(dot), 0, size_t(n) * sizeof(T));
        const int64_t *const address = window.address + first;
        mxd::MXD_ISA::dots<T, T>(address, address, (n + ROWS - 1) / ROWS * ROWS, channels, g, dot);
        const uint32_t *const order = args.by_feat.order;
        for (int64_t i = 0; i < n; ++i) args.dots[order ? order[start + i] : start + i] = dot[i];
    }
};

// Computes a range of the elements of grad_depth. Each thread reads all points, and adds the dot products of points whose
// ranks_depth is in the thread's range.
template <class T> class DepthGradient {
  public:
    struct Args {
        const Call &call;
        const T *dots;
        const int64_t ranges;
    };

    DepthGradient(const Args &a, Arena &arena) : args(a), sums(arena.take<T>(most() + 1)) {}

    void operator()(int64_t range) {
        const Tensor &to = args.call.grad_depth;
        const int64_t begin = range * most(), rest = to.shape[LISTED] - begin, count = rest < most() ? rest : most();
        if (count <= 0) return;
        memset(static_cast<void *>(sums), 0, size_t(count + 1) * sizeof(T));
        with_ranks(args.call.ranks_depth, [&](auto *ranks, int64_t stride) {
            for (int64_t i = 0; i < args.call.sizes.points; ++i) {
                const uint64_t position = uint64_t(ranks[i * stride] - begin);
                sums[position < uint64_t(count) ? int64_t(position) : count] += args.dots[i];
            }
        });
        write_run(sums, at(to, begin * to.strides[LISTED]), to.dtype, to.strides[LISTED], count);
    }

  private:
    const Args &args;
    T *const sums; // one sum for each element of the range, and one for all points of other ranges

    int64_t most() const { return (args.call.grad_depth.shape[LISTED] + args.ranges - 1) / args.ranges; }
};

template <class T> bool gradients(const Call &call) {
    const Sizes &n = call.sizes;
    const Sorted by_feat(call.ranks_feat, n.points, n.keys, call.num_threads);
    const bool needs_depth = call.grad_depth.data;
    const int64_t bytes = Arena::bytes<T>(n.cells * n.channels) + (needs_depth ? Arena::bytes<T>(n.points) : 0);
    const Memory memory(bytes + 1); // Memory of 0 bytes is null
    if (!by_feat.ready() || !memory.begin()) return false;
    Arena arena(memory.begin());
    T *const rows = arena.take<T>(n.cells * n.channels), *const dots = needs_depth ? arena.take<T>(n.points) : nullptr;
    const Source cell_rows{call.ranks_bev, call.depth, call.ranks_depth, reinterpret_cast<int64_t>(rows),
                           n.channels * int64_t(sizeof(T))};
    const Backward<T> args{call, by_feat, Cells(call.grad_output), rows, dots, cell_rows};
    const int64_t ranges = call.num_threads < 1 ? 1 : call.num_threads;
    return (n.channels == 0 || parallel<CellRows<T>>(call.num_threads, args.cells.blocks(), args)) &&
           parallel<FeatGradient<T>>(call.num_threads, FeatGradient<T>::blocks(call), args) &&
           (!needs_depth ||
            parallel<DepthGradient<T>>(call.num_threads, ranges, typename DepthGradient<T>::Args{call, dots, ranges}));
}

} // namespace

bool bev_pool_v3(const Call &call, const Plan &) {
    const Sorted by_cell(call.ranks_bev, call.sizes.points, call.sizes.cells, call.num_threads);
    return by_cell.ready() && with_types(call, [&](auto *v, auto *t) {
               const Source feat{call.ranks_feat, call.depth, call.ranks_depth, reinterpret_cast<int64_t>(call.value.data),
                                 call.value.strides[KEY] * int64_t(sizeof *v)};
               const Forward args{call, by_cell, Cells(call.output), feat, Forward::are_side_by_side(call, by_cell)};
               return parallel<CellSums<__typeof__(*v), __typeof__(*t)>>(call.num_threads, args.cells.blocks(), args);
           });
}

bool bev_pool_v3_backward(const Call &call, const Plan &) {
    return with_types(call, [&](auto *, auto *t) { return gradients<__typeof__(*t)>(call); });
}

} // namespace mxd::MXD_ISA
