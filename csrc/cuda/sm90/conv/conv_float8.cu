// Block-sparse convolution of float8_e4m3fn for Hopper (conv_bytes.cuh).
//
// Sums. The tensor core keeps about 13 bits behind the point of the largest of what it adds, and cuts off the rest.
// Where a reduction is longer than kShortProducts of 32 channels, sums of kRunTaps taps are added up in float32
// (docs/kernels/conv_float8.md). That takes the registers of a second CTA on the multiprocessor, so short ones have
// code of their own.
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_bytes.cuh"

namespace sbnet::sm90 {

constexpr int kShortProducts = 18;  // 3x3 of 64 channels, 1x1 of 512

Status conv_float8(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.y.size[0] == 0) return ok_status();
  const int64_t products = p.weight.size[2] * p.weight.size[3] * ((p.x.size[1] + 31) / 32);
  return products <= kShortProducts ? launch<__nv_fp8_e4m3, false>(p, device, stream)
                                    : launch<__nv_fp8_e4m3, true>(p, device, stream);
}

}  // namespace sbnet::sm90
