// A case with all its tensors, and how far its results are from those of another instruction set, compiler or processor.
#pragma once

#include "inputs.h"

#include <cinttypes>
#include <map>

namespace compare {

struct Results {
    int64_t status;
    uint64_t fingerprint;                     // of the inputs
    std::vector<std::vector<double>> numbers; // of each result; empty: not wanted
};

inline mxd_tensor described(const Argument &argument) {
    return argument.tensor ? argument.tensor->described() : mxd_tensor{nullptr, MXD_NOT_GIVEN, {}, {}};
}

class Call {
  public:
    explicit Call(int64_t number) : random(number), c(case_of(number, random)), inputs(Builder(c, random).build()) {
        const Layout layout = c.strided ? random.pick({Layout::ANY, Layout::EXPANDED}) : Layout::CONTIGUOUS;
        const Shape shape = c.aggregates() ? Shape{c.bs, c.queries, c.channels} : Shape{c.bs, c.queries, c.heads, c.channels};
        grad_output = std::make_unique<Tensor>(draw_floating(c, random), shape, layout, random);
        grad_output->fill(-1, 1, random);
        grad_output->forbid_writing();
        written.push_back({"output", make_result(inputs.arguments[0].tensor->dtype, shape), false});
        unsigned wanted = c.wanted;
        for (const Argument &input : inputs.arguments) {
            if (input.tensor) input.tensor->forbid_writing();
            if (!input.has_gradient) continue;
            auto gradient = wanted & 1 ? make_result(draw_floating(c, random), input.tensor->shape) : nullptr;
            written.push_back({"gradient of " + input.name, std::move(gradient), false});
            wanted >>= 1;
        }
    }

    const Case &sizes() const { return c; }
    // The output, then the gradients.
    const std::vector<Argument> &results() const { return written; }

    // Clears the results and calls both directions on the instruction set in use.
    Results run() {
        Results results{0, fingerprint(), {}};
        for (const Argument &result : written)
            if (result.tensor) result.tensor->clear();
        std::vector<mxd_tensor> forward, backward{grad_output->described()};
        for (const Argument &input : inputs.arguments) forward.push_back(described(input));
        backward.insert(backward.end(), forward.begin(), forward.end());
        forward.push_back(described(written[0]));
        for (size_t i = 1; i < written.size(); ++i) backward.push_back(described(written[i]));
        const std::string name = name_of(c.op);
        results.status = run(name, forward);
        if (results.status == MXD_OK) results.status = run(name + "_backward", backward);
        for (const Argument &result : written) {
            results.numbers.emplace_back();
            for (int64_t i = 0; result.tensor && i < result.tensor->count(); ++i)
                results.numbers.back().push_back(result.tensor->get(i));
        }
        return results;
    }

  private:
    Random random;
    const Case c;
    Inputs inputs;
    std::unique_ptr<Tensor> grad_output;
    std::vector<Argument> written;

    std::unique_ptr<Tensor> make_result(Dtype dtype, Shape shape) {
        const Layout layout = c.strided ? random.pick({Layout::LAST_AXIS_STAYS, Layout::ANY}) : Layout::CONTIGUOUS;
        return std::make_unique<Tensor>(dtype, std::move(shape), layout, random);
    }
    int run(const std::string &name, const std::vector<mxd_tensor> &tensors) const {
        const int64_t option = inputs.reference_axis;
        mxd_set_work_of_a_thread(1); // as many threads as are named, however little there is to do
        return mxd_run(name.c_str(), tensors.data(), int(tensors.size()), &option, c.threads);
    }
    // Differs where the inputs of two programs differ.
    uint64_t fingerprint() const {
        uint64_t hash = 0xcbf29ce484222325;
        const auto mix = [&](const Tensor &tensor) {
            for (int64_t i = 0; i < tensor.count(); ++i) {
                uint64_t bits;
                const double number = tensor.get(i);
                std::memcpy(&bits, &number, sizeof bits);
                hash = (hash ^ bits) * 0x100000001b3 + (hash >> 47);
            }
        };
        for (const Argument &input : inputs.arguments)
            if (input.tensor) mix(*input.tensor);
        mix(*grad_output);
        return hash;
    }
};

// An ulp of float32, of float64 where all tensors have that, at the largest number of a result, and at 1 or more:
// inputs are below 1, and a result that cancels keeps the errors of its terms. Results of 16 bits may be one number
// apart. Seen in 24,000 cases: 62.
constexpr double MOST_ULPS = 128;

inline bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Half an ulp at 1.
inline double rounding_of(Dtype dtype) {
    switch (dtype) {
    case MXD_FLOAT64: return 0x1p-53;
    case MXD_FLOAT32: return 0x1p-24;
    case MXD_FLOAT16: return 0x1p-11;
    default: return 0x1p-8;
    }
}

inline double largest(const std::vector<double> &numbers) {
    double most = 1;
    for (double number : numbers)
        if (std::isfinite(number)) most = std::max(most, std::fabs(number));
    return most;
}

// What one step of a 16-bit result may hide.
inline double step_of(Dtype dtype, double a, double b) {
    if (dtype == MXD_FLOAT64 || dtype == MXD_FLOAT32) return 0;
    const double least = dtype == MXD_FLOAT16 ? 0x1p-24 : 0;
    return 2 * rounding_of(dtype) * std::max(std::fabs(a), std::fabs(b)) + least;
}

class Comparison {
  public:
    // A line to stdout for each result of the last run of `call` that is too far from `want`, or around which a byte
    // was written. `who`: whose results they are.
    void add(const std::string &who, const Call &call, const Results &want, const Results &got) {
        const Case &c = call.sizes();
        if (want.fingerprint != got.fingerprint) return report(who, c, "the inputs differ: two programs of other sources");
        if (want.status != MXD_OK || got.status != MXD_OK)
            return report(who, c, "status must be 0; got " + std::to_string(got.status ? got.status : want.status));
        for (size_t i = 0; i < want.numbers.size(); ++i) {
            const Argument &result = call.results()[i];
            if (!result.tensor) continue;
            compare(who, c, result, want.numbers[i], got.numbers[i]);
            if (!result.tensor->gaps_intact()) report(who, c, "a byte beside " + result.name + " was written");
        }
    }
    int64_t findings() const { return found; }
    // A line for each result: how far it was from the other one at most, and in which case.
    void print_summary() const {
        for (const auto &[what, w] : worst)
            std::printf("%s: at most %.3g ulps (case %" PRId64 ") in %" PRId64 " numbers\n", what.c_str(), w.ulps, w.number,
                        w.elements);
    }

  private:
    struct Worst {
        double ulps = 0;
        int64_t number = 0, elements = 0;
    };
    std::map<std::string, Worst> worst;
    int64_t found = 0;

    void report(const std::string &who, const Case &c, const std::string &what) {
        ++found;
        std::printf("FINDING case %" PRId64 ", %s: %s [%s]\n", c.number, who.c_str(), what.c_str(), text_of(c).c_str());
    }
    void compare(const std::string &who, const Case &c, const Argument &result, const std::vector<double> &want,
                 const std::vector<double> &got) {
        const bool wide = c.dtype == MXD_FLOAT64 && !c.mixed;
        const double ulp = 2 * rounding_of(wide ? MXD_FLOAT64 : MXD_FLOAT32) * largest(want);
        double most = 0;
        size_t place = 0;
        for (size_t i = 0; i < want.size(); ++i) {
            if (same(want[i], got[i])) continue;
            const bool finite = std::isfinite(want[i]) && std::isfinite(got[i]);
            const double apart = std::fabs(want[i] - got[i]) - step_of(result.tensor->dtype, want[i], got[i]);
            const double ulps = finite ? apart / ulp : std::numeric_limits<double>::infinity();
            if (ulps > most) most = ulps, place = i;
        }
        Worst &so_far = worst[who + " " + name_of(c.op) + ", " + result.name];
        so_far.elements += int64_t(want.size());
        if (most > so_far.ulps) so_far.ulps = most, so_far.number = c.number;
        if (most <= MOST_ULPS) return;
        char text[200];
        std::snprintf(text, sizeof text, " must be %.9g at %zu of %zu; got %.9g, %.3g ulps away", want[place], place,
                      want.size(), got[place], most);
        report(who, c, result.name + text);
    }
};

} // namespace compare
