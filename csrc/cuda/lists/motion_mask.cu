// motion_mask on CUDA, two launches:
//   look_kernel    a CTA a tile: brightness averaged over the box, and the sum of its distance from the background
//   decide_kernel  every CTA adds the sums of its image, in one order, so that all find the same: a cut or none; then
//                  the mask and the background
// Nothing is read on the host, and there are no atomics: the same frames give the same bits.
#include "core/lists/motion_mask.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kPixelsOfCta = 4 * kThreads;
constexpr int kWide = kMotionTile + kMostSmooth - 1;

struct MotionArgs {
  const void* frame;
  int64_t stride[4];  // of N, C, H, W
  DType dtype;
  int channels, height, width, reach;
  int64_t pixels;                  // of an image
  int tiles, tile_columns, parts;  // of an image; parts: CTAs of decide_kernel
  float divisor, threshold, rate, cut;
  const float* background;
  float* next;
  uint8_t* mask;
  double* sums;   // [N, tiles]
  float* smooth;  // [N, pixels]
};

template <class T>
__device__ __forceinline__ float channel_sum(const MotionArgs& a, int64_t at) {
  const T* pixel = static_cast<const T*>(a.frame) + at;
  float sum = 0;
  for (int c = 0; c < a.channels; ++c) sum += static_cast<float>(pixel[c * a.stride[1]]);
  return sum;
}

__device__ __forceinline__ float brightness(const MotionArgs& a, int n, int y, int x) {
  const int64_t at = n * a.stride[0] + y * a.stride[2] + x * a.stride[3];
  switch (a.dtype) {
    case DType::kU8:
      return channel_sum<uint8_t>(a, at) / a.divisor;
    case DType::kF16:
      return channel_sum<__half>(a, at) / a.divisor;
    case DType::kBF16:
      return channel_sum<__nv_bfloat16>(a, at) / a.divisor;
    default:
      return channel_sum<float>(a, at) / a.divisor;
  }
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

__global__ void __launch_bounds__(kThreads) look_kernel(const __grid_constant__ MotionArgs a) {
  __shared__ float light[kWide * kWide];          // the tile and what its boxes reach; 0 outside the frame
  __shared__ float columns[kMotionTile * kWide];  // summed over the rows of a box
  __shared__ double scratch[kWarps];
  grid_dependency_release();
  grid_dependency_wait();
  const int n = blockIdx.x / a.tiles, tile = blockIdx.x - n * a.tiles, row = tile / a.tile_columns;
  const int y0 = row * kMotionTile, x0 = (tile - row * a.tile_columns) * kMotionTile;
  const int wide = kMotionTile + 2 * a.reach;
  for (int k = threadIdx.x; k < wide * wide; k += kThreads) {
    const int y = y0 - a.reach + k / wide, x = x0 - a.reach + k % wide;
    const bool inside = y >= 0 && y < a.height && x >= 0 && x < a.width;
    light[k] = inside ? brightness(a, n, y, x) : 0.0f;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < kMotionTile * wide; k += kThreads) {
    float sum = 0;
    for (int r = 0; r <= 2 * a.reach; ++r) sum += light[k + r * wide];
    columns[k] = sum;
  }
  __syncthreads();
  float apart = 0;
  for (int k = threadIdx.x; k < kMotionTile * kMotionTile; k += kThreads) {
    const int dy = k / kMotionTile, dx = k % kMotionTile, y = y0 + dy, x = x0 + dx;
    if (y >= a.height || x >= a.width) continue;
    float sum = 0;
    for (int c = 0; c <= 2 * a.reach; ++c) sum += columns[dy * wide + dx + c];
    const int rows = min(y + a.reach, a.height - 1) - max(y - a.reach, 0) + 1;
    const int across = min(x + a.reach, a.width - 1) - max(x - a.reach, 0) + 1;
    const float now = sum / (static_cast<float>(rows) * static_cast<float>(across));
    const int64_t at = n * a.pixels + static_cast<int64_t>(y) * a.width + x;
    a.smooth[at] = now;
    apart += fabsf(now - a.background[at]);
  }
  const double sum = cta_sum(apart, scratch);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) decide_kernel(const __grid_constant__ MotionArgs a) {
  __shared__ double scratch[kWarps];
  grid_dependency_release();
  const int n = blockIdx.x / a.parts, part = blockIdx.x - n * a.parts;
  grid_dependency_wait();
  double sum = 0;
  for (int k = threadIdx.x; k < a.tiles; k += kThreads) sum += a.sums[static_cast<int64_t>(n) * a.tiles + k];
  const bool cut = is_cut(cta_sum(sum, scratch), a.pixels, a.cut);
  for (int k = threadIdx.x; k < kPixelsOfCta; k += kThreads) {
    const int64_t pixel = static_cast<int64_t>(part) * kPixelsOfCta + k, at = n * a.pixels + pixel;
    if (pixel >= a.pixels) return;
    const float now = a.smooth[at], before = a.background[at];
    a.mask[at] = cut || fabsf(now - before) > a.threshold;
    a.next[at] = cut ? now : followed(before, now, a.rate);
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
  a.frame = p.frame.data, a.dtype = p.frame.dtype;
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
  a.smooth = reinterpret_cast<float*>(a.sums + p.images() * tiles);
  const int images = static_cast<int>(p.images());
  SBNET_CUDA_TRY(kOp, launch_dependent(device, look_kernel, dim3(images * a.tiles), dim3(kThreads), 0, stream, a));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, decide_kernel, dim3(images * a.parts), dim3(kThreads), 0, stream, a));
  return ok_status();
}
