// Block-sparse transposed 2-D convolution ("deconvolution"): parameters, validation, and its phases.
//   y = activation(conv_transpose2d(x, weight) + bias + residual) on the active blocks of the OUTPUT plane, nowhere
//   else.
#pragma once
#include "core/kernels.h"
#include "core/masked/conv.h"

namespace sbnet {

struct ConvTransposeParams {
  TensorView x;         // [N, C, H, W], any strides
  TensorView weight;    // [C, K/groups, R, S], any strides
  const void* bias;     // [K] contiguous or null
  DType bias_dtype;     // x.dtype or float32
  TensorView residual;  // [N, K, Ho, Wo] of x.dtype, any strides; data null for none. May alias y.
  TensorView y;         // [N, K, Ho, Wo] of x.dtype, any strides; must not overlap x
  ActiveView active;    // tiling grid of y's plane
  FringeView fringe;
  int32_t stride[2], padding[2], output_padding[2], dilation[2];
  int32_t groups;
  Activation activation;
  float activation_param;
  const void* slope;  // [K] contiguous or null
  DType slope_dtype;  // x.dtype or float32
  bool allow_tf32;
};

SBNET_EXPORT Status validate(const ConvTransposeParams& p);

// Along one axis, outputs phase, phase + stride, phase + 2 stride, ... read the same taps: number q of them reads
// coordinates q + first + r*dilation through taps last_tap - r*tap_step, r < taps. That is a convolution of stride 1.
struct TransposePhase {
  int32_t taps, last_tap, tap_step, first, dilation;
  int64_t side;  // outputs of this phase
};
TransposePhase transpose_phase(const ConvTransposeParams& p, int d, int32_t phase);

constexpr int kMaxTransposeStride = 8;
// Can all phases run as convolutions, on the same list of blocks?
bool runs_by_phases(const ConvTransposeParams& p);
// Elements of all phases' weights, which together are the weight's.
int64_t transpose_weights(const ConvTransposeParams& p);
// One phase, its weights [K, C/groups, taps, taps] in K,R,S,C order at `weights`; without the fringe. Its y is every
// stride-th pixel of p's, so validate() has no say: blocks that hold no pixel of it lie past its grid.
Conv2dParams phase_conv(const ConvTransposeParams& p, const TransposePhase& row, const TransposePhase& column,
                        int32_t row_phase, int32_t column_phase, void* weights);

// Why the Hopper kernel that runs all phases in one launch does not take p, which is valid; null: it does.
const char* hopper_transpose_declines(const ConvTransposeParams& p);

}  // namespace sbnet

struct SbnetConvQuery;  // core/masked/conv_select.h
extern "C" {
// As sbnet_select_conv2d_cuda: "Hopper transposed", "by phases: the kernels of all phases" or "by pixel".
SBNET_EXPORT sbnet::Status sbnet_select_conv_transpose2d_cuda(const SbnetConvQuery* query,
                                                              const int64_t* output_padding, char* text, int64_t room);
}

SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(sparse_conv_transpose2d, ConvTransposeParams)
