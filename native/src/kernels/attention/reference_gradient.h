// The gradient of reference points, to which all heads add. Each head has sums of its own, which are added in the order
// of the heads, so that the bits do not depend on threads.
#pragma once

#include "kernels/shared/job.h"
#include "kernels/shared/sampling.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> class ReferenceSums {
  public:
    static int64_t numbers(const Call &call) { return call.sizes.references * call.sizes.coordinates; }
    static int64_t bytes(const Call &call) {
        const Sizes &n = call.sizes;
        return n.batch * n.heads * n.queries * numbers(call) * int64_t(sizeof(T)) + 1; // never nothing
    }
    explicit ReferenceSums(const Job &job)
        : n(job.call.sizes), of_query(numbers(job.call)), all(reinterpret_cast<T *>(job.reference_sums)) {}

    // Selects a (batch, head).
    void open(int64_t b, int64_t h) { opened = all ? all + (b * n.heads + h) * n.queries * of_query : nullptr; }
    MXD_INLINE T *of(int64_t q) const { return opened ? opened + q * of_query : nullptr; }

  private:
    Sizes n;
    int64_t of_query;
    T *all, *opened = nullptr;
};

// Items: blocks of queries, of all batches together.
template <class T> class ReferenceGradient {
  public:
    ReferenceGradient(const Job &job, Arena &arena)
        : grad(job.call.grad_reference), n(job.call.sizes), sums(job), numbers(ReferenceSums<T>::numbers(job.call)),
          row(arena.take<T>(numbers)) {}

    static int64_t items(const Job &job) { return job.call.sizes.batch * blocks(job.call.sizes); }
    void operator()(int64_t item) {
        const int64_t b = item / blocks(n), block = item % blocks(n);
        for (int64_t q = n.queries * block / blocks(n); q < n.queries * (block + 1) / blocks(n); ++q) write(b, q);
    }

  private:
    const Tensor &grad;
    Sizes n;
    ReferenceSums<T> sums;
    int64_t numbers;
    T *row;

    static int64_t blocks(const Sizes &n) { return n.queries < 64 ? n.queries : 64; }

    void write(int64_t b, int64_t q) {
        for (int64_t i = 0; i < numbers; ++i) row[i] = 0;
        for (int64_t h = 0; h < n.heads; ++h) {
            sums.open(b, h);
            const T *of_head = sums.of(q);
            for (int64_t i = 0; i < numbers; ++i) row[i] += of_head[i];
        }
        SomeAxes<2>(grad, {REFERENCE, COORDINATE}).write(offset_of(grad, b, q), row);
    }
};

} // namespace
} // namespace mxd::MXD_ISA
