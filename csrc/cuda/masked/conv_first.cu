// First layers of a network with a large kernel, as 7x7: up to four input channels, 17 to 64 taps, up to 64 output
// channels, x of any strides; float16 and bfloat16, on the tensor cores of every device since sm_80.
//
// A unit is two cells of 8x8 outputs by all output channels. What they read of x comes to shared memory, a pixel as
// four channels: an operand of mma.sync is then one access a tap (conv_few_channels.cuh). Four warps have two rows of
// each cell; the weights lie in shared memory, too, in the order in which lanes read them.
#include "core/masked/conv_select.h"
#include "cuda/masked/conv_few_channels.cuh"
#include "cuda/masked/conv_patch_shape.cuh"
#include "cuda/masked/conv_sums.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kCell = 8, kFirstThreads = 128, kFirstCtas = 4, kCells = 2;

struct FirstPlan {
  PatchPlan patch;
  FastDiv pitch;              // pixels of a row of a patch
  int32_t pixels, row, cell;  // of a patch; bytes from a row of outputs to the next; bytes of a cell's patch
  int32_t zeros;              // bytes from a patch to zeros, as far apart as rows of outputs

  explicit FirstPlan(const Conv2dParams& p) : patch(p, kCell) {
    const auto side = [&](int d) {
      return (kCell - 1) * p.stride[d] + (static_cast<int>(p.weight.size[2 + d]) - 1) * p.dilation[d] + 1;
    };
    pitch = FastDiv(side(1));
    pixels = side(0) * side(1);
    row = side(1) * p.stride[0] * 8;
    zeros = pixels * 8;
    cell = zeros + row + 8;
  }
};

// kTiles: of eight output channels; kSteps: of four taps.
template <int kTiles, int kSteps>
constexpr int kWeightBytes = kSteps * kTiles * 32 * 8;

template <class T, int kMost, int kTiles, int kSteps>
__global__ void __launch_bounds__(kFirstThreads, kFirstCtas)
    conv_first_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ FirstPlan plan) {
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, K = static_cast<int>(p.weight.size[0]);
  const int channels = static_cast<int>(p.x.size[1]), width = static_cast<int>(p.weight.size[3]);
  const int taps = static_cast<int>(p.weight.size[2]) * width;
  uint2* const weights = reinterpret_cast<uint2*>(smem);
  char* const patches = smem + kWeightBytes<kTiles, kSteps>;
  grid_dependency_wait();
  grid_dependency_release();
  clear_fringe<T>(p, plan.patch.fringe, int64_t{blockIdx.x} * kFirstThreads + threadIdx.x,
                  int64_t{gridDim.x} * kFirstThreads);
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int cells = count * static_cast<int>(plan.patch.cells_per_block.divisor), units = (cells + kCells - 1) / kCells;
  if (static_cast<int>(blockIdx.x) >= units) return;

  constexpr int kWeightPasses = kSteps * kTiles * 32 / kFirstThreads;
  Quad staged[kWeightPasses];  // all are loaded before one is used
#pragma unroll
  for (int pass = 0; pass < kWeightPasses; ++pass) {
    const int i = pass * kFirstThreads + threadIdx.x;
    const int tile = i / 32 % kTiles, n = i % 32 / 4, tap = i / (32 * kTiles) * kStepTaps + i % kStepTaps;
    const int k = tile / 4 * 32 + n / 2 * 8 + tile % 4 * 2 + n % 2;  // conv_sums.cuh
    staged[pass] = read_quad<kMost>(static_cast<const uint16_t*>(p.weight.data) + k * p.weight.stride[0] +
                                        tap / width * p.weight.stride[2] + tap % width * p.weight.stride[3],
                                    p.weight.stride[1], channels, (k < K) & (tap < taps));
  }
#pragma unroll
  for (int pass = 0; pass < kWeightPasses; ++pass)
    weights[pass * kFirstThreads + threadIdx.x] = make_uint2(staged[pass].low(), staged[pass].high());
  for (int i = threadIdx.x; i < kCells * 2; i += kFirstThreads)
    *reinterpret_cast<uint2*>(patches + i / 2 * plan.cell + plan.zeros + i % 2 * plan.row) = make_uint2(0, 0);
  int from[kSteps];  // of the lane's first pixel, in bytes
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int tap = s * kStepTaps + lane % 4, pitch = static_cast<int>(plan.pitch.divisor);
    from[s] = tap < taps ? ((warp * 2 * p.stride[0] + tap / width * p.dilation[0]) * pitch + lane / 4 * p.stride[1] +
                            tap % width * p.dilation[1]) *
                               8
                         : plan.zeros;
  }

  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    int n[kCells], row[kCells], column[kCells];
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      const int number = unit * kCells + c;
      uint32_t slot, rest, down, across;
      plan.patch.cells_per_block.divmod(static_cast<uint32_t>(min(number, cells - 1)), &slot, &rest);
      plan.patch.cells_per_row.divmod(rest, &down, &across);
      BlockIndex b;
      const bool is = load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), p.active.grid, &b);
      n[c] = is && number < cells ? b.n : -1;
      row[c] = b.i * p.active.grid.size[0] + static_cast<int>(down) * kCell;
      column[c] = b.j * p.active.grid.size[1] + static_cast<int>(across) * kCell;
    }
    constexpr int kTogether = 4;  // loads are under way together
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      const int row0 = row[c] * p.stride[0] - p.padding[0], column0 = column[c] * p.stride[1] - p.padding[1];
      const auto* x = static_cast<const uint16_t*>(p.x.data) + n[c] * p.x.stride[0];
#pragma unroll 1
      for (int first = threadIdx.x; first < plan.pixels; first += kTogether * kFirstThreads) {
        Quad quads[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          uint32_t down, across;
          plan.pitch.divmod(static_cast<uint32_t>(first + i * kFirstThreads), &down, &across);
          const int r = row0 + static_cast<int>(down), s = column0 + static_cast<int>(across);
          const bool in = (n[c] >= 0) & (first + i * kFirstThreads < plan.pixels) &
                          (static_cast<unsigned>(r) < static_cast<unsigned>(p.x.size[2])) &
                          (static_cast<unsigned>(s) < static_cast<unsigned>(p.x.size[3]));
          quads[i] = read_quad<kMost>(x + r * p.x.stride[2] + s * p.x.stride[3], p.x.stride[1], channels, in);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (first + i * kFirstThreads < plan.pixels)
            *reinterpret_cast<uint2*>(patches + c * plan.cell + (first + i * kFirstThreads) * 8) =
                make_uint2(quads[i].low(), quads[i].high());
      }
    }
    __syncthreads();
    float sums[kCells][kTiles][4];
#pragma unroll
    for (int c = 0; c < kCells; ++c)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[c][j][e] = 0.f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t a[kCells][4];
#pragma unroll
      for (int c = 0; c < kCells; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint2 v = *reinterpret_cast<const uint2*>(patches + from[s] + c * plan.cell + h * plan.row);
          a[c][h] = v.x, a[c][2 + h] = v.y;
        }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint2 w = weights[(s * kTiles + j) * 32 + lane];
#pragma unroll
        for (int c = 0; c < kCells; ++c) mma_16x8<T>(sums[c][j], a[c], w.x, w.y);
      }
    }
    Output first[kCells];
    int rows[kCells];  // of outputs, from there on the plane
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      const Pixel pixel = {n[c], row[c] + warp * 2, column[c] + lane / 4};
      first[c] = output_of(p, pixel);
      rows[c] = (n[c] < 0) | (pixel.column >= p.y.size[3]) ? 0 : static_cast<int>(p.y.size[2]) - pixel.row;
    }
    const auto to = [&](int m, int h) -> Output {
      if (h >= rows[m]) return {-1, 0};
      return {first[m].y + h * p.y.stride[2], first[m].residual + h * p.residual.stride[2]};
    };
    finish_sums<T>(p, sums, to, lane % 4 * 8, K);
    __syncthreads();  // all are done with the patches
  }
}

template <class T, int kMost, int kTiles, int kSteps>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  const FirstPlan plan(p);
  constexpr auto kernel = conv_first_kernel<T, kMost, kTiles, kSteps>;
  constexpr int kMostBytes = kWeightBytes<kTiles, kSteps> + kCells * kMostFirstPatch * 8;
  const int bytes = kWeightBytes<kTiles, kSteps> + kCells * plan.cell;
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kFirstThreads, kMostBytes, &cache, &ctas));
  const int64_t cells = p.active.capacity * plan.patch.cells_per_block.divisor;
  ctas = std::min(kFirstCtas, ctas * kMostBytes / bytes);  // counted with the most that any layer asks for
  const unsigned grid =
      persistent_grid(device, ctas, (cells + kCells - 1) / kCells, plan.patch.fringe.threads(p), kFirstThreads);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kFirstThreads), bytes, stream, p, plan));
  return ok_status();
}

template <class T, int kMost, int kTiles>
Status launch_taps(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t taps = p.weight.size[2] * p.weight.size[3];
  if (taps <= 28) return launch<T, kMost, kTiles, 7>(p, device, stream);
  return taps <= 52 ? launch<T, kMost, kTiles, 13>(p, device, stream) : launch<T, kMost, kTiles, 16>(p, device, stream);
}
template <class T>
Status launch_half(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool narrow = p.weight.size[0] <= 32;
  if (p.x.size[1] < kChannels)
    return narrow ? launch_taps<T, kChannels - 1, 4>(p, device, stream)
                  : launch_taps<T, kChannels - 1, 8>(p, device, stream);
  return narrow ? launch_taps<T, kChannels, 4>(p, device, stream) : launch_taps<T, kChannels, 8>(p, device, stream);
}

}  // namespace

Status launch_first(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.x.dtype == DType::kBF16 ? launch_half<__nv_bfloat16>(p, device, stream)
                                   : launch_half<__half>(p, device, stream);
}

}  // namespace sbnet::portable
