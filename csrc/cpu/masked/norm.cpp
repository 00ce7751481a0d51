// sparse_norm2d on the CPU: threads fold the blocks for the statistics of groups, then take rows of active blocks. The
// arithmetic of a row is in norm_kernel.h.
#include "core/masked/norm.h"

#include <algorithm>
#include <cmath>

#include "cpu/masked/block_fold.h"
#include "cpu/masked/norm_kernels.h"
#include "cpu/masked/pixels.h"
#include "cpu/simd/half.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

float parameter(const void* data, DType dtype, int64_t c, float otherwise) {
  if (!data) return otherwise;
  if (dtype == DType::kF16) return to_float(static_cast<const Half*>(data)[c]);
  if (dtype == DType::kBF16) return to_float(static_cast<const BFloat16*>(data)[c]);
  return static_cast<const float*>(data)[c];
}

// Mean, scale and shift of each channel of each image.
void fill_table(const NormParams& p, const FoldParts& parts, void* workspace, const Parallel& parallel) {
  const int64_t C = p.x.size[1], group = C / p.groups;
  const float *values = static_cast<const float*>(workspace),
              *counts = fold_counts(parts, FoldKind::kMoments, workspace);
  float* const table = group_table(parts, workspace);
  parallel_for(parallel, p.x.size[0] * p.groups, 1 + 16384 / (group * parts.slices), [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const int64_t n = g / p.groups, first = g % p.groups * group;
      PartMoments all = {};
      for (int64_t part = n * parts.slices; part < (n + 1) * parts.slices; ++part)
        for (int64_t c = first; c < first + group; ++c)
          all.merge({counts[part], values[2 * part * C + c], values[(2 * part + 1) * C + c]});
      const float scale = 1.0f / std::sqrt(static_cast<float>(all.square) / std::max(all.count, 1.0f) + p.eps);
      float* to = table + 3 * n * C;
      for (int64_t c = first; c < first + group; ++c) {
        to[c] = static_cast<float>(all.mean);
        to[C + c] = scale * parameter(p.weight, p.param_dtype, c, 1.0f);
        to[2 * C + c] = parameter(p.bias, p.param_dtype, c, 0.0f);
      }
    }
  });
}

// The same of a response norm.
void fill_response_table(const NormParams& p, const FoldParts& parts, void* workspace, const Parallel& parallel) {
  const int64_t C = p.x.size[1];
  const float *values = static_cast<const float*>(workspace),
              *counts = fold_counts(parts, FoldKind::kMoments, workspace);
  float* const table = group_table(parts, workspace);
  parallel_for(parallel, p.x.size[0], 1 + 16384 / (C * parts.slices), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float *shift = table + 3 * n * C, *scale = shift + C, *bias = scale + C;
      std::fill(shift, bias, 0.0f);
      for (int64_t part = n * parts.slices; part < (n + 1) * parts.slices; ++part)
        for (int64_t c = 0; c < C; ++c) {
          const float mean = values[2 * part * C + c];
          scale[c] += values[(2 * part + 1) * C + c] + counts[part] * mean * mean;
        }
      double sum = 0;
      for (int64_t c = 0; c < C; ++c) sum += scale[c] = std::sqrt(scale[c]);
      const float all = static_cast<float>(sum / static_cast<double>(C)) + p.eps;
      for (int64_t c = 0; c < C; ++c) {
        scale[c] = 1.0f + parameter(p.weight, p.param_dtype, c, 1.0f) * scale[c] / all;
        bias[c] = parameter(p.bias, p.param_dtype, c, 0.0f);
      }
    }
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_norm2d_cpu(const sbnet::NormParams* params, void* workspace,
                                      const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const NormParams& p = *params;
  SBNET_TRY(validate(p));
  if (!p.x.size[0]) return ok_status();
  const int64_t C = p.x.size[1];
  float* table = static_cast<float*>(workspace);
  int64_t of_image = 0;
  if (of_images(p.kind)) {
    const FoldParts parts = parts_of(p, kCpuPartPixels);
    fold_blocks(parts, FoldKind::kMoments, workspace, *parallel);
    const auto fill = p.kind == NormKind::kGroup ? fill_table : fill_response_table;
    fill(p, parts, workspace, *parallel);
    table = group_table(parts, workspace), of_image = 3 * C;
  } else {
    for (int64_t c = 0; c < C; ++c) {
      table[c] = parameter(p.weight, p.param_dtype, c, 1.0f);
      table[C + c] = parameter(p.bias, p.param_dtype, c, 0.0f);
    }
  }
  const NormRowFunction run = SBNET_FROM(Avx2, kNormRow);
  for_rows(p, 4 * C, *parallel, [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
    run(p, table + n * of_image, {n, row, begin, end});
  });
  return ok_status();
}
