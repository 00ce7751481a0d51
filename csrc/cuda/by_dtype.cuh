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

// The same for a mask, which may also be of bytes (booleans among them) or doubles; in kernels, too.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class F>
SBNET_HOST_DEVICE auto by_mask_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF16:
      return f(__half{});
    case DType::kBF16:
      return f(__nv_bfloat16{});
    case DType::kF32:
      return f(float{});
    case DType::kF64:
      return f(double{});
    default:
      return f(uint8_t{});
  }
}

}  // namespace sbnet
