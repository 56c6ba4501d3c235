// Every instruction set that this processor has against baseline, in a few hundred random calls.
#include "check.h"
#include "compare/difference.h"

#include <string>

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
