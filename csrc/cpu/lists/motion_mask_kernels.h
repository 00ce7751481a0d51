// The instruction-set dependent half of motion_mask on the CPU: rows.
#pragma once
#include "core/lists/motion_mask.h"

namespace sbnet {

struct MotionKernels {
  // Sums of the channels of row y of image n, [W].
  void (*channel_sums)(const MotionMaskParams& p, int64_t n, int64_t y, float* out);
  // Averages row y of the brightness of image n, of which `sums` holds the channels' from row `first` on, [rows,W]. An
  // ordinary frame: mask, next, and the sum of the differences is returned. A frame that is a cut: all motion, the
  // background starts again.
  double (*row)(const MotionMaskParams& p, int64_t n, int64_t y, const float* sums, int64_t first, bool cut);
};

extern const MotionKernels kMotionGeneric;
#if defined(__x86_64__)
extern const MotionKernels kMotionAvx2;
#endif

}  // namespace sbnet
