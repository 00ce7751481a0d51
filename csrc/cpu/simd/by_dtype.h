// From the dtype of a call to the element type of a kernel.
#pragma once
#include "core/types.h"

namespace sbnet {

// Calls f(T{}) with the element type of `dtype`: HalfType, BFloatType, or float.
template <class HalfType, class BFloatType, class F>
auto by_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF16:
      return f(HalfType{});
    case DType::kBF16:
      return f(BFloatType{});
    default:
      return f(float{});
  }
}

}  // namespace sbnet
