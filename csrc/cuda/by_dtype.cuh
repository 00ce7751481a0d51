// core/by_dtype.h with the types of CUDA.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/by_dtype.h"

namespace sbnet {

template <class F>
auto by_dtype(DType dtype, const F& f) {
  return by_dtype<__half, __nv_bfloat16>(dtype, f);
}

#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class F>
SBNET_HOST_DEVICE auto by_mask_dtype(DType dtype, const F& f) {
  return by_mask_dtype<__half, __nv_bfloat16>(dtype, f);
}

}  // namespace sbnet
