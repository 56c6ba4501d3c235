#include "difference.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <limits>

namespace compare {
namespace {

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Half an ulp at 1.
double rounding_of(Dtype dtype) {
    switch (dtype) {
    case MXD_FLOAT64: return 0x1p-53;
    case MXD_FLOAT32: return 0x1p-24;
    case MXD_FLOAT16: return 0x1p-11;
    default: return 0x1p-8;
    }
}

double largest(const std::vector<double> &numbers) {
    double most = 1;
    for (double number : numbers)
        if (std::isfinite(number)) most = std::max(most, std::fabs(number));
    return most;
}

// What one step of a 16-bit result may hide.
double step_of(Dtype dtype, double a, double b) {
    if (dtype == MXD_FLOAT64 || dtype == MXD_FLOAT32) return 0;
    const double least = dtype == MXD_FLOAT16 ? 0x1p-24 : 0;
    return 2 * rounding_of(dtype) * std::max(std::fabs(a), std::fabs(b)) + least;
}

std::vector<double> numbers_of(const Argument &result) {
    std::vector<double> numbers;
    if (!result.tensor) return numbers;
    numbers.reserve(size_t(result.tensor->count()));
    for (int64_t i = 0; i < result.tensor->count(); ++i) numbers.push_back(result.tensor->get(i));
    return numbers;
}

} // namespace

Results results_of(Call &call) {
    Results results{call.run(), call.fingerprint(), {}};
    for (const Argument &result : call.results()) results.numbers.push_back(numbers_of(result));
    return results;
}

void Comparison::report(const std::string &who, const Case &c, const std::string &what) {
    ++found;
    std::printf("FINDING case %" PRId64 ", %s: %s [%s]\n", c.number, who.c_str(), what.c_str(), text_of(c).c_str());
}

void Comparison::compare(const std::string &who, const Case &c, const Argument &result, const std::vector<double> &want,
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
    std::snprintf(text, sizeof text, " must be %.9g at %zu of %zu; got %.9g, %.3g ulps away", want[place], place, want.size(),
                  got[place], most);
    report(who, c, result.name + text);
}

void Comparison::add(const std::string &who, const Call &call, const Results &want, const Results &got) {
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

void Comparison::print_summary() const {
    for (const auto &[what, w] : worst)
        std::printf("%s: at most %.3g ulps (case %" PRId64 ") in %" PRId64 " numbers\n", what.c_str(), w.ulps, w.number,
                    w.elements);
}

} // namespace compare
