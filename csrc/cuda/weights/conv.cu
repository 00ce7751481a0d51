// Convolutions with block-sparse weights on every GPU, in plain float32 arithmetic: any strides, lists and geometry;
// and the CUDA entries, which ask for Hopper's kernel first.
//
// A CTA computes 64 positions of one group of up to 32 output channels, 16 products (input channel, tap) of each at a
// time, block after block of those that the group is in. No two CTAs write one element: overlapping blocks add up in
// registers, in the order of the blocks.
#include <algorithm>

#include "core/weights/conv.h"
#include "cuda/capability.h"
#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/weights/matmul_portable.cuh"
#include "cuda/weights/simt.cuh"
#ifdef SBNET_SM90
#include "cuda/sm90/conv/conv.h"
#endif

namespace sbnet {
namespace portable {
namespace {

constexpr const char* kBlockConvOp = "blocksparse_conv";
constexpr const char* kBlockConvGradOp = "blocksparse_conv_weight_grad";
constexpr int kThreads = 128, kRows = 64, kDepth = 16, kWide = 4, kTall = 4, kRowStep = kRows / kTall;
// Sums are gathered in runs of this many products and then added up: one running sum would lose more.
constexpr int kRun = 4 * kDepth;

struct Taps {
  __device__ __forceinline__ Taps(const ConvGeometry& g, int t)
      : at{t / (g.kernel[1] * g.kernel[2]), t / g.kernel[2] % g.kernel[1], t % g.kernel[2]} {}
  int at[3];
};

// Elements from x's first to the pixel that a tap of a position reads, or -1.
__device__ __forceinline__ int64_t source_offset(const ConvGeometry& g, const VolumeView& x, bool transposed,
                                                 const VolumePosition& to, const Taps& tap) {
  VolumePosition from = {to.n, {}};
  if (to.n < 0) return -1;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    from.at[d] = conv_source(g, transposed, d, to.at[d], tap.at[d], x.size[2 + d]);
    if (from.at[d] < 0) return -1;
  }
  return volume_offset(x, from);
}

__device__ __forceinline__ int64_t position_count(const VolumeView& y, const ActiveView& active) {
  if (!active.given()) return position_capacity(y, active);
  return static_cast<int64_t>(clamped_count(active.count, static_cast<int>(active.capacity))) * active.grid.size[0] *
         active.grid.size[1];
}

template <class T>
__global__ void __launch_bounds__(kThreads) conv_kernel(const BlocksparseConvParams p, int64_t tiles) {
  __shared__ float left[kDepth][kRows + 1], right[kDepth][kConvGroup];
  __shared__ VolumePosition position[kRows];
  __shared__ int32_t channel[kConvGroup], place[kConvGroup];
  const int tid = threadIdx.x, row0 = tid / (kConvGroup / kWide), column0 = tid % (kConvGroup / kWide) * kWide;
  const BlocksparseConvShape& shape = p.layout.shape;
  const int to = p.to(), from = p.from(), taps = static_cast<int>(shape.taps);
  const BlocksparseConvSide& side = p.layout.side[to];
  const T* const x = static_cast<const T*>(p.x.data);
  const T* const weight = static_cast<const T*>(p.weight);
  grid_dependency_wait();
  const int64_t positions = position_count(p.y, p.active);

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / shape.groups[to] * kRows, group = tile % shape.groups[to];
    if (first_row >= positions) break;
    __syncthreads();  // what the tile before reads
    if (tid < kRows) {
      position[tid] = {-1, {}};
      if (first_row + tid < positions) position[tid] = position_of(p.y, p.active, first_row + tid);
    }
    if (tid < kConvGroup) {
      const int32_t c = side.channels[group * kConvGroup + tid];
      channel[tid] = c < shape.channels[to] ? c : -1;
    }
    const int64_t first = min(max(int64_t{side.start[group]}, int64_t{0}), shape.entries[to]);
    const int64_t end = min(max(int64_t{side.start[group + 1]}, first), shape.entries[to]);
    float sum[kTall][kWide] = {};
    for (int64_t e = first; e < end; ++e) {
      const BlocksparseConvBlock block = conv_block(p.layout, side.block[e]);
      const int depth = block.count[from] * taps;
      float run[kTall][kWide] = {};
      for (int d0 = 0; d0 < depth; d0 += kDepth) {
        __syncthreads();
        if (tid < kConvGroup && d0 == 0) {
          const int32_t at = side.position[e * kConvGroup + tid];
          place[tid] = at < block.count[to] ? at : -1;
        }
        for (int i = tid; i < kRows * kDepth; i += kThreads) {
          const int row = i % kRows, d = d0 + i / kRows;
          float v = 0.f;
          if (d < depth) {
            const int64_t pixel =
                source_offset(p.geometry, p.x, p.transposed, position[row], Taps(p.geometry, d % taps));
            const int64_t c = block.list[from][d / taps];
            if (pixel >= 0 && c >= 0 && c < p.x.size[1]) v = to_float(x[pixel + c * p.x.stride[1]]);
          }
          left[i / kRows][row] = v;
        }
        if (d0 == 0) __syncthreads();  // the places
        for (int i = tid; i < kConvGroup * kDepth; i += kThreads) {
          const int k = i / kDepth, d = d0 + i % kDepth;
          float v = 0.f;
          if (d < depth && place[k] >= 0) {
            const int64_t input = d / taps, inputs = block.count[1];
            const int64_t at = p.transposed ? input * inputs + place[k] : place[k] * inputs + input;
            v = to_float(weight[block.weight + at * taps + d % taps]);
          }
          right[i % kDepth][k] = v;
        }
        __syncthreads();
        multiply_stage<kRowStep>(left, right, row0, column0, run);
        if ((d0 + kDepth) % kRun && d0 + kDepth < depth) continue;
        end_run(sum, run);
      }
    }
    __syncthreads();  // position and channel, where no stage has passed
#pragma unroll
    for (int k = 0; k < kWide; ++k) {
      const int32_t c = channel[column0 + k];
      float bias = 0.f;
      if (p.bias && c >= 0)
        bias = p.bias_dtype == DType::kF32 ? static_cast<const float*>(p.bias)[c]
                                           : to_float(static_cast<const T*>(p.bias)[c]);
#pragma unroll
      for (int i = 0; i < kTall; ++i) sum[i][k] += bias;
    }
    activate(p.activation, p.activation_param, sum);
#pragma unroll
    for (int i = 0; i < kTall; ++i) {
      const VolumePosition& at = position[row0 + i * kRowStep];
      if (at.n < 0) continue;
      T* const y = static_cast<T*>(p.y.data) + volume_offset(p.y, at);
#pragma unroll
      for (int k = 0; k < kWide; ++k)
        if (channel[column0 + k] >= 0) y[channel[column0 + k] * p.y.stride[1]] = from_float<T>(sum[i][k]);
    }
  }
}

// `share` CTAs a block. A CTA of 256 threads: 32 output channels x 32 products (input channel, tap) of a block, over
// all positions.
constexpr int kGradThreads = 256, kGradTile = 32, kGradRows = 32;

template <class T>
__global__ void __launch_bounds__(kGradThreads)
    conv_weight_grad_kernel(const BlocksparseConvWeightGradParams p, int share) {
  constexpr int kMost = kGradTile * kGradTile / kGradThreads;
  __shared__ float left[kGradRows][kGradTile + 1], right[kGradRows][kGradTile + 1];
  const int tid = threadIdx.x, taps = static_cast<int>(p.layout.shape.taps);
  grid_dependency_wait();
  const int64_t positions = position_capacity(p.dy, {});
  for (int64_t b = blockIdx.x / share; b < p.layout.shape.blocks; b += gridDim.x / share) {
    const BlocksparseConvBlock block = conv_block(p.layout, b);
    const int outputs = block.count[0], depth = block.count[1] * taps;
    const int wide = (depth + kGradTile - 1) / kGradTile, tiles = wide * ((outputs + kGradTile - 1) / kGradTile);
    for (int tile = blockIdx.x % share; tile < tiles; tile += share) {
      const int k0 = tile / wide * kGradTile, d0 = tile % wide * kGradTile;
      float sum[kMost] = {};
      for (int64_t row = 0; row < positions; row += kGradRows) {
        __syncthreads();
        for (int i = tid; i < kGradRows * kGradTile; i += kGradThreads) {
          const int r = i % kGradRows, f = i / kGradRows;
          const VolumePosition at = row + r < positions ? position_of(p.dy, {}, row + r) : VolumePosition{-1, {}};
          float dy = 0.f, x = 0.f;
          if (at.n >= 0 && k0 + f < outputs) {
            const int64_t k = block.list[0][k0 + f];
            if (k >= 0 && k < p.dy.size[1])
              dy = to_float(static_cast<const T*>(p.dy.data)[volume_offset(p.dy, at) + k * p.dy.stride[1]]);
          }
          if (d0 + f < depth) {
            const int64_t pixel = source_offset(p.geometry, p.x, false, at, Taps(p.geometry, (d0 + f) % taps));
            const int64_t c = block.list[1][(d0 + f) / taps];
            if (pixel >= 0 && c >= 0 && c < p.x.size[1])
              x = to_float(static_cast<const T*>(p.x.data)[pixel + c * p.x.stride[1]]);
          }
          left[r][f] = dy;
          right[r][f] = x;
        }
        __syncthreads();
        multiply_rows<kGradThreads>(left, right, kGradTile, sum);
      }
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int e = tid + i * kGradThreads, k = k0 + e / kGradTile, d = d0 + e % kGradTile;
        if (k < outputs && d < depth)
          static_cast<T*>(p.dw)[block.weight + int64_t{k} * depth + d] = from_float<T>(sum[i]);
      }
    }
  }
}

}  // namespace
}  // namespace portable
}  // namespace sbnet

extern "C" {

int64_t sbnet_blocksparse_conv_workspace_bytes_cuda(const sbnet::BlocksparseConvParams* p) {
  using namespace sbnet;
#ifdef SBNET_SM90
  DeviceInfo device;
  if (validate(*p).ok() && current_device(portable::kBlockConvOp, &device).ok() && select_capability(device) == 90 &&
      !hopper_blocksparse_conv_declines(*p))
    return p->packed ? 0 : sm90::conv_blocksparse_packed_bytes(p->layout.shape, p->to());
#endif
  (void)p;
  return 0;
}

sbnet::Status sbnet_blocksparse_conv_cuda(const sbnet::BlocksparseConvParams* p, void* workspace, void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  const int64_t positions = position_capacity(p->y, p->active);
  if (!positions) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(portable::kBlockConvOp, &device));
#ifdef SBNET_SM90
  if (select_capability(device) == 90 && !hopper_blocksparse_conv_declines(*p))
    return sm90::conv_blocksparse(*p, device, workspace, static_cast<cudaStream_t>(stream_handle));
#else
  (void)workspace;
#endif
  const int64_t tiles = (positions + portable::kRows - 1) / portable::kRows * p->layout.shape.groups[p->to()];
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, 1 << 24)));
  return by_dtype(p->x.dtype, [&](auto t) {
    SBNET_CUDA_TRY(portable::kBlockConvOp,
                   launch_dependent(device, portable::conv_kernel<decltype(t)>, grid, dim3(portable::kThreads), 0,
                                    static_cast<cudaStream_t>(stream_handle), *p, tiles));
    return ok_status();
  });
}

int64_t sbnet_blocksparse_packed_bytes_cuda(const int64_t* layout, sbnet::DType dtype, bool transposed) {
  using namespace sbnet;
#ifdef SBNET_SM90
  DeviceInfo device;
  const BlocksparseConvShape shape = conv_layout_shape(layout);
  const bool halves = dtype == DType::kF16 || dtype == DType::kBF16;
  if (halves && shape.block_size && current_device(portable::kBlockConvOp, &device).ok() &&
      select_capability(device) == 90)
    return sm90::conv_blocksparse_packed_bytes(shape, transposed ? 1 : 0);
#endif
  (void)layout, (void)dtype, (void)transposed;
  return 0;
}

sbnet::Status sbnet_pack_blocksparse_filters_cuda(const sbnet::BlocksparsePackParams* p, void* stream_handle) {
  using namespace sbnet;
#ifdef SBNET_SM90
  DeviceInfo device;
  SBNET_TRY(current_device("pack_blocksparse_filters", &device));
  return sm90::pack_blocksparse(*p, device, static_cast<cudaStream_t>(stream_handle));
#else
  (void)p, (void)stream_handle;
  return ok_status();
#endif
}

int64_t sbnet_blocksparse_conv_weight_grad_workspace_bytes_cuda(const sbnet::BlocksparseConvWeightGradParams*) {
  return 0;
}

sbnet::Status sbnet_blocksparse_conv_weight_grad_cuda(const sbnet::BlocksparseConvWeightGradParams* p, void*,
                                                      void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  DeviceInfo device;
  SBNET_TRY(current_device(portable::kBlockConvGradOp, &device));
  const int64_t blocks = std::min<int64_t>(p->layout.shape.blocks, 1 << 20);
  const int share = static_cast<int>(std::clamp<int64_t>(8 * device.sm_count / blocks, 1, 1024));  // CTAs of a block
  const dim3 grid(static_cast<unsigned>(blocks * share));
  return by_dtype(p->x.dtype, [&](auto t) {
    SBNET_CUDA_TRY(portable::kBlockConvGradOp, launch_dependent(device, portable::conv_weight_grad_kernel<decltype(t)>,
                                                                grid, dim3(portable::kGradThreads), 0,
                                                                static_cast<cudaStream_t>(stream_handle), *p, share));
    return ok_status();
  });
}
}
