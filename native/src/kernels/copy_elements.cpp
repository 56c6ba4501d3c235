// Copies value if kernels cannot read it in place. Only the baseline instruction set has this code, because few calls need it.
#include "kernels/kernels.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {

void copy_elements(const Tensor &t, bool as_doubles, char *to) {
    const SomeAxes<4> all(t, {BATCH, KEY, HEAD, CHANNEL});
    if (as_doubles) return all.read(0, reinterpret_cast<double *>(to));
    const int64_t size = element_size(t.dtype);
    all.runs(0, [&](int64_t offset, int64_t stride, int64_t n, int64_t position) {
        for (int64_t i = 0; i < n; ++i) memcpy(to + (position + i) * size, at(t, offset + i * stride), size_t(size));
    });
}

} // namespace mxd::MXD_ISA
