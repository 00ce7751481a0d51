// The instruction-set dependent half of motion_mask on the CPU: rows.
#pragma once
#include "core/lists/motion_mask.h"

namespace sbnet {

struct MotionKernels {
  // Brightness of row y of image n, [W], not yet averaged.
  void (*brightness)(const MotionMaskParams& p, int64_t n, int64_t y, float* out);
  // Averages row y of the brightness of image n, of which `brightness` holds the rows from `first` on, [rows,W]. An
  // ordinary frame: mask, next, and the sum of the differences is returned. A frame that is a cut: all motion, the
  // background starts again.
  double (*row)(const MotionMaskParams& p, int64_t n, int64_t y, const float* brightness, int64_t first, bool cut);
};

extern const MotionKernels kMotionGeneric;
#if defined(__x86_64__)
extern const MotionKernels kMotionAvx2;
#endif

}  // namespace sbnet
