// A GPU of sorts on the CPU, for tests of csrc/cuda/sm90 where there is none: it runs the kernels' own source.
//
// A thread of a kernel is a fiber. Warps run in random order, a CTA cluster at a time, their lanes one after the other
// until each must wait; copies (TMA, st.async) and products (WGMMA) happen some time after they were asked for, as late
// as the kernel's waits allow, in random order. So a wait that is missing shows in the result, one that never ends is
// reported with who waits where, and so are bytes or arrivals that do not add up. Not modelled: clocks, proxies and
// fences, memory that a kernel launched ahead still reads.
//
// ptx.h stands for csrc/cuda/sm90/ptx.cuh; test_emulator.py says how a kernel is built.
#pragma once
#define cudaLaunchKernelEx cuda_runtimes_own  // a template that wants nvcc
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#undef cudaLaunchKernelEx
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#ifndef __grid_constant__
#define __grid_constant__
#endif
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
// The CTAs of a launch run one after the other: a shared variable is one that their threads, fibers of one thread, have
// in common. (extern ones lie in Cta::memory.)
#undef __shared__
#define __shared__ static
using std::isinf;
using std::max;
using std::min;

namespace emulator {

constexpr uint32_t kSharedBytes = 227 * 1024;
constexpr int kRankShift = 20;  // a shared-window address: the CTA's rank in its cluster, an offset
constexpr uint32_t kOffset = (1u << kRankShift) - 1;

using Action = std::function<void()>;
using Group = std::vector<Action>;

struct Barrier {  // an mbarrier
  int count = 0, pending = 0, phase = 0;
  int64_t bytes = 0;  // still expected
  bool initialised = false;
  void settle();
};
struct Meeting {  // of threads, at a named or a cluster barrier
  int arrived = 0;
  unsigned generation = 0;
};
struct Warp {
  Meeting meeting;
  uint64_t given[32][4], taken[2][32][4];
};
struct Cluster;
struct Cta {
  std::vector<uint8_t> memory = std::vector<uint8_t>(kSharedBytes + 1024);
  uint8_t* shared = memory.data() + (1024 - reinterpret_cast<uintptr_t>(memory.data()) % 1024) % 1024;
  uint32_t rank = 0, block = 0;
  int running = 0;  // threads
  std::map<uint32_t, Barrier> barriers;
  Meeting named[16];
  std::vector<Warp> warps;
  Cluster* cluster = nullptr;
};
struct Cluster {
  std::vector<Cta> ctas;
  int threads;  // of a CTA
  Meeting meeting;
};
struct Fiber {
  ucontext_t start;
  jmp_buf at;  // where it waits, once it has begun
  bool begun = false;
  Cta* cta;
  uint32_t thread;
  bool done = false;
  std::string waits;
  Group products, stores;                         // asked for, not yet committed; of sm_80's kernels cp.async
  std::deque<Group> committed, committed_stores;  // not yet done
  bool stores_awaited = true;                     // all of them, by the thread itself
  unsigned cluster_generation = 0;
  std::string name() const { return "CTA " + std::to_string(cta->rank) + ", warp " + std::to_string(thread / 32); }
};

inline Fiber* self;  // null while none runs
inline jmp_buf scheduler;
inline std::string failure;  // what was wrong first
inline std::mt19937 random(1);
inline int64_t progress;
inline Group copies, slow_copies;  // on their way; the slow ones until nothing else goes on
inline unsigned grid_size, grid_rows;
inline int multiprocessors = 4;

inline bool one_in(unsigned n) { return random() % n == 0; }
// By _setjmp, as swapcontext asks the system for the signal mask each time. Nothing else is in these functions: what a
// frame that was left had in registers is lost.
[[gnu::noinline]] inline void yield() {
  if (!_setjmp(self->at)) _longjmp(scheduler, 1);
}
[[gnu::noinline]] inline void resume(Fiber* f) {
  if (_setjmp(scheduler)) return;
  if (f->begun) _longjmp(f->at, 1);
  f->begun = true;
  setcontext(&f->start);
}
// Ends the launch: a fiber that fails never runs again.
inline void fail(const std::string& what) {
  if (failure.empty()) failure = what + (self ? ", in " + self->name() : "");
  while (self) yield();
}
inline void Barrier::settle() {
  if (pending < 0) fail("more arrivals than a barrier has");
  if (pending == 0 && bytes == 0) pending = count, phase ^= 1;
}
template <class F>
void wait_until(const std::string& what, F&& ready) {
  self->waits = what;
  while (!ready()) yield();
  ++progress;
  self->waits.clear();
}
inline void meet(Meeting& m, int threads, const char* what) {
  const unsigned generation = m.generation;
  ++progress;
  if (++m.arrived == threads)
    m.arrived = 0, ++m.generation;
  else
    wait_until(what, [&] { return m.generation != generation; });
}

// ---------------------------------------------------------------- shared memory
inline Cta& cta_at(uint32_t address) {
  Cta& cta = self->cta->cluster->ctas[address >> kRankShift];
  if (!cta.running) fail("shared memory of a CTA that has ended");
  return cta;
}
inline uint8_t* shared_at(uint32_t address) {
  if ((address & kOffset) + 16 > kSharedBytes) fail("outside of shared memory");
  return cta_at(address).shared + (address & kOffset);
}
inline Barrier& barrier_at(uint32_t address) {
  Barrier& b = cta_at(address).barriers[address & kOffset];
  if (!b.initialised) fail("a barrier that was not initialised, at " + std::to_string(address & kOffset));
  return b;
}
// Of rows of 128 bytes, or of 64.
inline uint32_t swizzled(uint32_t offset, int row = 128) { return offset ^ (offset >> 7 & (row / 16 - 1)) << 4; }

// The lanes of a warp hand in four words each and get those of all.
using Words = const uint64_t (*)[4];
inline Words exchange(uint64_t a = 0, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
  Warp& w = self->cta->warps[self->thread / 32];
  const unsigned generation = w.meeting.generation;
  uint64_t* mine = w.given[self->thread % 32];
  mine[0] = a, mine[1] = b, mine[2] = c, mine[3] = d;
  if (w.meeting.arrived == 31) std::memcpy(w.taken[generation & 1], w.given, sizeof(w.given));
  meet(w.meeting, 32, "its warp");
  return w.taken[generation & 1];
}

// Bytes that come into shared memory of `cta` some time and are counted on `barrier` then.
template <class F>
void copy_later(Cta& cta, Barrier& barrier, int64_t bytes, F&& copy) {
  (one_in(16) ? slow_copies : copies).push_back([=, &cta, &barrier] {
    if (!cta.running) fail("a copy into a CTA that has ended");
    copy();
    barrier.bytes -= bytes;
    barrier.settle();
  });
}

// ---------------------------------------------------------------- tensor maps
// To the nearest tf32; infinities and NaN stay.
inline uint32_t rounded_to_tf32(uint32_t bits) {
  if ((bits & 0x7f800000) == 0x7f800000) return bits & 0x7fffff ? 0x7fffffff : bits;
  return bits + 0x1000 & ~0x1fffu;
}
struct Map {  // what cuTensorMapEncodeTiled was given
  uint8_t* data;
  int64_t stride[4];  // bytes
  int32_t size[5];
  uint16_t box[5];
  uint16_t swizzle;  // bytes of a row; 0: none
  uint16_t item;     // bytes of an element; 4: float32, which become tf32
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
inline Map map_of(const CUtensorMap* m) {
  Map map;
  std::memcpy(&map, m, sizeof(map));
  return map;
}
inline CUresult encode(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* size,
                       const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map m = {static_cast<uint8_t*>(data), {}, {1, 1, 1, 1, 1}, {1, 1, 1, 1, 1}, 0, 2};
  if (type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32) m.item = 4;
  m.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 0;
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (box[d] > 256 || (d + 1 < rank && stride[d] % 16)) return CUDA_ERROR_INVALID_VALUE;
    m.size[d] = static_cast<int32_t>(size[d]), m.box[d] = static_cast<uint16_t>(box[d]);
    if (d + 1 < rank) m.stride[d] = static_cast<int64_t>(stride[d]);
  }
  std::memcpy(out, &m, sizeof(m));
  return CUDA_SUCCESS;
}
using At = std::array<int, 5>;
// f(offset in shared memory, global address or null, bytes there) for the box's words of 16 bytes.
template <class F>
void for_box(const Map& m, uint32_t offset, const At& at, F&& f) {
  const int rows = m.box[1] * m.box[2] * m.box[3] * m.box[4];
  for (int row = 0; row < rows; ++row)
    for (int c = 0; c < m.box[0]; c += 16 / m.item, offset += 16) {
      int rest = row;
      bool inside = at[0] + c >= 0 && at[0] + c < m.size[0];
      uint8_t* global = m.data + (at[0] + c) * m.item;
      for (int d = 1; d < 5; rest /= m.box[d++]) {
        const int i = at[d] + rest % m.box[d];
        inside = inside && i >= 0 && i < m.size[d];
        global += i * m.stride[d - 1];
      }
      f(m.swizzle ? swizzled(offset, m.swizzle) : offset, inside ? global : nullptr, min(16 / m.item, m.size[0] - at[0] - c) * m.item);
    }
}
inline void load_box(uint32_t to, const CUtensorMap* map, uint32_t bar, const At& at) {
  const Map m = map_of(map);
  const int64_t bytes = int64_t{m.item} * m.box[0] * m.box[1] * m.box[2] * m.box[3] * m.box[4];
  if (to % 128 || (to & kOffset) + bytes > kSharedBytes) fail("a box to no place in shared memory");
  Cta& cta = cta_at(to);
  Barrier& barrier = barrier_at(bar);
  copy_later(cta, barrier, bytes, [=, &cta] {
    for_box(m, to & kOffset, at, [&](uint32_t offset, const uint8_t* global, int there) {
      std::memset(cta.shared + offset, 0, 16);
      if (global) std::memcpy(cta.shared + offset, global, there);
      if (m.item == 4)
        for (int e = 0; e < 4; ++e) {
          uint32_t bits;
          std::memcpy(&bits, cta.shared + offset + e * 4, 4);
          bits = rounded_to_tf32(bits);
          std::memcpy(cta.shared + offset + e * 4, &bits, 4);
        }
    });
  });
}

// ---------------------------------------------------------------- launches
inline const Action* kernel_body;
inline void run_fiber() {
  (*kernel_body)();
  if (!self->stores_awaited) fail("stores out of the shared memory of a CTA that ends without a wait for them");
  self->done = true;
  --self->cta->running;
  ++progress;
  yield();
}

inline void do_first(std::deque<Group>& groups) {
  for (auto& action : groups.front()) action();
  groups.pop_front();
  ++progress;
}

inline void do_last(Group& actions) {
  const Action action = std::move(actions.back());
  actions.pop_back();
  action();
  ++progress;
}

constexpr size_t kStackBytes = 160 << 10;
inline std::vector<std::unique_ptr<uint8_t[]>> stacks;  // kept from launch to launch, with what fibers left on them

inline void run_cluster(unsigned first_block, int ctas, int threads, const Action& body) {
  Cluster cluster;
  cluster.ctas.resize(ctas), cluster.threads = threads, kernel_body = &body, copies.clear(), slow_copies.clear();
  std::vector<Fiber> fibers(static_cast<size_t>(ctas) * threads);
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& f = fibers[i];
    f.cta = &cluster.ctas[i / threads], f.thread = static_cast<uint32_t>(i % threads);
    if (i == stacks.size()) stacks.emplace_back(new uint8_t[kStackBytes]);
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = stacks[i].get(), f.start.uc_stack.ss_size = kStackBytes;
    makecontext(&f.start, run_fiber, 0);
  }
  for (int rank = 0; rank < ctas; ++rank) {
    Cta& cta = cluster.ctas[rank];
    std::memset(cta.shared, 0xff, kSharedBytes);  // NaN
    cta.rank = rank, cta.block = first_block + rank, cta.running = threads, cta.warps.resize((threads + 31) / 32),
    cta.cluster = &cluster;
  }
  std::vector<Fiber*> warps;  // the first fiber of each
  for (size_t i = 0; i < fibers.size(); i += 32) warps.push_back(&fibers[i]);
  size_t left = fibers.size();
  int idle = 0;
  while (left || !copies.empty() || !slow_copies.empty()) {
    const int64_t before = progress;
    std::shuffle(warps.begin(), warps.end(), random);
    const bool lazy = one_in(3);  // most warps rest for this round
    for (Fiber* first : warps) {
      if (lazy && !one_in(4)) continue;
      for (Fiber* f = first; f < first + 32; ++f) {
        if (!f->done) {
          self = f;
          resume(f);
          self = nullptr;
          if (!failure.empty()) return;
          left -= f->done;
        }
        if (!f->committed_stores.empty() && (f->done || one_in(30))) do_first(f->committed_stores);
        if (!f->committed.empty() && one_in(10)) do_first(f->committed);
      }
    }
    std::shuffle(copies.begin(), copies.end(), random);
    for (size_t n = copies.empty() ? 0 : random() % (copies.size() + 1); n > 0; --n) do_last(copies);
    if (idle > 3 && !slow_copies.empty()) {
      std::swap(slow_copies[random() % slow_copies.size()], slow_copies.back());
      do_last(slow_copies);
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle < 50) continue;
    std::map<std::string, int> waiting;
    for (Fiber& f : fibers)
      if (!f.done) ++waiting[f.name() + " for " + f.waits];
    std::string all;
    for (auto& [who, count] : waiting) all += "\n" + std::to_string(count) + " threads of " + who;
    return fail("nothing goes on; there wait" + all);
  }
  for (Fiber& f : fibers) {
    while (!f.committed_stores.empty()) do_first(f.committed_stores);
    while (!f.committed.empty() && f.committed.front().empty()) f.committed.pop_front();
    if (!f.stores.empty() || !f.committed.empty()) fail("a store not committed or a product not waited for");
  }
  for (Cta& cta : cluster.ctas)
    for (auto& [address, barrier] : cta.barriers)
      if (barrier.bytes) fail("bytes still expected at " + std::to_string(address));
}

}  // namespace emulator

#include "device.h"
