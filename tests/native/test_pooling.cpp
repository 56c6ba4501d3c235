// bev_pool_v3 in memory of exactly its tensors' sizes: sums beside plain loops, on each instruction set, with several threads.
#include "problem.h"

#include <cmath>
#include <string>

namespace {

struct Lift {
    std::mt19937 random;
    int64_t points, channels, rows, depths, cells[4]; // B, D, H, W
    std::vector<float> feat, depth, grad_output;
    std::vector<int32_t> of_feat, of_depth, of_cell;
    std::vector<float> output, grad_feat, grad_depth;

    int64_t below(int64_t most) { return int64_t(random() % uint64_t(most)); }
    int64_t all_cells() const { return cells[0] * cells[1] * cells[2] * cells[3]; }

    explicit Lift(unsigned seed) : random(seed) {
        points = below(700), channels = 1 + below(90), rows = 1 + below(60), depths = 1 + below(200);
        for (int64_t &size : cells) size = 1 + below(12);
        const auto fill = [&](std::vector<float> &all, int64_t count) {
            all.resize(size_t(count));
            for (float &one : all) one = float(below(2001) - 1000) / 1000;
        };
        fill(feat, rows * channels), fill(depth, depths), fill(grad_output, all_cells() * channels);
        output.resize(grad_output.size()), grad_feat.resize(feat.size()), grad_depth.resize(depth.size());
        for (auto &[ranks, most] : {std::pair(&of_feat, rows), {&of_depth, depths}, {&of_cell, all_cells()}})
            for (int64_t i = 0; i < points; ++i) ranks->push_back(int32_t(below(most)));
        if (seed % 2) std::sort(of_cell.begin(), of_cell.end());
    }

    static mxd_tensor list(void *data, int64_t dtype, int64_t count) { return {data, dtype, {count}, {1}}; }
    mxd_tensor view(std::vector<float> &of) const {
        const int64_t *n = cells, w = 1, h = n[3], d = h * n[2], c = d * n[1];
        return {of.data(), MXD_FLOAT32, {n[0], channels, n[1], n[2], n[3]}, {c * channels, c, d, h, w}};
    }
    int run(int num_threads) {
        const mxd_tensor f{feat.data(), MXD_FLOAT32, {rows, channels}, {channels, 1}},
            e = list(depth.data(), MXD_FLOAT32, depths), a = list(of_feat.data(), MXD_INT32, points),
            b = list(of_depth.data(), MXD_INT32, points), c = list(of_cell.data(), MXD_INT32, points), o = view(output),
            g = view(grad_output);
        mxd_tensor of_f = f, of_e = e;
        of_f.data = grad_feat.data(), of_e.data = grad_depth.data();
        const int status = mxd_bev_pool_v3(&f, &e, &a, &b, &c, &o, num_threads);
        return status ? status : mxd_bev_pool_v3_backward(&g, &f, &e, &a, &b, &c, &of_f, &of_e, num_threads);
    }

    // Where channel c of a cell lies in an output.
    size_t place(int64_t cell, int64_t c) const {
        const int64_t of_batch = all_cells() / cells[0];
        return size_t((cell / of_batch * channels + c) * of_batch + cell % of_batch);
    }
    bool is_right() const {
        std::vector<double> out(output.size()), f(feat.size()), e(depth.size());
        for (size_t i = 0; i < of_cell.size(); ++i)
            for (int64_t c = 0; c < channels; ++c) {
                const size_t row = size_t(of_feat[i] * channels + c), at = place(of_cell[i], c), d = size_t(of_depth[i]);
                out[at] += double(depth[d]) * double(feat[row]);
                f[row] += double(depth[d]) * double(grad_output[at]);
                e[d] += double(feat[row]) * double(grad_output[at]);
            }
        return near(output, out) && near(grad_feat, f) && near(grad_depth, e);
    }
    static bool near(const std::vector<float> &found, const std::vector<double> &expected) {
        for (size_t i = 0; i < found.size(); ++i)
            if (!(std::abs(double(found[i]) - expected[i]) < 1e-3)) return false;
        return true;
    }
};

} // namespace

void pooling() {
    const std::string best = mxd_isa();
    for (unsigned seed = 0; seed < 60; ++seed)
        for (const char *isa : {"baseline", "avx2", "avx512"}) {
            if (mxd_use_isa(isa) != 0) continue;
            Lift one(seed), several(seed);
            CHECK(one.run(1) == MXD_OK && several.run(3) == MXD_OK);
            CHECK(one.is_right());
            CHECK(one.output == several.output && one.grad_feat == several.grad_feat && one.grad_depth == several.grad_depth);
        }
    CHECK(mxd_use_isa(best.c_str()) == 0);
    Lift wrong(3);
    wrong.of_depth.back() = int32_t(wrong.depths);
    CHECK(wrong.run(2) == MXD_BAD_RANK);
    CHECK(std::count(wrong.output.begin(), wrong.output.end(), 0.0f) == std::ptrdiff_t(wrong.output.size()));
}
