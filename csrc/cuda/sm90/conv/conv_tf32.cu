// Block-sparse convolution of float32 for Hopper, its products in tf32: what conv_general.cu takes of 16 bits.
//
// It is that kernel on pairs of halves: 32 channels of float32 are the 128 bytes of 64 of float16, and a product sums 8
// of them in the time of 16. So plan, tiles and producer warps are told of twice as many channels of two bytes.
//
// Operands are rounded to the nearest tf32 on their way into shared memory, by TMA, merged groups' weights in
// registers: a product would cut off what does not fit, which is a bias towards zero.
#include "core/masked/conv_pairs.h"
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_general_compute.cuh"

namespace sbnet::sm90 {
namespace {

using namespace general;

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

}  // namespace sbnet::sm90
