// Host side of the Hopper convolutions: tensor maps, and Conv2dParams to CommonArgs.
#pragma once
#include <atomic>
#include <cmath>

#include "core/masked/conv_select.h"
#include "core/memory.h"
#include "core/settled.h"
#include "cuda/sm90/conv/conv_args.cuh"

namespace sbnet::sm90 {

constexpr const char* kOp = "sparse_conv2d";

using EncodeFn = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeFn encode_function() {  // from the driver at run time: no link to libcuda
  static const EncodeFn fn = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found);
    return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeFn>(p) : nullptr;
  }();
  return fn;
}

inline Plane plane_of(const TensorView& t) {
  const PixelStrides s = pixel_strides(t);
  return {t.data, s.n, s.y, s.x};
}

inline Status make_map(CUtensorMap* m, DType dtype, const char* name, int rank, void* data, const cuuint64_t* size,
                       const cuuint64_t* stride_bytes, const cuuint32_t* box,
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B, const char* op = kOp) {
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  const EncodeFn encode = encode_function();
  if (!encode) return make_status(Code::kDeviceError, "%s: the driver has no cuTensorMapEncodeTiled", op);
  const CUresult r =
      encode(m, dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, data,
             size, stride_bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS)
    return make_status(Code::kDeviceError, "%s: %s: cuTensorMapEncodeTiled failed with code %d", op, name,
                       static_cast<int>(r));
  return ok_status();
}

// Boxes of 64 channels x box_x x box_y pixels of every `step`-th row and column, from (first_y, first_x) on.
inline Status plane_map(CUtensorMap* m, const char* name, const TensorView& t, int box_x, int box_y, int step = 1,
                        int first_y = 0, int first_x = 0) {
  const Plane p = plane_of(t);
  const cuuint64_t size[4] = {cuuint64_t(t.size[1]), cuuint64_t((t.size[3] - first_x + step - 1) / step),
                              cuuint64_t((t.size[2] - first_y + step - 1) / step), cuuint64_t(t.size[0])};
  const cuuint64_t stride[3] = {cuuint64_t(p.x) * 2 * step, cuuint64_t(p.y) * 2 * step, cuuint64_t(p.n) * 2};
  const cuuint32_t box[4] = {64, cuuint32_t(box_x), cuuint32_t(box_y), 1};
  return make_map(m, t.dtype, name, 4, static_cast<uint16_t*>(p.data) + first_y * p.y + first_x * p.x, size, stride,
                  box);
}

// Boxes of 64 channels of a tap x `rows` output channels of packed weights.
inline Status tap_map(CUtensorMap* m, const Conv2dParams& p, int rows) {
  const cuuint64_t size[3] = {cuuint64_t(p.weight.size[1]), cuuint64_t(p.weight.size[2] * p.weight.size[3]),
                              cuuint64_t(p.weight.size[0])};
  const cuuint64_t stride[2] = {size[0] * 2, size[0] * size[1] * 2};
  const cuuint32_t box[3] = {64, 1, cuuint32_t(rows)};
  return make_map(m, p.x.dtype, "weight", 3, p.weight.data, size, stride, box);
}

// Boxes of `rows` output channels x 64 input channels, of which there are `slabs`, one after the other.
inline Status slab_map(CUtensorMap* m, const Conv2dParams& p, int rows, int64_t slabs) {
  const cuuint64_t size[2] = {64, cuuint64_t(slabs * rows)}, stride[1] = {128};
  const cuuint32_t box[2] = {64, cuuint32_t(rows)};
  return make_map(m, p.x.dtype, "weight", 2, p.weight.data, size, stride, box);
}

inline bool has_fringe(const Conv2dParams& p) { return p.fringe.pixels && p.fringe.capacity > 0; }

inline void fill_common(const Conv2dParams& p, CommonArgs* a) {
  a->y = plane_of(p.y);
  if (p.residual.data) a->residual = plane_of(p.residual);
  a->bias = p.bias;
  a->bias_f32 = p.bias_dtype == DType::kF32;
  a->blocks = p.active.indices;
  a->count = p.active.count;
  a->capacity = static_cast<int>(p.active.capacity);
  if (has_fringe(p)) {
    a->fringe = p.fringe.pixels;
    a->fringe_count = p.fringe.count;
    a->fringe_capacity = static_cast<int>(p.fringe.capacity);
  }
  a->N = static_cast<int>(p.y.size[0]);
  a->K = static_cast<int>(p.y.size[1]);
  a->H = static_cast<int>(p.y.size[2]);
  a->W = static_cast<int>(p.y.size[3]);
  a->grid_h = p.active.grid.count[0];
  a->grid_w = p.active.grid.count[1];
  a->block_h = p.active.grid.size[0];
  a->block_w = p.active.grid.size[1];
  a->plane_h = FastDiv(a->H);
  a->plane_w = FastDiv(a->W);
  a->activation = p.activation;
  gate_of(p.activation, a->gate);
  a->after = adds_after(p);
  a->low = p.activation == Activation::kNone ? -INFINITY : 0.f;
  a->slope = p.activation_param;
  a->slopes = p.slope;
  a->slopes_f32 = p.slope_dtype == DType::kF32;
  a->settled = inputs_settled();
}

// allow_shared(), of a kernel whose CTAs share a multiprocessor: as much of its cache as can be becomes shared memory.
template <auto kKernel>
Status allow_most_shared(const DeviceInfo& device, int bytes) {
  static std::atomic<bool> known[kMaxDevices];
  const bool cached = device.index < kMaxDevices;
  if (cached && known[device.index].load(std::memory_order_acquire)) return ok_status();
  SBNET_CUDA_TRY(kOp, cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  SBNET_CUDA_TRY(kOp, cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
  if (cached) known[device.index].store(true, std::memory_order_release);
  return ok_status();
}

// A launch in clusters of 2^log_cluster CTAs, which may begin before the kernel ahead of it has ended.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  ClusterLaunch(int64_t ctas, int threads, int shared, int log_cluster, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {1u << log_cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = static_cast<unsigned>(ctas);
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points at attributes
};

// How many clusters of 2^log_cluster CTAs of kKernel the device holds at once; in smaller ones where so large ones
// leave a tenth of it idle (small MIG slices). Sets the kernel's attributes on first use.
template <auto kKernel>
Status clusters_that_fit(const DeviceInfo& device, int threads, int shared, int* log_cluster, int* clusters) {
  static std::atomic<int> known[kMaxDevices][3];  // + 1; clusters of up to four
  const bool cached = device.index < kMaxDevices;
  for (;; --*log_cluster) {
    int n = cached ? known[device.index][*log_cluster].load(std::memory_order_acquire) - 1 : -1;
    if (n < 0) {
      SBNET_CUDA_TRY(kOp, cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
      n = device.sm_count;
      if (*log_cluster) {
        const int fit = device.sm_count >> *log_cluster;
        const ClusterLaunch whole((fit > 0 ? fit : 1) << *log_cluster, threads, shared, *log_cluster, nullptr);
        SBNET_CUDA_TRY(kOp, cudaOccupancyMaxActiveClusters(&n, kKernel, &whole.config));
      }
      if (cached) known[device.index][*log_cluster].store(n + 1, std::memory_order_release);
    }
    *clusters = n;
    if (*log_cluster == 0 || (n << *log_cluster) * 10 >= device.sm_count * 9) return ok_status();
  }
}

}  // namespace sbnet::sm90
