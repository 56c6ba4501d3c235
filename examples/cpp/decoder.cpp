// Runs what export_decoder.py wrote, in a program without Python: ./decoder FOLDER
//
// Nothing here names mx_driving: the program is linked with mx_driving::torch, which registers the operators when it starts.
#include <cstdio>
#include <string>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/import.h>

namespace {

bool compare(const char *what, const at::Tensor &found, const at::Tensor &expected) {
    const bool same = found.equal(expected);
    std::printf("%s: %lld boxes, %s\n", what, static_cast<long long>(found.size(1)),
                same ? "the bits of Python" : "other numbers than in Python");
    return same;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    const std::string folder = std::string(argv[1]) + "/";
    const c10::InferenceMode inference;
    const torch::jit::Module example = torch::jit::load(folder + "example.pt");
    const auto buffer = [&](const char *name) { return example.attr(name).toTensor(); };
    torch::inductor::AOTIModelPackageLoader package(folder + "decoder.pt2");
    torch::jit::Module traced = torch::jit::load(folder + "decoder.pt");
    const at::Tensor of_package = package.run({buffer("queries"), buffer("memory")}).at(0);
    const at::Tensor of_trace = traced.forward({buffer("queries"), buffer("memory")}).toTensor();
    const bool same = compare("AOTInductor", of_package, buffer("of_package"));
    return compare("traced", of_trace, buffer("of_trace")) && same ? 0 : 1;
}
