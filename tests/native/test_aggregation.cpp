// deformable_aggregation_with_logits in any layout and dtype, against locations and weights worked out here in double,
// which go through mxd_deformable_aggregation, and its gradients back.
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace {

struct Rig {
    int64_t bs, anchors, cams, scales, points, groups, channels;
};

// Each camera's maps are 5 x 4 and 3 x 2 pixels, and so on in turn.
int64_t height_of(int64_t map) { return map % 2 ? 3 : 5; }
int64_t width_of(int64_t map) { return map % 2 ? 2 : 4; }
int64_t rows_of(const Rig &n) {
    int64_t rows = 0;
    for (int64_t map = 0; map < n.cams * n.scales; ++map) rows += height_of(map) * width_of(map);
    return rows;
}

struct Aggregation {
    Aggregation(const Rig &rig, unsigned seed, bool strided, aclDataType wide, aclDataType narrow)
        : n(rig), random(seed), given(seed % 2), features({n.bs, rows_of(n), n.channels}, narrow, layout(strided)),
          shapes({n.cams, n.scales, 2}, ACL_INT32, layout(strided)), starts({n.cams, n.scales}, ACL_INT64, layout(strided)),
          key_points({n.bs, n.anchors, n.points, 3}, wide, layout(strided)),
          projection({n.bs, n.cams, 4, 4}, wide, layout(strided)),
          logits({n.bs, n.anchors, n.cams, n.scales, n.points, n.groups}, narrow, layout(strided)),
          image_size({n.bs, n.cams, 2}, wide, layout(strided)),
          pair_scale({n.bs, n.anchors, n.cams, n.points}, narrow, layout(strided)),
          grad_output({n.bs, n.anchors, n.channels}, wide, layout(strided)),
          output({n.bs, n.anchors, n.channels}, narrow, layout(strided)),
          grad_features(features.shape, narrow, layout(strided)), grad_key_points(key_points.shape, wide, layout(strided)),
          grad_projection(projection.shape, wide, layout(strided)), grad_logits(logits.shape, narrow, layout(strided)),
          locations({n.bs, n.anchors, n.points, n.cams, 2}, ACL_FLOAT, nullptr),
          weights({n.bs, n.anchors, n.points, n.cams, n.scales, n.groups}, ACL_FLOAT, nullptr),
          bare_output(output.shape, narrow, nullptr), of_features(features.shape, narrow, nullptr),
          of_locations(locations.shape, ACL_FLOAT, nullptr), of_weights(weights.shape, ACL_FLOAT, nullptr) {
        int64_t row = 0;
        for (int64_t map = 0; map < n.cams * n.scales; ++map) {
            shapes.set(2 * map, double(height_of(map)));
            shapes.set(2 * map + 1, double(width_of(map)));
            starts.set(map, double(row));
            row += height_of(map) * width_of(map);
        }
        for (View *view : {&features, &key_points, &logits, &grad_output, &pair_scale})
            for (int64_t i = 0; i < view->count(); ++i) view->set(i, between(-1, 1, random));
        for (int64_t i = 0; i < projection.count(); ++i) {
            const double size = given && i % 16 < 8 ? 32 : 1;
            projection.set(i, i % 16 == 11 ? 1 : size * (i % 4 == 3 ? between(0.1, 0.9, random) : between(-1, 1, random) / 3));
        }
        for (int64_t i = 0; i < image_size.count(); ++i) image_size.set(i, 32);
    }

    void run(int num_threads) {
        View *scale = given ? &pair_scale : nullptr, *size = given ? &image_size : nullptr;
        View *const forward[] = {&features, &shapes, &starts, &key_points, &projection, &logits, size, scale, &output};
        CHECK(with_tensors(mxd_deformable_aggregation_with_logits, forward, num_threads) == MXD_OK);
        View *const backward[] = {&grad_output,     &features,        &shapes,     &starts, &key_points,
                                  &projection,      &logits,          size,        scale,   &grad_features,
                                  &grad_key_points, &grad_projection, &grad_logits};
        CHECK(with_tensors(mxd_deformable_aggregation_with_logits_backward, backward, num_threads) == MXD_OK);
    }

    void verify(double tolerance) {
        turn();
        View *const forward[] = {&features, &shapes, &starts, &locations, &weights, &bare_output};
        CHECK(with_tensors(mxd_deformable_aggregation, forward, 1) == MXD_OK);
        View *const backward[] = {&grad_output, &features,    &shapes,       &starts,    &locations,
                                  &weights,     &of_features, &of_locations, &of_weights};
        CHECK(with_tensors(mxd_deformable_aggregation_backward, backward, 1) == MXD_OK);
        turn_back();
        compare_by_greatest(output, numbers(bare_output), tolerance);
        compare_by_greatest(grad_features, numbers(of_features), tolerance);
        compare_by_greatest(grad_key_points, of_points, tolerance);
        compare_by_greatest(grad_projection, of_matrix, tolerance);
        compare_by_greatest(grad_logits, of_logits, tolerance);
        for (const View *view : {&features, &key_points, &projection, &logits, &image_size, &pair_scale, &grad_output})
            CHECK(view->gaps_intact());
    }

  private:
    const Rig n;
    std::mt19937 random;
    const bool given; // image_size and pair_scale
    View features, shapes, starts, key_points, projection, logits, image_size, pair_scale, grad_output;
    View output, grad_features, grad_key_points, grad_projection, grad_logits;
    View locations, weights, bare_output, of_features, of_locations, of_weights; // of the bare operator
    std::vector<double> softmax, of_points, of_matrix, of_logits;

    std::mt19937 *layout(bool strided) { return strided ? &random : nullptr; }
    // fn(place in key_points, in projection, in pair_scale, in locations) of each pair; places of the first number.
    template <class Fn> void each_pair(Fn &&fn) {
        for (int64_t b = 0; b < n.bs; ++b)
            for (int64_t a = 0; a < n.anchors; ++a)
                for (int64_t cam = 0; cam < n.cams; ++cam)
                    for (int64_t p = 0; p < n.points; ++p) {
                        const int64_t anchor = b * n.anchors + a;
                        fn((anchor * n.points + p) * 3, (b * n.cams + cam) * 16, (anchor * n.cams + cam) * n.points + p,
                           ((anchor * n.points + p) * n.cams + cam) * 2);
                    }
    }
    // fn(place in logits, in weights, in pair_scale, in a list of groups) of each logit.
    template <class Fn> void each_logit(Fn &&fn) {
        for (int64_t i = 0; i < logits.count(); ++i) {
            const int64_t g = i % n.groups, p = i / n.groups % n.points, s = i / n.groups / n.points % n.scales;
            const int64_t of_anchor = n.groups * n.points * n.scales * n.cams, anchor = i / of_anchor;
            const int64_t cam = i % of_anchor / (n.groups * n.points * n.scales);
            const int64_t pair = (anchor * n.points + p) * n.cams + cam;
            fn(i, (pair * n.scales + s) * n.groups + g, (anchor * n.cams + cam) * n.points + p, anchor * n.groups + g);
        }
    }
    double scale_of(int64_t place) const { return given ? pair_scale.get(place) : 1; }
    double size() const { return given ? 32 : 1; }
    double turned(int64_t point, int64_t matrix, int64_t r) const {
        double sum = projection.get(matrix + 4 * r + 3);
        for (int64_t k = 0; k < 3; ++k) sum += projection.get(matrix + 4 * r + k) * key_points.get(point + k);
        return sum;
    }

    void turn() {
        each_pair([&](int64_t point, int64_t matrix, int64_t, int64_t place) {
            const double depth = std::max(1e-5, turned(point, matrix, 2));
            for (int64_t r = 0; r < 2; ++r) locations.set(place + r, turned(point, matrix, r) / depth / size());
        });
        std::vector<double> sums(size_t(n.bs * n.anchors * n.groups));
        softmax.assign(size_t(logits.count()), 0);
        each_logit([&](int64_t i, int64_t, int64_t, int64_t group) { sums[size_t(group)] += std::exp(logits.get(i)); });
        each_logit([&](int64_t i, int64_t weight, int64_t scale, int64_t group) {
            softmax[size_t(i)] = std::exp(logits.get(i)) / sums[size_t(group)];
            weights.set(weight, softmax[size_t(i)] * scale_of(scale));
        });
    }

    void turn_back() {
        std::vector<double> mean(size_t(n.bs * n.anchors * n.groups));
        of_logits.assign(size_t(logits.count()), 0);
        of_points.assign(size_t(key_points.count()), 0);
        of_matrix.assign(size_t(projection.count()), 0);
        each_logit([&](int64_t i, int64_t weight, int64_t scale, int64_t group) {
            mean[size_t(group)] += softmax[size_t(i)] * of_weights.get(weight) * scale_of(scale);
        });
        each_logit([&](int64_t i, int64_t weight, int64_t scale, int64_t group) {
            of_logits[size_t(i)] = softmax[size_t(i)] * (of_weights.get(weight) * scale_of(scale) - mean[size_t(group)]);
        });
        each_pair([&](int64_t point, int64_t matrix, int64_t, int64_t place) {
            const double d = turned(point, matrix, 2), depth = std::max(1e-5, d);
            double of_turned[3] = {0, 0, 0};
            for (int64_t r = 0; r < 2; ++r) {
                of_turned[r] = of_locations.get(place + r) / depth / size();
                of_turned[2] -= d > 1e-5 ? of_turned[r] * turned(point, matrix, r) / depth : 0;
            }
            for (int64_t r = 0; r < 3; ++r)
                for (int64_t k = 0; k < 4; ++k) {
                    of_matrix[size_t(matrix + 4 * r + k)] += of_turned[r] * (k < 3 ? key_points.get(point + k) : 1);
                    if (k < 3) of_points[size_t(point + k)] += of_turned[r] * projection.get(matrix + 4 * r + k);
                }
        });
    }
};

void with_this_isa() {
    // groups that fill vectors, that do not, and more pairs than are worked on together
    const Rig rigs[] = {{2, 9, 2, 2, 7, 8, 16}, {1, 4, 3, 1, 5, 3, 9}, {1, 3, 3, 3, 40, 1, 5}, {1, 40, 1, 1, 1, 4, 8}};
    for (unsigned seed = 0; seed < 4; ++seed)
        for (const Rig &rig : rigs)
            for (const bool strided : {false, true}) {
                Aggregation single(rig, seed, strided, ACL_FLOAT, ACL_FLOAT);
                single.run(1 + int(seed % 3));
                single.verify(1e-4); // slopes of float32 locations, through depths of a third
                Aggregation mixed(rig, seed, strided, ACL_FLOAT, ACL_BF16);
                mixed.run(1 + int(seed % 3));
                mixed.verify(1.0 / 128); // results in bfloat16, rounded here and there
            }
}

} // namespace

void cameras() {
    const std::string best = mxd_isa();
    for (const char *isa : {"baseline", "avx2", "avx512"})
        if (mxd_use_isa(isa) == 0) with_this_isa();
    CHECK(mxd_use_isa(best.c_str()) == 0);
}
