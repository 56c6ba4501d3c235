// The one loop over threads.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "lent_threads.h"
#include "simd.h"

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

struct Nothing {}; // in place of Begin

// A loop on lent threads. Who takes a unit, a chunk or an item, waits until all units before its stage or its items are
// done. Those are taken, by threads that run, so that it works with any number of threads, and bodies in any order.
template <class Worker, class Args, class Begin> struct LentLoop {
    int64_t per_stage, units; // of a stage; of all
    const Args &args;
    const Begin &begin;
    char *memory;
    int64_t scratch; // bytes of a body
    static constexpr int64_t CHUNKS = same_type<Begin, Nothing> ? 0 : STAGE_CHUNKS;
    int64_t taken = 0, done = 0;
    int used = 0;

    static void body(void *context, int index) { static_cast<LentLoop *>(context)->work(index); }

  private:
    int64_t take() { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); }

    void work(int index) {
        int64_t unit = take();
        if (unit >= units) return;
        __atomic_fetch_add(&used, 1, __ATOMIC_RELAXED);
        Worker worker(args, Arena(memory + index * scratch));
        for (; unit < units; unit = take()) {
            const int64_t stage = unit / (CHUNKS + per_stage), place = unit % (CHUNKS + per_stage);
            const int64_t before = unit - place + (place < CHUNKS ? 0 : CHUNKS);
            while (__atomic_load_n(&done, __ATOMIC_ACQUIRE) < before) let_others_run();
            if constexpr (CHUNKS > 0)
                if (place < CHUNKS) begin(stage, place);
            if (place >= CHUNKS) worker(stage * per_stage + place - CHUNKS);
            __atomic_fetch_add(&done, 1, __ATOMIC_RELEASE);
        }
    }
};

template <class Worker, class Args, class Begin>
bool lent_stages(LentThreads &lent, int64_t stages, int64_t items, const Args &args, const Begin &begin) {
    const int64_t per_stage = items / stages, scratch = (Worker::scratch_bytes(args) + 127) / 64 * 64;
    const int bodies = per_stage < lent.most ? int(per_stage) : lent.most;
    int64_t bytes;
    if (__builtin_mul_overflow(scratch, bodies, &bytes)) return false;
    char *memory = static_cast<char *>(malloc(size_t(bytes) + 64));
    if (!memory) return false;
    char *aligned = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64);
    typedef LentLoop<Worker, Args, Begin> Loop;
    Loop loop{per_stage, stages * (Loop::CHUNKS + per_stage), args, begin, aligned, scratch};
    lent.run(lent.lender, bodies, loop.body, &loop);
    if (loop.used > lent.used) lent.used = loop.used;
    free(memory);
    return true;
}

template <class Worker, class Args, class Begin>
bool parallel_stages(int num_threads, int64_t stages, int64_t items, const Args &args, const Begin &begin) {
    if (items <= 0) return true;
    if (LentThreads *lent = lent_threads()) return lent_stages<Worker>(*lent, stages, items, args, begin);
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
            if constexpr (!same_type<Begin, Nothing>)
                for (int64_t c = 0; c < STAGE_CHUNKS; ++c) begin(s, c);
            for (int64_t i = 0; i < per_stage; ++i) worker(s * per_stage + i);
        }
    } else {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        {
            Worker worker(args, Arena(aligned + omp_get_thread_num() * scratch));
            for (int64_t s = 0; s < stages; ++s) {
                if constexpr (!same_type<Begin, Nothing>) {
#pragma omp for schedule(static)
                    for (int64_t c = 0; c < STAGE_CHUNKS; ++c) begin(s, c);
                }
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
    return parallel_stages<Worker>(num_threads, 1, items, args, Nothing{});
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
