// geometric_kernel_attention on the CPU. Locations are pixels: truncated, clamped to the map, no interpolation.
#include "queries.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// Clamped before it becomes an integer; a NaN goes to 0 because it is not greater than 0.
template <class T> inline IntLanes<T> nearest(RealLanes<T> x, RealLanes<T> last) {
    x = x > 0 ? x : RealLanes<T>{};
    return convert<Int<T>, LANES>(RealLanes<T>(x < last ? x : last));
}

template <class T> inline IntLanes<T> pixel_of(const QueryReader<T> &reader, int64_t sample) {
    const Maps<T> &maps = reader.maps();
    RealLanes<T> x, y;
    reader.location(sample, x, y);
    const IntLanes<T> column = nearest<T>(x, raw_load<T, LANES>(maps.width + sample) - 1);
    const IntLanes<T> row = nearest<T>(y, raw_load<T, LANES>(maps.height + sample) - 1);
    return raw_load<Int<T>, LANES>(maps.start + sample) + row * raw_load<Int<T>, LANES>(maps.columns + sample) + column;
}

template <class T> struct Nearest {
    static constexpr int CORNERS = 1;

    static void prepare(const QueryReader<T> &reader, const RowAddresses &rows, SampleBuffer<T> &buffer) {
        for (int64_t i = 0; i < reader.padded; i += LANES)
            buffer.put(i, 0, rows.of_pixel<T>(pixel_of(reader, i)), reader.weight(i));
    }

    template <class B> static void scatter(const QueryReader<T> &reader, const B &band, ScatterList<T> &list) {
        for (int64_t i = 0; i < reader.padded; i += LANES) {
            const IntLanes<T> real = raw_load<Int<T>, LANES>(reader.maps().columns + i) > 0; // not padding
            const IntLanes<T> pixel = pixel_of(reader, i);
            const RealLanes<T> weight = reader.weight(i);
            list.template add<1>(&real, &pixel, &weight, band);
        }
    }
};

// The gradient of weights: one dot product a sample.
template <class V, class T> class WeightGradient : QueryWorker<V, T> {
    typedef QueryWorker<V, T> Base;

  public:
    static int64_t scratch_bytes(const Call &call) {
        return Base::scratch_bytes(call) + Arena::bytes<T>(Sizes(call).room());
    }
    WeightGradient(const Call &c, Arena arena)
        : Base(c, arena), grad_weight(arena.take<T>(this->n.room())), weights_out(c.grad_weights, 3) {}
    void operator()(int64_t item) {
        this->blocks.each(
            item,
            [&](int64_t b, int64_t h, int64_t q, int slot) {
                this->readers[slot].read(b, h, q);
                Nearest<T>::prepare(this->readers[slot], this->rows(b, h), this->buffers[slot]);
            },
            [&](int64_t b, int64_t h, int64_t q, int slot) {
                finish(b, h, q, this->buffers[slot].address, this->buffers[1 - slot].address);
            });
    }

  private:
    T *grad_weight;
    Block<2> weights_out;

    void finish(int64_t b, int64_t h, int64_t q, const int64_t *address, const int64_t *next) {
        const int64_t samples = this->readers[0].samples;
        for (int64_t i = 0; i < samples; ++i) grad_weight[i] = 0; // where there are no channels
        dots<V, T>(address, next, samples, this->n.channels, this->grad_output(b, h, q), grad_weight);
        weights_out.write(offset3(this->call.grad_weights, b, q, h), grad_weight);
    }
};

} // namespace

bool geometric_kernel_attention(const Call &call) {
    const int64_t items = QueryBlocks(Sizes(call)).count();
    return with_types(call, [&](auto *v, auto *t) {
        return parallel<Forward<__typeof__(*v), __typeof__(*t), Nearest>>(call.num_threads, items, call);
    });
}

bool geometric_kernel_attention_backward(const Call &call) {
    const Sizes n(call);
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        bool enough = true;
        if (call.grad_weights.data)
            enough = parallel<WeightGradient<V, T>>(call.num_threads, QueryBlocks(n).count(), call);
        if (enough && call.grad_value.data)
            enough = parallel<ValueGradient<T, Nearest>>(call.num_threads, n.batch * n.heads * call.num_bands, call);
        return enough;
    });
}

} // namespace MXD_ISA
} // namespace mxd
