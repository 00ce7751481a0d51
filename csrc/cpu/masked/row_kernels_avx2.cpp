// Batch normalisation and elementwise gradients for AVX2 and F16C (-mavx2 -mfma -mf16c). Wider vectors would wait for
// the same memory.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile row_kernels_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA row_kernels_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 4
#include "cpu/masked/row_kernel.h"

namespace sbnet {
const RowKernels kRowKernelsAvx2 = {row_kernels_avx2::norm, row_kernels_avx2::norm_sums, row_kernels_avx2::norm_grad,
                                    row_kernels_avx2::activation, row_kernels_avx2::activation_grad};
}  // namespace sbnet
#endif
