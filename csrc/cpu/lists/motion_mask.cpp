// motion_mask on the CPU: the frame is read once, into a brightness a pixel, from which the box is summed row by row.
// Each frame is first taken for an ordinary one; where the sum of the differences says that it is a cut, mask and
// background are written again. Sums are kept by rows and added in their order: the threads do not show.
#include <algorithm>

#include "cpu/lists/motion_mask_kernels.h"
#include "cpu/simd/isa.h"

sbnet::Status sbnet_motion_mask_cpu(const sbnet::MotionMaskParams* params, void* workspace,
                                    const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const MotionMaskParams& p = *params;
  SBNET_TRY(validate(p));
  if (p.images() == 0 || p.pixels() == 0) return ok_status();
  const MotionKernels* kernels = &kMotionGeneric;
#if defined(__x86_64__)
  if (chosen_isa() >= Isa::kAvx2) kernels = &kMotionAvx2;
#endif
  const int64_t height = p.frame.size[2], width = p.frame.size[3], rows = p.images() * height;
  const int64_t grain = 1 + 8192 / width;
  double* sums = static_cast<double*>(workspace);  // [rows]
  float* brightness = reinterpret_cast<float*>(sums + p.images() * std::max(height, motion_tiles(p)));
  parallel_for(*parallel, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) kernels->brightness(p, r / height, r % height, brightness + r * width);
  });
  const auto image = [&](int64_t n) { return brightness + n * p.pixels(); };
  parallel_for(*parallel, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) sums[r] = kernels->row(p, r / height, r % height, image(r / height), false);
  });
  for (int64_t n = 0; n < p.images(); ++n) {
    double sum = 0;
    for (int64_t y = 0; y < height; ++y) sum += sums[n * height + y];
    if (!is_cut(sum, p.pixels(), p.cut)) continue;
    parallel_for(*parallel, height, grain, [&](int64_t begin, int64_t end) {
      for (int64_t y = begin; y < end; ++y) kernels->row(p, n, y, image(n), true);
    });
  }
  return ok_status();
}
