// The instruction-set dependent half of convolutions with block-sparse weights on the CPU.
//
// No patch of x is ever copied: x is float32 with its channels side by side (the tensor itself where it is that, else a
// copy), a task has a table of the pixels that each tap of each position reads, and the microkernel multiplies channels
// straight from there. Taps beyond the border point at zeros. Weights are packed as [entry][tap][input][kConvGroup].
#pragma once
#include "core/weights/conv.h"

namespace sbnet {

constexpr int64_t kConvPositions = 96;  // of a task: a multiple of every microkernel's
constexpr int64_t kConvDepth = 256;     // products summed in a row: longer sums are added up from parts

// Inline functions of core stay out of kernels (cpu/simd/isa.h): what they compute comes in the tasks.
struct ConvEntry {
  const int32_t* channels;  // of x, in the order of the weights
  int64_t count;
  const float* weight;  // [tap][count][kConvGroup]
};

struct BlocksparseConvTask {
  int64_t taps, positions;
  const float* const* source;  // [tap][kConvPositions] first channel of a pixel
  const float* zeros;          // what taps beyond the border point at
  const int64_t* out;          // [positions] elements from y's first, -1: none
  int64_t channel_stride;      // of y
  // One group of output channels.
  const ConvEntry* entries;
  int64_t entry_count;
  const int32_t* channels;  // [width]
  int64_t width;
  const float* bias;  // [kConvGroup]
};

// dw of one tap of one block.
struct ConvWeightGradTask {
  int64_t positions;       // of the chunk, at most kConvDepth
  const float* const* x;   // [positions]
  const float* const* dy;  // [positions]
  const int32_t* inputs;   // channels of x
  const int32_t* outputs;  // channels of dy
  int64_t in_count, out_count;
  float* left;   // [kConvDepth][padded in_count]
  float* right;  // [kConvDepth][padded out_count]
  float* sums;   // [padded in_count][padded out_count], added to unless `first`
  bool first;
};

constexpr int64_t padded_channels(int64_t n) { return (n + kConvGroup - 1) / kConvGroup * kConvGroup; }

struct BlocksparseConvKernels {
  void (*multiply)(void* y, DType dtype, Activation activation, float param, const BlocksparseConvTask& task);
  void (*weight_grad)(const ConvWeightGradTask& task);
};

extern const BlocksparseConvKernels kBlocksparseConvKernelsGeneric;
#if defined(__x86_64__)
extern const BlocksparseConvKernels kBlocksparseConvKernelsAvx2;
extern const BlocksparseConvKernels kBlocksparseConvKernelsAvx512;
#endif

}  // namespace sbnet
