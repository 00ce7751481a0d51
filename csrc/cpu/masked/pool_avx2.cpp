// Pooling for AVX2 and F16C (-mavx2 -mfma -mf16c). Wider vectors would wait for the same memory.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile pool_avx2.cpp with -mavx2 -mfma -mf16c"
#endif
#define SBNET_ISA pool_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 4
#include "cpu/masked/pool_kernel.h"

namespace sbnet {
const PoolRowFunction kPoolRowAvx2 = pool_avx2::pool_row;
}  // namespace sbnet
#endif
