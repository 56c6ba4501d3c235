// Included before each source of the library with the faults of faults.toml: the environment chooses one of them.
#pragma once
#ifdef __cplusplus
#include <cstdlib>
static inline int mxd_chosen() {
    const char *number = std::getenv("MXD_MUTANT");
    return number ? std::atoi(number) : 0;
}
// mxd_* is what the library exports.
extern "C" {
inline __attribute__((visibility("default"))) volatile int mxd_mutant = mxd_chosen();
inline __attribute__((visibility("default"))) unsigned char mxd_reached[1024] = {};
}
static inline bool mxd_planted(int number) {
    mxd_reached[number] = 1;
    return mxd_mutant == number;
}
#endif
