// The convolution for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA conv_generic
#define SBNET_LANES 4
#if defined(__aarch64__)
#define SBNET_VECTORS 4  // 32 vector registers
#else
#define SBNET_VECTORS 2
#endif
#include "cpu/masked/conv_fma.h"

namespace sbnet {
const ConvKernels kConvKernelsGeneric = {
    {SBNET_LANES, SBNET_VECTORS, 1, 4, 0}, conv_generic::pack_all, conv_generic::run_job, conv_generic::pack_panel};
}  // namespace sbnet
