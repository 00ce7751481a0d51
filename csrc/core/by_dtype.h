// From the dtype of a call to the element type of a kernel.
#pragma once
#include "core/types.h"

namespace sbnet {

// Calls f(T{}) with the element type of `dtype`: HalfType, BFloatType, or float where it is no half. In kernels, too.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class HalfType, class BFloatType, class F>
SBNET_HOST_DEVICE auto by_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF16:
      return f(HalfType{});
    case DType::kBF16:
      return f(BFloatType{});
    default:
      return f(float{});
  }
}

// The same for a mask, which may also be of bytes (booleans among them) or doubles.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class HalfType, class BFloatType, class F>
SBNET_HOST_DEVICE auto by_mask_dtype(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double{});
  if (dtype == DType::kBool || dtype == DType::kU8) return f(uint8_t{});
  return by_dtype<HalfType, BFloatType>(dtype, f);
}

}  // namespace sbnet
