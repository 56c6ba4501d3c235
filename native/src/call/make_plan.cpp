// Decides which levels are packed, how heads are cut, and how many threads make a call fastest.
#include "call/make_plan.h"

#include <atomic>

#include "call/check.h"

namespace mxd {
namespace {

int64_t num_rows(const Level &level) { return level.height * level.width; }

// Returns the size of the computed type. The type is double if any input is double: prepare.cpp then converts value to double.
int64_t computed_size(const Call &call) { return call.value.dtype == MXD_FLOAT64 ? 8 : 4; }

bool needs_samples(const Call &call) {
    return call.grad_locations.data || call.grad_weights.data || call.grad_reference.data || call.grad_projection.data;
}

int64_t num_threads(const Call &call) { return std::max(1, call.num_threads); }

// Returns whether workers can sum in grad_value itself, because it has the computed type and contiguous channels.
bool can_be_added_to(const Call &call) {
    const int64_t computed = call.value.dtype == MXD_FLOAT64 ? MXD_FLOAT64 : MXD_FLOAT32;
    return call.grad_value.dtype == computed && (call.sizes.channels <= 1 || call.grad_value.strides[CHANNEL] == 1);
}

bool overlap_the_next(const Level *begin, const Level *end) {
    return std::adjacent_find(begin, end, [](const Level &a, const Level &b) { return a.start + num_rows(a) > b.start; }) !=
           end;
}

bool levels_overlap(const Call &call) {
    const Level *end = call.levels + call.sizes.levels;
    if (!overlap_the_next(call.levels, end)) return false; // usual: the levels are in ascending order and do not overlap
    std::vector<Level> levels(call.levels, end);
    std::sort(levels.begin(), levels.end(), [](const Level &a, const Level &b) { return a.start < b.start; });
    return overlap_the_next(levels.data(), levels.data() + levels.size());
}

// ---- which levels are packed

constexpr PackedLevels NONE{nullptr, 0, 0, 0, 0, 0};

bool all_near(const PackedLevels &packed) { return packed.bytes > 0 && packed.far_begin >= packed.far_end; }

// This many bytes of packed rows stay in a core's second-level cache beside all other data. The smallest levels that together
// fit into these bytes are near. Rows of near levels are not prefetched, because they are in the cache already, and a prefetch
// is not cheap: the prefetch of a row takes three load instructions, the sum of the row takes six. Without these prefetches the
// forward on one thread takes 27.3 instead of 29.0 ms for Deformable-DETR's encoder, 72.3 instead of 74.6 for BEVFormer spatial
// (2026-11-23, Zen 3), and 21.1 instead of 23.1 for MapTR tiny, all of whose rows are near (2026-11-22, Zen 5).
constexpr int64_t NEAR_BYTES = 256 * 1024;

// A level is packed if its rows are read at least PACK_READS times on average. The smallest levels are packed first, as long as
// all copies together take at most PACK_BYTES, or PACK_SHARE of value's memory if that is more.
constexpr double PACK_BYTES = 15.5 * (1 << 20); // with this limit all scratch memory together takes about 16 MB
constexpr double PACK_SHARE = 0.049;            // with this limit all scratch memory together takes about 5 % of value's memory
constexpr int64_t PACK_READS = 8;

// Returns the most bytes that one copy of the packed levels may take if there are `copies` copies.
double most_packed_bytes(const Call &call, int64_t copies) {
    const Sizes &n = call.sizes;
    const double value_bytes = double(n.batch * n.keys) * double(n.heads * n.channels * floating_size(call.value.dtype));
    return std::max(PACK_BYTES, PACK_SHARE * value_bytes) / double(copies);
}

struct RowBytes {
    int64_t far, near;
};

PackedLevels choose_levels(const Call &call, RowBytes row_bytes, double most_bytes, int64_t least_reads,
                           std::vector<int64_t> &offset) {
    const Sizes &n = call.sizes;
    const int64_t reads = n.queries * n.points * (call.op == GEOMETRIC ? 1 : 4);
    std::vector<int64_t> order;
    for (int64_t l = 0; l < call.sizes.levels; ++l) order.push_back(l);
    const auto rows = [&](int64_t l) { return num_rows(call.levels[l]); };
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rows(a) < rows(b); });
    offset.assign(size_t(call.sizes.levels), -1);
    int64_t total = 0, far_begin = n.levels, far_end = 0;
    bool packs = true, near = true;
    for (int64_t l : order) {
        const auto bytes_of = [&](int64_t row_bytes) { return (rows(l) * row_bytes + 63) / 64 * 64; };
        near = near && total + bytes_of(row_bytes.near) <= NEAR_BYTES;
        const int64_t bytes = bytes_of(near ? row_bytes.near : row_bytes.far);
        packs = packs && double(total + bytes) <= most_bytes && reads >= least_reads * rows(l);
        if (packs) {
            offset[size_t(l)] = total;
            total += bytes;
        }
        if (packs && near) continue;
        far_begin = std::min(far_begin, l);
        far_end = std::max(far_end, l + 1);
    }
    return {offset.data(), total, far_begin, far_end, row_bytes.far, row_bytes.near};
}

// If levels are packed, all threads together process one head, and then the next head. So levels are packed only if a head has
// at least this many queries for each thread.
constexpr int64_t QUERIES_OF_A_THREAD = 512;

bool value_can_be_packed(const Call &call) {
    return call.op != AGGREGATION && call.value.strides[KEY] > call.sizes.channels && // else rows are contiguous already
           call.sizes.queries >= QUERIES_OF_A_THREAD * num_threads(call);
}

int64_t own_row_bytes(const Call &call) { return call.sizes.channels * floating_size(call.value.dtype); }
int64_t wide_row_bytes(const Call &call) { return call.sizes.channels * computed_size(call); }

PackedLevels choose_packed_value(const Call &call, RowBytes row_bytes, std::vector<int64_t> &offset) {
    if (!value_can_be_packed(call)) return NONE;
    return choose_levels(call, row_bytes, most_packed_bytes(call, 1), PACK_READS, offset);
}

// Plans packing in the forward. Near levels of float16 are widened when they are packed, because otherwise each sample would
// widen its rows again. A widened level must begin at a multiple of ROWS samples. Levels of bfloat16 are not widened: a sum
// reads two bfloat16 as one 32-bit word, and this costs no more than reading a widened row of twice the bytes.
// geometric_kernel_attention widens levels of both 16-bit dtypes, but only if all levels are near.
void plan_packed_forward(const Call &call, Plan &plan, std::vector<int64_t> &offset) {
    const bool is_half = call.value.dtype == MXD_FLOAT16;
    plan.near_as_computed = call.op == GEOMETRIC || (is_half && call.sizes.points % ROWS == 0);
    const int64_t own = own_row_bytes(call), near = plan.near_as_computed ? wide_row_bytes(call) : own;
    plan.packed_value = choose_packed_value(call, {own, near}, offset);
    if (call.op != GEOMETRIC || all_near(plan.packed_value)) return;
    plan.near_as_computed = false;
    plan.packed_value = choose_packed_value(call, {own, own}, offset);
}

// Plans packing in the backward. Rows of 16 bits are widened when they are packed, if all levels can be packed as widened rows.
// Otherwise each sample widens its rows again, because dot products need channels in order. So they cannot read pairs of
// bfloat16 as words, as sums do. With widened levels Deformable-DETR's encoder takes 26.1 instead of 31.3 ms in bfloat16 (24.6
// in float32; 2026-11-27, Intel Xeon 6/207).
void plan_packed_backward(const Call &call, Plan &plan, std::vector<int64_t> &offset) {
    const int64_t own = own_row_bytes(call), wide = wide_row_bytes(call);
    if (call.op == MULTI_SCALE) plan.packed_value = choose_packed_value(call, {wide, wide}, offset);
    plan.near_as_computed = plan.packed_value.bytes > 0 && std::count(offset.begin(), offset.end(), -1) == 0;
    if (!plan.near_as_computed) plan.packed_value = choose_packed_value(call, {own, own}, offset);
}

// The memory of each thread for sums that cannot be made in grad_value itself, such as those of a 16-bit gradient. In nearly
// every model this memory holds a whole head. With less memory a head would be cut into more bands, and each band reads all
// queries.
constexpr int64_t BUFFERED_BYTES = 6 << 20;

// Chooses the levels of the gradient that are packed. If levels overlap, packs none: a row that belongs to two levels would be
// summed in two places, and its bits would depend on which levels are packed.
PackedLevels choose_packed_gradient(const Call &call, std::vector<int64_t> &offset) {
    const int64_t size = computed_size(call), row_bytes = call.sizes.channels * size;
    const bool buffered = !can_be_added_to(call);
    const bool lie_side_by_side = !buffered && call.grad_value.strides[KEY] * size <= row_bytes;
    if (lie_side_by_side || levels_overlap(call)) return NONE;
    if (buffered) return choose_levels(call, {row_bytes, row_bytes}, BUFFERED_BYTES, 0, offset);
    const int64_t copies = std::min(call.sizes.batch * call.sizes.heads, num_threads(call));
    return choose_levels(call, {row_bytes, row_bytes}, most_packed_bytes(call, copies), PACK_READS, offset);
}

bool all_rows_are_packed(const Call &call, const PackedLevels &packed) {
    int64_t rows = 0; // each row is counted once, because levels do not overlap if any is packed
    for (int64_t l = 0; packed.bytes > 0 && l < call.sizes.levels; ++l)
        rows += packed.offset[l] < 0 ? 0 : num_rows(call.levels[l]);
    return rows == call.sizes.keys;
}

// ---- how heads are cut into bands or parts, so that all threads have work

struct Cut {
    int64_t bands, parts;
};

int64_t rounds(int64_t items, int64_t threads) { return (items + threads - 1) / threads; }

bool heads_keep_threads_busy(int64_t heads, int64_t threads) { return 4 * heads >= 3 * threads * rounds(heads, threads); }

// Returns the time until all threads are done, as a multiple of the time of a whole head. A band of any size costs an
// additional 0.15 of a head (measured), because each band reads all queries.
double time_of(const Cut &cut, int64_t heads, int64_t threads, int64_t num_levels) {
    if (cut.bands > 1) return double(rounds(heads * cut.bands, threads)) * (0.15 + 1.0 / double(cut.bands));
    return double(rounds(heads * cut.parts, threads)) * double(rounds(num_levels, cut.parts)) / double(num_levels);
}

// Returns whether heads can be cut into parts. A part must begin at a multiple of ROWS samples, because lists of rows have
// groups of ROWS samples. Levels must not overlap, because a row that belongs to two levels would belong to two parts.
bool levels_can_be_parts(const Call &call) {
    return call.op != AGGREGATION && call.sizes.points % ROWS == 0 && !levels_overlap(call);
}

Cut choose_cut(const Call &call, bool in_place) {
    const int64_t threads = num_threads(call), num_levels = call.sizes.levels;
    const int64_t heads = std::max<int64_t>(1, call.sizes.batch * call.sizes.heads);
    Cut best{1, 1};
    if (heads_keep_threads_busy(heads, threads) || num_levels == 0) return best;
    double best_time = time_of(best, heads, threads, num_levels);
    const auto consider = [&](const Cut &cut) {
        const double time = time_of(cut, heads, threads, num_levels);
        if (time < best_time) best = cut, best_time = time;
    };
    consider({num_levels, 1}); // every level is cut into the same number of bands
    for (int64_t bands = 2 * num_levels; heads * bands <= 2 * threads; bands += num_levels) consider({bands, 1});
    if (in_place && levels_can_be_parts(call))
        for (int64_t parts = 2; parts <= num_levels; ++parts) consider({1, parts});
    return best;
}

// ---- heads that are processed together

// The forward with a window processes all heads of a query together if one batch of value, in the computed type, has at most
// this many bytes. The time, relative to one head after the other: 0.63 for MapTR tiny (384 KB), 0.83 for 1 MB, 0.95 for 6 MB;
// 1.25 for 24 MB, where packed heads are better (2026-11-23, Zen 3, 512 KB of second-level cache).
constexpr int64_t NEAR_BYTES_OF_ALL_HEADS = 4 * NEAR_BYTES;

bool heads_can_go_together(const Call &call) { return call.has_window && call.sizes.levels * call.sizes.points > 0; }

// Returns whether it pays to widen all 16-bit rows in advance. There must be at least as many samples as rows. The widened rows
// must also have few bytes, because an expanded value may have less memory than its widened rows need.
bool widening_pays(const Call &call) {
    const Sizes &n = call.sizes;
    if (floating_size(call.value.dtype) == computed_size(call)) return true; // rows need no widening
    return n.queries * n.levels * n.points >= n.keys &&
           n.keys * n.heads * n.channels * computed_size(call) <= NEAR_BYTES_OF_ALL_HEADS;
}

int64_t choose_heads_of_forward(const Call &call) {
    const int64_t *strides = call.value.strides, heads = call.sizes.heads;
    const int64_t extent = std::max(call.sizes.keys * strides[KEY], heads * strides[HEAD]);
    const bool near = extent * computed_size(call) <= NEAR_BYTES_OF_ALL_HEADS && //
                      std::min(strides[KEY], strides[HEAD]) >= 0;
    return heads_can_go_together(call) && near && widening_pays(call) ? heads : 0;
}

// Returns the number of heads that the backward processes together. The packed rows of value and gradient must fit into the
// second-level cache, and every thread must get work.
int64_t choose_heads_of_backward(const Call &call, const PackedLevels &packed) {
    const int64_t batch = call.sizes.batch, heads = call.sizes.heads;
    for (int64_t together : {4, 2})
        if (heads % together == 0 && 2 * together * packed.bytes <= NEAR_BYTES &&
            heads_keep_threads_busy(batch * heads / together, num_threads(call)))
            return together;
    return 1;
}

// ---- bands

// Writes the first row of each band, and the end of the last band, to `cuts`. Cuts every level into the same number of bands,
// because every level has the same number of samples. Then cuts every band that has more than `most_rows` rows.
void cut_bands(const Call &call, int64_t bands_at_least, int64_t most_rows, std::vector<int64_t> &cuts) {
    cuts = {0, call.sizes.keys};
    if (bands_at_least > 1 || most_rows < call.sizes.keys) {
        const int64_t per_level = call.sizes.levels == 0 ? 1 : (bands_at_least + call.sizes.levels - 1) / call.sizes.levels;
        for (int64_t l = 0; l < call.sizes.levels; ++l)
            for (int64_t i = 0; i <= per_level; ++i)
                cuts.push_back(call.levels[l].start + num_rows(call.levels[l]) * i / per_level);
        std::sort(cuts.begin(), cuts.end());
        const std::vector<int64_t> coarse = cuts;
        for (size_t i = 0; i + 1 < coarse.size(); ++i) {
            const int64_t rows = coarse[i + 1] - coarse[i], bands = (rows + most_rows - 1) / most_rows;
            for (int64_t b = 1; b < bands; ++b) cuts.push_back(coarse[i] + rows * b / bands);
        }
        std::sort(cuts.begin(), cuts.end());
    }
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
}

// A band of deformable_aggregation has all channels and is summed in place. A band of this size should stay in the third-level
// cache.
constexpr int64_t AGGREGATION_BAND_BYTES = 16 << 20;

int64_t most_rows_of_a_band(const Call &call, bool buffered) {
    const int64_t row_bytes = std::max<int64_t>(1, call.sizes.channels * computed_size(call));
    if (buffered) return std::max<int64_t>(1, BUFFERED_BYTES / row_bytes);
    return call.op == AGGREGATION ? std::max<int64_t>(1, AGGREGATION_BAND_BYTES / row_bytes) : call.sizes.keys;
}

// ---- the choice of ValueGradient

// Returns whether one pass for all gradients pays if it uses packed rows. Two passes read the queries and find the rows twice.
// One pass needs the rows of value and of its gradient in the caches at once. So one pass pays if a sample reads one row and
// all packed rows of a head stay in the second-level cache. Packed rows have the computed type, so value and its gradient may
// have any dtype.
bool one_packed_pass_pays(const Call &call, const PackedLevels &packed) {
    return call.op == GEOMETRIC && needs_samples(call) && packed.bytes > 0 && 2 * packed.bytes <= NEAR_BYTES &&
           all_rows_are_packed(call, packed);
}

// Returns whether to compute all gradients in one pass over rows that are not packed. The gradients of samples must be wanted.
// Value and its gradient must have the same dtype and row stride. And a sample must read one row, or separate passes must have
// no use for packed rows, because queries are few or levels are large.
bool one_pass_pays(const Call &call, bool value_would_be_packed) {
    return needs_samples(call) && call.value.dtype == call.grad_value.dtype &&
           call.value.strides[KEY] == call.grad_value.strides[KEY] && (call.op == GEOMETRIC || !value_would_be_packed);
}

void plan_bands(const Call &call, int64_t bands, bool buffered, Plan &plan, PlanLists &lists) {
    plan.value_gradient = ValueGradient::BY_BANDS;
    cut_bands(call, bands, most_rows_of_a_band(call, buffered), lists.bands);
    plan.band_starts = lists.bands.data();
    plan.num_bands = int64_t(lists.bands.size()) - 1;
    plan.band_is_buffered = buffered;
}

// Chooses whole heads, parts or bands for the gradient of value, as choose_cut says. Chooses bands in place of whole heads that
// are not possible. Whole heads repeat no work, each part rereads grad_output, and each band rereads all queries.
void plan_value_gradient(const Call &call, bool value_would_be_packed, Plan &plan, PlanLists &lists) {
    const bool buffered = !can_be_added_to(call);
    const Cut cut = choose_cut(call, !buffered);
    const bool whole_heads = call.op != AGGREGATION && cut.bands == 1 && cut.parts == 1;
    const PackedLevels packed = whole_heads ? choose_packed_gradient(call, lists.packed_gradient) : NONE;
    if (whole_heads && one_packed_pass_pays(call, packed)) {
        plan.value_gradient = ValueGradient::WITH_SAMPLES;
        plan.packed_gradient = packed;
        plan.all_rows_are_packed = true;
        if (heads_can_go_together(call)) plan.heads_together = choose_heads_of_backward(call, packed);
    } else if (whole_heads && !buffered && one_pass_pays(call, value_would_be_packed)) {
        plan.value_gradient = ValueGradient::WITH_SAMPLES;
    } else if (whole_heads && (!buffered || all_rows_are_packed(call, packed))) {
        plan.value_gradient = ValueGradient::BY_HEADS;
        plan.packed_gradient = packed;
        plan.all_rows_are_packed = all_rows_are_packed(call, packed);
    } else if (cut.parts > 1) {
        plan.value_gradient = ValueGradient::BY_PARTS;
        plan.parts = cut.parts;
    } else {
        plan_bands(call, cut.bands, buffered, plan, lists);
    }
}

void plan_gradients(const Call &call, Plan &plan, PlanLists &lists) {
    plan_packed_backward(call, plan, lists.packed_value);
    if (call.grad_value.data) plan_value_gradient(call, plan.packed_value.bytes > 0, plan, lists);
    plan.sample_gradients = needs_samples(call) && plan.value_gradient != ValueGradient::WITH_SAMPLES;
    if (!plan.sample_gradients) plan.packed_value = NONE;
}

// The least work for which one more thread is used, in elements of rows. Waking a thread takes about as long as reading this
// many elements.
constexpr int64_t WORK_OF_A_THREAD = 1 << 16;
std::atomic<int64_t> work_of_a_thread{WORK_OF_A_THREAD};

// Returns the number of elements in the rows that a call reads, plus the elements of grad_value if it is wanted. For
// bev_pool_v3, counts a row for each point and each cell. Assumes that each key point is seen by one camera.
double elements_used(const Call &call) {
    const Sizes &n = call.sizes;
    if (call.op == POOLING) return double(n.points + n.cells) * double(n.channels);
    const double samples = double(n.batch) * double(n.queries) * double(n.heads) * double(n.scales) * double(n.points);
    const double read = samples * (call.op == GEOMETRIC ? 1 : 4) * double(n.channels);
    const double added_to = double(n.batch) * double(n.keys) * double(n.heads) * double(n.channels);
    return call.grad_value.data ? read + added_to : read;
}

std::string packed_text(const Call &call, const PackedLevels &packed) {
    if (packed.bytes == 0) return "none";
    const int64_t left = std::count(packed.offset, packed.offset + call.sizes.levels, -1);
    return std::to_string(call.sizes.levels - left) + " of " + std::to_string(call.sizes.levels) + " levels, " +
           std::to_string(packed.bytes / 1024) + " KB";
}

std::string prefetched_text(const Call &call, const PackedLevels &packed) {
    if (packed.bytes == 0) return "all";
    if (all_near(packed)) return "none";
    return std::to_string(packed.far_end - packed.far_begin) + " of " + std::to_string(call.sizes.levels) + " levels";
}

std::string value_gradient_text(const Plan &plan) {
    static const char *const NAMES[] = {"NOT_WANTED", "WITH_SAMPLES", "BY_HEADS", "BY_PARTS", "BY_BANDS"};
    std::string text = NAMES[int(plan.value_gradient)];
    if (plan.parts > 0) text += ", " + std::to_string(plan.parts) + " a head";
    if (plan.num_bands > 0) text += ", " + std::to_string(plan.num_bands);
    return text + (plan.band_is_buffered ? ", buffered" : "");
}

} // namespace

Plan make_plan(const Call &call, PlanLists &lists) {
    Plan plan{};
    if (call.op == POOLING) return plan; // bev_pool_v3 has nothing to decide
    if (call.backward) {
        plan_gradients(call, plan, lists);
        return plan;
    }
    plan.heads_together = choose_heads_of_forward(call);
    if (plan.heads_together > 0) return plan;
    plan_packed_forward(call, plan, lists.packed_value);
    return plan;
}

int threads_that_pay(const Call &call, int most) {
    const double pay = elements_used(call) / double(work_of_a_thread.load(std::memory_order_relaxed));
    return int(std::max(1.0, std::min(pay, double(most))));
}

void set_work_of_a_thread(int64_t elements) { work_of_a_thread = elements > 0 ? elements : WORK_OF_A_THREAD; }

std::string describe(const Call &call, const Plan &plan) {
    std::string text = "threads: " + std::to_string(num_threads(call)) + "\n";
    if (call.op == POOLING) return text;
    text += "packed_value: " + packed_text(call, plan.packed_value) + "\n";
    if (call.has_window) text += "heads_together: " + std::to_string(plan.heads_together) + "\n";
    if (!call.backward) return text + "prefetched_rows: " + prefetched_text(call, plan.packed_value) + "\n";
    text += "sample_gradients: ";
    text += plan.sample_gradients ? "ALONE" : needs_samples(call) ? "WITH_VALUE" : "NOT_WANTED";
    text += "\nvalue_gradient: " + value_gradient_text(plan) + "\n";
    return text + "packed_gradient: " + packed_text(call, plan.packed_gradient) + "\n";
}

} // namespace mxd
