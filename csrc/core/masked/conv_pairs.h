// A convolution of float32 to code that only moves its operands: a channel as two neighbouring ones of 16 bits.
#pragma once
#include "core/masked/conv.h"

namespace sbnet {

// y and residual are as they were.
inline Conv2dParams half_pairs(const Conv2dParams& p) {
  Conv2dParams pairs = p;
  for (TensorView* t : {&pairs.x, &pairs.weight}) {
    t->dtype = DType::kF16;
    t->size[1] *= 2, t->stride[1] = 1;
    for (const int d : {0, 2, 3}) t->stride[d] *= 2;
  }
  return pairs;
}

}  // namespace sbnet
