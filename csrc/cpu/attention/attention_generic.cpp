// Block-sparse attention for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA attention_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 2
#define SBNET_GROUP 4
#include "cpu/attention/attention_fma.h"

namespace sbnet {
const AttentionKernels kAttentionKernelsGeneric = attention_generic::kTable;
}  // namespace sbnet
