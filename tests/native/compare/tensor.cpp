#include "tensor.h"

#include "numbers.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace compare {
namespace {

size_t size_of(Dtype dtype) {
    if (dtype == MXD_FLOAT64 || dtype == MXD_INT64) return 8;
    return dtype == MXD_FLOAT32 || dtype == MXD_INT32 ? 4 : 2;
}

int64_t product(const std::vector<int64_t> &shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
}

// Axes in the order in which memory has them, the innermost last.
std::vector<size_t> order_of(size_t axes, Layout layout, Random &random) {
    std::vector<size_t> order(axes);
    std::iota(order.begin(), order.end(), 0);
    const bool permuted = layout == Layout::ANY || layout == Layout::LAST_AXIS_STAYS;
    size_t left = permuted ? axes - (layout == Layout::LAST_AXIS_STAYS) : 0;
    for (; left > 1; --left) std::swap(order[left - 1], order[size_t(random.below(int64_t(left)))]);
    return order;
}

std::vector<int64_t> strides_of(const std::vector<int64_t> &shape, Layout layout, Random &random) {
    std::vector<int64_t> strides(shape.size());
    const std::vector<size_t> order = order_of(shape.size(), layout, random);
    const int64_t repeated = layout == Layout::EXPANDED ? random.below(int64_t(shape.size()) - 1) : -1;
    int64_t stride = layout == Layout::ANY ? 1 + random.below(2) : 1;
    for (size_t i = order.size(); i-- > 0;) {
        const size_t axis = order[i];
        const bool repeats = int64_t(axis) == repeated;
        strides[axis] = repeats ? 0 : stride;
        stride *= repeats ? 1 : shape[axis];
    }
    return strides;
}

size_t elements_of(const std::vector<int64_t> &shape, const std::vector<int64_t> &strides) {
    if (product(shape) == 0) return 0;
    int64_t last = 0;
    for (size_t axis = 0; axis < shape.size(); ++axis) last += (shape[axis] - 1) * strides[axis];
    return size_t(last) + 1;
}

} // namespace

const char *name_of(Dtype dtype) {
    switch (dtype) {
    case MXD_FLOAT32: return "float32";
    case MXD_FLOAT64: return "float64";
    case MXD_FLOAT16: return "float16";
    case MXD_BFLOAT16: return "bfloat16";
    case MXD_INT32: return "int32";
    default: return "int64";
    }
}

Tensor::Tensor(Dtype type, std::vector<int64_t> dims, Layout layout, Random &random)
    : dtype(type), shape(std::move(dims)), strides(strides_of(shape, layout, random)),
      memory(elements() * size_of(dtype), !random.one_in(8)) {}

int64_t Tensor::count() const { return product(shape); }

size_t Tensor::elements() const { return elements_of(shape, strides); }

char *Tensor::at(int64_t flat) const {
    int64_t place = 0;
    for (size_t axis = shape.size(); axis-- > 0; flat /= shape[axis]) place += flat % shape[axis] * strides[axis];
    return memory.data() + place * int64_t(size_of(dtype));
}

double Tensor::get(int64_t flat) const {
    const char *from = at(flat);
    switch (dtype) {
    case MXD_FLOAT32: return load<float>(from);
    case MXD_FLOAT64: return load<double>(from);
    case MXD_FLOAT16: return from_float16(load<uint16_t>(from));
    case MXD_BFLOAT16: return from_bfloat16(load<uint16_t>(from));
    case MXD_INT32: return load<int32_t>(from);
    default: return double(load<int64_t>(from));
    }
}

void Tensor::set(int64_t flat, double number) {
    char *to = at(flat);
    switch (dtype) {
    case MXD_FLOAT32: return store(to, float(number));
    case MXD_FLOAT64: return store(to, number);
    case MXD_FLOAT16: return store(to, to_float16(number));
    case MXD_BFLOAT16: return store(to, to_bfloat16(float(number)));
    case MXD_INT32: return store(to, to_integer<int32_t>(number));
    default: return store(to, to_integer<int64_t>(number));
    }
}

void Tensor::fill(double from, double to, Random &random) {
    for (int64_t i = 0; i < count(); ++i) set(i, random.between(from, to));
}

void Tensor::clear() { std::fill_n(memory.data(), memory.size(), GuardedMemory::CANARY); }

mxd_tensor Tensor::described() const {
    mxd_tensor t{memory.data(), dtype, {}, {}};
    std::copy(shape.begin(), shape.end(), t.shape);
    std::copy(strides.begin(), strides.end(), t.strides);
    return t;
}

bool Tensor::gaps_intact() const {
    std::vector<char> mine(memory.size(), 0);
    for (int64_t i = 0; i < count(); ++i) std::fill_n(mine.begin() + (at(i) - memory.data()), size_of(dtype), 1);
    for (size_t byte = 0; byte < mine.size(); ++byte)
        if (!mine[byte] && memory.data()[byte] != GuardedMemory::CANARY) return false;
    return memory.rest_intact();
}

} // namespace compare
