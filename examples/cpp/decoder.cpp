// Runs the files that export_decoder.py wrote, in a program without Python: ./decoder FOLDER
//
// The source does not name mx_driving. CMake links mx_driving::torch, which registers the operators when the program starts.
#include <cstdio>
#include <exception>
#include <string>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/import.h>

namespace {

bool compare(const char *what, const at::Tensor &boxes, const at::Tensor &expected) {
    const bool same = boxes.equal(expected);
    std::printf("%s: %lld boxes, %s\n", what, static_cast<long long>(boxes.size(1)),
                same ? "the bits of Python" : "other numbers than in Python");
    return same;
}

bool run(const std::string &folder) {
    const c10::InferenceMode inference;
    const torch::jit::Module example = torch::jit::load(folder + "/example.pt");
    const auto buffer = [&](const char *name) { return example.attr(name).toTensor(); };
    torch::inductor::AOTIModelPackageLoader package(folder + "/decoder.pt2");
    torch::jit::Module traced = torch::jit::load(folder + "/decoder.pt");
    const at::Tensor of_package = package.run({buffer("queries"), buffer("memory")}).at(0);
    const at::Tensor of_trace = traced.forward({buffer("queries"), buffer("memory")}).toTensor();
    const bool same = compare("AOTInductor", of_package, buffer("of_package"));
    return compare("traced", of_trace, buffer("of_trace")) && same;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    try {
        return run(argv[1]) ? 0 : 1;
    } catch (const c10::Error &error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what_without_backtrace());
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    }
    return 1;
}
