// SplitMix64: the same numbers with every compiler and C++ library.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace compare {

class Random {
  public:
    explicit Random(int64_t seed) : state(uint64_t(seed) * 0xd1342543de82ef95) {}

    int64_t below(int64_t end) { return int64_t(next() % uint64_t(end)); }
    bool one_in(int n) { return below(n) == 0; }
    double between(double from, double to) { return from + (to - from) * (double(next() >> 11) * 0x1p-53); }
    template <class T> T pick(std::initializer_list<T> choices) { return choices.begin()[below(int64_t(choices.size()))]; }

    int64_t divisor_of(int64_t number) {
        int64_t divisor;
        do divisor = 1 + below(number);
        while (number % divisor);
        return divisor;
    }

  private:
    uint64_t state;

    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
};

} // namespace compare
