// Block-sparse attention for AVX-512 (F, BW, DQ, VL): 32 registers of 16 floats.
#if defined(__x86_64__)
#define SBNET_ISA attention_avx512
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#define SBNET_GROUP 8
#include "cpu/attention/attention_fma.h"

namespace sbnet {
const AttentionKernels kAttentionKernelsAvx512 = attention_avx512::kTable;
}  // namespace sbnet
#endif
