#include "call.h"

#include <cstring>
#include <utility>

namespace compare {
namespace {

mxd_tensor described(const Argument &argument) {
    return argument.tensor ? argument.tensor->described() : mxd_tensor{nullptr, MXD_NOT_GIVEN, {}, {}};
}

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
    std::vector<mxd_tensor> in, out;
    for (const Argument &input : inputs.arguments) in.push_back(described(input));
    for (const Argument &result : written) out.push_back(described(result));
    std::vector<mxd_tensor> forward = in, backward = out;
    forward.push_back(out[0]);
    backward[0] = grad_output->described();
    backward.insert(backward.begin() + 1, in.begin(), in.end());
    const std::string name = name_of(c.op);
    const int status = run(name, forward);
    return status == MXD_OK ? run(name + "_backward", backward) : status;
}

int Call::run(const std::string &name, const std::vector<mxd_tensor> &tensors) const {
    const int64_t option = inputs.reference_axis;
    mxd_set_work_of_a_thread(1); // as many threads as are named, however little there is to do
    return mxd_run(name.c_str(), tensors.data(), int(tensors.size()), &option, c.threads);
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
