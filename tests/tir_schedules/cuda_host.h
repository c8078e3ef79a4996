// What the CUDA text of a kernel needs to run on the host: the threads of a block as fibers.
// A warp is picked at random; its lanes run one after another until each meets an operation of
// the warp, a barrier of the block, or the end. `fail` ends the launch with a message.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

namespace host {

constexpr int LANES = 32;
constexpr size_t STACK = 256 << 10, GUARD = 4096;

struct Copy {  // of cp.async, under way
  uint32_t offset, size;
  unsigned char data[16];
};

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

enum State { RUNNABLE, AT_WARP, AT_BARRIER, DONE };

struct Lane {
  Index index;
  int number, warp, line = 0;  // line: where in the text it last called a function
  State state = RUNNABLE;
  bool started = false;
  ucontext_t start;
  jmp_buf context;
  char* stack;
  void (*perform)(void**);  // the operation of the warp that it waits for, and its operands
  const char* operation = "";
  void* operands;
  std::vector<std::vector<Copy>> copies{1};  // groups, the last one open
  unsigned proxy_fences = 0;                 // fence.proxy.async passed
};

struct Block {
  Index index, grid, extent;
  unsigned number;
  std::vector<Lane> lanes;
  unsigned phase;                     // barriers passed, from 1 on
  std::vector<unsigned> warp_phases;  // __syncwarp passed, by warp
};

inline Block block;
inline Lane* current;
inline jmp_buf scheduler, failure;
inline char message[400];
inline void (*body)();

[[noreturn, gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
  int used = 0;
  if (current)
    used = snprintf(message, sizeof message, "from line %d on, block %u, thread %d: ",
                    current->line, block.number, current->number);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message + used, sizeof message - used, format, arguments);
  _longjmp(failure, 1);
}

// Fibers

[[gnu::noinline]] inline void suspend(State state) {
  current->state = state;
  if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

inline void enter() {
  body();
  current->state = DONE;
  _longjmp(scheduler, 1);
}

[[gnu::noinline]] inline void resume(Lane& lane) {
  current = &lane;
  if (_setjmp(scheduler) == 0) {
    if (lane.started) _longjmp(lane.context, 1);
    lane.started = true;
    setcontext(&lane.start);
  }
}

inline char* stack_of(size_t number) {
  static std::vector<char*> stacks;
  while (stacks.size() <= number) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, GUARD, PROT_NONE)) fail("no memory for a stack");
    stacks.push_back(static_cast<char*>(stack));
  }
  return stacks[number];
}

inline void prepare(Lane& lane, int number, const Index& extent) {
  lane.number = number;
  lane.warp = number / LANES;
  lane.index = {number % extent.x, number / extent.x % extent.y, number / extent.x / extent.y};
  lane.stack = stack_of(number);
  getcontext(&lane.start);
  lane.start.uc_stack.ss_sp = lane.stack;
  lane.start.uc_stack.ss_size = STACK;
  lane.start.uc_link = nullptr;
  makecontext(&lane.start, enter, 0);
}

// Operations of a warp and of a block

// Waits for all lanes of the warp; then `perform` gets the operands of each.
template <class Operands>
void together(const char* operation, Operands& operands, void (*perform)(Operands**)) {
  current->operation = operation;
  current->operands = &operands;
  current->perform = reinterpret_cast<void (*)(void**)>(perform);
  suspend(AT_WARP);
}

[[noreturn]] inline void fail_apart(const Lane& lane, const Lane& other) {
  static const char* const WHERE[] = {"running", "", "at __syncthreads", "at the end"};
  current = const_cast<Lane*>(&lane);
  const char* where = lane.state == AT_WARP ? lane.operation : WHERE[lane.state];
  const char* there = other.state == AT_WARP ? other.operation : WHERE[other.state];
  fail("threads are apart: %s, thread %d at line %d: %s", where, other.number, other.line, there);
}

inline void settle(Lane* lanes) {  // of one warp, none of which can run on
  void* operands[LANES];
  for (int i = 0; i < LANES; ++i) {
    const Lane &lane = lanes[i], &first = lanes[0];
    const bool same = lane.state == first.state && (lane.state == DONE || lane.line == first.line);
    if (!same || (lane.state == AT_WARP && lane.perform != first.perform)) fail_apart(lane, first);
    operands[i] = lane.operands;
  }
  if (lanes->state != AT_WARP) return;
  current = lanes;
  lanes->perform(operands);
  for (int i = 0; i < LANES; ++i) lanes[i].state = RUNNABLE;
}

inline bool pass_barrier() {  // false where the block is at its end
  Lane& first = block.lanes[0];
  for (Lane& lane : block.lanes)
    if (lane.state != first.state || (lane.state == AT_BARRIER && lane.line != first.line))
      fail_apart(lane, first);
  if (first.state == DONE) return false;
  for (Lane& lane : block.lanes) lane.state = RUNNABLE;
  block.phase++;
  return true;
}

inline void run_block(uint64_t& random) {
  const int threads = block.extent.x * block.extent.y * block.extent.z;
  block.lanes = std::vector<Lane>(threads);
  for (int i = 0; i < threads; ++i) prepare(block.lanes[i], i, block.extent);
  block.warp_phases.assign(threads / LANES, 1);
  block.phase = 1;
  do {
    std::vector<int> ready;
    do {
      ready.clear();
      for (int i = 0; i < threads; i += LANES)
        if (block.lanes[i].state == RUNNABLE) ready.push_back(i);
      if (ready.empty()) break;
      random = random * 6364136223846793005u + 1442695040888963407u;
      Lane* lanes = &block.lanes[ready[(random >> 33) % ready.size()]];
      for (int i = 0; i < LANES; ++i) resume(lanes[i]);
      settle(lanes);
    } while (true);
  } while (pass_barrier());
  current = nullptr;
}

}  // namespace host

#include "cuda_host_memory.h"
#include "cuda_host_types.h"

#define __CUDA_ARCH__ 900
#define threadIdx (host::current->index)
#define blockIdx (host::block.index)
#define blockDim (host::block.extent)
#define gridDim (host::block.grid)
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)

inline void __syncthreads(int line = __builtin_LINE()) {
  host::current->line = line;
  host::suspend(host::AT_BARRIER);
}

// Whether the other lanes are there shows where the mask is used.
inline unsigned __activemask() { return ~0u; }

inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  host::current->line = line;
  host::demand_all(mask);
  host::together<unsigned>("__syncwarp", mask, [](unsigned**) {
    host::block.warp_phases[host::current->warp]++;
  });
}

#include "cuda_host_ptx.h"
#include "cuda_host_wgmma.h"

namespace host {

// Extents of grid and block as (x, y, z). The message of an error, or null.
inline const char* launch(const int* extents, int64_t dynamic_bytes, unsigned seed,
                          void (*kernel)()) {
  uint64_t random = seed;
  const Index grid{unsigned(extents[0]), unsigned(extents[1]), unsigned(extents[2])};
  current = nullptr;
  if (_setjmp(failure)) return message;
  block.grid = grid;
  block.extent = {unsigned(extents[3]), unsigned(extents[4]), unsigned(extents[5])};
  const int threads = extents[3] * extents[4] * extents[5];
  if (threads < 1 || threads > 1024 || threads % LANES) fail("a block of %d threads", threads);
  if (int64_t(grid.x) * grid.y * grid.z < 1) fail("a grid without blocks");
  body = kernel;
  for (block.number = 0; block.number < grid.x * grid.y * grid.z; block.number++) {
    const unsigned row = block.number / grid.x;
    block.index = {block.number % grid.x, row % grid.y, row / grid.y};
    shared.reset(dynamic_bytes);
    begin_products_of_block();
    run_block(random);
    end_products_of_block();
  }
  return nullptr;
}

}  // namespace host

// What -fsanitize=bounds calls.
extern "C" void __ubsan_handle_out_of_bounds_abort(void*, unsigned long index) {
  host::fail("an array of the thread: index %ld is out of bounds", long(index));
}
