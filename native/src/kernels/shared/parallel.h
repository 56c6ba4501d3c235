// The loop over threads, and the scratch memory of threads.
#pragma once

#include "kernels/shared/vectors.h"
#include "threads/threads.h"

#include <stdint.h>
#include <stdlib.h>

namespace mxd::MXD_ISA {
namespace {

// Hands out scratch memory. Each array begins at a cache line. scratch_of() constructs a worker on an arena that only counts
// bytes. Such an arena has no memory, so a worker's constructor must not write to arrays.
class Arena {
  public:
    Arena() : counts(true), begin(64), next(begin) {}
    explicit Arena(char *memory) : counts(false), begin(reinterpret_cast<int64_t>(memory)), next(begin) {}
    template <class T> T *take(int64_t count) {
        T *const array = reinterpret_cast<T *>(next);
        next += bytes<T>(count);
        return array;
    }
    template <class T> T *zeros(int64_t count) {
        T *const array = take<T>(count);
        if (!counts) memset(static_cast<void *>(array), 0, size_t(count) * sizeof(T));
        return array;
    }
    int64_t taken() const { return next - begin; }
    template <class T> static int64_t bytes(int64_t count) { return (count * int64_t(sizeof(T)) + 63) / 64 * 64; }

    const bool counts;

  private:
    const int64_t begin;
    int64_t next;
};

// Memory that begins at a cache line. begin() is null for 0 bytes and if malloc fails.
class Memory {
  public:
    explicit Memory(int64_t bytes) : memory(bytes > 0 ? static_cast<char *>(malloc(size_t(bytes) + 64)) : nullptr) {}
    Memory(const Memory &) = delete;
    ~Memory() { free(memory); }
    char *begin() const { return memory ? memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) : nullptr; }

  private:
    char *memory;
};

constexpr int64_t STAGE_CHUNKS = 64;

struct Nothing {};

// The state that the bodies of a loop share. Usually each body has its own thread. A unit is a chunk or an item. Bodies take
// units one by one: stage by stage, and in a stage the chunks before the items. Before a chunk, a body waits until all earlier
// stages are done. Before an item, a body also waits for the chunks of the item's stage. These units were taken earlier, by
// bodies that are already running. So the loop ends for any number of threads, even if bodies run one after the other. If Begin
// is Nothing, there are no chunks, and no body waits.
template <class Worker, class Args, class Begin> struct Loop {
    int64_t stages, per_stage;
    const Args &args;
    const Begin &begin;
    char *memory;
    int64_t scratch; // bytes of scratch memory for each body
    alignas(64) int64_t taken = 0;
    alignas(64) int64_t done = 0;
    int used = 0; // number of bodies that had work

    static void body(void *context, int index) { static_cast<Loop *>(context)->work(index); }

  private:
    static constexpr int64_t CHUNKS = same_type<Begin, Nothing> ? 0 : STAGE_CHUNKS;

    int64_t take() { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); }

    void work(int index) {
        const int64_t units = stages * (CHUNKS + per_stage);
        int64_t unit = take();
        if (unit >= units) return;
        __atomic_fetch_add(&used, 1, __ATOMIC_RELAXED);
        Arena arena(memory + index * scratch);
        Worker worker(args, arena);
        for (; unit < units; unit = take()) {
            do_unit(worker, unit / (CHUNKS + per_stage), unit % (CHUNKS + per_stage));
            __atomic_fetch_add(&done, 1, __ATOMIC_RELEASE);
        }
    }

    void do_unit(Worker &worker, int64_t stage, int64_t index) {
        wait_until_done(stage * (CHUNKS + per_stage) + (index < CHUNKS ? 0 : CHUNKS));
        if constexpr (CHUNKS > 0)
            if (index < CHUNKS) return begin(stage, index);
        worker(stage * per_stage + index - CHUNKS);
    }

    void wait_until_done(int64_t units) const {
        if constexpr (CHUNKS > 0) wait_for(&done, units);
    }
};

template <class Worker, class Args> int64_t scratch_of(const Args &args) {
    Arena arena;
    const Worker worker(args, arena);
    return arena.taken();
}

// Constructs a Worker(args, arena) for each thread, and calls worker(i) for all items in any order. Returns false if memory
// runs out.
//
// The items are cut into equal stages. Before the items of a stage, threads call begin(stage, chunk) for chunks
// 0..STAGE_CHUNKS-1 and wait for each other.
template <class Worker, class Args, class Begin>
bool parallel_stages(int num_threads, int64_t stages, int64_t items, const Args &args, const Begin &begin) {
    if (items <= 0) return true;
    const int64_t per_stage = items / stages;
    LentThreads *lent = lent_threads();
    int threads = lent ? lent->most : num_threads < 1 ? 1 : num_threads;
    if (per_stage < threads) threads = int(per_stage);
    const int64_t scratch = scratch_of<Worker>(args) + 64;
    int64_t bytes;
    if (__builtin_mul_overflow(scratch, threads, &bytes)) return false;
    const Memory memory(bytes);
    if (!memory.begin()) return false;
    Loop<Worker, Args, Begin> loop{stages, per_stage, args, begin, memory.begin(), scratch};
    if (lent) {
        lent->run(lent->lender, threads, loop.body, &loop);
        if (loop.used > lent->used) lent->used = loop.used;
    } else {
        run_on_threads(threads, loop.body, &loop);
    }
    return true;
}

template <class Worker, class Args> bool parallel(int num_threads, int64_t items, const Args &args) {
    return parallel_stages<Worker>(num_threads, 1, items, args, Nothing{});
}

} // namespace
} // namespace mxd::MXD_ISA
