// sparse_adaptive_pool2d on the CPU: threads fold the blocks of parts, then merge what the slices of a window gave.
#include "core/masked/adaptive_pool.h"

#include "core/by_dtype.h"
#include "cpu/masked/block_fold.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace {

template <class T>
void finish(const AdaptivePoolParams& p, const FoldParts& parts, const float* values, const float* counts,
            const Parallel& parallel) {
  const int64_t C = p.x.size[1], slices = parts.slices;
  const bool max = p.kind == AdaptivePoolKind::kMax;
  parallel_for(parallel, parts.all_windows(), 1 + 65536 / (C * slices), [&](int64_t begin, int64_t end) {
    for (int64_t window = begin; window < end; ++window) {
      const BandWalk walk(parts, window * slices);
      const float* const from = values + window * slices * C;
      float count = 0;
      for (int64_t s = 0; s < slices; ++s) count += counts[window * slices + s];
      const int64_t i = window / parts.windows[1] % parts.windows[0], j = window % parts.windows[1];
      T* y = static_cast<T*>(p.y.data) + walk.image() * p.y.stride[0] + i * p.y.stride[2] + j * p.y.stride[3];
      for (int64_t c = 0; c < C; ++c) {
        float value = from[c];
        for (int64_t s = 1; s < slices; ++s) {
          const float other = from[s * C + c];
          value = !max ? value + other : other > value || other != other ? other : value;
        }
        y[c * p.y.stride[1]] = from_float<T>(pooled(p, value, count, walk.pixels()));
      }
    }
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_adaptive_pool2d_cpu(const sbnet::AdaptivePoolParams* p, void* workspace,
                                               const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  if (!p->x.size[0]) return ok_status();
  const FoldParts parts = parts_of(*p, kCpuPartPixels);
  const FoldKind kind = fold_kind(*p);
  fold_blocks(parts, kind, workspace, *parallel);
  const float *values = static_cast<const float*>(workspace), *counts = fold_counts(parts, kind, workspace);
  by_dtype<Half, BFloat16>(p->x.dtype, [&](auto t) { finish<decltype(t)>(*p, parts, values, counts, *parallel); });
  return ok_status();
}
