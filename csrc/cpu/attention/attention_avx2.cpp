// Block-sparse attention for AVX2, FMA and F16C (-mavx2 -mfma -mf16c): 16 registers of 8 floats.
#if defined(__x86_64__)
#define SBNET_ISA attention_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 2
#define SBNET_GROUP 4
#include "cpu/attention/attention_fma.h"

namespace sbnet {
const AttentionKernels kAttentionKernelsAvx2 = attention_avx2::kTable;
}  // namespace sbnet
#endif
