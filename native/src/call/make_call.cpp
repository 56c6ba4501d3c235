// Gives tensors the names that kernels know them by, and their axes the order of axes.h.
#include "call/make_call.h"

namespace mxd {
namespace {

void set_layout(Tensor &t, const mxd_tensor &from, const Argument &argument) {
    const List<int, MOST_AXES> &layout = argument.layout;
    t.axes = layout.count;
    if (argument.in_layout) {
        static_cast<mxd_tensor &>(t) = from;
        return;
    }
    t.data = from.data;
    t.dtype = from.dtype;
    for (int a = 0; a < layout.count; ++a) {
        const int axis = layout[a];
        t.shape[a] = axis < 0 ? 1 : from.shape[axis];
        t.strides[a] = axis < 0 ? 0 : from.strides[axis];
    }
}

Sizes sizes_of(const AxisSizes &sizes) {
    Sizes n{};
    n.heads = n.cameras = 1;
    for (int size = 0; size < sizes::TWO; ++size)
        if (SIZE_MEMBERS[size] && sizes.of[size] >= 0) n.*SIZE_MEMBERS[size] = sizes.of[size];
    n.levels = n.cameras * n.scales;
    n.group_channels = n.groups > 0 ? n.channels / n.groups : 0;
    return n;
}

// Without channels there may be any number of them: INT64_MAX is no number that a call may have.
int64_t cells_of(const Tensor &t) {
    int64_t cells = 1;
    for (Axis axis : {BATCH, CELL_D, CELL_H, CELL_W})
        if (__builtin_mul_overflow(cells, t.shape[axis], &cells)) return INT64_MAX;
    return cells;
}

} // namespace

mxd_tensor split_products(const Argument &argument, const TensorInfo &tensor, const AxisSizes &sizes) {
    mxd_tensor to{const_cast<void *>(tensor.data), tensor.dtype, {}, {}};
    const List<NamedAxis, MOST_AXES> &axes = *argument.axes_of(tensor.axes);
    for (int from = 0, a = 0; from < axes.count; ++from, ++a) {
        to.shape[a] = tensor.shape[from];
        to.strides[a] = tensor.strides[from];
        if (axes[from].times == sizes::NONE) continue;
        const int64_t inner = sizes.of[axes[from].times];
        to.shape[a] = sizes.of[axes[from].size];
        to.strides[a] *= inner;
        to.shape[++a] = inner;
        to.strides[a] = tensor.strides[from];
    }
    return to;
}

Call make_call(const Function &function, const mxd_tensor *const *tensors, const AxisSizes &sizes, int64_t option,
               int num_threads) {
    Call call{};
    call.op = function.kernel;
    call.with_logits = function.with_logits;
    call.has_window = call.with_logits && call.op == GEOMETRIC;
    call.backward = function.backward;
    call.num_threads = num_threads;
    call.reference_by_point = option == 1;
    for (const Argument &each : function.arguments) {
        if (*tensors) set_layout(call.*each.tensor, **tensors, each);
        ++tensors;
    }
    call.sizes = sizes_of(sizes);
    if (call.op == POOLING) call.sizes.cells = cells_of(call.backward ? call.grad_output : call.output);
    call.sizes.coordinates = call.reference.shape[COORDINATE];
    return call;
}

} // namespace mxd
