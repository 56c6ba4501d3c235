// Numbers of every dtype as double and back, rounded to the nearest, half to even; and random numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

namespace compare {

template <class T> T load(const char *from) {
    T number;
    std::memcpy(&number, from, sizeof(T));
    return number;
}
template <class T> void store(char *to, T number) { std::memcpy(to, &number, sizeof(T)); }

inline float from_bfloat16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    return load<float>(reinterpret_cast<const char *>(&wide));
}
inline uint16_t to_bfloat16(float number) {
    const uint32_t bits = load<uint32_t>(reinterpret_cast<const char *>(&number));
    if (std::isnan(number)) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Half precision: 1 bit of sign, 5 of exponent, 10 of mantissa. Numbers below 2^-14 are multiples of 2^-24.
inline double from_float16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
    return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}
inline uint16_t to_float16(double number) {
    if (std::isnan(number)) return 0x7e00;
    const uint16_t sign = std::signbit(number) ? 0x8000 : 0;
    const double size = std::fabs(number);
    if (size >= 65520) return sign | 0x7c00;
    if (size == 0) return sign;
    int exponent = 0;
    std::frexp(size, &exponent);
    exponent = std::max(exponent, -13);
    // a mantissa of 2048 carries over into the exponent by itself
    const auto mantissa = uint16_t(std::nearbyint(std::ldexp(size, 11 - exponent)));
    return uint16_t(sign | (mantissa + ((exponent + 13) << 10)));
}

// The nearest that T has, where a conversion would be undefined.
template <class T> T to_integer(double number) {
    constexpr double BEYOND = -2.0 * double(std::numeric_limits<T>::min() / 2);
    if (std::isnan(number)) return 0;
    if (number >= BEYOND) return std::numeric_limits<T>::max();
    return number < -BEYOND ? std::numeric_limits<T>::min() : T(number);
}

// SplitMix64: the same numbers with every compiler and C++ library.
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
