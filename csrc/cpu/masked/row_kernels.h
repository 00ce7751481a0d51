// The instruction-set dependent half of batch normalisation and of the gradients of elementwise layers on the CPU: one
// row of active blocks.
#pragma once
#include "core/masked/activation_grad.h"
#include "core/masked/batch_norm.h"
#include "cpu/masked/block_row.h"

namespace sbnet {

struct RowKernels {
  // `table`: [3, C] mean, scale, shift.
  void (*norm)(const BatchNormParams& p, const float* table, const BlockRow& row);
  // Adds to [2, C] the sums of g and of g (x - mean). `table`: as above.
  void (*norm_sums)(const BatchNormGradParams& p, const float* table, const BlockRow& row, float* sums);
  // dx = g a + (x - mean) b + c, and g of the residual. `table`: [6, C] mean, scale, shift, a, b, c.
  void (*norm_grad)(const BatchNormGradParams& p, const float* table, const BlockRow& row);
  void (*activation)(const ActivationParams& p, const BlockRow& row);
  // `slopes`: [C], or null.
  void (*activation_grad)(const ActivationGradParams& p, const float* slopes, const BlockRow& row);
};

extern const RowKernels kRowKernelsGeneric;
#if defined(__x86_64__)
extern const RowKernels kRowKernelsAvx2;
#endif

}  // namespace sbnet
