// These programs load no OpenMP runtime, so calls run on the library's own threads.
#include "problem.h"

#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

namespace {

// So many queries that two threads pack each head together, and all have items.
const Sizes MANY_QUERIES{2, 1100, 3, 8, 2, {{9, 11}, {4, 5}}};
constexpr unsigned SEED = 7;

// Threads wait for each other in both: forward around each head's packing, backward before gradients are added to zero.
std::vector<float> results(int num_threads) {
    Problem p(MANY_QUERIES, SEED);
    View<float> result({p.n.bs, p.n.queries, p.n.heads, p.n.channels});
    const mxd_tensor value = p.value.described(), shapes = p.shapes.described(), starts = p.starts.described(),
                     location = p.location.described(), weight = p.weight.described(), output = result.described(),
                     grad_output = p.grad_output.described();
    const mxd_tensor grads[] = {p.grad_value.described(), p.grad_location.described(), p.grad_weight.described()};
    CHECK(mxd_multi_scale_deformable_attn(&value, &shapes, &starts, &location, &weight, &output, num_threads) == MXD_OK);
    CHECK(mxd_multi_scale_deformable_attn_backward(&grad_output, &value, &shapes, &starts, &location, &weight, &grads[0],
                                                   &grads[1], &grads[2], num_threads) == MXD_OK);
    std::copy_n(result.data.get(), result.count, p.output.data.get());
    return p.results();
}

#ifdef __linux__
long threads_of_process() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
}
#endif

} // namespace

void own_threads() {
    CHECK(std::strcmp(mxd_threads(), "threads of its own") == 0);
    const std::vector<float> one = results(1);
    for (int num_threads : {2, 3, 8, 5}) CHECK(results(num_threads) == one);
#ifdef __linux__
    // CANN's functions are given no number: as many threads as there are processors, or as OMP_NUM_THREADS says.
    Problem(MANY_QUERIES, SEED).run(nullptr); // makes the stream's thread
    const long with_eight = threads_of_process();
    CHECK(with_eight >= 8);
    CHECK(results(8) == one && threads_of_process() == with_eight); // those that there are run it again
    CHECK(results(10) == one && threads_of_process() == with_eight + 2);
    setenv("OMP_NUM_THREADS", "12", 1);
    Problem(MANY_QUERIES, SEED).run(nullptr);
    CHECK(threads_of_process() == with_eight + 4);
    unsetenv("OMP_NUM_THREADS");
#endif
}

// One caller has the pool and the others work alone, in turns.
void callers_at_once() {
    const std::vector<float> one = results(1);
    std::vector<std::thread> callers;
    for (int t = 0; t < 4; ++t)
        callers.emplace_back([&one, t] {
            for (int round = 0; round < 6; ++round) CHECK(results(2 + t) == one);
        });
    for (std::thread &caller : callers) caller.join();
}
