// Softmax down the rows of logits [row, groups], which lie side by side. A vector holds some groups of one row, or some
// rows: the place of a number among the groups repeats after `cycle` numbers. Until then each lane has a maximum and a
// sum of its own; they are folded at the end.
#pragma once

#include "sampling.h"
#include "softmax.h"

namespace mxd {
namespace MXD_ISA {
namespace {

template <class T> class GroupedSoftmax {
    static constexpr int N = WIDTH<T>;
    static constexpr int64_t STEP = 4 * N; // four vectors, because one by itself waits for each step of its exp
    typedef Vec<T, N> Lanes;

  public:
    // Room for the exps of `count` logits.
    static int64_t room(int64_t count) { return round_up(count, STEP); }
    static int64_t bytes(int64_t count, int64_t groups) { return Arena::bytes<T>(room(count) + groups); }
    GroupedSoftmax(int64_t rows, int64_t of_row, Arena &arena)
        : groups(of_row), count(rows * of_row), whole(count / STEP * STEP), padded(room(count)),
          cycle(of_row > 0 ? STEP / common_divisor(of_row, STEP) * of_row : STEP),
          used(cycle < padded ? cycle : padded), lanes(arena.take<T>(padded + of_row)) {}

    // exps = e^(logit - most[group]) and share[group] = 1 / their sum, as torch computes softmax: a group is NaN whose
    // largest logit is infinite, or that has a NaN. logits may be exps. next: as many bytes to prefetch; any address is
    // harmless.
    void operator()(const T *logits, int64_t next, T *exps, T *most, T *share) const {
        if (count == 0) return;
        const Lanes least = broadcast<T, N>(-T(__builtin_inf()));
        for (int64_t i = whole; i < padded; ++i) exps[i] = i < count ? logits[i] : least[0];
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes top[4] = {least, least, least, least};
            for (int64_t i = column; i < padded; i += cycle) {
                const T *from = (i < whole ? logits : exps) + i;
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    const Lanes x = raw_load<T, N>(from + k * N);
                    top[k] = x > top[k] ? x : top[k];
                }
            }
            memcpy(lanes + column, top, sizeof top);
        }
        fold(least[0], most, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
        for (int64_t column = 0; column < used; column += STEP) {
            Lanes top[4], sums[4] = {};
            memcpy(top, lanes + column, sizeof top);
            for (int64_t i = column; i < padded; i += cycle) {
                const T *from = (i < whole ? logits : exps) + i;
                MXD_UNROLL
                for (int k = 0; k < 4; ++k) {
                    ask_for<int(sizeof(Lanes))>(next + (i + k * N) * int64_t(sizeof(T)));
                    const Lanes e = exp_below_zero<T, N>(raw_load<T, N>(from + k * N) - top[k]);
                    store<T, N>(exps + i + k * N, e);
                    sums[k] += e;
                }
            }
            memcpy(lanes + column, sums, sizeof sums);
        }
        fold(T(0), share, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
        for (int64_t g = 0; g < groups; ++g) share[g] = 1 / share[g];
    }

    // to[row, group] = exps * factor[group]; what does not fill STEP numbers is written over exps first.
    void scaled(T *exps, const T *factor, T *to) const {
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
        for_pieces<T>(groups, [&](auto width, auto vectors, int64_t g) {
            constexpr int W = width.value;
            for (int v = 0; v < vectors.value; ++v, g += W) {
                Vec<T, W> all = raw_load<T, W>(lanes + g);
                for (int64_t i = groups + g; i < end; i += groups) all = fold(raw_load<T, W>(lanes + i), all);
                store<T, W>(to + g, all);
                for (int64_t i = g; i < end; i += groups) store<T, W>(lanes + i, all);
            }
        });
    }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
