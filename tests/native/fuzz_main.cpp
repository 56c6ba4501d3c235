// Stands in for libFuzzer where there is no clang: random bytes for a number of seconds.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length);
extern "C" uint64_t fuzz_accepted, fuzz_run;

int main(int count, char **arguments) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(count > 1 ? std::atoi(arguments[1]) : 30);
    std::mt19937_64 random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
    uint64_t executions = 0;
    for (; std::chrono::steady_clock::now() < end; ++executions) {
        std::vector<uint8_t> bytes(random() % 400);
        for (uint8_t &byte : bytes) byte = uint8_t(random());
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::printf("fuzz_phase_one: %llu executions, %llu accepted by phase one, %llu of them run; no finding\n",
                (unsigned long long)executions, (unsigned long long)fuzz_accepted, (unsigned long long)fuzz_run);
}
