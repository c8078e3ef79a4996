// Instructions of the PTX ISA (8.7) on the host: outputs first, operands in the order of PTX.
#pragma once

namespace ptx {

using host::LANES;

inline int64_t shared_offset(uint32_t address) {
  return int64_t(address) - host::Shared::BASE;
}
inline host::Place shared(uint32_t address) {
  return {host::shared.data.data() + shared_offset(address), nullptr, true};
}
inline host::Place global(const Ptr<void>& pointer) {
  if (!pointer.place.array) host::fail("not an address of global memory");
  return pointer.place;
}

// Tensor cores: "Matrix Fragments for mma.m16n8k16/k32/k64". All three have, of 32 / `bits`
// elements in a register: lane 4 g + t holds row g (or g + 8) of A, column g of B.

template <class T>
struct Pairs {
  static constexpr int COUNT = 2;
  using Sum = double;
  static double get(uint32_t word, int i) {
    return float(std::bit_cast<T>(uint16_t(word >> 16 * i)));
  }
  static double sum_from(float c) { return c; }
  static float rounded(double sum) { return float(sum); }
};

template <int BITS, bool SIGNED>
struct Integers {
  static constexpr int COUNT = 32 / BITS;
  using Sum = int64_t;
  static int64_t get(uint32_t word, int i) {
    const uint32_t left = word << (32 - BITS - BITS * i);
    return SIGNED ? int64_t(int32_t(left) >> (32 - BITS)) : int64_t(left >> (32 - BITS));
  }
  static int64_t sum_from(uint32_t c) { return int32_t(c); }
  static uint32_t rounded(int64_t sum) { return uint32_t(sum); }  // wraps
};

template <class A, class B, class C>
struct Mma {
  uint32_t a[4], b[2];
  C c[4];

  static void perform(Mma** lanes) {
    constexpr int E = A::COUNT, K = 8 * E;
    using Sum = typename A::Sum;
    Sum left[16][K], right[K][8];
    for (int lane = 0; lane < LANES; ++lane)
      for (int e = 0; e < E; ++e) {
        const int g = lane / 4, k = lane % 4 * E + e;
        for (int r = 0; r < 4; ++r)
          left[g + r % 2 * 8][k + r / 2 * 4 * E] = A::get(lanes[lane]->a[r], e);
        for (int r = 0; r < 2; ++r) right[k + r * 4 * E][g] = B::get(lanes[lane]->b[r], e);
      }
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        Sum sum = A::sum_from(lanes[lane]->c[i]);
        for (int k = 0; k < K; ++k) sum += left[row][k] * right[k][column];
        lanes[lane]->c[i] = A::rounded(sum);
      }
  }
};

template <class A, class B, class C>
void mma(C& d0, C& d1, C& d2, C& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
         uint32_t b0, uint32_t b1, C c0, C c1, C c2, C c3) {
  Mma<A, B, C> operands{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
  host::together("mma", operands, Mma<A, B, C>::perform);
  d0 = operands.c[0], d1 = operands.c[1], d2 = operands.c[2], d3 = operands.c[3];
}

// Lanes 8 i to 8 i + 7 address the rows of matrix i; a lane gets two elements of each matrix.
template <int COUNT, bool TRANSPOSED>
struct Matrices {
  uint32_t address, words[COUNT];

  static void perform(Matrices** lanes) {
    uint16_t rows[COUNT][8][8];
    for (int lane = 0; lane < 8 * COUNT; ++lane) {
      host::current = &host::block.lanes[host::current->warp * LANES + lane];
      host::shared.read(rows[lane / 8][lane % 8], shared_offset(lanes[lane]->address), 16);
    }
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < COUNT; ++i) {
        const int g = lane / 4, t = lane % 4 * 2;
        const uint16_t low = TRANSPOSED ? rows[i][t][g] : rows[i][g][t];
        const uint16_t high = TRANSPOSED ? rows[i][t + 1][g] : rows[i][g][t + 1];
        lanes[lane]->words[i] = low | uint32_t(high) << 16;
      }
  }
};

template <int COUNT, bool TRANSPOSED, class... Words>
void ldmatrix(uint32_t address, Words&... words) {
  static_assert(sizeof...(words) == COUNT);
  Matrices<COUNT, TRANSPOSED> operands{address, {}};
  host::together("ldmatrix", operands, decltype(operands)::perform);
  int i = 0;
  ((words = operands.words[i++]), ...);
}
// All lanes are there: `together` demands it.
inline void activemask(uint32_t& d, int line = __builtin_LINE()) {
  host::current->line = line;
  host::together<uint32_t>("activemask", d, [](uint32_t** lanes) {
    for (int lane = 0; lane < LANES; ++lane) *lanes[lane] = ~0u;
  });
}
inline void bar_warp_sync(uint32_t mask) { __syncwarp(mask, host::current->line); }

// Asynchronous copies: `bytes` are read, the rest is zeros.

inline void cp_async_ca(uint32_t to, const Ptr<void>& from, uint32_t size, uint32_t bytes) {
  if ((size != 4 && size != 8 && size != 16) || bytes > size)
    host::fail("cp.async: %u bytes, of which %u are read", size, bytes);
  host::Copy copy{uint32_t(shared_offset(to)), size, {}};
  if (bytes) global(from).array->read(copy.data, from.place.at, bytes, size);
  host::shared.start_copy(copy);
}
inline void cp_async_ca(uint32_t to, const Ptr<void>& from, uint32_t size) {
  cp_async_ca(to, from, size, size);
}
template <class... Sizes>
void cp_async_cg(uint32_t to, const Ptr<void>& from, uint32_t size, Sizes... bytes) {
  if (size != 16) host::fail("cp.async.cg: %u bytes", size);
  cp_async_ca(to, from, size, bytes...);
}
inline void cp_async_commit_group() { host::current->copies.emplace_back(); }
inline void cp_async_wait_group(int pending) { host::shared.wait(pending); }
inline void cp_async_wait_all() {
  cp_async_commit_group();
  host::shared.wait(0);
}

// Loads and stores of one element, or of 2 or 4 at once; E is what one is in memory.

template <class To, class From>
To resized(From value) {
  if constexpr (sizeof(To) == sizeof(From)) return std::bit_cast<To>(value);
  else return To(value);
}

template <class E, int COUNT, class... Registers>
void ld(const host::Place& place, Registers&... registers) {
  static_assert(sizeof...(registers) == COUNT);
  E elements[COUNT];
  place.read(elements, sizeof elements);
  int i = 0;
  ((registers = resized<Registers>(elements[i++])), ...);
}

template <class E, int COUNT, class... Registers>
void st(const host::Place& place, Registers... registers) {
  const E elements[COUNT] = {resized<E>(registers)...};
  place.write(elements, sizeof elements);
}

// Bits, and arithmetic of two elements in a register

inline void lop3(uint32_t& d, uint32_t a, uint32_t b, uint32_t c, int table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  d = result;
}

// Bytes of b:a by the low four nibbles of `selector`; with bit 3 a byte of copies of the sign.
inline void prmt(uint32_t& d, uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15;
    uint32_t byte = bytes >> 8 * (nibble & 7) & 0xFF;
    if (nibble & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  d = result;
}

// Of the second factor no byte is taken.
inline void prmt_rc8(uint32_t& d, uint32_t a, uint32_t, uint32_t selector) {
  d = (a >> 8 * (selector & 3) & 0xFF) * 0x01010101u;
}

template <class T, class Function, class... Words>
void each(uint32_t& d, Function function, Words... words) {
  uint32_t pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const T result = function(std::bit_cast<T>(uint16_t(words >> shift))...);
    pair |= uint32_t(std::bit_cast<uint16_t>(result)) << shift;
  }
  d = pair;
}
template <class T>
void add(uint32_t& d, uint32_t a, uint32_t b) {
  each<T>(d, [](T x, T y) { return x + y; }, a, b);
}
template <class T>
void sub(uint32_t& d, uint32_t a, uint32_t b) {
  each<T>(d, [](T x, T y) { return x - y; }, a, b);
}
template <class T>
void mul(uint32_t& d, uint32_t a, uint32_t b) {
  each<T>(d, [](T x, T y) { return x * y; }, a, b);
}
template <class T>
void fma(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  each<T>(d, [](T x, T y, T z) { return host::multiply_add(x, y, z); }, a, b, c);
}

inline void mov(uint32_t& d, uint32_t a) { d = a; }

inline void fma_f32(float& d, float a, float b, float c) { d = __builtin_fmaf(a, b, c); }

template <class T>
void cvt_pair(uint32_t& d, float upper, float lower) {
  d = uint32_t(std::bit_cast<uint16_t>(T(upper))) << 16 | std::bit_cast<uint16_t>(T(lower));
}

inline void ex2(float& d, float a) { d = exp2f(a); }

// One unit in the last place off, which is as much as the PTX ISA allows; subnormals are 0.
inline void rcp(float& d, float a) {
  if (std::fpclassify(a) == FP_SUBNORMAL) a = std::copysign(0.0f, a);
  d = std::nextafter(1 / a, 0.0f);
  if (std::fpclassify(d) == FP_SUBNORMAL) d = std::copysign(0.0f, d);
  if (std::isinf(1 / a)) d = 1 / a;
}

template <class Register>
void dp4a(Register& d, int32_t a, int32_t b, int32_t c) {
  for (int shift = 0; shift < 32; shift += 8) c += int8_t(a >> shift) * int8_t(b >> shift);
  d = c;
}

}  // namespace ptx
