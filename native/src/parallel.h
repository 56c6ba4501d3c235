// The one loop over threads.
#pragma once

#include "simd.h"
#include "threads.h"

#include <stdint.h>
#include <stdlib.h>

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

constexpr int64_t STAGE_CHUNKS = 64;

// What the threads of a loop share. Begin may be Nothing.
template <class Worker, class Args, class Begin> struct Loop {
    int64_t stages, per_stage;
    const Args &args;
    const Begin &begin;
    char *memory;
    int64_t scratch; // bytes of a thread
    alignas(64) int64_t taken = 0;

    int64_t take() { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); }
};

struct Nothing {};

// One thread of a loop. It takes items one by one; that which lies behind a stage is its first one of the next stage.
template <class Worker, class Args, class Begin> void do_loop(void *context, const Member &member) {
    auto &loop = *static_cast<Loop<Worker, Args, Begin> *>(context);
    Worker worker(loop.args, Arena(loop.memory + member.index * loop.scratch));
    int64_t item = loop.take();
    for (int64_t s = 0; s < loop.stages; ++s) {
        if constexpr (!same_type<Begin, Nothing>) {
            if (s > 0) wait_for_members(member);
            const int64_t end = STAGE_CHUNKS * (member.index + 1) / member.count;
            for (int64_t c = STAGE_CHUNKS * member.index / member.count; c < end; ++c) loop.begin(s, c);
            wait_for_members(member);
        }
        for (; item < (s + 1) * loop.per_stage; item = loop.take()) worker(item);
    }
}

// Worker(args, arena) once per thread, then worker(i) for items 0..items-1 in any order. False: no memory for scratch.
//
// The items come in equal stages, one after the other. Before the items of a stage the threads do begin(stage, chunk)
// for chunks 0..STAGE_CHUNKS-1, and wait for each other.
template <class Worker, class Args, class Begin>
bool parallel_stages(int num_threads, int64_t stages, int64_t items, const Args &args, const Begin &begin) {
    if (items <= 0) return true;
    const int64_t per_stage = items / stages;
    int threads = num_threads < 1 ? 1 : num_threads;
    if (per_stage < threads) threads = int(per_stage);
    const int64_t scratch = (Worker::scratch_bytes(args) + 127) / 64 * 64;
    int64_t bytes;
    if (__builtin_mul_overflow(scratch, threads, &bytes)) return false;
    char *memory = static_cast<char *>(malloc(size_t(bytes) + 64));
    if (!memory) return false;
    char *aligned = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64);
    Loop<Worker, Args, Begin> loop{stages, per_stage, args, begin, aligned, scratch};
    run_on_threads(threads, do_loop<Worker, Args, Begin>, &loop);
    free(memory);
    return true;
}

template <class Worker, class Args> bool parallel(int num_threads, int64_t items, const Args &args) {
    return parallel_stages<Worker>(num_threads, 1, items, args, Nothing{});
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
