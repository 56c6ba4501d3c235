// Our operators as an extension of OpenVINO: the nodes that `translations("onnxruntime")` writes, computed by
// libmx_driving.
//
//     cmake -B build -DCMAKE_BUILD_TYPE=Release -Dmx_driving_DIR=$(python -m mx_driving.config --cmakedir) \
//         -DOpenVINO_DIR=$(python -c "import openvino; print(openvino.__path__[0])")/cmake
//     cmake --build build
//
// In Python: core.add_extension("build/libmx_driving_openvino.so"). The last optional inputs of aggregation may be
// left out.

#include <algorithm>
#include <map>
#include <memory>
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/frontend/onnx/extension/conversion.hpp>
#include <openvino/op/op.hpp>
#include <string>
#include <utility>
#include <vector>

#include "mx_driving.h"

namespace {

using Tensors = const mxd_tensor *const *;
using Call = int (*)(Tensors in, const mxd_tensor *out, int axis);
constexpr int THREADS = 1; // OpenVINO does not tell an extension the threads of its stream

// clang-format off
const std::map<std::string, Call> OPERATORS = {
    {"multi_scale_deformable_attn", [](Tensors t, const mxd_tensor *out, int) {
        return mxd_multi_scale_deformable_attn(t[0], t[1], t[2], t[3], t[4], out, THREADS); }},
    {"multi_scale_deformable_attn_with_logits", [](Tensors t, const mxd_tensor *out, int axis) {
        return mxd_multi_scale_deformable_attn_with_logits(t[0], t[1], t[2], t[3], t[4], t[5], out, axis, THREADS); }},
    {"deformable_aggregation", [](Tensors t, const mxd_tensor *out, int) {
        return mxd_deformable_aggregation(t[0], t[1], t[2], t[3], t[4], out, THREADS); }},
    {"deformable_aggregation_with_logits", [](Tensors t, const mxd_tensor *out, int) {
        return mxd_deformable_aggregation_with_logits(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], out, THREADS); }},
    {"geometric_kernel_attention", [](Tensors t, const mxd_tensor *out, int) {
        return mxd_geometric_kernel_attention(t[0], t[1], t[2], t[3], t[4], out, THREADS); }},
    {"geometric_kernel_attention_with_logits", [](Tensors t, const mxd_tensor *out, int) {
        return mxd_geometric_kernel_attention_with_logits(t[0], t[1], t[2], t[3], t[4], t[5], out, THREADS); }},
};
// clang-format on

mxd_tensor described(const ov::Tensor &tensor, const ov::Shape &shape) {
    static const std::map<ov::element::Type, mxd_dtype> dtypes = {
        {ov::element::f32, MXD_FLOAT32}, {ov::element::f16, MXD_FLOAT16}, {ov::element::bf16, MXD_BFLOAT16},
        {ov::element::f64, MXD_FLOAT64}, {ov::element::i32, MXD_INT32},   {ov::element::i64, MXD_INT64}};
    mxd_tensor found{const_cast<void *>(tensor.data()), dtypes.at(tensor.get_element_type()), {}, {}};
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0; stride *= found.shape[i]) {
        found.shape[i] = static_cast<int64_t>(shape[i]);
        found.strides[i] = stride;
    }
    return found;
}

ov::Shape of_levels(const ov::Shape &logits, size_t levels) {
    ov::Shape found(logits.begin(), logits.begin() + 3);
    const size_t samples = ov::shape_size(ov::Shape(logits.begin() + 3, logits.end()));
    found.insert(found.end(), {levels, levels ? samples / levels : 0});
    return found;
}

class Sampling : public ov::op::Op {
  public:
    OPENVINO_OP("Sampling", "mx_driving");
    Sampling() = default;
    Sampling(const ov::OutputVector &inputs, std::string name, std::string axis)
        : Op(inputs), name_(std::move(name)), axis_(std::move(axis)) {
        constructor_validate_and_infer_types();
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector &inputs) const override {
        return std::make_shared<Sampling>(inputs, name_, axis_);
    }

    bool visit_attributes(ov::AttributeVisitor &visitor) override {
        visitor.on_attribute("operator", name_);
        visitor.on_attribute("reference_axis", axis_);
        return true;
    }

    void validate_and_infer_types() override {
        const auto value = get_input_partial_shape(0), queries = get_input_partial_shape(3);
        const auto channels = value.size() == 4 ? value[2] * value[3] : value[2];
        set_output_type(0, get_input_element_type(0), ov::PartialShape{value[0], queries[1], channels});
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector &outputs, const ov::TensorVector &inputs) const override {
        std::vector<mxd_tensor> tensors;
        const mxd_tensor *given[8] = {};
        for (const auto &input : inputs) {
            tensors.push_back(described(input, input.get_shape()));
        }
        if (inputs.size() == 6 &&
            inputs[0].get_shape().size() == 4) { // attention with logits: levels and points are one axis in a graph
            tensors[5] = described(inputs[5], of_levels(inputs[5].get_shape(), inputs[1].get_shape()[0]));
        }
        std::transform(tensors.begin(), tensors.end(), given, [](const mxd_tensor &tensor) { return &tensor; });
        const auto value = inputs[0].get_shape();
        ov::Shape shape{value[0], inputs[3].get_shape()[1], value[2]};
        shape.insert(shape.end(), value.begin() + 3, value.end()); // attention: separate axes of heads and channels
        outputs[0].set_shape({shape[0], shape[1], value.size() == 4 ? value[2] * value[3] : value[2]});
        const auto out = described(outputs[0], shape);
        const int status = OPERATORS.at(name_)(given, &out, axis_ == "point");
        OPENVINO_ASSERT(status == MXD_OK, name_, " must have arguments that fit: status ", status);
        return true;
    }

  private:
    std::string name_, axis_;
};

std::vector<ov::Extension::Ptr> extensions() {
    std::vector<ov::Extension::Ptr> found{std::make_shared<ov::OpExtension<Sampling>>()};
    for (const auto &row : OPERATORS) {
        const auto convert = [name = row.first](const ov::frontend::NodeContext &node) -> ov::OutputVector {
            ov::OutputVector inputs;
            for (size_t i = 0; i < node.get_input_size(); ++i) {
                inputs.push_back(node.get_input(static_cast<int>(i)));
            }
            return std::make_shared<Sampling>(inputs, name, node.get_attribute<std::string>("reference_axis", "level"))
                ->outputs();
        };
        found.push_back(std::make_shared<ov::frontend::onnx::ConversionExtension>(row.first, "mx_driving", convert));
    }
    return found;
}

} // namespace

OPENVINO_CREATE_EXTENSIONS(extensions());
