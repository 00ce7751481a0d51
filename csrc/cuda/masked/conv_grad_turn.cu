// turn_conv_weights on CUDA: a CTA takes a tap's tile of 32 by 32 channels of one of the weights through shared memory,
// so that both results are written along their channels.
#include <algorithm>

#include "core/masked/conv_grad.h"
#include "cuda/by_dtype.cuh"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "turn_conv_weights";
constexpr int kTile = 32, kRows = 8;
constexpr int kTogether = 40;  // weights of a launch, whose arguments are 4 KB at most

struct TurnWeight {
  const void* from;
  void *same, *turned;
  int64_t stride[4];
  int32_t outputs, inputs, kernel_width, taps;
  int32_t tiles;  // of this weight and those before it
};
struct TurnLaunch {
  TurnWeight weight[kTogether];
};

template <class From, class To>
__global__ void __launch_bounds__(kTile* kRows) turn_kernel(const __grid_constant__ TurnLaunch launch) {
  __shared__ To tile[kTile][kTile + 2];
  grid_dependency_wait();
  grid_dependency_release();
  int of = 0, number = static_cast<int>(blockIdx.x);
  while (number >= launch.weight[of].tiles) ++of;
  if (of) number -= launch.weight[of - 1].tiles;
  const TurnWeight& p = launch.weight[of];
  const int taps = p.taps, tap = number % taps, columns = (p.inputs + kTile - 1) / kTile;
  const int first_c = number / taps % columns * kTile, first_k = number / taps / columns * kTile;
  const int lane = threadIdx.x % kTile, row = threadIdx.x / kTile;
  const From* const from =
      static_cast<const From*>(p.from) + tap / p.kernel_width * p.stride[2] + tap % p.kernel_width * p.stride[3];
#pragma unroll
  for (int r = row; r < kTile; r += kRows) {
    const int64_t k = first_k + r, c = first_c + lane;
    if (k >= p.outputs || c >= p.inputs) continue;
    const To value = from_float<To>(to_float(from[k * p.stride[0] + c * p.stride[1]]));
    tile[r][lane] = value;
    static_cast<To*>(p.same)[(k * taps + tap) * p.inputs + c] = value;
  }
  __syncthreads();
#pragma unroll
  for (int r = row; r < kTile; r += kRows) {
    const int64_t c = first_c + r, k = first_k + lane;
    if (k < p.outputs && c < p.inputs)
      static_cast<To*>(p.turned)[(c * taps + (taps - 1 - tap)) * p.outputs + k] = tile[lane][r];
  }
}

// The weights from `begin` on whose dtypes are that one's, up to kTogether of them; how many.
Status turn(const TurnWeightParams* weights, int64_t count, const DeviceInfo& device, cudaStream_t stream,
            int64_t* taken) {
  const DType dtype = weights[0].weight.dtype, to_dtype = weights[0].same.dtype;
  TurnLaunch launch = {};
  int64_t tiles = 0;
  int used = 0;
  for (*taken = 0; *taken < count && used < kTogether; ++*taken) {
    const TurnWeightParams& p = weights[*taken];
    if (p.weight.dtype != dtype || p.same.dtype != to_dtype) break;
    const int64_t K = p.weight.size[0], C = p.weight.size[1], taps = p.weight.size[2] * p.weight.size[3];
    const int64_t own = (K + kTile - 1) / kTile * ((C + kTile - 1) / kTile) * taps;
    if (!own) continue;
    if (tiles + own > INT32_MAX) break;
    TurnWeight& w = launch.weight[used++];
    w = {p.weight.data, p.same.data, p.turned.data, {}, 0, 0, 0, 0, 0};
    std::copy_n(p.weight.stride, 4, w.stride);
    w.outputs = static_cast<int32_t>(K), w.inputs = static_cast<int32_t>(C), w.taps = static_cast<int32_t>(taps);
    w.kernel_width = static_cast<int32_t>(p.weight.size[3]);
    w.tiles = static_cast<int32_t>(tiles += own);
  }
  if (!tiles) return ok_status();
  return by_dtype(dtype, [&](auto from) {
    return by_dtype(to_dtype, [&](auto to) -> Status {
      SBNET_CUDA_TRY(kOp, launch_dependent(device, turn_kernel<decltype(from), decltype(to)>,
                                           dim3(static_cast<unsigned>(tiles)), dim3(kTile * kRows), 0, stream, launch));
      return ok_status();
    });
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_turn_conv_weights_cuda(const sbnet::TurnWeightsParams* params, void* stream) {
  using namespace sbnet;
  SBNET_TRY(validate(*params));
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  for (int64_t first = 0, taken = 0; first < params->count; first += taken)
    SBNET_TRY(turn(params->weights + first, params->count - first, device, static_cast<cudaStream_t>(stream), &taken));
  return ok_status();
}
