// Types and functions of CUDA that TVM's text uses, on the host.
#pragma once
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>

namespace host {

inline void demand_all(unsigned mask) {
  if (mask != ~0u) fail("an operation of some lanes: mask %08x", mask);
}

// The nearest T, ties to even, from a double that may be a result rounded to odd.
template <class T>
T nearest(double value);

template <>
inline _Float16 nearest<_Float16>(double value) {
  return static_cast<_Float16>(value);
}

// a + b with the last bit odd where it is not exact: rounded once more, to less than half the
// bits, it is as if rounded once.
inline double add_to_odd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - a, lost = (a - (sum - part)) + (b - part);
  const auto bits = std::bit_cast<uint64_t>(sum);
  if (lost == 0 || (bits & 1)) return sum;
  return std::bit_cast<double>((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

}  // namespace host

struct nv_bfloat16 {
  uint16_t bits;

  nv_bfloat16() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  nv_bfloat16(T value) : bits(rounded(double(value))) {}
  operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }

  static uint16_t rounded(double value) {
    if (std::isnan(value)) return 0x7FFF;
    float near = float(value);  // towards 0, then with the last bit odd if it is not exact
    if (std::fabs(double(near)) > std::fabs(value)) near = std::nextafterf(near, 0.0f);
    auto word = std::bit_cast<uint32_t>(near);
    if (!std::isinf(value) && double(near) != value) word |= 1;
    return uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
  }
};

struct half {
  _Float16 value;

  half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  half(T from) : value(static_cast<_Float16>(from)) {}
  explicit half(_Float16 from) : value(from) {}
  operator float() const { return value; }
};

namespace host {

template <>
inline half nearest<half>(double value) {
  return half(static_cast<_Float16>(value));
}

template <>
inline nv_bfloat16 nearest<nv_bfloat16>(double value) {
  return nv_bfloat16(value);
}

template <class T>
T multiply_add(T a, T b, T c) {  // rounded once
  return nearest<T>(add_to_odd(double(float(a)) * double(float(b)), double(float(c))));
}

}  // namespace host

// float32 has more than twice the bits: its results, rounded again, are as if rounded once.
#define SITS_OPERATORS(T)                                              \
  inline T operator+(T a, T b) { return T(float(a) + float(b)); }      \
  inline T operator-(T a, T b) { return T(float(a) - float(b)); }      \
  inline T operator*(T a, T b) { return T(float(a) * float(b)); }      \
  inline T operator/(T a, T b) { return T(float(a) / float(b)); }      \
  inline bool operator<(T a, T b) { return float(a) < float(b); }      \
  inline bool operator>(T a, T b) { return float(a) > float(b); }      \
  inline bool operator<=(T a, T b) { return float(a) <= float(b); }    \
  inline bool operator>=(T a, T b) { return float(a) >= float(b); }    \
  inline bool operator==(T a, T b) { return float(a) == float(b); }    \
  inline bool operator!=(T a, T b) { return float(a) != float(b); }    \
  inline bool __hgt(T a, T b) { return float(a) > float(b); }          \
  inline bool __hlt(T a, T b) { return float(a) < float(b); }          \
  inline T __hfma(T a, T b, T c) { return host::multiply_add(a, b, c); }
SITS_OPERATORS(half)
SITS_OPERATORS(nv_bfloat16)
#undef SITS_OPERATORS

using __half = half;
using __nv_bfloat16 = nv_bfloat16;
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline float __bfloat162float(nv_bfloat16 x) { return x; }
inline nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
inline nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
inline half hexp(half x) { return half(expf(x)); }
inline half hsqrt(half x) { return half(sqrtf(x)); }

#define SITS_VECTORS(T, name)                                                       \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                \
  struct name##3 { T x, y, z; };                                                    \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                        \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SITS_VECTORS(int8_t, char)
SITS_VECTORS(uint8_t, uchar)
SITS_VECTORS(int16_t, short)
SITS_VECTORS(uint16_t, ushort)
SITS_VECTORS(int32_t, int)
SITS_VECTORS(uint32_t, uint)
SITS_VECTORS(int64_t, longlong)
SITS_VECTORS(uint64_t, ulonglong)
SITS_VECTORS(float, float)
SITS_VECTORS(double, double)
#undef SITS_VECTORS

struct alignas(4) half2 { half x, y; };
struct alignas(4) nv_bfloat162 { nv_bfloat16 x, y; };
using __half2 = half2;
using __nv_bfloat162 = nv_bfloat162;
inline half2 make_half2(half x, half y) { return {x, y}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }

constexpr float CUDART_INF_F = std::numeric_limits<float>::infinity();
constexpr float CUDART_NAN_F = std::numeric_limits<float>::quiet_NaN();

// CUDA's min and max of a number and NaN are the number.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
#define SITS_CHOICES(T)                              \
  inline T max(T a, T b) { return a < b ? b : a; }   \
  inline T min(T a, T b) { return b < a ? b : a; }
SITS_CHOICES(int32_t)
SITS_CHOICES(uint32_t)
SITS_CHOICES(int64_t)
SITS_CHOICES(uint64_t)
#undef SITS_CHOICES

namespace host {

template <class T>
struct Shuffle {
  T value;
  int source;

  static void perform(Shuffle** lanes) {
    T values[LANES];
    for (int i = 0; i < LANES; ++i) values[i] = lanes[i]->value;
    for (int i = 0; i < LANES; ++i) lanes[i]->value = values[lanes[i]->source];
  }
};

// The value of the lane `source` if that is from `first` to `last`, else its own value.
template <class T>
T shuffle(unsigned mask, T value, int source, int first, int last, int line) {
  const bool inside = first <= source && source <= last;
  current->line = line;
  demand_all(mask);
  Shuffle<T> operands{value, inside ? source : current->number % LANES};
  together("shuffle", operands, Shuffle<T>::perform);
  return operands.value;
}

}  // namespace host

// In groups of `width` lanes. A butterfly may reach into groups before its own.
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, int line = __builtin_LINE()) {
  const int own = host::current->number % host::LANES, first = own & -width;
  return host::shuffle(mask, value, first | (lane & (width - 1)), 0, 31, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
  const int own = host::current->number % host::LANES;
  return host::shuffle(mask, value, own ^ bits, 0, own | (width - 1), line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, int width = 32, int line = __builtin_LINE()) {
  const int own = host::current->number % host::LANES;
  return host::shuffle(mask, value, own + by, 0, own | (width - 1), line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, int width = 32, int line = __builtin_LINE()) {
  const int own = host::current->number % host::LANES;
  return host::shuffle(mask, value, own - by, own & -width, 31, line);
}
