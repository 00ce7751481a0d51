// The convolution's weight gradient for any processor.
#define SBNET_ISA conv_grad_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 2
#include "cpu/masked/conv_grad_kernel.h"

namespace sbnet {
const ConvGradFunction kConvGradGeneric = conv_grad_generic::run_task;
}  // namespace sbnet
