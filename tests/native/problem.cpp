#include "problem.h"

#include "aclnnop/aclnn_multi_scale_deformable_attention_grad.h"
#include "aclnnop/aclnn_multi_scale_deformable_attn_function.h"
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace {

constexpr char CANARY = 0x5a;

aclDataType pick(const std::vector<aclDataType> &dtypes, size_t which) { return dtypes[which % dtypes.size()]; }

} // namespace

View::View(std::vector<int64_t> dims, aclDataType type, std::mt19937 *layout)
    : shape(std::move(dims)), dtype(type), strides(shape.size()) {
    std::vector<int> order(shape.size());
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); layout && i > 1; --i) std::swap(order[i - 1], order[(*layout)() % i]);
    const int64_t gap = layout ? 1 + int64_t((*layout)() % 2) : 1;
    int64_t stride = gap;
    for (size_t i = order.size(); i-- > 0; stride *= shape[size_t(order[i])]) strides[size_t(order[i])] = stride;
    offset = layout ? int64_t((*layout)() % 4) : 0;
    elements = offset + 1;
    for (size_t a = 0; a < shape.size(); ++a) elements += (shape[a] - 1) * strides[a];
    memory.reset(new char[size_t(elements * size())]);
    std::fill_n(memory.get(), elements * size(), CANARY);
    handle =
        aclCreateTensor(shape.data(), shape.size(), dtype, strides.data(), offset, ACL_FORMAT_ND, &elements, 1, memory.get());
    CHECK(handle);
}

View::~View() { CHECK(aclDestroyTensor(handle) == ACL_SUCCESS); }

int64_t View::count() const { return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>()); }

int64_t View::size() const { return dtype == ACL_BF16 || dtype == ACL_FLOAT16 ? 2 : dtype == ACL_INT64 ? 8 : 4; }

char *View::at(int64_t flat) const {
    int64_t place = offset;
    for (size_t a = shape.size(); a-- > 0; flat /= shape[a]) place += flat % shape[a] * strides[a];
    return memory.get() + place * size();
}

double View::get(int64_t flat) const {
    const char *from = at(flat);
    switch (dtype) {
    case ACL_BF16: return from_bfloat16(load<uint16_t>(from));
    case ACL_INT32: return load<int32_t>(from);
    case ACL_INT64: return double(load<int64_t>(from));
    default: return load<float>(from);
    }
}

void View::set(int64_t flat, double number) {
    char *to = at(flat);
    switch (dtype) {
    case ACL_BF16: return store(to, to_bfloat16(float(number)));
    case ACL_INT32: return store(to, int32_t(number));
    case ACL_INT64: return store(to, int64_t(number));
    default: return store(to, float(number));
    }
}

mxd_tensor View::described() const {
    mxd_tensor t{memory.get() + offset * size(), int64_t(dtype), {}, {}};
    std::copy(shape.begin(), shape.end(), t.shape);
    std::copy(strides.begin(), strides.end(), t.strides);
    return t;
}

bool View::gaps_intact() const {
    std::vector<char> mine(size_t(elements * size()), 0);
    for (int64_t i = 0; i < count(); ++i) std::fill_n(mine.begin() + (at(i) - memory.get()), size(), 1);
    for (size_t byte = 0; byte < mine.size(); ++byte)
        if (!mine[byte] && memory[byte] != CANARY) return false;
    return true;
}

std::vector<double> numbers(const View &view) {
    std::vector<double> all;
    for (int64_t i = 0; i < view.count(); ++i) all.push_back(view.get(i));
    return all;
}

void compare_by_greatest(const View &got, const std::vector<double> &want, double tolerance) {
    double most = 1;
    for (double number : want) most = std::max(most, std::abs(number));
    for (int64_t i = 0; i < got.count(); ++i) CHECK(std::abs(got.get(i) - want[size_t(i)]) <= tolerance * most);
    CHECK(got.gaps_intact());
}

Workspace::Workspace(uint64_t announced) : memory(announced + 2 * ROOM, CANARY) {}

bool Workspace::canary_intact() const {
    const auto whole = [](char c) { return c == CANARY; };
    return std::all_of(memory.begin(), memory.begin() + ROOM, whole) && std::all_of(memory.end() - ROOM, memory.end(), whole);
}

int64_t Problem::keys(const Sizes &n) {
    int64_t rows = 0;
    for (const auto &level : n.levels) rows += level.first * level.second;
    return rows;
}

Problem::Problem(const Sizes &s, unsigned seed, bool strided, std::vector<aclDataType> dtypes, bool flat_rows)
    : n(s), random(seed), value({n.bs, keys(n), n.heads, n.channels}, pick(dtypes, 0), layout(strided)),
      shapes({int64_t(n.levels.size()), 2}, seed % 2 ? ACL_INT32 : ACL_INT64, layout(strided)),
      starts({int64_t(n.levels.size())}, seed % 3 ? ACL_INT64 : ACL_INT32, layout(strided)),
      location({n.bs, n.queries, n.heads, int64_t(n.levels.size()), n.points, 2}, pick(dtypes, 1), layout(strided)),
      weight({n.bs, n.queries, n.heads, int64_t(n.levels.size()), n.points}, pick(dtypes, 2), layout(strided)),
      grad_output(flat_rows ? std::vector<int64_t>{n.bs, n.queries, n.heads * n.channels}
                            : std::vector<int64_t>{n.bs, n.queries, n.heads, n.channels},
                  pick(dtypes, 3), layout(strided)),
      grad_value(value.shape, pick(dtypes, 4), layout(strided)),
      grad_location(location.shape, pick(dtypes, 5), layout(strided)),
      grad_weight(weight.shape, pick(dtypes, 6), layout(strided)),
      output({n.bs, n.queries, n.heads * n.channels}, pick(dtypes, 0), layout(strided)) {
    int64_t row = 0;
    for (size_t l = 0; l < n.levels.size(); ++l) {
        shapes.set(int64_t(2 * l), double(n.levels[l].first));
        shapes.set(int64_t(2 * l + 1), double(n.levels[l].second));
        starts.set(int64_t(l), double(row));
        row += n.levels[l].first * n.levels[l].second;
    }
    for (View *view : {&value, &weight, &grad_output})
        for (int64_t i = 0; i < view->count(); ++i) view->set(i, between(-1, 1, random));
    for (int64_t i = 0; i < location.count(); ++i) location.set(i, between(-0.2, 1.2, random));
}

aclnnStatus Problem::plan(uint64_t *bytes, aclOpExecutor **executor) {
    return aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(value.handle, shapes.handle, starts.handle, location.handle,
                                                                  weight.handle, grad_output.handle, grad_value.handle,
                                                                  grad_location.handle, grad_weight.handle, bytes, executor);
}

aclnnStatus Problem::plan_forward(uint64_t *bytes, aclOpExecutor **executor) {
    return aclnnMultiScaleDeformableAttnFunctionGetWorkspaceSize(value.handle, shapes.handle, starts.handle, location.handle,
                                                                 weight.handle, output.handle, bytes, executor);
}

void Problem::run(aclrtStream stream) {
    uint64_t bytes[2];
    aclOpExecutor *executors[2];
    CHECK(plan_forward(&bytes[0], &executors[0]) == ACLNN_SUCCESS);
    CHECK(plan(&bytes[1], &executors[1]) == ACLNN_SUCCESS);
    Workspace forward(bytes[0]), backward(bytes[1]);
    CHECK(aclnnMultiScaleDeformableAttnFunction(forward.data(), bytes[0], executors[0], stream) == ACLNN_SUCCESS);
    CHECK(aclnnMultiScaleDeformableAttentionGrad(backward.data(), bytes[1], executors[1], stream) == ACLNN_SUCCESS);
    CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
    CHECK(forward.canary_intact());
    CHECK(backward.canary_intact());
}

void Problem::expect_refusal_by_kernel(const char *sentence) {
    constexpr double MARK = 7;
    View *outputs[] = {&output, &grad_value, &grad_location, &grad_weight};
    for (View *view : outputs)
        for (int64_t i = 0; i < view->count(); ++i) view->set(i, MARK);
    for (const bool backward : {false, true}) {
        uint64_t bytes;
        aclOpExecutor *executor;
        CHECK((backward ? plan(&bytes, &executor) : plan_forward(&bytes, &executor)) == ACLNN_SUCCESS);
        Workspace workspace(bytes);
        const auto phase_two = backward ? aclnnMultiScaleDeformableAttentionGrad : aclnnMultiScaleDeformableAttnFunction;
        CHECK(phase_two(workspace.data(), bytes, executor, nullptr) == ACLNN_SUCCESS);
        CHECK(aclrtSynchronizeStream(nullptr) == ACL_ERROR_RT_AICORE_EXCEPTION);
        const char *message = aclGetRecentErrMsg();
        CHECK(message && std::strncmp(message, sentence, std::strlen(sentence)) == 0);
        CHECK(aclrtSynchronizeStream(nullptr) == ACL_SUCCESS); // told once
    }
    for (const View *view : outputs)
        for (int64_t i = 0; i < view->count(); ++i) CHECK(view->get(i) == MARK);
}

namespace {

// The four corners of a sample on a level: row of value or -1, share, and its derivatives by x and y in pixels.
struct Corner {
    int64_t row;
    double share, dx, dy;
};

bool corners(double x, double y, int64_t height, int64_t width, Corner (&to)[4]) {
    if (!(x > -1 && y > -1 && x < double(width) && y < double(height))) return false;
    const double x0 = std::floor(x), y0 = std::floor(y), lx = x - x0, ly = y - y0;
    for (int k = 0; k < 4; ++k) {
        const double right = k & 1, low = k >> 1;
        const int64_t column = int64_t(x0 + right), line = int64_t(y0 + low);
        const bool inside = column >= 0 && column < width && line >= 0 && line < height;
        const double sx = right ? lx : 1 - lx, sy = low ? ly : 1 - ly;
        to[k] = {inside ? line * width + column : -1, sx * sy, (right ? 1 : -1) * sy, (low ? 1 : -1) * sx};
    }
    return true;
}

// A sum in double, and the sum of its terms' sizes. A rounded pixel changes the factor of a term, a share or a slope of
// at most 1, which therefore does not count in the size. Terms may cancel; what they lose does not.
struct Sum {
    double sum = 0, size = 0;
    void add(double term, double factor) {
        sum += term * factor;
        size += std::abs(term);
    }
};

// float32 may lose this share of each term: a pixel below 32 is rounded by at most 2^-20, twice, on each of two axes.
// Seen: 1.6e-6 over 400 seeds. Nor may it lose more than OF_RESULT of the result and one, which is often less: the
// numbers of these tests meet it, others need not, because terms that cancel leave their errors.
constexpr double OF_TERMS = 4e-6, OF_RESULT = 2e-5;

void compare(const View &got, const std::vector<Sum> &want, double share) {
    for (int64_t i = 0; i < got.count(); ++i) {
        const Sum &w = want[size_t(i)];
        const double error = std::abs(got.get(i) - w.sum), result = std::abs(w.sum);
        CHECK(error <= share * result + OF_TERMS * w.size);
        CHECK(error <= (share + OF_RESULT) * (1 + result));
    }
    CHECK(got.gaps_intact());
}

} // namespace

void Problem::verify(double share) const {
    std::vector<Sum> v(size_t(value.count())), l(size_t(location.count())), w(size_t(weight.count())),
        o(size_t(output.count()));
    const int64_t rows = value.shape[1], levels = int64_t(n.levels.size());
    for (int64_t sample = 0; sample < weight.count(); ++sample) {
        const int64_t level = sample / n.points % levels, head = sample / n.points / levels % n.heads;
        const int64_t query = sample / n.points / levels / n.heads; // batch * queries + query
        const auto [height, width] = n.levels[size_t(level)];
        Corner corner[4];
        if (!corners(location.get(2 * sample) * double(width) - 0.5, location.get(2 * sample + 1) * double(height) - 0.5,
                     height, width, corner))
            continue;
        for (const Corner &c : corner) {
            if (c.row < 0) continue;
            const int64_t row = query / n.queries * rows + int64_t(starts.get(level)) + c.row;
            for (int64_t ch = 0; ch < n.channels; ++ch) {
                const size_t in = size_t((row * n.heads + head) * n.channels + ch);
                const int64_t out = (query * n.heads + head) * n.channels + ch;
                const double number = value.get(int64_t(in)), g = grad_output.get(out), a = weight.get(sample);
                o[size_t(out)].add(a * number, c.share);
                v[in].add(a * g, c.share);
                w[size_t(sample)].add(g * number, c.share);
                l[size_t(2 * sample)].add(double(width) * a * g * number, c.dx);
                l[size_t(2 * sample + 1)].add(double(height) * a * g * number, c.dy);
            }
        }
    }
    compare(output, o, share);
    compare(grad_value, v, share);
    compare(grad_location, l, share);
    compare(grad_weight, w, share);
    for (const View *input : {&value, &shapes, &starts, &location, &weight, &grad_output}) CHECK(input->gaps_intact());
}
