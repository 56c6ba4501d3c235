// geometric_kernel_attention in any layout against its equation in double, and both operators of attention with logits
// against the bare operator on locations and weights worked out here in double, and its gradients back.
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

namespace {

typedef std::vector<double> Numbers;

struct Attention {
    Attention(const Sizes &sizes, unsigned seed, bool strided)
        : n(sizes), random(seed), samples(int64_t(n.levels.size()) * n.points),
          value({n.bs, keys(), n.heads, n.channels}, ACL_FLOAT, layout(strided)),
          shapes({int64_t(n.levels.size()), 2}, ACL_INT32, layout(strided)),
          starts({int64_t(n.levels.size())}, ACL_INT64, layout(strided)),
          logits({n.bs, n.queries, n.heads, int64_t(n.levels.size()), n.points}, ACL_FLOAT, layout(strided)),
          grad_output({n.bs, n.queries, n.heads, n.channels}, ACL_FLOAT, layout(strided)),
          weights(logits.shape, ACL_FLOAT, layout(strided)), output(grad_output.shape, ACL_FLOAT, layout(strided)),
          grad_value(value.shape, ACL_FLOAT, layout(strided)), grad_logits(logits.shape, ACL_FLOAT, layout(strided)),
          bare_output(output.shape, ACL_FLOAT, nullptr), of_value(value.shape, ACL_FLOAT, nullptr),
          of_weights(logits.shape, ACL_FLOAT, layout(strided)) {
        int64_t start = 0;
        for (size_t l = 0; l < n.levels.size(); ++l) {
            shapes.set(int64_t(2 * l), double(n.levels[l].first));
            shapes.set(int64_t(2 * l + 1), double(n.levels[l].second));
            starts.set(int64_t(l), double(start));
            start += n.levels[l].first * n.levels[l].second;
        }
        for (View *view : {&value, &logits, &grad_output}) fill(*view, -1, 1);
        softmax();
    }

  protected:
    const Sizes n;
    std::mt19937 random;
    const int64_t samples; // of a head
    View value, shapes, starts, logits, grad_output, weights, output, grad_value, grad_logits;
    View bare_output, of_value, of_weights; // of the bare operator

    std::mt19937 *layout(bool strided) { return strided ? &random : nullptr; }
    int64_t keys() const {
        int64_t sum = 0;
        for (const auto &[height, width] : n.levels) sum += height * width;
        return sum;
    }
    std::vector<int64_t> with_xy(std::vector<int64_t> shape) const {
        shape.push_back(2);
        return shape;
    }
    void fill(View &view, double from, double to) {
        for (int64_t i = 0; i < view.count(); ++i) view.set(i, between(from, to, random));
    }
    int64_t level_of(int64_t sample) const { return sample / n.points % int64_t(n.levels.size()); }
    int64_t query_of(int64_t sample) const { return sample / samples / n.heads; }
    double size_of(int64_t sample, int64_t axis) const { return shapes.get(2 * level_of(sample) + 1 - axis); }

    void softmax() {
        Numbers sums(size_t(logits.count() / samples));
        for (int64_t i = 0; i < logits.count(); ++i) sums[size_t(i / samples)] += std::exp(logits.get(i));
        for (int64_t i = 0; i < logits.count(); ++i) weights.set(i, std::exp(logits.get(i)) / sums[size_t(i / samples)]);
    }
    Numbers of_logits() const {
        Numbers mean(size_t(logits.count() / samples)), all;
        for (int64_t i = 0; i < logits.count(); ++i) mean[size_t(i / samples)] += weights.get(i) * of_weights.get(i);
        for (int64_t i = 0; i < logits.count(); ++i)
            all.push_back(weights.get(i) * (of_weights.get(i) - mean[size_t(i / samples)]));
        return all;
    }
    void compare_with_bare(double tolerance) const {
        compare_by_greatest(output, numbers(bare_output), tolerance);
        compare_by_greatest(grad_value, numbers(of_value), tolerance);
        compare_by_greatest(grad_logits, of_logits(), tolerance);
        for (const View *view : {&value, &logits, &grad_output}) CHECK(view->gaps_intact());
    }
};

struct MultiScale : Attention {
    View reference, offsets, locations, grad_reference, grad_offsets, of_locations;

    MultiScale(const Sizes &sizes, unsigned seed, bool strided)
        : Attention(sizes, seed, strided),
          reference({n.bs, n.queries, int64_t(n.levels.size()), 2}, ACL_FLOAT, layout(strided)),
          offsets(with_xy(logits.shape), ACL_FLOAT, layout(strided)), locations(offsets.shape, ACL_FLOAT, nullptr),
          grad_reference(reference.shape, ACL_FLOAT, layout(strided)), grad_offsets(offsets.shape, ACL_FLOAT, layout(strided)),
          of_locations(offsets.shape, ACL_FLOAT, nullptr) {
        fill(reference, 0, 1);
        fill(offsets, -2, 2);
    }

    int64_t point_of(int64_t sample) const { return query_of(sample) * int64_t(n.levels.size()) + level_of(sample); }

    void check(int threads) {
        View *const forward[] = {&value, &shapes, &starts, &reference, &offsets, &logits, &output};
        const auto by_level = [](auto call) { // reference_axis 0
            return [call](auto... tensors_and_threads) { return call_with_axis(call, tensors_and_threads...); };
        };
        CHECK(with_tensors(by_level(mxd_multi_scale_deformable_attn_with_logits), forward, threads) == MXD_OK);
        View *const backward[] = {&grad_output, &value,      &shapes,         &starts,       &reference,  &offsets,
                                  &logits,      &grad_value, &grad_reference, &grad_offsets, &grad_logits};
        CHECK(with_tensors(by_level(mxd_multi_scale_deformable_attn_with_logits_backward), backward, threads) == MXD_OK);
        bare(threads);
        Numbers of_reference(size_t(reference.count())), of_offsets;
        for (int64_t i = 0; i < offsets.count(); ++i) {
            of_reference[size_t(2 * point_of(i / 2) + i % 2)] += of_locations.get(i);
            of_offsets.push_back(of_locations.get(i) / size_of(i / 2, i % 2));
        }
        compare_with_bare(TOLERANCE);
        compare_by_greatest(grad_reference, of_reference, TOLERANCE);
        compare_by_greatest(grad_offsets, of_offsets, TOLERANCE);
    }

  private:
    static constexpr double TOLERANCE = 1e-4; // slopes of float32 locations on 20 pixels

    template <class Call, class... Rest> static int call_with_axis(Call call, Rest... rest) {
        return with_axis(call, std::make_tuple(rest...), std::make_index_sequence<sizeof...(Rest) - 1>());
    }
    template <class Call, class Tuple, size_t... I> static int with_axis(Call call, Tuple all, std::index_sequence<I...>) {
        return call(std::get<I>(all)..., 0, std::get<sizeof...(I)>(all));
    }

    void bare(int threads) {
        for (int64_t i = 0; i < offsets.count(); ++i)
            locations.set(i, reference.get(2 * point_of(i / 2) + i % 2) + offsets.get(i) / size_of(i / 2, i % 2));
        View *const forward[] = {&value, &shapes, &starts, &locations, &weights, &bare_output};
        CHECK(with_tensors(mxd_multi_scale_deformable_attn, forward, threads) == MXD_OK);
        View *const backward[] = {&grad_output, &value,    &shapes,       &starts,    &locations,
                                  &weights,     &of_value, &of_locations, &of_weights};
        CHECK(with_tensors(mxd_multi_scale_deformable_attn_backward, backward, threads) == MXD_OK);
    }
};

struct Geometric : Attention {
    View reference, window, locations;

    Geometric(const Sizes &sizes, unsigned seed, bool strided)
        : Attention(sizes, seed, strided), reference({n.bs, n.queries, n.heads, 2}, ACL_FLOAT, layout(strided)),
          window({n.points, 2}, ACL_INT32, layout(strided)), locations(with_xy(logits.shape), ACL_INT32, layout(strided)) {
        fill(reference, 0, 1);
        fill(window, -3, 3); // cut off to whole pixels
        for (int64_t i = 0; i < locations.count(); ++i) {
            const double centre = reference.get(2 * (i / 2 / samples) + i % 2) * size_of(i / 2, i % 2);
            locations.set(i, std::nearbyint(centre + window.get(2 * (i / 2 % n.points) + i % 2)));
        }
    }

    void check(int threads) {
        View *const bare[] = {&value, &shapes, &starts, &locations, &weights, &bare_output};
        CHECK(with_tensors(mxd_geometric_kernel_attention, bare, threads) == MXD_OK);
        View *const bare_backward[] = {&grad_output, &value, &shapes, &starts, &locations, &weights, &of_value, &of_weights};
        CHECK(with_tensors(mxd_geometric_kernel_attention_backward, bare_backward, threads) == MXD_OK);
        by_the_equation();
        View *const forward[] = {&value, &shapes, &starts, &reference, &window, &logits, &output};
        CHECK(with_tensors(mxd_geometric_kernel_attention_with_logits, forward, threads) == MXD_OK);
        View *const backward[] = {&grad_output, &value,  &shapes,     &starts,     &reference,
                                  &window,      &logits, &grad_value, &grad_logits};
        CHECK(with_tensors(mxd_geometric_kernel_attention_with_logits_backward, backward, threads) == MXD_OK);
        compare_with_bare(TOLERANCE);
    }

  private:
    static constexpr double TOLERANCE = 1e-5;

    // A pixel outside its level is moved onto the border.
    void by_the_equation() const {
        Numbers out(size_t(output.count())), g_value(size_t(value.count())), g_weights(size_t(weights.count()));
        for (int64_t i = 0; i < weights.count(); ++i) {
            const double most_x = size_of(i, 0) - 1, most_y = size_of(i, 1) - 1;
            const int64_t x = int64_t(std::min(std::max(locations.get(2 * i), 0.0), most_x));
            const int64_t y = int64_t(std::min(std::max(locations.get(2 * i + 1), 0.0), most_y));
            const int64_t width = int64_t(size_of(i, 0));
            const int64_t head = i / samples % n.heads, batch = query_of(i) / n.queries;
            const int64_t key = batch * keys() + int64_t(starts.get(level_of(i))) + y * width + x;
            for (int64_t c = 0; c < n.channels; ++c) {
                const int64_t from = (key * n.heads + head) * n.channels + c, to = i / samples * n.channels + c;
                out[size_t(to)] += weights.get(i) * value.get(from);
                g_value[size_t(from)] += weights.get(i) * grad_output.get(to);
                g_weights[size_t(i)] += value.get(from) * grad_output.get(to);
            }
        }
        compare_by_greatest(bare_output, out, TOLERANCE);
        compare_by_greatest(of_value, g_value, TOLERANCE);
        compare_by_greatest(of_weights, g_weights, TOLERANCE);
    }
};

void with_this_isa() {
    const Sizes sizes[] = {{2, 9, 3, 8, 3, {{5, 4}, {2, 3}}},
                           {1, 7, 2, 40, 1, {{20, 20}}},
                           {1, 5, 1, 5, 9, {{3, 7}}},
                           {2, 30, 5, 8, 9, {{5, 4}, {2, 3}}}, // from here on levels are packed for their gradient
                           {3, 40, 4, 12, 4, {{5, 4}}}};
    for (unsigned seed = 0; seed < 4; ++seed)
        for (const Sizes &n : sizes)
            for (const bool strided : {false, true}) {
                MultiScale(n, seed, strided).check(1 + int(seed % 3));
                Geometric(n, seed, strided).check(1 + int(seed % 3));
            }
}

} // namespace

void attention() {
    const std::string best = mxd_isa();
    for (const char *isa : {"baseline", "avx2", "avx512"})
        if (mxd_use_isa(isa) == 0) with_this_isa();
    CHECK(mxd_use_isa(best.c_str()) == 0);
}
