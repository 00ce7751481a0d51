// What nvcc would know of a kernel and its launch, on the machine of machine.h, which includes it: indices, launches,
// barriers of CTAs, what lanes of a warp exchange, atomics.
#pragma once

#undef __noinline__  // after the headers of C++, which mean an attribute of this name
#define __noinline__ __attribute__((noinline))

namespace emulator {

template <class Value>
struct Index {
  struct {
    operator unsigned() const { return Value().x(); }
  } x;
  struct {
    operator unsigned() const { return Value().y(); }
  } y;
};
struct Thread {
  unsigned x() const { return self->thread; }
  unsigned y() const { return 0; }
};
struct Block {
  unsigned x() const { return self->cta->block % grid_size; }
  unsigned y() const { return self->cta->block / grid_size; }
};
struct Grid {
  unsigned x() const { return grid_size; }
  unsigned y() const { return grid_rows; }
};
struct Threads {
  unsigned x() const { return self->cta->cluster->threads; }
  unsigned y() const { return 1; }
};

}  // namespace emulator

inline emulator::Index<emulator::Threads> blockDim;
inline emulator::Index<emulator::Thread> threadIdx;
inline emulator::Index<emulator::Block> blockIdx;
inline emulator::Index<emulator::Grid> gridDim;

// CTAs that run at once: those of a cluster, or of a grid whose CTAs wait for one another.
inline unsigned cluster_size(const cudaLaunchConfig_t* config) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) return config->attrs[i].val.clusterDim.x;
    if (config->attrs[i].id == cudaLaunchAttributeCooperative) return config->gridDim.x * config->gridDim.y;
  }
  return 1;
}
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), const Args&... args) {
  const unsigned ctas = cluster_size(config);
  const unsigned all = config->gridDim.x * config->gridDim.y;
  emulator::grid_size = config->gridDim.x, emulator::grid_rows = config->gridDim.y;
  if (all % ctas || config->dynamicSmemBytes > emulator::kSharedBytes) return cudaErrorInvalidValue;
  emulator::failure.clear();
  for (unsigned block = 0; block < all && emulator::failure.empty(); block += ctas)
    emulator::run_cluster(block, ctas, config->blockDim.x, [&] { kernel(args...); });
  return emulator::failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*)(Params...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class... Params>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, void (*)(Params...), int, size_t) {
  *ctas = 1;
  return cudaSuccess;
}
template <class... Params>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*)(Params...), const cudaLaunchConfig_t* config) {
  *clusters = emulator::multiprocessors / static_cast<int>(cluster_size(config));
  return cudaSuccess;
}

inline void __syncthreads() {
  emulator::meet(emulator::self->cta->named[0], emulator::self->cta->cluster->threads, "__syncthreads");
}
inline void __syncwarp() { emulator::exchange(); }
inline unsigned __ballot_sync(unsigned, bool vote) {
  const emulator::Words votes = emulator::exchange(vote);
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(votes[lane][0]) << lane;
  return all;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote); }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == ~0u; }
template <class T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const int lane = static_cast<int>(emulator::self->thread % 32);
  word = emulator::exchange(word)[lane / width * width + from % width][0];
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, static_cast<int>(emulator::self->thread % 32) ^ lanes);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int lanes) {
  const int lane = static_cast<int>(emulator::self->thread % 32);
  return __shfl_sync(mask, value, lane < lanes ? lane : lane - lanes);
}
inline int __syncthreads_or(int vote) {
  static int any[2];
  emulator::Meeting& m = emulator::self->cta->named[0];
  const unsigned now = m.generation & 1;
  if (m.arrived == 0) any[now] = 0;
  any[now] |= vote;
  __syncthreads();
  return any[now] != 0;
}
inline int __reduce_add_sync(unsigned, int v) {
  const emulator::Words all = emulator::exchange(static_cast<uint32_t>(v));
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<int>(all[lane][0]);
  return sum;
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
  const emulator::Words all = emulator::exchange(v);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane][0]);
  return bits;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int k = 0; k < 32; k += 8) c += (a >> k & 255) * (b >> k & 255);
  return c;
}
inline int __dp4a(int a, int b, int c) {
  for (int k = 0; k < 32; k += 8) c += static_cast<int8_t>(a >> k) * static_cast<int8_t>(b >> k);
  return c;
}
inline int __float2int_rn(float v) {
  return v != v
             ? 0
             : static_cast<int>(std::nearbyint(std::min(std::max(static_cast<double>(v), -2147483648.), 2147483647.)));
}
inline float __int_as_float(int v) {
  float r;
  std::memcpy(&r, &v, 4);
  return r;
}
inline int __float_as_int(float v) {
  int r;
  std::memcpy(&r, &v, 4);
  return r;
}
using std::isfinite;
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.f / v; }
inline int atomicAdd(int* to, int v) { return std::exchange(*to, *to + v); }
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long v) {
  return std::exchange(*to, *to + v);
}
inline int atomicMin(int* to, int v) { return std::exchange(*to, std::min(*to, v)); }
inline int atomicMax(int* to, int v) { return std::exchange(*to, std::max(*to, v)); }
inline unsigned atomicOr(unsigned* to, unsigned v) { return std::exchange(*to, *to | v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned v = 0;
  for (int i = 0; i < 4; ++i) v |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return v;
}
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline float __log2f(float v) { return std::log2(v); }
inline size_t __cvta_generic_to_shared(const void* p) {
  const emulator::Cta& cta = *emulator::self->cta;
  return static_cast<size_t>(cta.rank) << emulator::kRankShift | (static_cast<const uint8_t*>(p) - cta.shared);
}
