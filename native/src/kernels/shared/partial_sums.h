// Gradients to which several parts of a call add. A part is a head, which adds to the gradient of reference points, or a block
// of anchors, which adds to the gradient of projections. Each part has sums of its own. They are added up in the order of the
// parts, so the bits do not depend on threads.
#pragma once

#include "kernels/shared/job.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

// The sums, [part, target, number]. Parts are numbered through all batches. A target is a query or a camera. The numbers of a
// target are the elements of the last two axes of the gradient.
template <class T> struct PartialSums {
    int64_t targets, numbers;
    T *all; // null if the gradient is not wanted

    PartialSums(const Tensor &gradient, char *memory)
        : targets(gradient.shape[QUERY]), numbers(gradient.shape[REFERENCE] * gradient.shape[COORDINATE]),
          all(reinterpret_cast<T *>(memory)) {}
    int64_t bytes(int64_t parts) const { return parts * targets * numbers * int64_t(sizeof(T)); }
    MXD_INLINE T *of(int64_t part, int64_t target) const { return all ? all + (part * targets + target) * numbers : nullptr; }
};

// Adds up the sums of the parts of each batch, and writes the totals to the gradient. An item is (batch, block of targets).
template <class T> class AddParts {
  public:
    struct Args {
        const Tensor &gradient;
        int64_t parts; // parts of a batch
        PartialSums<T> sums;

        int64_t blocks() const { return sums.numbers == 0 ? 0 : sums.targets < 64 ? sums.targets : 64; }
    };

    AddParts(const Args &a, Arena &arena) : args(a), row(arena.take<T>(args.sums.numbers)) {}
    void operator()(int64_t item) {
        const int64_t blocks = args.blocks(), block = item % blocks, targets = args.sums.targets;
        for (int64_t i = targets * block / blocks; i < targets * (block + 1) / blocks; ++i) write(item / blocks, i);
    }

  private:
    const Args &args;
    T *row;

    void write(int64_t b, int64_t target) {
        for (int64_t i = 0; i < args.sums.numbers; ++i) row[i] = 0;
        for (int64_t part = b * args.parts; part < (b + 1) * args.parts; ++part) {
            const T *part_sums = args.sums.of(part, target);
            for (int64_t i = 0; i < args.sums.numbers; ++i) row[i] += part_sums[i];
        }
        SomeAxes<2>(args.gradient, {REFERENCE, COORDINATE}).write(offset_of(args.gradient, b, target), row);
    }
};

template <class T> inline bool add_parts(int num_threads, const typename AddParts<T>::Args &args) {
    return parallel<AddParts<T>>(num_threads, args.gradient.shape[BATCH] * args.blocks(), args);
}

} // namespace
} // namespace mxd::MXD_ISA
