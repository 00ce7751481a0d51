// motion_mask on CUDA, two launches:
//   look_kernel    a CTA a tile: brightness averaged over the box, and the sum of its distance from the background
//   decide_kernel  every CTA adds the sums of its image, in one order, so that all find the same: a cut or none; then
//                  the mask and the background
// Nothing is read on the host, and there are no atomics: the same frames give the same bits. Both are bound by latency,
// not by bytes: a thread asks for all that it reads at once, and takes four pixels of a row.
#include "core/lists/motion_mask.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kQuad = 4, kPixelsOfCta = kQuad * kThreads;
constexpr int kWide = kMotionTile + kMostSmooth + 1;  // a multiple of four
constexpr int kQuads = kMotionTile / kQuad;           // of a row of the tile
static_assert(kQuads * kMotionTile == kThreads && kWide % kQuad == 0, "a thread takes four pixels of the tile");

struct MotionArgs {
  const void* frame;
  int64_t stride[4];  // of N, C, H, W
  int channels, height, width, reach;
  int64_t pixels;                  // of an image
  int tiles, tile_columns, parts;  // of an image; parts: CTAs of decide_kernel
  bool quads;                      // four pixels from a multiple of four on are one access, of all but the frame
  float divisor, threshold, rate, cut;
  const float* background;
  float* next;
  uint8_t* mask;
  float* smooth;  // [N, pixels]
  double* sums;   // [N, tiles]
};

// Four values from `at` on, of which the first `count` are there. whole: one access.
__device__ __forceinline__ void load_quad(const float* from, bool whole, int count, float (&v)[kQuad]) {
  if (whole) {
    const float4 quad = *reinterpret_cast<const float4*>(from);
    v[0] = quad.x, v[1] = quad.y, v[2] = quad.z, v[3] = quad.w;
  } else {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) v[e] = e < count ? from[e] : 0.0f;
  }
}
__device__ __forceinline__ void store_quad(float* to, bool whole, int count, const float (&v)[kQuad]) {
  if (whole) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int e = 0; e < kQuad; ++e)
      if (e < count) to[e] = v[e];
  }
}

template <class T, int kChannels>
__device__ __forceinline__ float channel_sum(const MotionArgs& a, int64_t at) {
  const T* pixel = static_cast<const T*>(a.frame) + at;
  float sum = 0;
  if constexpr (kChannels > 0) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sum += static_cast<float>(pixel[c * a.stride[1]]);
  } else {
    for (int c = 0; c < a.channels; ++c) sum += static_cast<float>(pixel[c * a.stride[1]]);
  }
  return sum;
}

// The sum over the CTA, for every thread: always added in the same order.
__device__ __forceinline__ double cta_sum(double v, double* scratch) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffff, v, step);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += scratch[w];
  __syncthreads();
  return sum;
}

// kChannels, kReach: known when compiled, for loads and sums without loops; 0 and -1: any.
template <class T, int kChannels, int kReach>
__global__ void __launch_bounds__(kThreads) look_kernel(const __grid_constant__ MotionArgs a) {
  // The tile and what its boxes reach, 0 outside the frame; then summed over the rows of a box. A row has a multiple of
  // four columns.
  constexpr int kMost = kReach < 0 ? kWide : kMotionTile + (2 * kReach + kQuad - 1) / kQuad * kQuad;
  __shared__ float4 light4[kMost * kMost / kQuad], columns4[kMotionTile * kMost / kQuad];
  __shared__ double scratch[kWarps];
  float* const light = reinterpret_cast<float*>(light4);
  const float* const columns = reinterpret_cast<const float*>(columns4);
  grid_dependency_release();
  const int reach = kReach < 0 ? a.reach : kReach;
  const int high = kMotionTile + 2 * reach, wide = kReach < 0 ? (high + kQuad - 1) / kQuad * kQuad : kMost;
  const int n = blockIdx.x / a.tiles, tile = blockIdx.x - n * a.tiles, row = tile / a.tile_columns;
  const int y0 = row * kMotionTile, x0 = (tile - row * a.tile_columns) * kMotionTile;
  const int dy = threadIdx.x / kQuads, dx = threadIdx.x % kQuads * kQuad, y = y0 + dy, x = x0 + dx;
  const int count = y < a.height ? min(max(a.width - x, 0), kQuad) : 0;
  const bool whole = a.quads && count == kQuad;
  const int64_t at = n * a.pixels + static_cast<int64_t>(y) * a.width + x;
  grid_dependency_wait();
  float before[kQuad];
  load_quad(a.background + at, whole, count, before);
  constexpr int kAtOnce = kReach < 0 ? 4 : (kMost * kMost + kThreads - 1) / kThreads;
  for (int first = threadIdx.x; first < high * wide; first += kAtOnce * kThreads) {
    float sum[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int k = first + e * kThreads, fy = y0 - reach + k / wide, fx = x0 - reach + k % wide;
      const bool inside = k < high * wide && fy >= 0 && fy < a.height && fx >= 0 && fx < a.width;
      sum[e] = inside ? channel_sum<T, kChannels>(a, n * a.stride[0] + fy * a.stride[2] + fx * a.stride[3]) : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e)
      if (first + e * kThreads < high * wide) light[first + e * kThreads] = sum[e] / a.divisor;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < kMotionTile * wide / kQuad; k += kThreads) {
    float4 sum = light4[k];
#pragma unroll
    for (int r = 1; r <= 2 * reach; ++r) {
      const float4 v = light4[k + r * wide / kQuad];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    columns4[k] = sum;
  }
  __syncthreads();
  float now[kQuad] = {};
#pragma unroll
  for (int c = 0; c <= 2 * reach; ++c) {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) now[e] += columns[dy * wide + dx + e + c];
  }
  const int rows = min(y + reach, a.height - 1) - max(y - reach, 0) + 1;
  float apart = 0;
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    const int across = min(x + e + reach, a.width - 1) - max(x + e - reach, 0) + 1;
    now[e] /= static_cast<float>(rows) * static_cast<float>(across);
    if (e < count) apart += fabsf(now[e] - before[e]);
  }
  store_quad(a.smooth + at, whole, count, now);
  const double sum = cta_sum(apart, scratch);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) decide_kernel(const __grid_constant__ MotionArgs a) {
  __shared__ double scratch[kWarps];
  grid_dependency_release();
  const int n = blockIdx.x / a.parts, part = blockIdx.x - n * a.parts;
  const int64_t pixel = static_cast<int64_t>(part) * kPixelsOfCta + threadIdx.x * kQuad, at = n * a.pixels + pixel;
  const int count = static_cast<int>(min(max(a.pixels - pixel, int64_t{0}), int64_t{kQuad}));
  const bool whole = a.quads && count == kQuad;
  grid_dependency_wait();
  float now[kQuad], before[kQuad];
  load_quad(a.smooth + at, whole, count, now);
  load_quad(a.background + at, whole, count, before);
  double sum = 0;
  for (int k = threadIdx.x; k < a.tiles; k += kThreads) sum += a.sums[static_cast<int64_t>(n) * a.tiles + k];
  const bool cut = is_cut(cta_sum(sum, scratch), a.pixels, a.cut);
  uchar4 moved;
  uint8_t* const found = reinterpret_cast<uint8_t*>(&moved);
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    found[e] = cut || fabsf(now[e] - before[e]) > a.threshold;
    now[e] = cut ? now[e] : followed(before[e], now[e], a.rate);
  }
  store_quad(a.next + at, whole, count, now);
  if (whole) {
    *reinterpret_cast<uchar4*>(a.mask + at) = moved;
  } else {
#pragma unroll
    for (int e = 0; e < kQuad; ++e)
      if (e < count) a.mask[at + e] = found[e];
  }
}

using LookKernel = void (*)(MotionArgs);

// The box of five is compiled for, of three channels (MotionMask) and of one (Changed).
template <class T>
LookKernel look_kernel_for(const MotionArgs& a) {
  if (a.reach == 2 && a.channels == 3) return look_kernel<T, 3, 2>;
  return a.reach == 2 && a.channels == 1 ? look_kernel<T, 1, 2> : look_kernel<T, 0, -1>;
}

LookKernel look_kernel_for(const MotionArgs& a, DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return look_kernel_for<uint8_t>(a);
    case DType::kF16:
      return look_kernel_for<__half>(a);
    case DType::kBF16:
      return look_kernel_for<__nv_bfloat16>(a);
    default:
      return look_kernel_for<float>(a);
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_motion_mask_cuda(const sbnet::MotionMaskParams* params, void* workspace, void* stream_handle) {
  using namespace sbnet;
  constexpr const char* kOp = "motion_mask";
  const MotionMaskParams& p = *params;
  SBNET_TRY(validate(p));
  if (p.images() == 0 || p.pixels() == 0) return ok_status();
  const int64_t tiles = motion_tiles(p), parts = (p.pixels() + kPixelsOfCta - 1) / kPixelsOfCta;
  SBNET_CHECK(p.pixels() <= INT32_MAX && size_product({p.images(), tiles}) <= INT32_MAX &&
                  size_product({p.images(), parts}) <= INT32_MAX,
              "%s: frame: expected at most 2^31 pixels, got %lld images of %lld", kOp,
              static_cast<long long>(p.images()), static_cast<long long>(p.pixels()));
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  MotionArgs a = {};
  a.frame = p.frame.data;
  for (int d = 0; d < 4; ++d) a.stride[d] = p.frame.stride[d];
  a.channels = static_cast<int>(p.frame.size[1]);
  a.height = static_cast<int>(p.frame.size[2]), a.width = static_cast<int>(p.frame.size[3]);
  a.reach = static_cast<int>(p.smooth / 2);
  a.pixels = p.pixels();
  a.tiles = static_cast<int>(tiles), a.parts = static_cast<int>(parts);
  a.tile_columns = (a.width + kMotionTile - 1) / kMotionTile;
  a.divisor = brightness_divisor(p), a.threshold = p.threshold, a.rate = p.rate, a.cut = p.cut;
  a.background = p.background, a.next = p.next, a.mask = p.mask;
  a.sums = static_cast<double*>(workspace);
  a.smooth = reinterpret_cast<float*>(a.sums + (p.images() * tiles + 1) / 2 * 2);  // 16 bytes apart
  const auto whole = [](const void* data, int bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
  a.quads =
      a.width % kQuad == 0 && whole(a.background, 16) && whole(a.next, 16) && whole(a.mask, 4) && whole(a.smooth, 16);
  const int images = static_cast<int>(p.images());
  const LookKernel look = look_kernel_for(a, p.frame.dtype);
  SBNET_CUDA_TRY(kOp, launch_dependent(device, look, dim3(images * a.tiles), dim3(kThreads), 0, stream, a));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, decide_kernel, dim3(images * a.parts), dim3(kThreads), 0, stream, a));
  return ok_status();
}
