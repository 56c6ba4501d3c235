// The one loop over threads.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace mxd {
namespace MXD_ISA {
namespace {

// Hands out scratch memory. Each array begins at a cache line.
class Arena {
  public:
    explicit Arena(char *memory) : next(memory) {}
    template <class T> T *take(int64_t count) {
        T *array = reinterpret_cast<T *>(next);
        next += bytes<T>(count);
        return array;
    }
    template <class T> static int64_t bytes(int64_t count) { return (count * int64_t(sizeof(T)) + 63) / 64 * 64; }

  private:
    char *next;
};

// Worker(args, arena) once per thread, then worker(i) for items 0..items-1 in any order. False: no memory for scratch.
//
// The items come in equal stages, one after the other. Before the items of a stage the threads do begin(stage, chunk)
// for chunks 0..STAGE_CHUNKS-1, and wait for each other.
constexpr int64_t STAGE_CHUNKS = 64;

template <class Worker, class Args, class Begin>
bool parallel_stages(int num_threads, int64_t stages, int64_t items, const Args &args, const Begin &begin) {
    if (items <= 0) return true;
    const int64_t per_stage = items / stages;
    int threads = num_threads < 1 ? 1 : num_threads;
#ifndef _OPENMP
    threads = 1;
#endif
    if (per_stage < threads) threads = int(per_stage);
    const int64_t scratch = (Worker::scratch_bytes(args) + 127) / 64 * 64;
    int64_t bytes;
    if (__builtin_mul_overflow(scratch, threads, &bytes)) return false;
    char *memory = static_cast<char *>(malloc(size_t(bytes) + 64));
    if (!memory) return false;
    char *aligned = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64);
    if (threads == 1) {
        Worker worker(args, Arena(aligned));
        for (int64_t s = 0; s < stages; ++s) {
            for (int64_t c = 0; c < STAGE_CHUNKS; ++c) begin(s, c);
            for (int64_t i = 0; i < per_stage; ++i) worker(s * per_stage + i);
        }
    } else {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        {
            Worker worker(args, Arena(aligned + omp_get_thread_num() * scratch));
            for (int64_t s = 0; s < stages; ++s) {
#pragma omp for schedule(static)
                for (int64_t c = 0; c < STAGE_CHUNKS; ++c) begin(s, c);
#pragma omp for schedule(dynamic, 1)
                for (int64_t i = 0; i < per_stage; ++i) worker(s * per_stage + i);
            }
        }
#endif
    }
    free(memory);
    return true;
}

template <class Worker, class Args> bool parallel(int num_threads, int64_t items, const Args &args) {
    return parallel_stages<Worker>(num_threads, 1, items, args, [](int64_t, int64_t) {});
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
