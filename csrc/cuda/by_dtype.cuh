// From the dtype of a call to the element type of a kernel.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/types.h"

namespace sbnet {

// Calls f(T{}) with the element type of `dtype`: float where it is no half.
template <class F>
auto by_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF16:
      return f(__half{});
    case DType::kBF16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

}  // namespace sbnet
