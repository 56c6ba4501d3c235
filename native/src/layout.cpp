// How a call is laid out in memory before a kernel runs.
#include "layout.h"

#include <algorithm>
#include <cstring>
#include <new>

#define MXD_ISA plain // the readers of tensor.h, for any machine
#include "tensor.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mxd {
namespace {

int64_t floating_size(const mxd_tensor &t) { return t.dtype == MXD_FLOAT64 ? 8 : t.dtype == MXD_FLOAT32 ? 4 : 2; }

bool empty(const mxd_tensor &t, int axes) {
    for (int a = 0; a < axes; ++a)
        if (t.shape[a] == 0) return true;
    return false;
}

// Computed in double as soon as one input is.
bool wide(const Call &call) {
    return call.value.dtype == MXD_FLOAT64 || call.locations.dtype == MXD_FLOAT64 || call.weights.dtype == MXD_FLOAT64;
}

// Levels from shapes [.., 2] and starts [..] of `axes` leading axes; false when one does not fit.
bool read_levels(const mxd_tensor &shapes, const mxd_tensor &starts, int axes, int64_t num_keys,
                 std::vector<Level> &levels) {
    const int64_t outer = axes == 2 ? starts.shape[0] : 1, inner = starts.shape[axes - 1];
    levels.reserve(size_t(outer * inner));
    const int64_t *shape_strides = shapes.strides + axes - 1, start_stride = starts.strides[axes - 1];
    for (int64_t i = 0; i < outer; ++i)
        for (int64_t j = 0; j < inner; ++j) {
            const int64_t at = (axes == 2 ? i * shapes.strides[0] : 0) + j * shape_strides[0];
            const int64_t start = element(starts, (axes == 2 ? i * starts.strides[0] : 0) + j * start_stride);
            const int64_t height = element(shapes, at), width = element(shapes, at + shape_strides[1]);
            if (height <= 0 || width <= 0 || start < 0 || start > num_keys) return false;
            if (width > num_keys || height > (num_keys - start) / width) return false;
            levels.push_back({height, width, start});
        }
    return true;
}

// Where bands of rows begin. Every level's rows are cut into the same number of bands because every level is sampled
// equally often; `most_rows` bounds a band where it needs a buffer.
std::vector<int64_t> cut_bands(const std::vector<Level> &levels, int64_t num_keys, int64_t wanted, int64_t most_rows) {
    std::vector<int64_t> cuts{0, num_keys};
    if (wanted > 1 || most_rows < num_keys) {
        const int64_t per_level = levels.empty() ? 1 : (wanted + int64_t(levels.size()) - 1) / int64_t(levels.size());
        for (const Level &level : levels) {
            const int64_t rows = level.height * level.width;
            for (int64_t i = 0; i <= per_level; ++i) cuts.push_back(level.start + rows * i / per_level);
        }
        std::sort(cuts.begin(), cuts.end());
        const size_t known = cuts.size();
        for (size_t i = 0; i + 1 < known; ++i) {
            const int64_t rows = cuts[i + 1] - cuts[i], parts = (rows + most_rows - 1) / most_rows;
            for (int64_t p = 1; p < parts; ++p) cuts.push_back(cuts[i] + rows * p / parts);
        }
        std::sort(cuts.begin(), cuts.end());
    }
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    return cuts;
}

// fn(offset of a run of channels, its place in the packed order) for each run of a [.., channels] tensor.
template <class Fn> void runs_of_channels(const mxd_tensor &t, int axes, Fn &&fn) {
    if (empty(t, axes)) return;
    int64_t runs = 1, index[6] = {};
    for (int a = 0; a < axes - 1; ++a) runs *= t.shape[a];
    for (int64_t run = 0; run < runs; ++run) {
        int64_t offset = 0;
        for (int a = 0; a < axes - 1; ++a) offset += index[a] * t.strides[a];
        fn(offset, run * t.shape[axes - 1]);
        for (int a = axes - 2; a >= 0 && ++index[a] == t.shape[a]; --a) index[a] = 0;
    }
}

// t becomes a packed tensor in `memory`, of elements of its own dtype or of doubles.
void copy_into(mxd_tensor &t, int axes, char *memory, bool as_doubles) {
    const int64_t size = floating_size(t), channels = t.shape[axes - 1], stride = t.strides[axes - 1];
    runs_of_channels(t, axes, [&](int64_t offset, int64_t place) {
        const char *from = plain::at(t, offset);
        if (as_doubles)
            return plain::read_elements(from, t.dtype, stride, channels, reinterpret_cast<double *>(memory) + place);
        for (int64_t c = 0; c < channels; ++c)
            std::memcpy(memory + (place + c) * size, from + c * stride * size, size_t(size));
    });
    if (as_doubles) t.dtype = MXD_FLOAT64;
    t.data = memory;
    for (int64_t a = axes - 1, expected = 1; a >= 0; expected *= t.shape[a--]) t.strides[a] = expected;
}

// A packed copy of value, where its channels are not adjacent or it must become double: kernels that compute in double
// read doubles only.
bool pack(mxd_tensor &value, int axes, bool as_doubles, std::unique_ptr<char[]> &memory) {
    as_doubles = as_doubles && value.dtype != MXD_FLOAT64;
    if (!needs_packing(value, axes) && !as_doubles) return true;
    const int64_t bytes = packed_bytes(value, axes) / floating_size(value) * (as_doubles ? 8 : floating_size(value));
    memory.reset(new (std::nothrow) char[size_t(bytes)]);
    if (memory) copy_into(value, axes, memory.get(), as_doubles);
    return bool(memory);
}

// Asks for huge pages under a large result that is about to be written. The heads one after the other touch the same
// small pages one after the other, which costs a fault for every 4 KB and misses the TLB. Only whole huge pages that
// lie inside the tensor, and only a hint.
void prefer_huge_pages(const mxd_tensor &t, int axes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    if (!t.data || empty(t, axes)) return;
    int64_t last = 0;
    for (int a = 0; a < axes; ++a) last += (t.shape[a] - 1) * t.strides[a];
    const int64_t size = floating_size(t);
    const uintptr_t data = reinterpret_cast<uintptr_t>(t.data);
    const uintptr_t begin = (data + PAGE - 1) / PAGE * PAGE, end = (data + uintptr_t((last + 1) * size)) / PAGE * PAGE;
    if (end > begin) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)t, (void)axes;
#endif
}

// Which levels of a head are worth packed memory of their own beside value: those read at least PACK_READS times a row,
// the smallest first, while `owners` such heads take at most PACK_SHARE of value's memory, rows of `row` bytes.
constexpr double PACK_SHARE = 0.049; // 5 % with all other scratch memory
constexpr int64_t PACK_READS = 8;

PackedLevels choose_levels(const Call &call, const std::vector<Level> &levels, int64_t corners, int64_t row,
                           int64_t owners, std::vector<int64_t> &offset) {
    const int64_t *shape = call.value.shape, reads = call.locations.shape[1] * call.locations.shape[4] * corners;
    const double allowed =
        PACK_SHARE * double(shape[0] * shape[1]) * double(shape[2] * shape[3] * floating_size(call.value));
    std::vector<size_t> order;
    for (size_t l = 0; l < levels.size(); ++l) order.push_back(l);
    const auto rows = [&](size_t l) { return levels[l].height * levels[l].width; };
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rows(a) < rows(b); });
    offset.assign(levels.size(), -1);
    int64_t total = 0;
    for (size_t l : order) {
        const int64_t bytes = (rows(l) * row + 63) / 64 * 64;
        if (double(total + bytes) * double(owners) > allowed || reads < PACK_READS * rows(l)) break;
        offset[l] = total;
        total += bytes;
    }
    return {offset.data(), total};
}

// Rows of value of one head, read in the forward direction and for the gradients of samples. Threads work on one head
// at a time then, so there must be enough queries for all.
constexpr int64_t COPY_QUERIES = 512; // for each thread

void lay_out_copy(Call &call, const std::vector<Level> &levels, int64_t corners, std::vector<int64_t> &offset) {
    const int64_t row = call.value.shape[3] * floating_size(call.value);
    if (call.value.strides[1] * floating_size(call.value) <= row) return; // rows lie side by side already
    if (call.locations.shape[1] < COPY_QUERIES * std::max(1, call.num_threads)) return;
    call.copied = choose_levels(call, levels, corners, row, 1, offset);
}

bool overlap(std::vector<Level> levels) {
    std::sort(levels.begin(), levels.end(), [](const Level &a, const Level &b) { return a.start < b.start; });
    for (size_t l = 1; l < levels.size(); ++l)
        if (levels[l - 1].start + levels[l - 1].height * levels[l - 1].width > levels[l].start) return true;
    return false;
}

// Rows of the gradient of value of one head, for each thread. Not where a row belongs to two levels: its sum would be
// put together from two, and depend on whether they are packed.
void lay_out_sums(Call &call, const std::vector<Level> &levels, int64_t corners, std::vector<int64_t> &offset) {
    const int64_t size = wide(call) ? 8 : 4, row = call.value.shape[3] * size;
    if (call.grad_value.strides[1] * size <= row || overlap(levels)) return;
    if (call.level_parts * call.channel_parts > 1) return;
    const int64_t heads = call.value.shape[0] * call.value.shape[2];
    const int64_t threads = std::min<int64_t>(heads, std::max(1, call.num_threads));
    call.summed = choose_levels(call, levels, corners, row, threads, offset);
}

// Two passes through the queries read the inputs and work out rows twice; one has two sets of rows in the caches,
// value's and its gradient's. That pays where value is not packed, because few queries or large levels leave nothing to
// be gained by it, and where a sample is one row.
bool one_pass_pays(const Call &call, int64_t corners) {
    return call.grad_value.data && (call.grad_locations.data || call.grad_weights.data) && call.grad_value_in_place &&
           call.num_bands == 1 && call.level_parts * call.channel_parts == 1 &&
           call.value.dtype == call.grad_value.dtype && call.value.strides[1] == call.grad_value.strides[1] &&
           (corners == 1 || call.copied.bytes == 0);
}

// Into how many bands or parts a head's gradient of value is cut, so that all threads have work.
struct Cut {
    int64_t bands, level_parts, channel_parts;
};

// Rounds of items until all threads are done.
int64_t rounds(int64_t items, int64_t threads) { return (items + threads - 1) / threads; }

// Whole heads keep at least three quarters of the threads busy.
bool heads_are_enough(int64_t heads, int64_t threads) { return 4 * heads >= 3 * threads * rounds(heads, threads); }

// What a cut takes until all threads are done, in times of a whole head, as measured: a band goes through all queries,
// and a part of the channels finds out again where the samples lie.
double time_of(const Cut &cut, int64_t heads, int64_t threads, int64_t num_levels) {
    if (cut.bands > 1) return double(rounds(heads * cut.bands, threads)) * (0.15 + 1.0 / double(cut.bands));
    const double levels = double(rounds(num_levels, cut.level_parts)) / double(num_levels);
    return double(rounds(heads * cut.level_parts * cut.channel_parts, threads)) * levels *
           (0.7 + 0.3 / double(cut.channel_parts));
}

// The cut that is done first. in_parts: whether heads may be cut into parts; a level belongs to one part and so does a
// cache line, so that no two threads write to the same one.
Cut choose_cut(const Call &call, const std::vector<Level> &levels, int64_t heads, bool in_parts) {
    const int64_t threads = std::max(1, call.num_threads), num_levels = int64_t(levels.size());
    Cut best{1, 1, 1};
    if (heads_are_enough(heads, threads) || num_levels == 0) return best;
    double best_time = time_of(best, heads, threads, num_levels);
    const auto consider = [&](const Cut &cut) {
        const double time = time_of(cut, heads, threads, num_levels);
        if (time < best_time) best = cut, best_time = time;
    };
    consider({num_levels, 1, 1}); // each level is cut into the same number
    for (int64_t bands = 2 * num_levels; heads * bands <= 2 * threads; bands += num_levels) consider({bands, 1, 1});
    if (!in_parts) return best;
    const int64_t row_bytes = call.value.shape[3] * (wide(call) ? 8 : 4);
    int64_t most_channel_parts = 1;
    while (row_bytes >= 128 * most_channel_parts && row_bytes % (128 * most_channel_parts) == 0)
        most_channel_parts *= 2;
    // lists of rows go four samples at a time, and parts must begin where such a group does
    const bool by_level = call.locations.shape[4] % plain::ROWS == 0 && !overlap(levels);
    for (int64_t channel_parts = 1; channel_parts <= most_channel_parts; channel_parts *= 2)
        for (int64_t level_parts = 1; level_parts <= (by_level ? num_levels : 1); ++level_parts)
            consider({1, level_parts, channel_parts});
    return best;
}

// Sums beside a 16-bit gradient, for each thread: a whole head in nearly every model. With less a head is cut into
// several bands, and each goes through all queries.
constexpr int64_t BUFFERED_BAND_BYTES = 6 << 20;
// Rows of all channels, added up in place: those of one band should stay in the last cache.
constexpr int64_t AGGREGATION_BAND_BYTES = 16 << 20;

// Bands of the gradient of value, or parts of a head. splits: the items there are without: heads, or batches.
void lay_out_bands(Call &call, const std::vector<Level> &levels, int axes, int64_t splits,
                   std::vector<int64_t> &bands) {
    const int64_t num_keys = call.value.shape[1], channels = call.value.shape[axes - 1];
    call.grad_value_in_place = call.grad_value.dtype == (wide(call) ? MXD_FLOAT64 : MXD_FLOAT32) &&
                               (channels <= 1 || call.grad_value.strides[axes - 1] == 1);
    const int64_t row_bytes = std::max<int64_t>(1, channels * (wide(call) ? 8 : 4));
    const int64_t most_bytes = !call.grad_value_in_place ? BUFFERED_BAND_BYTES
                               : axes == 3               ? AGGREGATION_BAND_BYTES
                                                         : num_keys * row_bytes;
    const int64_t most_rows = std::max<int64_t>(1, most_bytes / row_bytes);
    const Cut cut = choose_cut(call, levels, splits, call.grad_value_in_place && axes == 4);
    call.level_parts = cut.level_parts;
    call.channel_parts = cut.channel_parts;
    bands = cut_bands(levels, num_keys, cut.bands, most_rows);
    call.band_starts = bands.data();
    call.num_bands = int64_t(bands.size()) - 1;
}

} // namespace

int Layout::prepare(Call &call, Operator op, bool backward, const mxd_tensor &shapes, const mxd_tensor &starts) {
    const bool aggregation = op == AGGREGATION;
    const int axes = aggregation ? 3 : 4; // of value and output
    if (!read_levels(shapes, starts, aggregation ? 2 : 1, call.value.shape[1], levels)) return MXD_BAD_LEVEL;
    if (!pack(call.value, axes, wide(call), packed)) return MXD_OUT_OF_MEMORY;
    call.levels = levels.data();
    call.num_levels = int64_t(levels.size());
    const int64_t corners = op == GEOMETRIC ? 1 : 4;
    if (!aggregation) lay_out_copy(call, levels, corners, copy_offset);
    if (!backward) {
        prefer_huge_pages(call.output, axes);
        return MXD_OK;
    }
    prefer_huge_pages(call.grad_locations, aggregation ? 5 : 6);
    prefer_huge_pages(call.grad_weights, aggregation ? 6 : 5);
    if (call.grad_value.data) {
        prefer_huge_pages(call.grad_value, axes);
        const int64_t splits = call.value.shape[0] * (aggregation ? 1 : call.value.shape[2]);
        lay_out_bands(call, levels, axes, std::max<int64_t>(1, splits), bands);
        if (!aggregation) lay_out_sums(call, levels, corners, sums_offset);
        call.in_one_pass = !aggregation && one_pass_pays(call, corners);
        if (call.in_one_pass) call.copied.bytes = call.summed.bytes = 0;
    }
    return MXD_OK;
}

int64_t element(const mxd_tensor &t, int64_t offset) {
    return t.dtype == MXD_INT32 ? static_cast<const int32_t *>(t.data)[offset]
                                : static_cast<const int64_t *>(t.data)[offset];
}

bool needs_packing(const mxd_tensor &t, int axes) {
    return t.shape[axes - 1] > 1 && t.strides[axes - 1] != 1 && !empty(t, axes);
}

int64_t packed_bytes(const mxd_tensor &t, int axes) {
    int64_t bytes = floating_size(t);
    for (int a = 0; a < axes; ++a) bytes *= t.shape[a];
    return bytes;
}

void pack_into(mxd_tensor &t, int axes, char *memory) { copy_into(t, axes, memory, false); }

} // namespace mxd
