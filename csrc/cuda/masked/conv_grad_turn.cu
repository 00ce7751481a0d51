// turn_conv_weight on CUDA: a CTA takes a tap's tile of 32 by 32 channels through shared memory, so that both results
// are written along their channels.
#include "core/masked/conv_grad.h"
#include "cuda/by_dtype.cuh"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "turn_conv_weight";
constexpr int kTile = 32, kRows = 8;

template <class From, class To>
__global__ void __launch_bounds__(kTile* kRows) turn_kernel(const __grid_constant__ TurnWeightParams p) {
  __shared__ To tile[kTile][kTile + 2];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t K = p.weight.size[0], C = p.weight.size[1], S = p.weight.size[3], taps = p.weight.size[2] * S;
  const int tap = blockIdx.x % static_cast<int>(taps), first_c = blockIdx.x / static_cast<int>(taps) * kTile;
  const int first_k = blockIdx.y * kTile, lane = threadIdx.x % kTile, row = threadIdx.x / kTile;
  const From* const from =
      static_cast<const From*>(p.weight.data) + tap / S * p.weight.stride[2] + tap % S * p.weight.stride[3];
#pragma unroll
  for (int r = row; r < kTile; r += kRows) {
    const int64_t k = first_k + r, c = first_c + lane;
    if (k >= K || c >= C) continue;
    const To value = from_float<To>(to_float(from[k * p.weight.stride[0] + c * p.weight.stride[1]]));
    tile[r][lane] = value;
    static_cast<To*>(p.same.data)[(k * taps + tap) * C + c] = value;
  }
  __syncthreads();
#pragma unroll
  for (int r = row; r < kTile; r += kRows) {
    const int64_t c = first_c + r, k = first_k + lane;
    if (k < K && c < C) static_cast<To*>(p.turned.data)[(c * taps + (taps - 1 - tap)) * K + k] = tile[lane][r];
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_turn_conv_weight_cuda(const sbnet::TurnWeightParams* params, void* stream) {
  using namespace sbnet;
  const TurnWeightParams& p = *params;
  SBNET_TRY(validate(p));
  const int64_t K = p.weight.size[0], C = p.weight.size[1], taps = p.weight.size[2] * p.weight.size[3];
  if (!K || !C || !taps) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const int64_t rows = (K + kTile - 1) / kTile;
  SBNET_CHECK(rows < 65536, "%s: weight: expected fewer than 2^21 outputs, got %lld", kOp, static_cast<long long>(K));
  const dim3 ctas(static_cast<unsigned>((C + kTile - 1) / kTile * taps), static_cast<unsigned>(rows));
  return by_dtype(p.weight.dtype, [&](auto from) {
    return by_dtype(p.same.dtype, [&](auto to) -> Status {
      SBNET_CUDA_TRY(kOp, launch_dependent(device, turn_kernel<decltype(from), decltype(to)>, ctas, dim3(kTile * kRows),
                                           0, static_cast<cudaStream_t>(stream), p));
      return ok_status();
    });
  });
}
