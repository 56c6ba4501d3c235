// Softmax over the rows of contiguous logits [row, groups], for each group. A vector holds some groups of one row, or
// some rows: the group of a lane repeats after `cycle` numbers. Each of `cycle` lanes keeps a maximum and a sum of its
// own; the lanes of a group are folded at the end.
#pragma once

#include "kernels/shared/sampling.h"
#include "kernels/shared/softmax.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> class GroupedSoftmax {
    static constexpr int N = WIDTH<T>;
    static constexpr int64_t STEP = 4 * N; // four vectors, because one by itself waits for each step of its exp
    typedef Vec<T, N> Lanes;

  public:
    // Room for the exps of `count` logits.
    static int64_t room(int64_t count) { return round_up(count, STEP); }
    GroupedSoftmax(int64_t rows, int64_t of_row, Arena &arena)
        : groups(of_row), count(rows * of_row), whole(count / STEP * STEP), padded(room(count)),
          cycle(of_row > 0 ? STEP / common_divisor(of_row, STEP) * of_row : STEP), used(cycle < padded ? cycle : padded),
          lanes(arena.take<T>(padded + of_row)) {}

    // exps = e^(logit - most[group]) and inverse[group] = 1 / their sum, as torch computes softmax: a group is NaN
    // whose largest logit is infinite, or that has a NaN. next: logits to prefetch; any address is harmless.
    template <class S> void operator()(const S *logits, int64_t next, T *exps, T *most, T *inverse) const {
        if (count == 0) return;
        find_most(logits, exps, most);
        if constexpr (same_type<S, T>)
            find_exps(logits, next, int64_t(sizeof(S)), exps, inverse);
        else
            find_exps(exps, next, int64_t(sizeof(S)), exps, inverse);
    }

    // to[row, group] = exps * factor[group]; what does not fill STEP numbers is written over exps first.
    void multiply(T *exps, const T *factor, T *to) const {
        for (int64_t i = 0; i < used; i += groups) memcpy(lanes + i, factor, size_t(groups) * sizeof(T));
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes by[4];
            memcpy(by, lanes + column, sizeof by);
            for (int64_t i = column; i < padded; i += cycle) {
                T *out = (i < whole ? to : exps) + i;
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) store<T, N>(out + k * N, raw_load<T, N>(exps + i + k * N) * by[k]);
            }
        }
        if (to != exps) memcpy(to + whole, exps + whole, size_t(count - whole) * sizeof(T));
    }

  private:
    int64_t groups, count, whole, padded, cycle, used;
    T *lanes; // what each lane keeps, up to `used`

    // Logits that cannot be used as they lie are copied to exps: of another dtype, or too few to fill STEP.
    template <class S> void find_most(const S *logits, T *exps, T *most) const {
        const Lanes least = broadcast<T, N>(-T(__builtin_inf()));
        for (int64_t i = whole; i < padded; ++i) exps[i] = i < count ? load<T, 1>(logits + i) : least[0];
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes top[4] = {least, least, least, least};
            const auto use = [&](Lanes x, int k) __attribute__((always_inline)) { top[k] = x > top[k] ? x : top[k]; };
            int64_t i = column;
            for (; i < whole; i += cycle) {
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const Lanes x = load<T, N>(logits + i + k * N);
                    if constexpr (!same_type<S, T>) store<T, N>(exps + i + k * N, x);
                    use(x, k);
                }
            }
            if (i < padded) {
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) use(load<T, N>(exps + i + k * N), k);
            }
            memcpy(lanes + column, top, sizeof top);
        }
        fold(least[0], most, Larger());
    }

    // logits: exps, where they were copied.
    void find_exps(const T *logits, int64_t next, int64_t size, T *exps, T *inverse) const {
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes top[4], sums[4] = {};
            memcpy(top, lanes + column, sizeof top);
            for (int64_t i = column; i < padded; i += cycle) {
                const T *from = (i < whole ? logits : exps) + i;
                for (int64_t line = 0; line < STEP * size; line += 64) ask_for<64>(next + i * size + line);
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const Lanes e = exp_below_zero<T, N>(load<T, N>(from + k * N) - top[k]);
                    store<T, N>(exps + i + k * N, e);
                    sums[k] += e;
                }
            }
            memcpy(lanes + column, sums, sizeof sums);
        }
        fold(T(0), inverse, Total());
        for (int64_t g = 0; g < groups; ++g) inverse[g] = 1 / inverse[g];
    }

    static int64_t common_divisor(int64_t a, int64_t b) {
        while (b != 0) {
            const int64_t rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    }

    // One number for each group from those of its lanes, in `to` and again in each lane.
    template <class Fold> void fold(T neutral, T *to, Fold &&fold) const {
        const int64_t end = round_up(used, groups);
        for (int64_t i = used; i < end; ++i) lanes[i] = neutral;
        for_vectors<T>(groups, [&](auto width, int64_t g) {
            constexpr int W = width.value;
            Vec<T, W> all = raw_load<T, W>(lanes + g);
            for (int64_t i = groups + g; i < end; i += groups) all = fold(raw_load<T, W>(lanes + i), all);
            store<T, W>(to + g, all);
            for (int64_t i = g; i < end; i += groups) store<T, W>(lanes + i, all);
        });
    }
};

} // namespace
} // namespace mxd::MXD_ISA
