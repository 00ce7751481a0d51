// Block-sparse convolution of bytes for Hopper, int8 or float8_e4m3fn: any kernel, stride, dilation, blocks and even
// number of input channels, channel-last.
//
// It is the general convolution (conv_general.cu) on pairs: 128 channels of bytes are the 128 bytes of 64 of float16,
// and a product sums 32 of them in the time of 16. So plan, tiles and producer warps are that kernel's, which are told
// of half as many channels of two bytes; products, sums and epilogue are here.
//
// Sums of int8 are int32, hence exact. Of float8 the tensor core keeps about 13 bits behind the point of the largest of
// what it adds, and cuts off the rest. Where a reduction is longer than kShortProducts of 32 channels, sums of kRunTaps
// taps are added up in float32 (docs/kernels/conv_float8.md). That takes the registers of a second CTA on the
// multiprocessor, so short ones have code of their own.
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_bytes_finish.cuh"
#include "cuda/sm90/conv/conv_general_host.cuh"
#include "cuda/sm90/conv/conv_general_load.cuh"
#include "cuda/sm90/conv/conv_general_products.cuh"

namespace sbnet::sm90 {
namespace {

using namespace general;

constexpr int kShortProducts = 18;  // 3x3 of 64 channels, 1x1 of 512
constexpr int kRunTaps = 4;         // of 128 channels: 16 products

// kLong: sums are added up in runs.
template <class Element, bool kBytes, bool kLong_>
struct BytesConfig : bytes::Numbers<Element, kBytes>, SharedLayout<bytes::kRows, bytes::kStagingBytes, false> {
  static constexpr bool kLong = kLong_;
  static constexpr int kCtas = kLong ? 1 : 2;
  static constexpr int kSlopesAt = kBiasAt;
};

struct BytesArgs : Args, bytes::Epilogue {};
static_assert(sizeof(BytesArgs) + sizeof(Maps) <= 4096, "a kernel's parameters");

// Warps 0-7.
template <class C>
__device__ __forceinline__ void consume(const BytesArgs& a, uint32_t smem, uint8_t* shared) {
  const int tid = threadIdx.x & 127, lane = tid & 31;
  Products<C> products(a, smem);
  const int wg = products.wg;
  Place* places = reinterpret_cast<Place*>(shared + C::kPlacesAt) + wg * kPositions;
  float* slopes = reinterpret_cast<float*>(shared + C::kSlopesAt) + wg * C::kOutputs;
  take_turn();
  // While the first patch is on its way.
  bytes::by_result<C>(a.y_dtype, [&](auto t) {
    clear_fringe<decltype(t)>(a.zeros, a.zeros_plan, int64_t{blockIdx.x} * 256 + threadIdx.x, int64_t{gridDim.x} * 256);
  });
  const uint32_t tiles = tiles_of(a, min(max(load_int(a.count), 0), a.capacity));

  for (uint32_t tile = blockIdx.x, made = 0; tile < tiles; tile += gridDim.x, ++made) {
    uint32_t first_unit, column;
    a.columns.divmod(tile, &first_unit, &column);
    const int k0 = column * C::kOutputs;
    products.wait_for_patch();
    bar_sync(1 + wg, 128);  // the places of the tile before are no longer read
    places[tid] = place_of(
        a, reinterpret_cast<const int4*>(shared + C::kRecordsAt) + made % kMaxPatchStages * kMaxUnits, wg, tid);
    if (tid < C::kOutputs)
      slopes[tid] = a.slopes && k0 + tid < a.K ? load_float(static_cast<const float*>(a.slopes) + k0 + tid) : a.slope;
    float scale[2], bias[2];  // on their way until the products are done
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = k0 + (tid >> 5) * 16 + (lane >> 2) + h * 8;
      scale[h] = k < a.K ? load_float(a.scale + k) : 0.f;
      bias[h] = a.bias && k < a.K ? load_float(static_cast<const float*>(a.bias) + k) : 0.f;
    }

    typename C::Sum acc[64];             // the first product of a run overwrites it
    float sums[C::kLong ? 64 : 1] = {};  // of the runs before
    products.begin();
    const auto multiply = [&](uint64_t w, uint64_t x, int accumulate) { wgmma_bytes(acc, w, x, accumulate); };
    int left = kRunTaps;
    const auto in_runs = [&](int& tap, int end, const auto& multiply_taps) {
#pragma unroll 1
      while (tap < end) {
        const int stop = C::kLong ? min(end, tap + left) : end;
        left -= stop - tap;
        multiply_taps(stop);
        if (C::kLong && left == 0) {
          products.finish();
#pragma unroll
          for (int e = 0; e < 64; ++e) sums[C::kLong ? e : 0] += acc[e];
          products.accumulate = 0, left = kRunTaps;
        }
      }
    };
    const auto multiply_slice = [&](auto steps) { products.slice(steps, multiply, in_runs); };
#pragma unroll 1
    for (int slice = 0; slice < a.slices; ++slice) with_steps(slice + 1 < a.slices ? 4 : a.last_steps, multiply_slice);
    products.finish();
    if constexpr (C::kLong) {
#pragma unroll
      for (int e = 0; e < 64; ++e) acc[e] = products.accumulate ? sums[e] + acc[e] : sums[e];
    }
    bar_sync(1 + wg, 128);
    bytes::finish<C>(a, k0, acc, shared, places, scale, bias);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, C::kCtas)
    conv_bytes_kernel(const __grid_constant__ Maps maps, const __grid_constant__ BytesArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  run_roles<C>(maps, a, shared, [&](uint32_t smem) { consume<C>(a, smem, shared); });
}

// ---------------------------------------------------------------- host

template <class C>
Status launch_kernel(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const Conv2dParams pairs = byte_pairs(p);
  BytesArgs a = {};
  fill_common(pairs, &a);
  choose_columns(pairs, device, &a);  // whatever it chooses: there is one width, and tiles are not shared
  a.log_cluster = 0;
  a.columns = a.tiles_per_chunk = FastDiv((p.weight.size[0] + C::kOutputs - 1) / C::kOutputs);
  static_cast<bytes::Epilogue&>(a) = bytes::epilogue(p);
  return launch_cut<C, conv_bytes_kernel<C>>(pairs, a, device, stream);
}

template <class Element, bool kLong>
Status launch(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return bytes::of_registers(p) ? launch_kernel<BytesConfig<Element, true, kLong>>(p, device, stream)
                                : launch_kernel<BytesConfig<Element, false, kLong>>(p, device, stream);
}

}  // namespace

Status conv_int8(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.y.size[0] == 0) return ok_status();
  return launch<int8_t, false>(p, device, stream);
}

Status conv_float8(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.y.size[0] == 0) return ok_status();
  const int64_t products = p.weight.size[2] * p.weight.size[3] * ((p.x.size[1] + 31) / 32);
  return products <= kShortProducts ? launch<__nv_fp8_e4m3, false>(p, device, stream)
                                    : launch<__nv_fp8_e4m3, true>(p, device, stream);
}

}  // namespace sbnet::sm90
