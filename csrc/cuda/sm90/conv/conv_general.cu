// Block-sparse convolution for Hopper where no special kernel serves: any kernel, stride, dilation, groups, numbers of
// channels and blocks; fp16 and bf16 with fp32 sums, channel-last.
//
// Persistent CTAs. A tile is up to 256 positions of an input patch x 16 to 96 output channels. The patch is gathered
// once, 64 channels at a time, by TMA or by copies of whatever width the layout allows; all taps that share it read
// it in place, through WGMMA descriptors that a table of taps shifts. Steps of 16 input channels that are not there are
// not computed.
//
//   warps 0-7  two warpgroups: the fringe's zeros, then WGMMA and epilogue of 128 positions each
//              conv_general_compute.cuh, conv_general_finish.cuh
//   warp 8     schedule and patches    conv_general_load.cuh
//   warp 9     weights
//
// conv_tf32 is the same kernel on pairs of halves: 32 channels of float32 are the 128 bytes of 64 of float16, and a
// product sums 8 of them in the time of 16. So plan, tiles and producer warps are told of twice as many channels of two
// bytes. Operands are rounded to the nearest tf32 on their way into shared memory, by TMA, merged groups' weights in
// registers: a product would cut off what does not fit, which is a bias towards zero.
#include <algorithm>

#include "core/masked/conv_pairs.h"
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_general_compute.cuh"

namespace sbnet::sm90 {
namespace {

using namespace general;

template <class T, bool kWhole>
Status launch_width(int outputs, const Conv2dParams& p, Args& a, const DeviceInfo& device, cudaStream_t stream) {
  switch (outputs) {
    case 16:
      return launch<Config<T, 16, kWhole>>(p, a, device, stream);
    case 32:
      return launch<Config<T, 32, kWhole>>(p, a, device, stream);
    case 64:
      return launch<Config<T, 64, kWhole>>(p, a, device, stream);
    case 80:
      return launch<Config<T, 80, kWhole>>(p, a, device, stream);
    default:
      return launch<Config<T, 96, kWhole>>(p, a, device, stream);
  }
}

template <class T>
Status dispatch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  Args a = {};
  fill_common(p, &a);
  const int outputs = choose_columns(p, device, &a);
  const bool whole = a.out_word == 16 && a.chunk_outputs % 8 == 0;
  return whole ? launch_width<T, true>(outputs, p, a, device, stream)
               : launch_width<T, false>(outputs, p, a, device, stream);
}

template <class C>
Status launch_floats(const Conv2dParams& p, const Conv2dParams& pairs, Args& a, const DeviceInfo& device,
                     cudaStream_t stream) {
  return launch_cut<C, conv_general_kernel<C>>(pairs, a, device, stream, &p);
}

}  // namespace

Status conv_tf32(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  const Conv2dParams pairs = half_pairs(p);
  Args a = {};
  fill_common(p, &a);
  const int outputs = choose_columns(pairs, device, &a, 32, 64);
  const bool whole = channels_vectorize(p.y) && (!p.residual.data || channels_vectorize(p.residual));
  a.out_word = whole && a.chunk_outputs % 4 == 0 ? 16 : 4;
  return outputs == 64 ? launch_floats<FloatConfig<64>>(p, pairs, a, device, stream)
                       : launch_floats<FloatConfig<32>>(p, pairs, a, device, stream);
}

Status conv_general(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.y.size[0] == 0) return ok_status();
  if (p.x.dtype == DType::kF32) return conv_tf32(p, device, stream);
  // Of taps so far apart a patch would hold one: each is then a product of its own, with wider tiles than these.
  if (std::max(p.dilation[0], p.dilation[1]) > 2 && hopper_taps_fit(p)) {
    if (conv1x1_wide_pays(p, device)) return conv1x1_wide(p, device, stream);
    if (conv1x1_split_takes(p)) return conv1x1_split(p, device, stream);
  }
  return p.x.dtype == DType::kBF16 ? dispatch<__nv_bfloat16>(p, device, stream) : dispatch<__half>(p, device, stream);
}

}  // namespace sbnet::sm90
