#include "call.h"

#include <cstring>
#include <utility>

namespace compare {
namespace {

// Descriptions of tensors, and the pointers to them that the C interface takes.
struct Described {
    std::vector<mxd_tensor> tensors;
    std::vector<const mxd_tensor *> pointers;

    explicit Described(const std::vector<Argument> &arguments) {
        for (const Argument &a : arguments) tensors.push_back(a.tensor ? a.tensor->described() : mxd_tensor{});
        for (size_t i = 0; i < arguments.size(); ++i) pointers.push_back(arguments[i].tensor ? &tensors[i] : nullptr);
    }
};

uint64_t mixed_with(uint64_t hash, double number) {
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return (hash ^ bits) * 0x100000001b3 + (hash >> 47);
}

} // namespace

Call::Call(int64_t number) : random(number), c(case_of(number, random)), inputs(inputs_of(c, random)) {
    const Layout layout = c.strided ? random.pick({Layout::ANY, Layout::EXPANDED}) : Layout::CONTIGUOUS;
    grad_output = std::make_unique<Tensor>(draw_floating(c, random), shape_of_output(c), layout, random);
    grad_output->fill(-1, 1, random);
    grad_output->forbid_writing();
    written.push_back({"output", make_result(inputs.arguments[0].tensor->dtype, shape_of_output(c)), false});
    unsigned wanted = c.wanted;
    for (const Argument &input : inputs.arguments) {
        if (input.tensor) input.tensor->forbid_writing();
        if (!input.has_gradient) continue;
        auto gradient = wanted & 1 ? make_result(draw_floating(c, random), input.tensor->shape) : nullptr;
        written.push_back({"gradient of " + input.name, std::move(gradient), false});
        wanted >>= 1;
    }
}

std::unique_ptr<Tensor> Call::make_result(Dtype dtype, std::vector<int64_t> shape) {
    const Layout layout = c.strided ? random.pick({Layout::LAST_AXIS_STAYS, Layout::ANY}) : Layout::CONTIGUOUS;
    return std::make_unique<Tensor>(dtype, std::move(shape), layout, random);
}

int Call::run() {
    for (const Argument &result : written)
        if (result.tensor) result.tensor->clear();
    const Described in(inputs.arguments), out(written);
    const mxd_tensor grad = grad_output->described();
    const int status = forward(in.pointers.data(), out.pointers[0]);
    return status == MXD_OK ? backward(&grad, in.pointers.data(), out.pointers.data() + 1) : status;
}

int Call::forward(const mxd_tensor *const *in, const mxd_tensor *out) const {
    switch (c.op) {
    case MULTI_SCALE: return mxd_multi_scale_deformable_attn(in[0], in[1], in[2], in[3], in[4], out, c.threads);
    case MULTI_SCALE_LOGITS:
        return mxd_multi_scale_deformable_attn_with_logits(in[0], in[1], in[2], in[3], in[4], in[5], out, inputs.reference_axis,
                                                           c.threads);
    case AGGREGATION: return mxd_deformable_aggregation(in[0], in[1], in[2], in[3], in[4], out, c.threads);
    case AGGREGATION_LOGITS:
        return mxd_deformable_aggregation_with_logits(in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7], out, c.threads);
    case GEOMETRIC: return mxd_geometric_kernel_attention(in[0], in[1], in[2], in[3], in[4], out, c.threads);
    default: return mxd_geometric_kernel_attention_with_logits(in[0], in[1], in[2], in[3], in[4], in[5], out, c.threads);
    }
}

int Call::backward(const mxd_tensor *grad, const mxd_tensor *const *in, const mxd_tensor *const *out) const {
    switch (c.op) {
    case MULTI_SCALE:
        return mxd_multi_scale_deformable_attn_backward(grad, in[0], in[1], in[2], in[3], in[4], out[0], out[1], out[2],
                                                        c.threads);
    case MULTI_SCALE_LOGITS:
        return mxd_multi_scale_deformable_attn_with_logits_backward(grad, in[0], in[1], in[2], in[3], in[4], in[5], out[0],
                                                                    out[1], out[2], out[3], inputs.reference_axis, c.threads);
    case AGGREGATION:
        return mxd_deformable_aggregation_backward(grad, in[0], in[1], in[2], in[3], in[4], out[0], out[1], out[2], c.threads);
    case AGGREGATION_LOGITS:
        return mxd_deformable_aggregation_with_logits_backward(grad, in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7],
                                                               out[0], out[1], out[2], out[3], c.threads);
    case GEOMETRIC:
        return mxd_geometric_kernel_attention_backward(grad, in[0], in[1], in[2], in[3], in[4], out[0], out[1], c.threads);
    default:
        return mxd_geometric_kernel_attention_with_logits_backward(grad, in[0], in[1], in[2], in[3], in[4], in[5], out[0],
                                                                   out[1], c.threads);
    }
}

uint64_t Call::fingerprint() const {
    uint64_t hash = 0xcbf29ce484222325;
    const auto mix = [&](const Tensor &tensor) {
        for (int64_t i = 0; i < tensor.count(); ++i) hash = mixed_with(hash, tensor.get(i));
    };
    for (const Argument &input : inputs.arguments)
        if (input.tensor) mix(*input.tensor);
    mix(*grad_output);
    return hash;
}

} // namespace compare
