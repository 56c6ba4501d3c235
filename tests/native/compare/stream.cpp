#include "stream.h"

#include <cstdlib>

namespace compare {
namespace {

template <class T> void write_all(std::FILE *to, const T *from, size_t count) {
    if (std::fwrite(from, sizeof(T), count, to) == count) return;
    std::perror("compare: results cannot be written");
    std::exit(3);
}
template <class T> void write_one(std::FILE *to, T number) { write_all(to, &number, 1); }

template <class T> void read_all(std::FILE *from, T *to, size_t count) {
    if (std::fread(to, sizeof(T), count, from) == count) return;
    std::fprintf(stderr, "compare: the results end in the middle of a case\n");
    std::exit(3);
}
template <class T> T read_one(std::FILE *from) {
    T number;
    read_all(from, &number, 1);
    return number;
}

} // namespace

void write(std::FILE *to, int64_t number, const Results &results) {
    write_one(to, number);
    write_one(to, int64_t(results.status));
    write_one(to, results.fingerprint);
    write_one(to, uint64_t(results.numbers.size()));
    for (const std::vector<double> &numbers : results.numbers) {
        write_one(to, uint64_t(numbers.size()));
        write_all(to, numbers.data(), numbers.size());
    }
}

bool read(std::FILE *from, int64_t &number, Results &results) {
    if (std::fread(&number, sizeof number, 1, from) != 1) return false;
    results.status = int(read_one<int64_t>(from));
    results.fingerprint = read_one<uint64_t>(from);
    results.numbers.resize(read_one<uint64_t>(from));
    for (std::vector<double> &numbers : results.numbers) {
        numbers.resize(read_one<uint64_t>(from));
        read_all(from, numbers.data(), numbers.size());
    }
    return true;
}

} // namespace compare
