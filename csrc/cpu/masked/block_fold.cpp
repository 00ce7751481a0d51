#include "cpu/masked/block_fold.h"

#include <algorithm>
#include <limits>

#include "cpu/masked/block_fold_kernels.h"
#include "cpu/simd/isa.h"

namespace sbnet {

void fold_blocks(const FoldParts& parts, FoldKind kind, void* workspace, const Parallel& parallel) {
  const FoldRect fold = SBNET_FROM(Avx2, kFoldRect);
  const int64_t row = fold_values(kind) * parts.x.size[1];
  float* const values = static_cast<float*>(workspace);
  float* const counts = fold_counts(parts, kind, workspace);
  const float start = kind == FoldKind::kMax ? -std::numeric_limits<float>::infinity() : 0.0f;
  parallel_for(parallel, parts.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      float* const own = values + part * row;
      std::fill(own, own + row, start);
      int64_t count = 0;
      PixelRect rect;
      for (BandWalk walk(parts, part); walk.next(&rect);) {
        fold(kind, parts.x, walk.image(), rect, own, static_cast<float>(count));
        count += int64_t{rect.row_end - rect.row} * (rect.column_end - rect.column);
      }
      counts[part] = static_cast<float>(count);
    }
  });
}

}  // namespace sbnet
