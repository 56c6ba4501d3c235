// The floor's C interface: one function. benchmarks/floor.py calls it.
#include <cstring>

#include "floor.h"

namespace mxd {

#define MXD_DECLARE(isa)                                                                                                       \
    namespace isa {                                                                                                            \
    int gather_floor(const Floor &);                                                                                           \
    }

MXD_DECLARE(baseline)
#ifdef MXD_HAVE_AVX2
MXD_DECLARE(avx2)
#endif
#ifdef MXD_HAVE_AVX512
MXD_DECLARE(avx512)
#endif

namespace {

const struct {
    const char *name;
    int (*gather_floor)(const Floor &);
} ISAS[] = {
    {"baseline", baseline::gather_floor},
#ifdef MXD_HAVE_AVX2
    {"avx2", avx2::gather_floor},
#endif
#ifdef MXD_HAVE_AVX512
    {"avx512", avx512::gather_floor},
#endif
};

} // namespace
} // namespace mxd

// isa: what mxd_isa() of libmx_driving says; this machine must have it. Returns an mxd_status, or -1 for another name.
// The tensors are those of struct Floor; starts and grad_value may be null.
extern "C" MXD_API int mxd_gather_floor(const char *isa, const mxd_tensor *value, const mxd_tensor *rows,
                                        const mxd_tensor *starts, const mxd_tensor *output, const mxd_tensor *grad_value,
                                        int num_threads) {
    if (rows->dtype != MXD_INT32) return MXD_BAD_DTYPE;
    if (rows->shape[3] % 4 != 0 || (starts && grad_value)) return MXD_BAD_SHAPE;
    const mxd::Floor floor = {
        *value, *rows, starts ? *starts : mxd_tensor{}, *output, grad_value ? *grad_value : mxd_tensor{}, num_threads};
    for (const auto &known : mxd::ISAS)
        if (std::strcmp(known.name, isa) == 0) return known.gather_floor(floor);
    return -1;
}
