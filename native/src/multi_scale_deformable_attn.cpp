// multi_scale_deformable_attn on the CPU. Locations are normalised, samples bilinear, what lies outside is zero.
#include "queries.h"

namespace mxd {
namespace MXD_ISA {
namespace {

template <class T> inline Corners<T> corners_of(const QueryReader<T> &reader, int64_t sample) {
    RealLanes<T> x, y;
    reader.location(sample, x, y);
    x = x * raw_load<T, LANES>(reader.maps().width + sample) - T(0.5);
    y = y * raw_load<T, LANES>(reader.maps().height + sample) - T(0.5);
    return corners_at<T>(x, y, reader.maps(), sample);
}

template <class T> struct Bilinear {
    static constexpr int CORNERS = 4;

    static void prepare(const QueryReader<T> &reader, const RowAddresses &rows, SampleBuffer<T> &buffer) {
        for (int64_t i = 0; i < reader.padded; i += LANES) {
            const Corners<T> c = corners_of(reader, i);
            const RealLanes<T> weight = reader.weight(i);
            for (int k = 0; k < 4; ++k)
                buffer.put(i, k, rows.of(c, k), c.inside[k] ? weight * c.share(k) : RealLanes<T>{});
        }
    }

    template <class B> static void scatter(const QueryReader<T> &reader, const B &band, ScatterList<T> &list) {
        for (int64_t i = 0; i < reader.padded; i += LANES) {
            list.add(corners_of(reader, i), reader.weight(i), band);
        }
    }
};

// Gradients of locations and weights, query by query.
template <class V, class T> class SampleGradients : QueryWorker<V, T> {
    typedef QueryWorker<V, T> Base;

  public:
    static int64_t scratch_bytes(const Call &call) {
        const int64_t room = Sizes(call).room();
        return Base::scratch_bytes(call) + Arena::bytes<T>(4 * room) + Arena::bytes<T>(2 * room) +
               Arena::bytes<T>(room);
    }
    SampleGradients(const Call &c, Arena arena)
        : Base(c, arena), dot(arena.take<T>(4 * this->n.room())), grad_xy(arena.take<T>(2 * this->n.room())),
          grad_weight(arena.take<T>(this->n.room())), locations_out(c.grad_locations, 3),
          weights_out(c.grad_weights, 3) {
        memset(dot, 0, size_t(4 * this->n.room()) * sizeof(T));
    }
    void operator()(int64_t item) {
        this->blocks.each(
            item, [&](int64_t b, int64_t h, int64_t q, int slot) { prepare(b, h, q, slot); },
            [&](int64_t b, int64_t h, int64_t q, int slot) { finish(b, h, q, slot); });
    }

  private:
    T *dot, *grad_xy, *grad_weight;
    Block<3> locations_out;
    Block<2> weights_out;

    void prepare(int64_t b, int64_t h, int64_t q, int slot) {
        this->readers[slot].read(b, h, q);
        const RowAddresses rows = this->rows(b, h);
        for (int64_t i = 0; i < this->readers[slot].padded; i += LANES) {
            const Corners<T> c = corners_of(this->readers[slot], i);
            for (int k = 0; k < 4; ++k) this->buffers[slot].put_address(i, k, rows.of(c, k));
        }
    }

    void finish(int64_t b, int64_t h, int64_t q, int slot) {
        const Call &call = this->call;
        const QueryReader<T> &reader = this->readers[slot];
        const SampleBuffer<T> &buffer = this->buffers[slot];
        const T *g = this->grad_output(b, h, q);
        for (int k = 0; k < 4; ++k)
            dots<V, T>(buffer.address + k * buffer.samples, this->buffers[1 - slot].address + k * buffer.samples,
                       reader.samples, this->n.channels, g, dot + k * buffer.samples);
        for (int64_t i = 0; i < reader.padded; i += LANES) slopes(reader, i);
        if (call.grad_locations.data) locations_out.write(offset3(call.grad_locations, b, q, h), grad_xy);
        if (call.grad_weights.data) weights_out.write(offset3(call.grad_weights, b, q, h), grad_weight);
    }

    // From the four dot products of LANES samples to their gradients.
    void slopes(const QueryReader<T> &reader, int64_t i) {
        const Corners<T> c = corners_of(reader, i);
        const CornerSlopes<T> slope(c, dot + i, this->n.room());
        const RealLanes<T> weight = reader.weight(i);
        const RealLanes<T> gx = raw_load<T, LANES>(reader.maps().width + i) * weight * slope.dx;
        const RealLanes<T> gy = raw_load<T, LANES>(reader.maps().height + i) * weight * slope.dy;
        store_pairs<T>(grad_xy + 2 * i, c.valid ? gx : RealLanes<T>{}, c.valid ? gy : RealLanes<T>{});
        store<T, LANES>(grad_weight + i, c.valid ? slope.sample : RealLanes<T>{});
    }
};

} // namespace

bool multi_scale_deformable_attn(const Call &call) {
    const int64_t items = QueryBlocks(Sizes(call)).count();
    return with_types(call, [&](auto *v, auto *t) {
        return parallel<Forward<__typeof__(*v), __typeof__(*t), Bilinear>>(call.num_threads, items, call);
    });
}

bool multi_scale_deformable_attn_backward(const Call &call) {
    const Sizes n(call);
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        bool enough = true;
        if (call.grad_locations.data || call.grad_weights.data)
            enough = parallel<SampleGradients<V, T>>(call.num_threads, QueryBlocks(n).count(), call);
        if (enough && call.grad_value.data)
            enough = parallel<ValueGradient<T, Bilinear>>(call.num_threads, n.batch * n.heads * call.num_bands, call);
        return enough;
    });
}

} // namespace MXD_ISA
} // namespace mxd
