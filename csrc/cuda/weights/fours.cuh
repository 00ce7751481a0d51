// Blocks of 8 as blocks of 16, which WGMMA can multiply: four of them, zeros for those that are not stored
// (core/weights/plan.h).
#pragma once
#include <algorithm>

#include "core/weights/plan.h"
#include "cuda/weights/matmul_portable.cuh"

namespace sbnet {
namespace sm90 {

// Of the blocks of 16, in halves: there are at most as many of them as of 8. 0: no block of 8, or no plan.
inline int64_t fours_bytes(const BlockLayoutShape& s, int64_t plan_words, DType dtype) {
  return s.block_size == 8 && s.blocks && plan_words > 0 && dtype != DType::kF32 ? s.blocks * 256 * 2 : 0;
}

struct Fours {
  const int32_t* plan;
  int64_t plan_words, blocks;

  // The tables may hold anything.
  __device__ __forceinline__ int64_t count() const {
    const int64_t most = min(blocks, (plan_words - 1) / 4);
    return min(max(int64_t{plan[plan_words - 1]}, int64_t{0}), most);
  }
  // The block of 8 that word `i` (8 elements) of the blocks of 16 is of, or -1; and which word of it.
  __device__ __forceinline__ int64_t source(int64_t count, int64_t i, int* word) const {
    const int row = static_cast<int>(i >> 1) & 15, right = i & 1;
    const int64_t id = plan[plan_words - 1 - 4 * count + 4 * (i >> 5) + (row >> 3) * 2 + right];
    *word = row & 7;
    return id < 0 || id >= blocks ? -1 : id;
  }
};

template <class T>
__global__ void __launch_bounds__(256) pack_fours_kernel(Fours fours, const T* from, const float* gates, T* to) {
  grid_dependency_wait();
  const int64_t count = fours.count(), threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count * 32; i += threads) {
    int word;
    const int64_t id = fours.source(count, i, &word);
    const float gate = id < 0 ? 0.f : gates ? gates[id] : 1.f;
    alignas(16) T v[8] = {};
    if (gate != 0.f) {
      *reinterpret_cast<uint4*>(v) = reinterpret_cast<const uint4*>(from)[id * 8 + word];
      if (gates)  // rounded as PyTorch rounds weight * gate
        for (T& e : v) e = from_float<T>(to_float(e) * gate);
    }
    reinterpret_cast<uint4*>(to)[i] = *reinterpret_cast<const uint4*>(v);
  }
}

template <class T>
__global__ void __launch_bounds__(256) unpack_fours_kernel(Fours fours, const T* from, T* to) {
  grid_dependency_wait();
  constexpr int kWords = sizeof(T) * 8 / 16;
  const int64_t count = fours.count(), threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count * 32; i += threads) {
    int word;
    const int64_t id = fours.source(count, i, &word);
    if (id < 0) continue;
    for (int k = 0; k < kWords; ++k)
      reinterpret_cast<uint4*>(to)[(id * 8 + word) * kWords + k] = reinterpret_cast<const uint4*>(from)[i * kWords + k];
  }
}

inline dim3 fours_grid(int64_t blocks, const DeviceInfo& device) {
  return dim3(static_cast<unsigned>(std::min<int64_t>((blocks * 32 + 255) / 256, device.sm_count * 8)));
}

inline Status pack_fours(const BlocksparseMatmulParams& p, void* to, const DeviceInfo& device, cudaStream_t stream) {
  const Fours fours = {p.plan, p.plan_words, p.layout.shape.blocks};
  return by_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    SBNET_CUDA_TRY(portable::kMatmulOp,
                   launch_dependent(device, pack_fours_kernel<T>, fours_grid(fours.blocks, device), dim3(256), 0,
                                    stream, fours, static_cast<const T*>(p.weight), p.gate, static_cast<T*>(to)));
    return ok_status();
  });
}

inline Status unpack_fours(const BlocksparseWeightGradParams& p, const void* from, const DeviceInfo& device,
                           cudaStream_t stream) {
  const Fours fours = {p.plan, p.plan_words, p.layout.shape.blocks};
  return by_dtype(p.dw_dtype, [&](auto t) {
    using T = decltype(t);
    SBNET_CUDA_TRY(portable::kWeightGradOp,
                   launch_dependent(device, unpack_fours_kernel<T>, fours_grid(fours.blocks, device), dim3(256), 0,
                                    stream, fours, static_cast<const T*>(from), static_cast<T*>(p.dw)));
    return ok_status();
  });
}

}  // namespace sm90
}  // namespace sbnet
