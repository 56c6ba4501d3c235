// Bilinear samples: their corners, which corners are on the map, and their bilinear coefficients. Lists of sampled rows.
#pragma once

#include "kernels/shared/parallel.h"
#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {
namespace {

template <class T> using RealLanes = Vec<T, LANES>;
template <class T> using IntLanes = Vec<Int<T>, LANES>;
typedef Vec<int64_t, LANES> AddressLanes;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
// Returns the number of samples of one query and head, rounded up to whole vectors.
inline int64_t padded_samples(const Sizes &n) { return round_up(n.levels * n.points, LANES); }

// The maps of N samples. All arrays are in one struct, so that one register addresses all of them.
template <class T, int N = LANES> struct MapLanes {
    T width[N], height[N];
    Int<T> row[N];               // number of pixels in a row of the map
    Int<T> last_x[N], last_y[N]; // -1 on an empty map
    Int<T> start[N];

    void set(int64_t lane, const Level &level) {
        width[lane] = T(level.width);
        height[lane] = T(level.height);
        row[lane] = Int<T>(level.width);
        last_x[lane] = Int<T>(level.width - 1);
        last_y[lane] = Int<T>(level.height - 1);
        start[lane] = Int<T>(level.start);
    }
};

// The map of each sample of one query. Samples are in the order level, point.
template <class T> class Maps {
  public:
    Maps(Arena &arena, int64_t samples)
        : lanes(arena.take<MapLanes<T>>(samples / LANES)), sixteens(arena.take<MapLanes<T, 16>>(samples / 16)),
          in_sixteens(samples / 16 * 16) {}

    // Returns the maps of samples i..i+LANES-1, where i is a multiple of LANES. This equals lanes[i / LANES], but compilers
    // increment this address in a loop instead of recomputing it.
    MXD_INLINE const MapLanes<T> &at(int64_t i) const {
        return *reinterpret_cast<const MapLanes<T> *>(reinterpret_cast<const char *>(lanes) +
                                                      i * int64_t(sizeof(MapLanes<T>) / LANES));
    }
    // Returns the maps of samples i..i+15, where i is a multiple of 16.
    MXD_INLINE const MapLanes<T, 16> &sixteen_at(int64_t i) const { return sixteens[i / 16]; }
    T width(int64_t sample) const { return lanes[sample / LANES].width[sample % LANES]; }
    T height(int64_t sample) const { return lanes[sample / LANES].height[sample % LANES]; }

    void set(int64_t sample, const Level &level) {
        lanes[sample / LANES].set(sample % LANES, level);
        if (sample < in_sixteens) sixteens[sample / 16].set(sample % 16, level);
    }
    // Sets the maps of samples: `points` samples for each of the levels first..last-1. Padding samples get an empty map.
    void set_levels(const Level *levels, int64_t first, int64_t last, int64_t points, int64_t padded) {
        int64_t sample = 0;
        for (int64_t l = first; l < last; ++l)
            for (int64_t p = 0; p < points; ++p) set(sample++, levels[l]);
        for (; sample < padded; ++sample) set(sample, Level{0, 0, 0});
    }

  private:
    MapLanes<T> *lanes;
    MapLanes<T, 16> *sixteens;
    int64_t in_sixteens; // number of samples that `sixteens` covers
};

// For each sample of one query, the range of y in which the sample may read rows of a band. The range has two extra pixels at
// both ends: a sample also reads the pixels below its y, and rounding may move y to another pixel.
template <class T> class BandReach {
  public:
    BandReach(Arena &arena, int64_t samples) : first_y(arena.take<T>(samples)), last_y(arena.take<T>(samples)) {}

    // Sets the ranges of samples, in the order of Maps::set_levels.
    template <class B>
    void set_levels(const Level *levels, int64_t first_level, int64_t last_level, int64_t points, int64_t padded,
                    const B &band) {
        int64_t sample = 0;
        for (int64_t l = first_level; l < last_level; ++l)
            for (int64_t p = 0; p < points; ++p, ++sample) {
                const Level &level = levels[l];
                const bool reached = band.touches(level);
                first_y[sample] = reached ? T((band.begin - level.start) / level.width - 2) : T(1);
                last_y[sample] = reached ? T((band.end - 1 - level.start) / level.width + 2) : T(0);
            }
        for (; sample < padded; ++sample) first_y[sample] = 1, last_y[sample] = 0;
    }
    bool holds_one(T y, int64_t sample) const { return y >= first_y[sample] && y <= last_y[sample]; }
    MXD_INLINE IntLanes<T> holds(RealLanes<T> y, int64_t sample) const {
        return (y >= raw_load<T, LANES>(first_y + sample)) & (y <= raw_load<T, LANES>(last_y + sample));
    }

  private:
    T *first_y, *last_y;
};

// pixel_of converts a normalised coordinate to pixels. is_inside returns whether a location is strictly inside an image, and
// false for NaN. Both accept numbers and vectors.
template <class T, class Real> MXD_INLINE Real pixel_of(Real location, Real size) { return location * size - T(0.5); }
template <class Real> MXD_INLINE auto is_inside(Real x, Real y) { return (x > 0) & (x < 1) & (y > 0) & (y < 1); }

// Returns the bilinear coefficient of corner k. Bit 0 of k selects the right column, bit 1 the lower row. `right` and `below`
// are the distances of the sample from corner 0 (lw and lh in mmcv).
template <class Real> MXD_INLINE Real corner_coefficient(int k, Real right, Real below) {
    return (k & 1 ? right : 1 - right) * (k & 2 ? below : 1 - below);
}

template <class T> struct Corners {
    IntLanes<T> valid, inside[4]; // in each lane all ones or all zeros
    IntLanes<T> pixel[4];         // index of the row of value; undefined where not inside
    IntLanes<T> row;              // pixels in a row of the map
    RealLanes<T> right, below;    // 0 where not valid

    RealLanes<T> coefficient(int k) const { return corner_coefficient(k, right, below); }
};

// Finds the corners of samples at x, y in pixels. A sample is valid if -1 < x < width and -1 < y < height. A NaN is not valid.
template <class T> MXD_INLINE Corners<T> corners_at(RealLanes<T> x, RealLanes<T> y, const MapLanes<T> &maps) {
    const auto width = raw_load<T, LANES>(maps.width), height = raw_load<T, LANES>(maps.height);
    const auto last_x = raw_load<Int<T>, LANES>(maps.last_x), last_y = raw_load<Int<T>, LANES>(maps.last_y);
    Corners<T> c;
    c.valid = (x > -1) & (y > -1) & (x < width) & (y < height);
    x = or_zero(c.valid, x);
    y = or_zero(c.valid, y);
    IntLanes<T> left, top;
    c.right = x - floor_of<LANES>(x, left);
    c.below = y - floor_of<LANES>(y, top);
    const IntLanes<T> left_in = c.valid & (left >= 0), right_in = c.valid & (left < last_x);
    const IntLanes<T> top_in = top >= 0, bottom_in = top < last_y;
    c.inside[0] = top_in & left_in;
    c.inside[1] = top_in & right_in;
    c.inside[2] = bottom_in & left_in;
    c.inside[3] = bottom_in & right_in;
    c.row = raw_load<Int<T>, LANES>(maps.row);
    c.pixel[0] = raw_load<Int<T>, LANES>(maps.start) + top * c.row + left;
    c.pixel[1] = c.pixel[0] + 1;
    c.pixel[2] = c.pixel[0] + c.row;
    c.pixel[3] = c.pixel[2] + 1;
    return c;
}

template <class T> MXD_INLINE void load_pairs(const T *xy, RealLanes<T> &x, RealLanes<T> &y) {
    separate<T, LANES>(raw_load<T, LANES>(xy), raw_load<T, LANES>(xy + LANES), x, y);
}
template <class T> MXD_INLINE void store_pairs(T *xy, RealLanes<T> x, RealLanes<T> y) {
    RealLanes<T> a, b;
    interleave<T, LANES>(x, y, a, b);
    memcpy(xy, &a, sizeof a);
    memcpy(xy + LANES, &b, sizeof b);
}

// The rows that LANES samples read, and their coefficients in the output.
template <class T, int CORNERS> struct SampledRows {
    IntLanes<T> inside[CORNERS], pixel[CORNERS];
    IntLanes<T> row;                   // pixels in a row of the map
    RealLanes<T> coefficient[CORNERS]; // 0 where not inside
};

// Returns the index of corner k of a sample in a list of rows. A list has groups of ROWS samples. A group has its ROWS entries
// for corner 0, then its ROWS entries for corner 1, and so on. Sums in list order have the same bits for any cut into parts or
// bands.
template <int CORNERS> inline int64_t entry_of(int64_t sample, int k) {
    return (sample / ROWS * CORNERS + k) * ROWS + sample % ROWS;
}

// Returns entry_of(i, k), without divisions. i must be a multiple of ROWS.
template <int CORNERS> MXD_INLINE int64_t first_entry_of(int64_t i, int k) { return i * CORNERS + k * ROWS; }

// Writes the entries of corner k of samples i..i+LANES-1 to a list, where i is a multiple of ROWS.
template <int CORNERS, class E> MXD_INLINE void put_entries(E *list, int64_t i, int k, Vec<E, LANES> entries) {
    E *to = list + first_entry_of<CORNERS>(i, k);
    if constexpr (LANES == ROWS || CORNERS == 1) {
        memcpy(to, &entries, sizeof entries);
    } else {
        const Vec<E, 4> low = four_of<0>(entries), high = four_of<4>(entries);
        memcpy(to, &low, sizeof low);
        memcpy(to + CORNERS * ROWS, &high, sizeof high);
    }
}

// Computes the addresses of the rows that LANES samples read. Pixel 0 is at `base`, and pixels are `step` bytes apart. `far` is
// true if a step does not fit in 32 bits, which no tensor of a model needs.
template <int CORNERS, class Sampled>
MXD_INLINE void find_addresses(const Sampled &sampled, AddressLanes base, AddressLanes step, bool far,
                               AddressLanes (&to)[CORNERS]) {
    AddressLanes first, row;
    if (sizeof(sampled.row[0]) == 4 && !far) {
        first = short_product<LANES>(sampled.pixel[0], step);
        row = short_product<LANES>(sampled.row, step);
    } else {
        first = convert<int64_t, LANES>(sampled.pixel[0]) * step;
        row = convert<int64_t, LANES>(sampled.row) * step;
    }
    to[0] = base + first;
    if constexpr (CORNERS == 4) { // the corner to the right is the next pixel
        to[1] = to[0] + step;
        to[2] = to[0] + row;
        to[3] = to[2] + step;
    }
}
inline bool is_far(int64_t step) { return step != int32_t(step); }

// The addresses of rows: pixel i of sample s is at base[s] + i * stride[s] bytes. A corner off the map gets the address of the
// zero row. To read a row of the map with coefficient 0 would be wrong, because 0 * infinity is NaN. row_bytes[s] is the number
// of bytes from one row of pixels of the map to the next.
struct RowAddresses {
    int64_t *base, *stride, *row_bytes, zero_row;
    bool far = false; // true if is_far(stride) for any sample

    RowAddresses(Arena &arena, int64_t samples, const void *zero_row_at)
        : base(arena.take<int64_t>(samples)), stride(arena.take<int64_t>(samples)), row_bytes(arena.take<int64_t>(samples)),
          zero_row(reinterpret_cast<int64_t>(zero_row_at)) {}

    // Sets samples first..last-1, whose map has `width` pixels in a row.
    void set(int64_t first, int64_t last, const void *pixel0, int64_t bytes, int64_t width = 0) {
        for (int64_t i = first; i < last; ++i) {
            base[i] = reinterpret_cast<int64_t>(pixel0);
            stride[i] = bytes;
            row_bytes[i] = width * bytes;
        }
        far = far || is_far(bytes);
    }
    template <int CORNERS, class Sampled> MXD_INLINE void put(int64_t *list, int64_t i, const Sampled &sampled) const {
        AddressLanes address[CORNERS];
        find_addresses(sampled, raw_load<int64_t, LANES>(base + i), raw_load<int64_t, LANES>(stride + i), far, address);
        const AddressLanes off_map = broadcast<int64_t, LANES>(zero_row);
        MXD_UNROLL
        for (int k = 0; k < CORNERS; ++k) {
            // With one corner the pixel is clamped to the map, so it is never off the map. Padding samples have the zero row as
            // base.
            if constexpr (CORNERS == 1)
                put_entries<CORNERS>(list, i, k, address[k]);
            else
                put_entries<CORNERS>(list, i, k, choose(sampled.inside[k], address[k], off_map));
        }
    }
};

template <int CORNERS, class E> MXD_INLINE Vec<E, LANES> get_entries(const E *list, int64_t i, int k) {
    const E *from = list + first_entry_of<CORNERS>(i, k);
    if constexpr (LANES == ROWS)
        return raw_load<E, LANES>(from);
    else
        return eight_of<E>(raw_load<E, 4>(from), raw_load<E, 4>(from + CORNERS * ROWS));
}

// `sample`: the dot product of a row of grad_output with a sample. `dx` and `dy`: the slopes of this dot product in x and y.
// The argument d has the dot products of the row with the four corner rows, and 0 for corners off the map.
template <class Real> struct CornerSlopes {
    Real sample, dx, dy;

    MXD_INLINE CornerSlopes(const Real (&d)[4], Real right, Real below) : sample{} {
        MXD_UNROLL
        for (int k = 0; k < 4; ++k) sample += corner_coefficient(k, right, below) * d[k];
        dx = (1 - below) * (d[1] - d[0]) + below * (d[3] - d[2]);
        dy = (1 - right) * (d[2] - d[0]) + right * (d[3] - d[1]);
    }
};

// Returns the CornerSlopes of samples i..i+LANES-1, whose dot products are a list in the order of entry_of.
template <class T> MXD_INLINE CornerSlopes<RealLanes<T>> slopes_at(const Corners<T> &c, const T *dot, int64_t i) {
    RealLanes<T> d[4];
    MXD_UNROLL
    for (int k = 0; k < 4; ++k) d[k] = or_zero(c.inside[k], get_entries<4>(dot, i, k));
    return {d, c.right, c.below};
}

// Returns a mask of the samples whose corner k is a row of the band.
template <class T, class Sampled, class B> MXD_INLINE IntLanes<T> in_band(const Sampled &sampled, int k, const B &band) {
    return sampled.inside[k] & (sampled.pixel[k] >= Int<T>(band.begin)) & (sampled.pixel[k] < Int<T>(band.end));
}

// The rows of one query that belong to a band, as one list without gaps.
template <class T> struct ScatterList {
    int64_t *address;
    T *coefficient;
    int64_t count = 0;

    // The arrays have LANES extra entries, because add() writes an entry before it knows whether the entry is kept. Addresses
    // begin as zeros, because they are prefetched before add() writes them.
    ScatterList(Arena &arena, int64_t n)
        : address(arena.zeros<int64_t>(4 * n + LANES)), coefficient(arena.take<T>(4 * n + LANES)) {}

    // Adds the entries of LANES samples that belong to the band, in the order of entry_of. Callers begin at the same samples
    // for all bands, so the order does not depend on where bands are cut.
    template <int CORNERS, class B> MXD_INLINE void add(const SampledRows<T, CORNERS> &rows, const B &band) {
        IntLanes<T> mine[CORNERS], here = {};
        MXD_UNROLL
        for (int k = 0; k < CORNERS; ++k) {
            mine[k] = in_band<T>(rows, k, band);
            here |= mine[k];
        }
        if (!any(here)) return;
        AddressLanes to[CORNERS];
        find_addresses(rows, broadcast<int64_t, LANES>(band.address - band.begin * band.step),
                       broadcast<int64_t, LANES>(band.step), is_far(band.step), to);
        add_four<0>(rows, mine, to);
        if constexpr (LANES == 8) add_four<4>(rows, mine, to);
    }

  private:
    template <int FIRST, int CORNERS>
    MXD_INLINE void add_four(const SampledRows<T, CORNERS> &rows, const IntLanes<T> (&mine)[CORNERS],
                             const AddressLanes (&to)[CORNERS]) {
        static_assert(ROWS == 4, "four samples corner by corner");
        int64_t n = count;
        MXD_UNROLL
        for (int k = 0; k < CORNERS; ++k)
            n += put_kept<T>(four_of<FIRST>(mine[k]), four_of<FIRST>(to[k]), four_of<FIRST>(rows.coefficient[k]), address + n,
                             coefficient + n);
        count = n;
    }
};

} // namespace
} // namespace mxd::MXD_ISA
