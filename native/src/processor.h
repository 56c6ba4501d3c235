// Which instruction sets the x86 processor and the system have: a system that does not save wide registers cannot run
// their instructions. Not __builtin_cpu_supports: Clang 14 does not know F16C there, and Zig's runtime says no to all.
#pragma once

#include <cpuid.h>
#include <stdint.h>

namespace mxd {

// Registers that the system saves (bits of XCR0), and those of CPUID's bits that the kernels need.
struct Processor {
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
    static bool has(uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; }
};

} // namespace mxd
