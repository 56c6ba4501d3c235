// Runs calls on the kernels of the best instruction set that this machine has.
#include "run.h"

#include <atomic>
#include <cstring>

#include "call/make_plan.h"
#include "call/prepare.h"
#include "call/tables.h"
#include "kernels/kernels.h"
#ifdef MXD_HAVE_AVX2
#include <cpuid.h>
#endif

namespace mxd {
namespace {

#ifdef MXD_HAVE_AVX2

// The instruction sets that the processor and the operating system support: the system must save wide registers.
// __builtin_cpu_supports is not enough, because Clang 14 does not know F16C, and Zig's runtime denies every instruction set.
struct Processor {
    // saved: XCR0, the registers that the system saves. leaf1_c: register ECX of CPUID leaf 1. leaf7_b: EBX of leaf 7.
    uint32_t saved = 0, leaf1_c = 0, leaf7_b = 0;

    Processor() {
        uint32_t a, b, c, d;
        if (__get_cpuid(1, &a, &b, &c, &d)) leaf1_c = c;
        if (leaf1_c & bit_OSXSAVE) __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) leaf7_b = b;
    }

    bool avx2() const {
        constexpr uint32_t XMM_YMM = 0x6, LEAF1 = bit_AVX | bit_FMA | bit_F16C;
        return has(saved, XMM_YMM) && has(leaf1_c, LEAF1) && has(leaf7_b, bit_AVX2);
    }
    bool avx512() const {
        constexpr uint32_t MASKS_ZMM = 0xe0, LEAF7 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
        return avx2() && has(saved, MASKS_ZMM) && has(leaf7_b, LEAF7);
    }

  private:
    static bool has(uint32_t bits, uint32_t all) { return (bits & all) == all; }
};

#endif

struct Isa {
    const char *name;
    bool (*supported)();
    const Kernels *kernels; // indexed by Operator
};

// In ascending order of preference.
const Isa ISAS[] = {
    {"baseline", [] { return true; }, baseline::kernels},
#ifdef MXD_HAVE_AVX2
    {"avx2", [] { return Processor().avx2(); }, avx2::kernels},
#endif
#ifdef MXD_HAVE_AVX512
    {"avx512", [] { return Processor().avx512(); }, avx512::kernels},
#endif
};

const Isa *best_isa() {
    const Isa *best = &ISAS[0];
    for (const Isa &isa : ISAS)
        if (isa.supported()) best = &isa;
    return best;
}

std::atomic<const Isa *> &chosen_isa() {
    static std::atomic<const Isa *> isa(best_isa());
    return isa;
}

} // namespace

const char *isa_in_use() { return chosen_isa().load()->name; }

bool use_isa(const char *name) {
    for (const Isa &isa : ISAS)
        if (name && std::strcmp(isa.name, name) == 0 && isa.supported()) {
            chosen_isa() = &isa;
            return true;
        }
    return false;
}

int run(Call &call) {
    return out_of_memory_if_thrown([&]() -> int {
        Prepared prepared;
        PlanLists lists;
        const int status = prepare(call, prepared, baseline::copy_elements);
        if (status != MXD_OK || nothing_to_do(call)) return status;
        const Plan plan = make_plan(call, lists);
        const Kernels &kernels = chosen_isa().load()->kernels[call.op];
        return (call.backward ? kernels.backward : kernels.forward)(call, plan) ? MXD_OK : MXD_OUT_OF_MEMORY;
    });
}

std::string sentence_of(int status, const Function &function, const Call &call) {
    const auto name = [&](int input) { return function.arguments[function.first_input + input].name; };
    if (status == MXD_BAD_RANK) return fault_of_ranks(call);
    if (status == MXD_BAD_LEVEL) return fault_of_levels(call, name(1), name(2));
    return "the native kernel of " + std::string(function.op) + " was given not enough memory for its scratch buffers";
}

} // namespace mxd
