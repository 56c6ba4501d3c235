// A case with all its tensors, and both directions of its operator.
#pragma once

#include "inputs.h"

namespace compare {

class Call {
  public:
    explicit Call(int64_t number);

    const Case &sizes() const { return c; }
    // Clears the results and calls both functions; returns the first status that is not MXD_OK.
    int run();
    // The output, then the gradients.
    const std::vector<Argument> &results() const { return written; }
    // Differs where the inputs of two programs differ.
    uint64_t fingerprint() const;

  private:
    Random random;
    const Case c;
    Inputs inputs;
    std::unique_ptr<Tensor> grad_output;
    std::vector<Argument> written;

    std::unique_ptr<Tensor> make_result(Dtype dtype, std::vector<int64_t> shape);
    int run(const std::string &name, const std::vector<mxd_tensor> &tensors) const;
};

} // namespace compare
