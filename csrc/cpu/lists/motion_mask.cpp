// motion_mask on the CPU: bands of rows, one after another; of each the channels' sums of its pixels and of what its
// boxes reach are made in a buffer that stays in the cache, from which the box is summed row by row. Each frame is
// first taken for an ordinary one; where the sum of the differences says that it is a cut, mask and background are
// written again. Sums are kept by rows and added in their order: the threads do not show.
#include <algorithm>
#include <cstring>

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
  const int64_t height = p.frame.size[2], width = p.frame.size[3], reach = p.smooth / 2;
  double* sums = static_cast<double*>(workspace);  // [images,height]
  float* bands = reinterpret_cast<float*>(sums + p.images() * std::max(height, motion_tiles(p)));
  const auto rows = [&](int64_t begin, int64_t end, bool cut) {
    // A buffer for each range, which begin kMotionRange rows apart or more.
    float* band = bands + begin / kMotionRange * (kMotionBand + p.smooth) * width;
    int64_t done = 0;  // rows of the image whose sums were made, if it is that of the band before
    int64_t top = 0;   // the first of them in the buffer
    for (int64_t r = begin, next; r < end; r = next) {
      const int64_t n = r / height, y = r % height;
      next = std::min({end, r + kMotionBand, (n + 1) * height});
      const int64_t first = std::max<int64_t>(y - reach, 0), last = std::min(y + (next - r) + reach, height);
      if (r == begin || y == 0) {
        done = first;
      } else {
        std::memmove(band, band + (first - top) * width, sizeof(float) * static_cast<size_t>((done - first) * width));
      }
      top = first;
      for (; done < last; ++done) kernels->channel_sums(p, n, done, band + (done - top) * width);
      for (int64_t k = r; k < next; ++k) sums[k] = kernels->row(p, n, k % height, band, top, cut);
    }
  };
  const auto all_rows = [&](int64_t from, int64_t count, bool cut) {
    parallel_for(*parallel, (count + kMotionRange - 1) / kMotionRange, 1 + 256 / width,
                 [&](int64_t begin, int64_t end) {
                   rows(from + begin * kMotionRange, from + std::min(end * kMotionRange, count), cut);
                 });
  };
  all_rows(0, p.images() * height, false);
  for (int64_t n = 0; n < p.images(); ++n) {
    double sum = 0;
    for (int64_t y = 0; y < height; ++y) sum += sums[n * height + y];
    if (!is_cut(sum, p.pixels(), p.cut)) continue;
    all_rows(n * height, height, true);
  }
  return ok_status();
}
