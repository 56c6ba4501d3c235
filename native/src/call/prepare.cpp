// Makes a call from tensors, and copies value if kernels cannot read it.
#include "call/prepare.h"

#include <new>

#include "call/tables.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mxd {
namespace {

void set_tensor(Tensor &t, const TensorInfo &from, const Argument &argument, const AxisSizes &sizes) {
    const List<NamedAxis, MOST_AXES> &axes = *argument.axes_of(from.axes);
    int64_t shape[MOST_AXES], strides[MOST_AXES]; // a product of sizes becomes two axes
    for (int at = 0, a = 0; at < axes.count; ++at, ++a) {
        shape[a] = from.shape[at];
        strides[a] = from.strides[at];
        if (axes[at].times == sizes::NONE) continue;
        shape[a + 1] = sizes.of[axes[at].times];
        strides[a + 1] = strides[a];
        shape[a] = sizes.of[axes[at].size];
        strides[a] *= shape[a + 1];
        ++a;
    }
    t.data = const_cast<void *>(from.data);
    t.dtype = from.dtype;
    t.axes = argument.layout.count;
    for (int a = 0; a < t.axes; ++a) {
        const int axis = argument.layout[a];
        t.shape[a] = axis < 0 ? 1 : shape[axis];
        t.strides[a] = axis < 0 ? 0 : strides[axis];
    }
}

Sizes sizes_of(const AxisSizes &sizes) {
#define MXD_MEMBER(name, member) member,
    constexpr int64_t Sizes::*MEMBERS[sizes::TWO] = {MXD_SIZES(MXD_MEMBER)};
#undef MXD_MEMBER
    Sizes n{};
    n.heads = n.cameras = 1;
    for (int size = 0; size < sizes::TWO; ++size)
        if (MEMBERS[size] && sizes.of[size] >= 0) n.*MEMBERS[size] = sizes.of[size];
    n.levels = n.cameras * n.scales;
    n.group_channels = n.groups > 0 ? n.channels / n.groups : 0;
    return n;
}

// Returns the number of cells, at most INT64_MAX. An output without channels may have more cells, because it takes no memory.
int64_t cells_of(const Tensor &t) {
    int64_t cells = 1;
    for (Axis axis : {BATCH, CELL_D, CELL_H, CELL_W})
        if (__builtin_mul_overflow(cells, t.shape[axis], &cells)) return INT64_MAX;
    return cells;
}

// The most samples of a query. Kernels have scratch memory for all samples of a query, some 300 bytes per sample.
constexpr int64_t MOST_SAMPLES = int64_t(1) << 32;
// The most points of bev_pool_v3. A list of points has 32-bit indices.
constexpr int64_t MOST_POINTS = UINT32_MAX;

bool too_many_samples(const Call &call, const Tensor &t) {
    if (is_empty(t)) return false;
    int64_t samples = 1;
    for (int a = call.op == AGGREGATION ? KEY_POINT : LEVEL; a < t.axes; ++a) samples *= t.shape[a];
    return samples > MOST_SAMPLES;
}

// Returns whether an anchor has too many pairs (point, camera). If a call with logits has no scales, its logits are empty, and
// no tensor limits the number of pairs.
bool too_many_pairs(const Call &call) {
    int64_t pairs;
    return call.op == AGGREGATION && call.with_logits &&
           (__builtin_mul_overflow(call.sizes.points, call.sizes.cameras, &pairs) || pairs > MOST_SAMPLES);
}

// Returns whether a query or an anchor has more samples than a kernel has memory for, or a pool has more points or cells than a
// kernel can count.
bool is_too_large(const Call &call) {
    if (call.op == POOLING) return call.sizes.points > MOST_POINTS || call.sizes.cells >= TOO_MANY;
    return too_many_samples(call, call.locations) || too_many_samples(call, call.weights) || too_many_pairs(call);
}

// In a backward without samples, sets the numbers of queries and points to 0, because the gradient of value is zero for any
// number of queries. Does nothing if another gradient has elements.
void forget_queries_without_samples(Call &call) {
    if (call.op == POOLING || !call.backward || !is_empty(call.weights)) return;
    for (const Tensor *gradient : {&call.grad_locations, &call.grad_reference})
        if (gradient->data && !is_empty(*gradient)) return;
    const int point = call.op == AGGREGATION ? KEY_POINT : POINT;
    for (Tensor *t : {&call.locations, &call.weights}) t->shape[QUERY] = t->shape[point] = 0;
    call.sizes.queries = call.sizes.points = 0;
}

// Requests huge pages for a large result. With small pages every 4 KB costs a page fault, and each head misses the TLB on the
// same pages again. The request is a hint, and covers only whole huge pages inside the tensor.
void prefer_huge_pages(const Tensor &t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    if (!t.data || is_empty(t)) return;
    int64_t last = 0;
    for (int a = 0; a < t.axes; ++a) last += (t.shape[a] - 1) * t.strides[a];
    const int64_t size = floating_size(t.dtype);
    const uintptr_t data = reinterpret_cast<uintptr_t>(t.data);
    const uintptr_t begin = (data + PAGE - 1) / PAGE * PAGE, end = (data + uintptr_t((last + 1) * size)) / PAGE * PAGE;
    if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)t;
#endif
}

int read_levels(Call &call, Prepared &prepared) {
    const Sizes &n = call.sizes;
    prepared.levels.resize(size_t(n.levels));
    call.levels = prepared.levels.data();
    Level *next = prepared.levels.data();
    for (int64_t camera = 0; camera < n.cameras; ++camera)
        for (int64_t scale = 0; scale < n.scales; ++scale) {
            *next = read_level(call, camera, scale);
            if (!level_fits(*next++, n.keys)) return MXD_BAD_LEVEL;
        }
    return MXD_OK;
}

int make_readable(Call &call, Prepared &prepared, CopyElements *copy_elements) {
    Tensor &value = call.value;
    const Tensor before = value;
    bool widens = false;
    for (const Tensor *t :
         {&call.locations, &call.weights, &call.reference, &call.projection, &call.image_size, &call.pair_scale, &call.depth})
        widens = widens || (t->dtype == MXD_FLOAT64 && value.dtype != MXD_FLOAT64);
    if (!widens && (value.shape[CHANNEL] <= 1 || value.strides[CHANNEL] == 1 || is_empty(value))) return MXD_OK;
    int64_t elements = 1;
    for (int a = value.axes; a-- > 0; elements *= value.shape[a]) value.strides[a] = elements;
    if (widens) value.dtype = MXD_FLOAT64;
    if (!copy_elements) return MXD_OK;
    prepared.value.reset(new (std::nothrow) char[size_t(elements * floating_size(value.dtype))]);
    if (!prepared.value) return MXD_OUT_OF_MEMORY;
    value.data = prepared.value.get();
    if (elements > 0) copy_elements(before, widens, prepared.value.get());
    return MXD_OK;
}

} // namespace

Call make_call(const Function &function, const TensorInfo *tensors, const AxisSizes &sizes, int64_t option, int num_threads) {
    Call call{};
    call.op = function.kernel;
    call.with_logits = function.with_logits;
    call.has_window = call.with_logits && call.op == GEOMETRIC;
    call.backward = function.backward;
    call.num_threads = num_threads;
    call.reference_by_point = option == 1;
    for (const Argument &each : function.arguments) {
        if (tensors->shape) set_tensor(call.*each.tensor, *tensors, each, sizes);
        ++tensors;
    }
    call.sizes = sizes_of(sizes);
    if (call.op == POOLING) call.sizes.cells = cells_of(call.backward ? call.grad_output : call.output);
    call.sizes.coordinates = call.reference.shape[COORDINATE];
    return call;
}

bool nothing_to_do(const Call &call) {
    for (const Tensor *result : {&call.output, &call.grad_value, &call.grad_locations, &call.grad_weights, &call.grad_reference,
                                 &call.grad_projection, &call.grad_depth})
        if (result->data && !is_empty(*result)) return false;
    return true;
}

int prepare(Call &call, Prepared &prepared, CopyElements *copy_elements) {
    forget_queries_without_samples(call);
    if (is_too_large(call)) return MXD_OUT_OF_MEMORY;
    const int status = read_levels(call, prepared);
    if (status != MXD_OK) return status;
    if (copy_elements) {
        if (nothing_to_do(call)) return MXD_OK;
        if (!ranks_fit(call)) return MXD_BAD_RANK;
        for (const Tensor *t : {&call.output, &call.grad_value, &call.grad_locations, &call.grad_weights})
            prefer_huge_pages(*t);
    }
    return make_readable(call, prepared, copy_elements);
}

} // namespace mxd
