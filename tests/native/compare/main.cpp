// Random calls of all operators, both directions: each instruction set against baseline, or this library's results
// against those of another compiler or processor.
//
//     compare [FIRST [COUNT [SETS]]]        cases FIRST to FIRST + COUNT - 1; SETS: "baseline,avx2,avx512", default all
//     compare write FIRST COUNT > results   baseline's results
//     compare read < results                this library's sets against those results
//
// A line FINDING is a difference; it names its case, which `compare CASE` repeats. Exits with 1 if there is one.
#include "difference.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace compare;
using Sets = std::vector<std::string>;

char working_on[600] = "no case yet";

// The text of the case that a signal ends, and no more: nothing else may be called here.
void say_case(int signal) {
    std::fprintf(stderr, "FINDING signal %d in case %s\n", signal, working_on);
    std::_Exit(1);
}

void note(const std::string &set, const Case &c) {
    std::snprintf(working_on, sizeof working_on, "%lld, %s [%s]", (long long)c.number, set.c_str(), text_of(c).c_str());
}

Sets sets_named(const std::string &list) {
    Sets sets;
    for (size_t from = 0, to; from <= list.size(); from = to + 1) {
        to = std::min(list.find(',', from), list.size());
        sets.push_back(list.substr(from, to - from));
        if (mxd_use_isa(sets.back().c_str()) == 0) continue;
        std::fprintf(stderr, "compare: SETS must be of this library and processor; got %s\n", sets.back().c_str());
        std::exit(2);
    }
    return sets;
}

Sets all_sets() {
    Sets sets;
    for (const char *set : {"baseline", "avx2", "avx512"})
        if (mxd_use_isa(set) == 0) sets.push_back(set);
    return sets;
}

Results run(const std::string &set, Call &call) {
    note(set, call.sizes());
    mxd_use_isa(set.c_str());
    return call.run();
}

// Results as bytes, for a program of another compiler or processor of the same byte order.
template <class T> void put(const T *from, size_t count) {
    if (std::fwrite(from, sizeof(T), count, stdout) == count) return;
    std::perror("compare: results cannot be written");
    std::exit(3);
}
template <class T> T get() {
    T number;
    if (std::fread(&number, sizeof(T), 1, stdin) == 1) return number;
    std::fprintf(stderr, "compare: the results end in the middle of a case\n");
    std::exit(3);
}

int finish(const Comparison &comparison, int64_t cases, const Sets &sets) {
    comparison.print_summary();
    std::string names;
    for (const std::string &set : sets) names += (names.empty() ? "" : ", ") + set;
    std::printf("compared: %lld calls on %s, %lld findings\n", (long long)(2 * cases), names.c_str(),
                (long long)comparison.findings());
    return comparison.findings() ? 1 : 0;
}

int compare_sets(int64_t first, int64_t count, const Sets &sets) {
    Comparison comparison;
    for (int64_t number = first; number < first + count; ++number) {
        Call call(number);
        const Results want = run("baseline", call);
        for (const std::string &set : sets)
            if (set != "baseline") comparison.add(set, call, want, run(set, call));
    }
    return finish(comparison, count, sets);
}

int write_results(int64_t first, int64_t count) {
    for (int64_t number = first; number < first + count; ++number) {
        Call call(number);
        const Results results = run("baseline", call);
        const uint64_t head[] = {uint64_t(number), uint64_t(results.status), results.fingerprint, results.numbers.size()};
        put(head, 4);
        for (const std::vector<double> &numbers : results.numbers) {
            const uint64_t size = numbers.size();
            put(&size, 1);
            put(numbers.data(), size);
        }
    }
    return 0;
}

int read_results() {
    const Sets sets = all_sets();
    Comparison comparison;
    int64_t number, cases = 0;
    for (; std::fread(&number, sizeof number, 1, stdin) == 1; ++cases) {
        Results want{get<int64_t>(), get<uint64_t>(), {}};
        want.numbers.resize(get<uint64_t>());
        for (std::vector<double> &numbers : want.numbers) {
            numbers.resize(get<uint64_t>());
            for (double &each : numbers) each = get<double>();
        }
        Call call(number);
        for (const std::string &set : sets) comparison.add(set, call, want, run(set, call));
    }
    return finish(comparison, cases, sets);
}

} // namespace

int main(int count, char **arguments) {
    for (const int signal : {SIGSEGV, SIGILL, SIGFPE, SIGABRT}) std::signal(signal, say_case);
    const std::string verb = count > 1 ? arguments[1] : "";
    const int skip = verb == "write" || verb == "read";
    const auto number = [&](int place, int64_t otherwise) {
        return place + skip < count ? std::atoll(arguments[place + skip]) : otherwise;
    };
    if (verb == "read") return read_results();
    if (verb == "write") return write_results(number(1, 0), number(2, 1));
    const Sets sets = count > 3 ? sets_named(arguments[3]) : all_sets();
    return compare_sets(number(1, 0), number(2, 1), sets);
}
