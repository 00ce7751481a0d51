// motion_mask for any processor.
#define SBNET_ISA motion_mask_generic
#include "cpu/lists/motion_mask_kernel.h"

namespace sbnet {
const MotionKernels kMotionGeneric = motion_mask_generic::kMotionKernels;
}  // namespace sbnet
