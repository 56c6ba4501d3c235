// The locations of deformable_aggregation_with_logits: (u, v, d) = projection (point, 1), and
//
//   location = (u, v) / max(d, 1e-5) / image_size
#pragma once

#include "kernels/shared/job.h"
#include "kernels/shared/sampling.h"

namespace mxd::MXD_ISA {
namespace {

// Returns the number of pairs (point, camera). The index of a pair is point * cameras + camera.
inline int64_t pairs_of(const Sizes &n) { return n.points * n.cameras; }

template <class T> constexpr T NEAREST = T(1e-5); // the least depth: replaces smaller depths, also those behind the camera

constexpr int64_t OF_MATRIX = 16; // elements of a 4x4 matrix; its last row is not read and has gradient 0

// The pairs of one anchor's key points and the cameras that see them.
template <class T> struct SeenPoints {
    int64_t room = 0;                            // the number of key points, padded to a multiple of LANES
    T *points = nullptr;                         // [3, room]: all x, then all y, then all z
    int64_t *pairs = nullptr, *begins = nullptr; // pairs: seen pairs, camera by camera; begins: where each camera begins
    int64_t count = 0;
    T *xy = nullptr, *depth = nullptr; // of each seen pair, indexed by the pair: xy is its location, depth is its d

    SeenPoints(const Call &call, Arena &arena) {
        if (!call.with_logits) return;
        const Sizes &n = call.sizes;
        room = round_up(n.points, LANES);
        points = arena.take<T>(3 * room);
        pairs = arena.take<int64_t>(pairs_of(n));
        begins = arena.take<int64_t>(n.cameras + 1);
        xy = arena.take<T>(2 * pairs_of(n));
        depth = arena.take<T>(pairs_of(n));
    }
};

template <class T> class Cameras {
  public:
    Cameras(const Call &c, Arena &arena) : call(c), n(c.sizes) {
        if (!call.with_logits) return;
        matrices = arena.take<T>(OF_MATRIX * n.cameras);
        image_sizes = arena.take<T>(2 * n.cameras);
    }

    void open(int64_t b) {
        const Tensor &m = call.projection, &s = call.image_size;
        for (int64_t cam = 0; cam < n.cameras; ++cam) {
            for (int64_t r = 0; r < 3; ++r)
                read_elements(at(m, offset_of(m, b, cam) + r * m.strides[ROW]), m.dtype, m.strides[COLUMN], 4,
                              matrices + cam * OF_MATRIX + 4 * r);
            T *size = image_sizes + 2 * cam;
            size[0] = size[1] = 1;
            if (s.data) read_elements(at(s, offset_of(s, b, cam)), s.dtype, s.strides[EXTENT], 2, size);
        }
    }

    // Finds the pairs of an anchor whose locations are strictly inside the images of the cameras first..last-1. The anchor's
    // key points begin at `offset`.
    void find_seen(int64_t offset, int64_t first, int64_t last, SeenPoints<T> &to) const {
        read_points(offset, to);
        to.count = 0;
        for (int64_t cam = first; cam < last; ++cam) {
            to.begins[cam] = to.count;
            for (int64_t p = 0; p < to.room; p += LANES) find_seen(cam, p, to);
        }
        to.begins[last] = to.count;
    }

    // Propagates the gradient of a location: adds to the gradient of its key point and, unless grad_matrices is null, to the
    // gradient of its camera's matrix. If the depth is clamped, the gradient of the depth is 0. Then the matrix's row for the
    // depth is skipped, because 0 times an infinite element would be NaN.
    void add_gradients(const SeenPoints<T> &seen, int64_t pair, const T *grad_location, T *grad_point, T *grad_matrices) const {
        const int64_t cam = pair % n.cameras, p = pair / n.cameras;
        const T *m = matrices + cam * OF_MATRIX, *size = image_sizes + 2 * cam, *location = seen.xy + 2 * pair;
        const bool in_front = seen.depth[pair] >= NEAREST<T>;
        const T depth = in_front ? seen.depth[pair] : NEAREST<T>;
        const T inner = grad_location[0] * location[0] + grad_location[1] * location[1];
        const T grad_projected[3] = {grad_location[0] / size[0] / depth, grad_location[1] / size[1] / depth, -inner / depth};
        T *to = grad_matrices ? grad_matrices + cam * OF_MATRIX : nullptr;
        for (int r = 0; r < (in_front ? 3 : 2); ++r) {
            for (int k = 0; k < 3; ++k) grad_point[k] += grad_projected[r] * m[4 * r + k];
            if (!to) continue;
            for (int k = 0; k < 3; ++k) to[4 * r + k] += grad_projected[r] * seen.points[k * seen.room + p];
            to[4 * r + 3] += grad_projected[r];
        }
    }

  private:
    const Call &call;
    Sizes n;
    T *matrices = nullptr, *image_sizes = nullptr; // matrices: [camera, 4, 4]; image_sizes: [camera, 2]

    // Reads the key points. Padding is NaN, which no camera sees.
    void read_points(int64_t offset, SeenPoints<T> &to) const {
        const Tensor &t = call.locations;
        for (int64_t k = 0; k < 3; ++k) {
            T *coordinates = to.points + k * to.room;
            read_elements(at(t, offset + k * t.strides[XYZ]), t.dtype, t.strides[KEY_POINT], n.points, coordinates);
            for (int64_t p = n.points; p < to.room; ++p) coordinates[p] = T(__builtin_nan(""));
        }
    }

    MXD_INLINE void find_seen(int64_t cam, int64_t p, SeenPoints<T> &to) const {
        const T *m = matrices + cam * OF_MATRIX, *size = image_sizes + 2 * cam;
        RealLanes<T> point[3], projected[3]; // projected is (u, v, d)
        MXD_UNROLL
        for (int k = 0; k < 3; ++k) point[k] = raw_load<T, LANES>(to.points + k * to.room + p);
        MXD_UNROLL
        for (int r = 0; r < 3; ++r)
            projected[r] = point[0] * m[4 * r] + point[1] * m[4 * r + 1] + point[2] * m[4 * r + 2] + m[4 * r + 3];
        const RealLanes<T> nearest = broadcast<T, LANES>(NEAREST<T>);
        const RealLanes<T> depth = nearest > projected[2] ? nearest : projected[2]; // a NaN stays
        const RealLanes<T> x = projected[0] / depth / size[0], y = projected[1] / depth / size[1];
        const IntLanes<T> inside = is_inside(x, y);
        if (!any(inside)) return;
        for (int lane = 0; lane < LANES; ++lane) {
            if (!inside[lane]) continue;
            const int64_t pair = (p + lane) * n.cameras + cam;
            to.pairs[to.count++] = pair;
            to.xy[2 * pair] = x[lane];
            to.xy[2 * pair + 1] = y[lane];
            to.depth[pair] = projected[2][lane];
        }
    }
};

} // namespace
} // namespace mxd::MXD_ISA
