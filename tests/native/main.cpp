#include "check.h"
#include "compare/difference.h"

#include <cstring>
#include <string>

namespace {

// Every instruction set that this processor has against baseline, in a few hundred random calls.
void instruction_sets() {
    constexpr int64_t CASES = 300;
    const std::string best = mxd_isa();
    compare::Comparison comparison;
    for (int64_t number = -compare::KNOWN; number < CASES; ++number) {
        compare::Call call(number);
        CHECK(mxd_use_isa("baseline") == 0);
        const compare::Results want = call.run();
        for (const char *isa : {"avx2", "avx512"})
            if (mxd_use_isa(isa) == 0) comparison.add(isa, call, want, call.run());
    }
    CHECK(comparison.findings() == 0);
    CHECK(mxd_use_isa(best.c_str()) == 0);
}

const struct {
    const char *name;
    void (*run)();
} TESTS[] = {{"known_answer", known_answer}, {"instruction_sets", instruction_sets},
             {"pooling", pooling},           {"handles", handles},
             {"any_number", any_number},     {"executors", executors},
             {"streams", streams},           {"many_threads", many_threads},
             {"own_threads", own_threads},   {"callers_at_once", callers_at_once}};

} // namespace

// With a name: that test alone.
int main(int count, char **arguments) {
    std::printf("instruction set: %s\n", mxd_isa());
    CHECK(aclFinalize() == ACL_ERROR_UNINITIALIZE);
    CHECK(aclInit(nullptr) == ACL_SUCCESS && aclInit(nullptr) == ACL_ERROR_REPEAT_INITIALIZE);
    for (const auto &test : TESTS) {
        if (count > 1 && std::strcmp(arguments[1], test.name) != 0) continue;
        test.run();
        std::printf("%s: passed\n", test.name);
    }
    CHECK(aclrtResetDevice(0) == ACL_SUCCESS && aclFinalize() == ACL_SUCCESS);
    CHECK(aclFinalize() == ACL_ERROR_REPEAT_FINALIZE);
}
