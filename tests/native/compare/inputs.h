// The input tensors of a case, in the order in which its functions take them.
#pragma once

#include "case.h"

#include <cmath>
#include <functional>
#include <memory>

namespace compare {

struct Argument {
    std::string name;
    std::unique_ptr<Tensor> tensor; // null: an optional one that is left out, or a gradient that is not wanted
    bool has_gradient = false;
};

struct Inputs {
    std::vector<Argument> arguments;
    int reference_axis = 0; // of multi_scale_deformable_attn_with_logits
};

using Shape = std::vector<int64_t>;
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();
constexpr double INF = std::numeric_limits<double>::infinity();

inline double special_place(Random &random) {
    return random.pick({NOT_A_NUMBER, INF,   -INF,   1e30, -1e30, 3e9, -3e9,    2147483647.0, 2147483648.0, -2147483648.0, 0.0,
                        -0.0,         1e-40, -1e-40, 1.0,  -1.0,  0.5, 65504.0, 1e19,         -1e19,        9.3e18});
}

inline double floor_to(double step, double number) { return std::floor(number / step) * step; }

// A gradient jumps where a sample crosses from one pixel to the next. Rounding moves one that is this near by a pixel
// on one instruction set and not on another, and both are right.
inline bool at_border(double pixel) { return std::fabs(pixel - std::nearbyint(pixel)) < 0x1p-10; }

inline Dtype draw_floating(const Case &c, Random &random) {
    if (!c.mixed || random.one_in(2)) return c.dtype;
    return random.pick({MXD_FLOAT32, MXD_FLOAT64, MXD_FLOAT16, MXD_BFLOAT16});
}

using Place = std::function<double(int64_t)>;
using Refused = std::function<bool(int64_t)>;

// Draws one number to a statement: compilers evaluate the arguments of a call in different orders.
class Builder {
  public:
    Builder(const Case &sizes, Random &numbers) : c(sizes), random(numbers) {}

    Inputs build() {
        add_value();
        add_levels();
        switch (c.op) {
        case MULTI_SCALE: add_sampling_locations(); break;
        case MULTI_SCALE_LOGITS: add_offsets_from_references(); break;
        case AGGREGATION: add_sample_locations(); break;
        case AGGREGATION_LOGITS: add_projected_points(); break;
        case GEOMETRIC: add_pixels(); break;
        case GEOMETRIC_LOGITS: add_window_around_references();
        }
        add_weights();
        if (c.op == AGGREGATION_LOGITS) add_image_size(), add_pair_scale();
        return std::move(made);
    }

  private:
    const Case &c;
    Random &random;
    Inputs made;
    const double image_size = random.pick({0., 4.}); // of aggregation; 0: none is given

    Layout draw_layout(bool may_expand = true) {
        if (!c.strided) return Layout::CONTIGUOUS;
        const auto layout = random.pick({Layout::LAST_AXIS_STAYS, Layout::ANY, Layout::EXPANDED});
        return layout == Layout::EXPANDED && !may_expand ? Layout::ANY : layout;
    }
    Tensor &add(const char *name, Shape shape, Dtype dtype, Layout layout, bool has_gradient) {
        auto tensor = std::make_unique<Tensor>(dtype, std::move(shape), layout, random);
        made.arguments.push_back({name, std::move(tensor), has_gradient});
        return *made.arguments.back().tensor;
    }
    Tensor &add_floating(const char *name, Shape shape, bool has_gradient, bool may_expand = true) {
        const Dtype dtype = draw_floating(c, random);
        const Layout layout = draw_layout(may_expand);
        return add(name, std::move(shape), dtype, layout, has_gradient);
    }
    Tensor &add_integer(const char *name, Shape shape) {
        const Dtype dtype = random.pick({MXD_INT32, MXD_INT64});
        const Layout layout = draw_layout(false);
        return add(name, std::move(shape), dtype, layout, false);
    }
    void set_somewhere(Tensor &tensor, double number) { tensor.set(random.below(tensor.count()), number); }
    void leave_out(const char *name) { made.arguments.push_back({name, nullptr, false}); }

    Shape by_query() const { return {c.bs, c.queries, c.heads, c.num_levels, c.points}; }
    Shape by_query_2() const { return {c.bs, c.queries, c.heads, c.num_levels, c.points, 2}; }

    void add_value() {
        const bool flat = c.aggregates();
        const Shape shape = flat ? Shape{c.bs, c.keys, c.channels} : Shape{c.bs, c.keys, c.heads, c.channels};
        Tensor &value = add_floating(flat ? "feature_maps" : "value", shape, true);
        value.fill(-1, 1, random);
        for (int i = 0; c.special_values && i < 3; ++i) set_somewhere(value, random.pick({NOT_A_NUMBER, INF, -INF}));
    }

    void add_levels() {
        const bool by_camera = c.aggregates();
        Tensor &shapes = add_integer("spatial_shapes", by_camera ? Shape{c.cameras, c.num_levels, 2} : Shape{c.num_levels, 2});
        Tensor &starts = add_integer("level_start_index", by_camera ? Shape{c.cameras, c.num_levels} : Shape{c.num_levels});
        for (size_t i = 0; i < c.levels.size(); ++i) {
            shapes.set(int64_t(2 * i), double(c.levels[i].height));
            shapes.set(int64_t(2 * i + 1), double(c.levels[i].width));
            starts.set(int64_t(i), double(c.levels[i].start));
        }
    }

    // Draws each place until it is not refused.
    void fill_places(Tensor &places, const Place &draw, const Refused &refused) {
        for (int64_t i = 0; i < places.count(); ++i) {
            do places.set(i, draw(i));
            while (refused(i));
            if (c.special_places && random.one_in(12)) places.set(i, special_place(random));
        }
    }

    // Of element `flat` of the last axis (x, y): the size of a level along it.
    static double size_of(const Level &level, int64_t flat) { return double(flat % 2 ? level.height : level.width); }
    const Level &level_at(int64_t flat) const { return c.levels[size_t(flat / 2 / c.points % c.num_levels)]; }
    const Level &level_at(int64_t camera, int64_t level) const { return c.levels[size_t(camera * c.num_levels + level)]; }
    template <class Pixel> bool at_border_of_any_level(int64_t camera, const Pixel &pixel) const {
        for (int64_t level = 0; level < c.num_levels; ++level)
            if (at_border(pixel(level_at(camera, level)))) return true;
        return false;
    }

    double draw_pixel(double size) {
        const double place = random.between(-3, size + 3);
        return c.snapped ? floor_to(0.25, place) : place;
    }
    double draw_normalised() {
        const double place = random.between(-0.3, 1.3);
        return c.snapped ? floor_to(1. / 64, place) : place;
    }

    void add_sampling_locations() {
        Tensor &locations = add_floating("sampling_locations", by_query_2(), true, false);
        const auto draw = [&](int64_t i) {
            const double size = size_of(level_at(i), i);
            return c.snapped ? (draw_pixel(size) + 0.5) / size : draw_normalised();
        };
        fill_places(locations, draw,
                    [&](int64_t i) { return !c.snapped && at_border(locations.get(i) * size_of(level_at(i), i) - 0.5); });
    }

    void add_pixels() {
        Tensor &pixels = random.one_in(2) ? add_integer("sampling_locations", by_query_2())
                                          : add_floating("sampling_locations", by_query_2(), false);
        const auto draw = [&](int64_t i) { return draw_pixel(size_of(level_at(i), i)); };
        fill_places(pixels, draw, [](int64_t) { return false; });
    }

    void add_sample_locations() {
        Tensor &locations = add_floating("sample_locations", {c.bs, c.queries, c.points, c.cameras, 2}, true, false);
        fill_places(
            locations, [&](int64_t) { return draw_normalised(); },
            [&](int64_t i) {
                const auto pixel = [&](const Level &level) { return locations.get(i) * size_of(level, i) - 0.5; };
                return !c.snapped && at_border_of_any_level(i / 2 % c.cameras, pixel);
            });
    }

    void add_offsets_from_references() {
        const Tensor &references = add_references();
        const bool boxes = references.shape[3] == 4;
        Tensor &offsets = add_floating("sampling_offsets", by_query_2(), true, false);
        const auto draw = [&](int64_t) { return c.snapped ? floor_to(0.25, random.between(-3, 3)) : random.between(-3, 3); };
        fill_places(offsets, draw, [&](int64_t i) {
            const double size = size_of(level_at(i), i);
            const int64_t reference = reference_of(i, references);
            const double scale = boxes ? references.get(reference + 2) / double(2 * c.points) : 1 / size;
            const bool exact = c.snapped && (!boxes || (c.points & (c.points - 1)) == 0);
            return !exact && at_border((references.get(reference) + offsets.get(i) * scale) * size - 0.5);
        });
    }
    // (x, y) or (x, y, w, h); how many of them, by the axis that they go along.
    const Tensor &add_references() {
        const int64_t coordinates = random.pick<int64_t>({2, 4});
        made.reference_axis = int(random.below(2));
        const int64_t count =
            made.reference_axis ? random.divisor_of(std::max<int64_t>(1, c.points)) : random.pick<int64_t>({1, c.num_levels});
        Tensor &references = add_floating("reference_points", {c.bs, c.queries, count, coordinates}, true);
        for (int64_t i = 0; i < references.count(); ++i) {
            const double number = random.between(i % coordinates < 2 ? -0.2 : 0.1, 1.2);
            references.set(i, c.snapped ? floor_to(1. / 64, number) : number);
        }
        return references;
    }
    // The coordinate of a reference point that goes with element `flat` of the offsets.
    int64_t reference_of(int64_t flat, const Tensor &references) const {
        const int64_t level = flat / 2 / c.points % c.num_levels, point = flat / 2 % c.points;
        const int64_t query = flat / 2 / c.points / c.num_levels / c.heads, count = references.shape[2];
        const int64_t which = (made.reference_axis ? point : level) % count;
        return (query * count + which) * references.shape[3] + flat % 2;
    }

    void add_window_around_references() {
        Tensor &references = add_floating("reference_points", {c.bs, c.queries, c.heads, 2}, false);
        fill_places(
            references, [&](int64_t) { return draw_normalised(); },
            [&](int64_t i) {
                // pixels are rounded to the nearest: their borders lie halfway
                const auto pixel = [&](const Level &level) { return references.get(i) * size_of(level, i) - 0.5; };
                return !c.snapped && at_border_of_any_level(0, pixel);
            });
        Tensor &window = add_integer("window", {c.points, 2});
        for (int64_t i = 0; i < window.count(); ++i) {
            const bool is_far = c.special_places && random.one_in(20);
            window.set(i, is_far ? random.pick({1e6, 3e9, -3e9}) : double(random.below(9) - 4));
        }
    }

    void add_projected_points() {
        Tensor &points = add_floating("key_points", {c.bs, c.queries, c.points, 3}, true, false);
        const Tensor &projection = add_projection();
        const auto draw = [&](int64_t) { return c.snapped ? floor_to(0.125, random.between(-1, 1)) : random.between(-1, 1); };
        fill_places(points, draw,
                    [&](int64_t i) { return !c.snapped && i % 3 == 2 && projected_to_border(points, i - 2, projection); });
    }
    bool projected_to_border(Tensor &points, int64_t from, const Tensor &projection) {
        for (int64_t camera = 0; camera < c.cameras; ++camera) {
            double image[3]; // u, v, depth
            for (int64_t row = 0; row < 3; ++row) {
                const int64_t place = ((from / 3 / c.points / c.queries * c.cameras + camera) * 4 + row) * 4;
                image[row] = projection.get(place + 3);
                for (int64_t k = 0; k < 3; ++k) image[row] += projection.get(place + k) * points.get(from + k);
            }
            for (int64_t axis = 0; axis < 2; ++axis) {
                const double place = image[axis] / std::max(image[2], 1e-5) / (image_size ? image_size : 1);
                const auto pixel = [&](const Level &level) { return place * size_of(level, axis) - 0.5; };
                if (at_border_of_any_level(camera, pixel)) return true;
            }
        }
        return false;
    }
    // The depth is near 1, and 1 where results must be exact.
    const Tensor &add_projection() {
        Tensor &projection = add_floating("projection", {c.bs, c.cameras, 4, 4}, true, false);
        for (int64_t i = 0; i < projection.count(); ++i) {
            const int64_t row = i / 4 % 4, column = i % 4;
            double number = column == 3 ? random.between(0.1, 0.9) : random.between(-1, 1) / 3.5;
            if (c.snapped) number = row == 2 ? 0 : floor_to(0.125, number);
            projection.set(i, row == 2 && column == 3 ? 1 : number);
        }
        return projection;
    }
    void add_image_size() {
        if (!image_size) return leave_out("image_size");
        add_floating("image_size", {c.bs, c.cameras, 2}, false).fill(image_size, image_size, random);
    }
    void add_pair_scale() {
        if (random.one_in(2)) return leave_out("pair_scale");
        add_floating("pair_scale", {c.bs, c.queries, c.cameras, c.points}, false).fill(0, 2, random);
    }

    Shape shape_of_weights() const {
        if (c.op == AGGREGATION) return {c.bs, c.queries, c.points, c.cameras, c.num_levels, c.groups};
        if (c.op == AGGREGATION_LOGITS) return {c.bs, c.queries, c.cameras, c.num_levels, c.points, c.groups};
        return by_query();
    }
    void add_weights() {
        const double most = c.from_logits() ? 4 : 1;
        Tensor &weights = add_floating(c.from_logits() ? "logits" : "weights", shape_of_weights(), true);
        weights.fill(-most, most, random);
        if (!c.special_places || weights.count() == 0 || random.one_in(2)) return;
        for (int i = 0; i < 4; ++i) set_somewhere(weights, random.pick({NOT_A_NUMBER, INF, -INF, -INF}));
    }
};

} // namespace compare
