// Stands for csrc/cuda/sm90/ptx.cuh: the same functions, for the machine in machine.h.
#pragma once
#include <type_traits>
#include <utility>

#include "core/float8.h"
#include "machine.h"

namespace sbnet::sm90 {

inline float exp2_approx(float v) { return std::exp2(v); }
inline uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
template <class... V>
void pin(V&...) {}

// ---------------------------------------------------------------- mbarriers
inline void mbar_init(uint32_t bar, uint32_t arrivals) {
  emulator::Barrier& b = emulator::cta_at(bar).barriers[bar & emulator::kOffset];
  if (b.initialised) emulator::fail("a barrier initialised twice");
  b.count = b.pending = static_cast<int>(arrivals), b.initialised = true;
}
inline void fence_mbar_init() {}
inline void arrive(uint32_t bar, uint32_t arrivals, uint32_t bytes) {
  emulator::Barrier& b = emulator::barrier_at(bar);
  b.bytes += bytes, b.pending -= static_cast<int>(arrivals);
  b.settle();
  ++emulator::progress;
}
inline void mbar_expect(uint32_t bar, uint32_t bytes) { arrive(bar, 1, bytes); }
inline void mbar_arrive(uint32_t bar, uint32_t arrivals = 1) { arrive(bar, arrivals, 0); }
inline bool mbar_test(uint32_t bar, uint32_t parity) {
  return emulator::barrier_at(bar).phase != static_cast<int>(parity & 1);
}
inline void mbar_wait(uint32_t bar, uint32_t parity) {
  emulator::self->address = bar & emulator::kOffset, emulator::self->parity = parity;
  const emulator::Barrier& barrier = emulator::barrier_at(bar);
  emulator::wait_until("barrier", [&] { return barrier.phase != static_cast<int>(parity & 1); });
}

// ---------------------------------------------------------------- thread block clusters
inline uint32_t cluster_rank() { return emulator::self->cta->rank; }
inline void cluster_arrive() {
  emulator::Cluster& cluster = *emulator::self->cta->cluster;
  emulator::self->cluster_generation = cluster.meeting.generation;
  if (++cluster.meeting.arrived == cluster.threads * static_cast<int>(cluster.ctas.size()))
    cluster.meeting.arrived = 0, ++cluster.meeting.generation;
  ++emulator::progress;
}
inline void cluster_wait() {
  emulator::wait_until("its cluster", [&] {
    return emulator::self->cta->cluster->meeting.generation != emulator::self->cluster_generation;
  });
}
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
inline uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  return (address & emulator::kOffset) | rank << emulator::kRankShift;
}
inline void store_async(uint32_t to, uint32_t bar, float a, float b, float c, float d) {
  uint8_t* data = emulator::shared_at(to);
  emulator::copy_later(emulator::cta_at(to), emulator::barrier_at(bar), 16, [=] {
    const float v[4] = {a, b, c, d};
    std::memcpy(data, v, 16);
  });
}
inline void mbar_arrive_at(uint32_t bar, uint32_t rank) { mbar_arrive(map_to_rank(bar, rank)); }
template <class V>
V load_shared_as(uint32_t from) {
  V v;
  std::memcpy(&v, emulator::shared_at(from), sizeof(V));
  return v;
}
inline uint32_t load_shared_word(uint32_t from) { return load_shared_as<uint32_t>(from); }
inline float4 load_shared(uint32_t from) { return load_shared_as<float4>(from); }
inline void store_shared(uint32_t to, float a, float b, float c, float d) {
  const float v[4] = {a, b, c, d};
  std::memcpy(emulator::shared_at(to), v, 16);
}

// ---------------------------------------------------------------- named barriers, proxies
inline void bar_sync(int id, int threads) {
  emulator::meet(emulator::self->cta->named[id], threads, "a named barrier");
}
inline void bar_arrive(int id, int threads) {
  emulator::Meeting& m = emulator::self->cta->named[id];
  if (++m.arrived == threads) m.arrived = 0, ++m.generation;
  ++emulator::progress;
}
template <int kRegisters>
void registers_up() {}
template <int kRegisters>
void registers_down() {}
inline void fence_async_proxy() {}

// ---------------------------------------------------------------- bulk tensor copies
inline void prefetch_map(const CUtensorMap*) {}
inline void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int x, int y, int n) {
  emulator::load_box(to, m, bar, {c, x, y, n});
}
inline void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int tap, int k) {
  emulator::load_box(to, m, bar, {c, tap, k, 0});
}
inline void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int k) {
  emulator::load_box(to, m, bar, {c, k, 0, 0});
}
inline void tma_multicast(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int tap, int k, uint32_t ctas) {
  for (uint32_t rank = 0; ctas >> rank; ++rank)
    if (ctas >> rank & 1) emulator::load_box(map_to_rank(to, rank), m, map_to_rank(bar, rank), {c, tap, k, 0});
}
inline void tma_multicast(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int k, uint32_t ctas) {
  tma_multicast(to, m, bar, c, k, 0, ctas);
}
inline void tma_load(uint32_t to, const CUtensorMap* m, uint32_t bar, int c, int slab, int x, int y, int n) {
  emulator::load_box(to, m, bar, {c, slab, x, y, n});
}
inline void store_box(const CUtensorMap* map, uint32_t from, const emulator::At& at) {
  const emulator::Map m = emulator::map_of(map);
  const uint8_t* shared = emulator::self->cta->shared;
  emulator::self->stores.push_back([=] {
    emulator::for_box(m, from & emulator::kOffset, at, [&](uint32_t offset, uint8_t* global, int bytes) {
      if (global) std::memcpy(global, shared + offset, bytes);
    });
  });
}
inline void tma_store(const CUtensorMap* m, uint32_t from, int c, int x, int y, int n) {
  store_box(m, from, {c, x, y, n});
}
inline void tma_store(const CUtensorMap* m, uint32_t from, int c, int slab, int x, int y, int n) {
  store_box(m, from, {c, slab, x, y, n});
}
inline void tma_store_commit() {
  emulator::self->committed_stores.push_back(std::exchange(emulator::self->stores, {}));
  emulator::self->stores_awaited = false;
}
// As late as allowed, unless the machine has come round to them.
inline void finish_but(std::deque<emulator::Group>& groups, size_t pending) {
  while (groups.size() > pending) {
    if (groups.size() > pending) emulator::do_first(groups);
  }
}
template <int kPending = 0>
void tma_store_wait_read() {
  finish_but(emulator::self->committed_stores, kPending);
  if (kPending == 0) emulator::self->stores_awaited = true;
}

// ---------------------------------------------------------------- loads
inline int load_int(const int32_t* p) { return *p; }
inline float load_float(const void* p) { return *static_cast<const float*>(p); }
inline uint32_t load_half(const void* p) { return *static_cast<const uint16_t*>(p); }

// ---------------------------------------------------------------- a store
inline void store_words(void* to, uint4 v) { std::memcpy(to, &v, 16); }

// ---------------------------------------------------------------- 16-bit pairs, matrices of them
template <class T>
uint16_t bits_of(float v) {
  T half;
  if constexpr (std::is_same_v<T, __half>)
    half = __float2half_rn(v);
  else
    half = __float2bfloat16_rn(v);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
template <class T>
float value_of(uint32_t bits) {  // the low half
  return emulator::value_of_half<T>(static_cast<uint16_t>(bits));
}
template <class T>
uint32_t pack(float a, float b) {
  return bits_of<T>(a) | static_cast<uint32_t>(bits_of<T>(b)) << 16;
}
template <class T>
float2 unpack(uint32_t v) {
  return make_float2(value_of<T>(v), value_of<T>(v >> 16));
}
template <class T>
uint32_t max_pair(uint32_t v, uint32_t low) {
  const float2 a = unpack<T>(v), b = unpack<T>(low);
  auto larger = [](float x, float y) { return x != x || x > y ? x : y; };  // NaN stays
  return pack<T>(larger(a.x, b.x), larger(a.y, b.y));
}
// Four matrices of 8x8: f(register, the element's address, is it the register's high half). Lane m * 8 + r gives the
// address of row r of matrix m.
template <class F>
void for_matrices(uint32_t address, bool transposed, F&& f) {
  const emulator::Words rows = emulator::exchange(address);
  const int lane = static_cast<int>(emulator::self->thread % 32);
  for (int m = 0; m < 4; ++m)
    for (int e = 0; e < 2; ++e) {
      const int first = lane / 4, second = lane % 4 * 2 + e, row = transposed ? second : first;
      const uint32_t at = static_cast<uint32_t>(rows[m * 8 + row][0]);
      if (at % 16) emulator::fail("a matrix row that is not aligned");
      f(m, emulator::shared_at(at) + (transposed ? first : second) * 2, e == 1);
    }
  emulator::exchange();
}
inline void store_matrices(uint32_t address, bool transposed, const uint32_t (&v)[4]) {
  for_matrices(address, transposed, [&](int m, uint8_t* element, bool high) {
    const uint16_t bits = static_cast<uint16_t>(high ? v[m] >> 16 : v[m]);
    std::memcpy(element, &bits, 2);
  });
}
inline void load_matrices(uint32_t address, bool transposed, uint32_t (&r)[4]) {
  for (uint32_t& v : r) v = 0;
  for_matrices(address, transposed, [&](int m, const uint8_t* element, bool high) {
    uint16_t bits;
    std::memcpy(&bits, element, 2);
    r[m] |= static_cast<uint32_t>(bits) << (high ? 16 : 0);
  });
}
inline void stmatrix_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_matrices(address, true, {a, b, c, d});
}
inline void stmatrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_matrices(address, false, {a, b, c, d});
}
inline void ldmatrix_trans(uint32_t address, uint32_t (&r)[4]) { load_matrices(address, true, r); }
inline void ldmatrix(uint32_t address, uint32_t (&r)[4]) { load_matrices(address, false, r); }

// ---------------------------------------------------------------- WGMMA
inline void wgmma_fence() { emulator::exchange(); }
inline void wgmma_commit() { emulator::self->committed.push_back(std::exchange(emulator::self->products, {})); }
template <int kPending>
void wgmma_wait() {
  emulator::exchange();  // a warp waits as one, here and in the fence
  finish_but(emulator::self->committed, kPending);
  emulator::exchange();
}
inline uint32_t wgmma_operand(uint32_t address) { return (address & 0x3FFFF) >> 4 | 1u << 16; }
constexpr uint64_t wgmma_layout(uint32_t stride) { return static_cast<uint64_t>(stride >> 4 | 1u << 30) << 32; }

// The 16 elements of a row of an operand. Rows past the end of shared memory hold nothing: some tiles have them.
template <class T>
void read_row(float (&out)[16], const uint8_t* shared, uint64_t operand, int row, bool transposed) {
  const uint32_t first = static_cast<uint32_t>(operand & 0x3FFF) << 4;
  const uint32_t next_64 = static_cast<uint32_t>(operand >> 16 & 0x3FFF) << 4;
  const uint32_t stride = static_cast<uint32_t>(operand >> 32 & 0x3FFF) << 4;
  const int bytes = operand >> 62 == 2 ? 64 : 128;  // of a row, and of the swizzle
  const int run = transposed ? 1 : 8;               // elements that lie side by side
  for (int k = 0; k < 16; k += run) {
    const uint32_t at =
        emulator::swizzled(first + (transposed ? row / 64 * next_64 + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                               : row / 8 * stride + row % 8 * bytes + k * 2),
                           bytes);
    for (int e = 0; e < run; ++e) {
      uint16_t bits = 0x7fff;  // NaN of either type
      if (at + e * 2 + 2 <= emulator::kSharedBytes) std::memcpy(&bits, shared + at + e * 2, 2);
      out[k + e] = value_of<T>(bits);
    }
  }
}
// This thread's sums of d[64 x N] (+)= A * B^T, of kSteps products each: rows lane / 4 and 8 below of its warp's 16,
// given row_of(which, out) and column_of(column, out). Four chains at a time, each in the order of k.
template <int kSteps, int N, class Sum, class A, class B>
void product(Sum* d, int accumulate, A row_of, B column_of) {
  const int lane = static_cast<int>(emulator::self->thread % 32);
  emulator::self->products.push_back([=] {
    Sum rows[2][kSteps], columns[2][kSteps];
    row_of(0, rows[0]), row_of(1, rows[1]);
    for (int n = 0; n < N / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      column_of(column, columns[0]), column_of(column + 1, columns[1]);
      Sum sums[4] = {};
      if (accumulate) std::memcpy(sums, d + n * 4, sizeof(sums));
      for (int k = 0; k < kSteps; ++k) {
        sums[0] += rows[0][k] * columns[0][k], sums[1] += rows[0][k] * columns[1][k];
        sums[2] += rows[1][k] * columns[0][k], sums[3] += rows[1][k] * columns[1][k];
      }
      std::memcpy(d + n * 4, sums, sizeof(sums));
    }
  });
}
// The first of the two rows of an operand that are this thread's.
inline int own_row() {
  return static_cast<int>(emulator::self->thread / 32 % 4 * 16 + emulator::self->thread % 32 / 4);
}
template <class T, int N, int kSums>
void wgmma(float (&d)[kSums], uint64_t a, uint64_t b, int accumulate, bool a_transposed = false,
           bool b_transposed = false) {
  static_assert(N / 2 <= kSums);
  product<16, N>(
      d, accumulate,
      [=, shared = emulator::self->cta->shared, row = own_row()](int h, float (&out)[16]) {
        read_row<T>(out, shared, a, row + h * 8, a_transposed);
      },
      [=, shared = emulator::self->cta->shared](int n, float (&out)[16]) {
        read_row<T>(out, shared, b, n, b_transposed);
      });
}
// Of bytes, 32 to a row: float8_e4m3fn where sums are float, else int8.
template <class Sum>
void read_bytes(Sum (&out)[32], const uint8_t* shared, uint64_t operand, int row) {
  const uint32_t first = static_cast<uint32_t>(operand & 0x3FFF) << 4;
  const uint32_t stride = static_cast<uint32_t>(operand >> 32 & 0x3FFF) << 4;
  for (int k = 0; k < 32; ++k) {
    const uint32_t at = emulator::swizzled(first + row / 8 * stride + row % 8 * 128 + k);
    const bool there = at < emulator::kSharedBytes;
    if constexpr (std::is_same_v<Sum, float>)
      out[k] = there ? float8_value(shared[at]) : std::nanf("");
    else
      out[k] = there ? static_cast<int8_t>(shared[at]) : -128;
  }
}
template <class Sum>
void wgmma_bytes(Sum (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  const auto read = [shared = emulator::self->cta->shared](uint64_t operand, int row, Sum(&out)[32]) {
    read_bytes(out, shared, operand, row);
  };
  product<32, 128>(
      d, accumulate, [=, row = own_row()](int h, Sum(&out)[32]) { read(a, row + h * 8, out); },
      [=](int n, Sum(&out)[32]) { read(b, n, out); });
}
template <class T, int N = 64, int kSums>
void wgmma_registers(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, int accumulate, bool b_transposed = false) {
  static_assert(N / 2 <= kSums);
  const emulator::Words given = emulator::exchange(a[0], a[1], a[2], a[3]);
  const int quad = static_cast<int>(emulator::self->thread % 32 / 4 * 4);
  std::vector<uint64_t> words;  // of the four lanes that share the two rows
  for (int lane = quad; lane < quad + 4; ++lane) words.insert(words.end(), given[lane], given[lane] + 4);
  product<16, N>(
      d, accumulate,
      [=](int h, float (&out)[16]) {
        for (int k = 0; k < 16; ++k) {
          const uint32_t pair = static_cast<uint32_t>(words[k % 8 / 2 * 4 + h + k / 8 * 2]);
          out[k] = value_of<T>(k % 2 ? pair >> 16 : pair);
        }
      },
      [=, shared = emulator::self->cta->shared](int n, float (&out)[16]) {
        read_row<T>(out, shared, b, n, b_transposed);
      });
}

}  // namespace sbnet::sm90
