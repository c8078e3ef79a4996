// Asynchronous products of warpgroups (PTX ISA 9.0, section 9.7.15) on the host.
// A product is computed when it starts; until the wait that covers it its registers hold NaN, and
// nobody may write the memory that it reads.
#pragma once

namespace host {

struct Sum {  // of a product under way
  uint32_t bits, group;
  int columns;
};

struct Products {  // of a lane
  uint32_t group = 0, complete = 0;  // the open group, and the first one that is not complete
  bool fenced = false;               // since the last group
  std::map<uint32_t*, Sum> sums;
  std::vector<std::pair<uint32_t, int64_t>> reads;  // group, offset in shared memory
};

// What the warps of a warpgroup have to agree on, in order.
struct Collective {
  int line, columns;
  uint64_t right;
  bool adds;

  bool operator==(const Collective&) const = default;
};

inline std::map<int, Products> products;                    // by thread
inline std::map<int, std::vector<Collective>> collectives;  // by warpgroup
inline std::map<int, size_t> started;                       // by warp

inline void begin_products_of_block() { products.clear(), collectives.clear(), started.clear(); }

inline void end_products_of_block() {
  for (const auto& [thread, own] : products)
    if (!own.sums.empty()) fail("wgmma: thread %d ends without a wait", thread);
  for (const auto& [group, order] : collectives)
    for (int warp = 4 * group; warp < 4 * group + 4; ++warp)
      if (started[warp] != order.size()) fail("wgmma: warp %d leaves its warpgroup", warp);
}

inline void agree(const Collective& one) {
  const int warp = current->warp;
  if (block.lanes.size() % (4 * LANES)) fail("wgmma: a block without whole warpgroups");
  auto& order = collectives[warp / 4];
  size_t& at = started[warp];
  if (at == order.size()) order.push_back(one);
  if (!(order[at++] == one)) fail("wgmma: the warps of a warpgroup are apart");
}

// 16 bytes of a descriptor's matrix, those of column `n`, swizzled by their address.
inline int64_t place_of(uint64_t descriptor, int n, int chunk) {
  const uint64_t RESERVED = 3ull << 14 | 3ull << 30 | 3ull << 46 | 1ull << 48 | 0x3FFull << 52;
  if (descriptor & RESERVED) fail("wgmma: descriptor %016lx: reserved bits", descriptor);
  if (descriptor >> 49 & 7) fail("wgmma: descriptor %016lx: a base offset", descriptor);
  if (descriptor >> 62 != 1) fail("wgmma: descriptor %016lx: not swizzled by 128", descriptor);
  const int64_t start = (descriptor & 0x3FFF) << 4, atoms = (descriptor >> 32 & 0x3FFF) << 4;
  const int64_t address = start + n / 8 * atoms + n % 8 * 128 + chunk * 16;
  return (address ^ (address >> 7 & 7) << 4) - Shared::BASE;
}

inline void wait_for_products(uint32_t pending, Products& own) {
  if (own.group < pending + own.complete) return;
  own.complete = own.group - pending;
  own.fenced = false;
  std::erase_if(own.sums, [&](const auto& item) {
    const auto& [at, sum] = item;
    if (sum.group >= own.complete) return false;
    if (*at != ~0u) fail("wgmma: a register is written before the wait");
    *at = sum.bits;
    return true;
  });
  std::erase_if(own.reads, [&](const auto& read) {
    if (read.first >= own.complete) return false;
    shared.end_product(read.second, 16);
    return true;
  });
}

}  // namespace host

namespace ptx {

inline void fence_proxy_async() { host::current->proxy_fences++; }

// Each warp has 16 rows of the left factor and of the sums.
template <class A, class B, class C, int N>
struct Wgmma {
  C* sums[N / 2];
  uint32_t left[4];
  uint64_t right;
  bool adds;

  static void read(Wgmma& first, host::Products& own, uint32_t (*columns)[8]) {
    for (int n = 0; n < N; ++n)
      for (int chunk = 0; chunk < 2; ++chunk) {
        const int64_t place = host::place_of(first.right, n, chunk);
        host::shared.read_by_product(columns[n] + 4 * chunk, place, 16);
        own.reads.emplace_back(own.group, place);
      }
  }
  typename A::Sum before(host::Products& own, int i) const {
    auto* at = reinterpret_cast<uint32_t*>(sums[i]);
    const auto found = own.sums.find(at);
    if (found == own.sums.end()) return adds ? A::sum_from(*sums[i]) : 0;
    if (*at != ~0u) host::fail("wgmma: a register is written before the wait");
    if (found->second.columns != N) host::fail("wgmma: another shape has the register");
    return adds ? A::sum_from(std::bit_cast<C>(found->second.bits)) : 0;
  }
  static void perform(Wgmma** lanes) {
    constexpr int E = A::COUNT, K = 8 * E;
    typename A::Sum left[16][K];
    uint32_t columns[N][8];
    host::Lane* all = host::current;
    Wgmma& first = *lanes[0];
    host::agree({all->line, N, first.right, first.adds});
    read(first, host::products[all->number], columns);
    for (int lane = 0; lane < LANES; ++lane) {
      if (lanes[lane]->right != first.right || lanes[lane]->adds != first.adds)
        host::fail("wgmma: the lanes of a warp are apart");
      if (!host::products[all[lane].number].fenced) host::fail("wgmma: no wgmma.fence before");
      for (int r = 0; r < 4; ++r)
        for (int e = 0; e < E; ++e)
          left[lane / 4 + r % 2 * 8][lane % 4 * E + e + r / 2 * 4 * E] =
              A::get(lanes[lane]->left[r], e);
    }
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < N / 2; ++i) {
        host::Products& own = host::products[all[lane].number];
        const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        auto sum = lanes[lane]->before(own, i);
        for (int k = 0; k < K; ++k) sum += left[row][k] * B::get(columns[column][k / E], k % E);
        auto* at = reinterpret_cast<uint32_t*>(lanes[lane]->sums[i]);
        own.sums[at] = {std::bit_cast<uint32_t>(A::rounded(sum)), own.group, N};
        *at = ~0u;
      }
  }
};

template <class A, class B, class C, int N, class... Operands>
void wgmma(Operands&&... operands) {
  const auto all = std::forward_as_tuple(operands...);
  Wgmma<A, B, C, N> own;
  [&]<size_t... I>(std::index_sequence<I...>) {
    ((own.sums[I] = &std::get<I>(all)), ...);
  }(std::make_index_sequence<N / 2>());
  [&]<size_t... I>(std::index_sequence<I...>) {
    ((own.left[I] = std::get<N / 2 + I>(all)), ...);
  }(std::make_index_sequence<4>());
  own.right = std::get<N / 2 + 4>(all);
  own.adds = std::get<N / 2 + 5>(all);
  host::together("wgmma", own, decltype(own)::perform);
}

template <class A, class B, int N, class... Operands>
void wgmma_floats(Operands&&... operands) {
  static_assert(sizeof...(operands) == N / 2 + 9 && N % 8 == 0 && N <= 256);
  const auto all = std::forward_as_tuple(operands...);
  if (std::get<N / 2 + 6>(all) != 1 || std::get<N / 2 + 7>(all) != 1 || std::get<N / 2 + 8>(all))
    host::fail("wgmma: a sign, or a right factor that is not along k");
  wgmma<A, B, float, N>(operands...);
}
template <class A, class B, int N, class... Operands>
void wgmma_integers(Operands&&... operands) {
  static_assert(sizeof...(operands) == N / 2 + 6);
  static_assert(N == 24 || (N < 32 && N % 8 == 0) || (N % 16 == 0 && N <= 224));
  wgmma<A, B, uint32_t, N>(operands...);
}

inline void wgmma_fence() { host::products[host::current->number].fenced = true; }
inline void wgmma_commit_group() {
  host::products[host::current->number].group++;
  host::products[host::current->number].fenced = false;
}
inline void wgmma_wait_group(uint32_t pending) {
  host::wait_for_products(pending, host::products[host::current->number]);
}

}  // namespace ptx
