// Programs of steps for AVX2 and F16C (-mavx2 -mfma -mf16c). Wider vectors would wait for the same memory.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile pointwise_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA pointwise_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 4
#include "cpu/masked/pointwise_kernel.h"

namespace sbnet {
const PointwiseRowFunction kPointwiseRowAvx2 = pointwise_avx2::pointwise_row;
}  // namespace sbnet
#endif
