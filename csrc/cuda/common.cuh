// Shared by all CUDA files: launch checks, device facts, the list of active blocks, dtype conversion.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

#include "core/fastdiv.h"
#include "core/types.h"

namespace sbnet {

#define SBNET_CUDA_TRY(op, expression)                                                                           \
  do {                                                                                                           \
    const cudaError_t error_ = (expression);                                                                     \
    if (error_ != cudaSuccess)                                                                                   \
      return ::sbnet::make_status(::sbnet::Code::kDeviceError, "%s: %s (%s:%d)", op, cudaGetErrorString(error_), \
                                  __FILE__, __LINE__);                                                           \
  } while (0)

constexpr int kMaxDevices = 64;

// Facts about the current device, read once per device.
struct DeviceInfo {
  int index, sm_count, capability;  // capability: 80, 86, 90, ...
};

inline Status current_device(const char* op, DeviceInfo* out) {
  static std::atomic<uint64_t> cache[kMaxDevices];  // capability << 32 | sm_count, 0 = not read yet
  int device = 0;
  SBNET_CUDA_TRY(op, cudaGetDevice(&device));
  uint64_t packed = device < kMaxDevices ? cache[device].load(std::memory_order_relaxed) : 0;
  if (!packed) {
    int sms = 0, major = 0, minor = 0;
    SBNET_CUDA_TRY(op, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    SBNET_CUDA_TRY(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    SBNET_CUDA_TRY(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    packed = static_cast<uint64_t>(major * 10 + minor) << 32 | static_cast<uint32_t>(sms);
    if (device < kMaxDevices) cache[device].store(packed, std::memory_order_relaxed);
  }
  *out = {device, static_cast<int>(packed & 0xffffffff), static_cast<int>(packed >> 32)};
  return ok_status();
}

// Plain loads, here and wherever a kernel may start before the one that writes its inputs has ended: the compiler takes
// __ldg for a load of constant memory and may move it above grid_dependency_wait().
__device__ __forceinline__ int clamped_count(const int32_t* count, int capacity) {
  return min(max(*count, 0), capacity);
}

// Is row `slot` of the index list a block of this grid and batch? Rows that are not are skipped, never followed.
struct BlockIndex {
  int n, i, j;
};
__device__ __forceinline__ bool is_block(const BlockIndex& b, int batch, const BlockGrid& grid) {
  return static_cast<unsigned>(b.n) < static_cast<unsigned>(batch) &&
         static_cast<unsigned>(b.i) < static_cast<unsigned>(grid.count[0]) &&
         static_cast<unsigned>(b.j) < static_cast<unsigned>(grid.count[1]);
}
__device__ __forceinline__ bool load_block(const int32_t* indices, int64_t slot, int batch, const BlockGrid& grid,
                                           BlockIndex* b) {
  const int32_t* row = indices + slot * 3;
  *b = {row[0], row[1], row[2]};
  return is_block(*b, batch, grid);
}

// kVec values in one access.
template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T v[kVec];
};

template <class T>
__device__ __forceinline__ float to_float(T v) {
  return static_cast<float>(v);
}
template <class T>
__device__ __forceinline__ T from_float(float v) {
  return static_cast<T>(v);
}

// max and min that pass NaN on.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Launches with programmatic dependent launch where the device has it (sm_90 on): the kernel must call
// grid_dependency_wait() before it touches memory that an earlier kernel of the stream writes or reads.
template <class... Params, class... Args>
cudaError_t launch_dependent(const DeviceInfo& device, void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem,
                             cudaStream_t stream, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = device.capability >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// Lets kKernel's launches have `bytes` of dynamic shared memory. The driver is asked once for each device.
template <auto kKernel>
Status allow_shared(const char* op, const DeviceInfo& device, int bytes) {
  static std::atomic<bool> allowed[kMaxDevices];
  const bool cached = device.index < kMaxDevices;
  if (cached && allowed[device.index].load(std::memory_order_relaxed)) return ok_status();
  SBNET_CUDA_TRY(op, cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (cached) allowed[device.index].store(true, std::memory_order_relaxed);
  return ok_status();
}

__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The kernel after this one may start its prologue now.
__device__ __forceinline__ void grid_dependency_release() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace sbnet
