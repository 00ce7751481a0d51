// Batch normalisation of active pixels on the CPU: threads fold the blocks, or the rows of parts of the list, then take
// rows of blocks. The arithmetic of a row is in row_kernel.h.
#include "core/masked/batch_norm.h"

#include <algorithm>
#include <cmath>

#include "core/by_dtype.h"
#include "cpu/masked/block_fold.h"
#include "cpu/masked/pixels.h"
#include "cpu/masked/row_kernels.h"
#include "cpu/simd/half.h"
#include "cpu/simd/isa.h"

namespace sbnet {
namespace {

float parameter(const void* data, DType dtype, int64_t c, float otherwise) {
  if (!data) return otherwise;
  return by_dtype<Half, BFloat16>(dtype, [&](auto t) { return to_float(static_cast<const decltype(t)*>(data)[c]); });
}

// Parts of the list, at most kMostNormParts, whatever the number of threads.
constexpr int64_t kPartBlocks = 8;

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_batch_norm2d_cpu(const sbnet::BatchNormParams* params, void* workspace,
                                            const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const BatchNormParams& p = *params;
  SBNET_TRY(validate(p));
  const int64_t C = p.x.size[1];
  if (!p.x.size[0]) {
    std::fill_n(p.statistics, 2 * C + 1, 0.0f);
    return ok_status();
  }
  const FoldParts parts = parts_of(p, kCpuPartPixels);
  fold_blocks(parts, FoldKind::kMoments, workspace, *parallel);
  const float *values = static_cast<const float*>(workspace),
              *counts = fold_counts(parts, FoldKind::kMoments, workspace);
  float* const table = const_cast<float*>(counts) + parts.count();
  double pixels = 0;
  for (int64_t part = 0; part < parts.count(); ++part) pixels += counts[part];
  p.statistics[2 * C] = static_cast<float>(pixels);
  parallel_for(*parallel, C, 1 + 16384 / parts.count(), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      PartMoments all = {};
      for (int64_t part = 0; part < parts.count(); ++part)
        all.merge({counts[part], values[2 * part * C + c], values[(2 * part + 1) * C + c]});
      const float mean = static_cast<float>(all.mean);
      const float variance = static_cast<float>(all.square) / std::max(all.count, 1.0f);
      p.statistics[c] = mean, p.statistics[C + c] = variance;
      table[c] = mean;
      table[C + c] = parameter(p.weight, p.param_dtype, c, 1.0f) / std::sqrt(variance + p.eps);
      table[2 * C + c] = parameter(p.bias, p.param_dtype, c, 0.0f);
    }
  });
  const RowKernels& kernels = SBNET_FROM(Avx2, kRowKernels);
  if (p.follow.running_mean) sbnet_batch_norm_follow_cpu(&p.follow, parallel);
  for_rows(p, 4 * C, *parallel,
           [&](int64_t n, int64_t row, int64_t begin, int64_t end) { kernels.norm(p, table, {n, row, begin, end}); });
  return ok_status();
}

sbnet::Status sbnet_sparse_batch_norm2d_backward_cpu(const sbnet::BatchNormGradParams* params, void* workspace,
                                                     const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const BatchNormGradParams& p = *params;
  SBNET_TRY(validate(p));
  const int64_t C = p.x.size[1];
  std::fill_n(p.grad_params, 2 * C, 0.0f);
  if (!p.x.size[0]) return ok_status();
  const RowKernels& kernels = SBNET_FROM(Avx2, kRowKernels);
  const BlockGrid& grid = p.active.grid;
  const int64_t blocks = std::clamp<int64_t>(*p.active.count, 0, p.active.capacity);
  const int64_t parts = std::min<int64_t>(kMostNormParts, (blocks + kPartBlocks - 1) / kPartBlocks);
  double* const sums = static_cast<double*>(workspace);  // of parts; those of a block are float32
  float* const table = reinterpret_cast<float*>(sums + 2 * kMostNormParts * C);
  float* const of_blocks = table + 6 * C;
  for (int64_t c = 0; c < C; ++c) {
    table[c] = p.statistics[c];
    table[C + c] = parameter(p.weight, p.param_dtype, c, 1.0f) / std::sqrt(p.statistics[C + c] + p.eps);
    table[2 * C + c] = parameter(p.bias, p.param_dtype, c, 0.0f);
  }
  parallel_for(*parallel, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      double* const own = sums + 2 * part * C;
      float* const of_block = of_blocks + 2 * part * C;
      std::fill_n(own, 2 * C, 0.0);
      for (int64_t slot = blocks * part / parts; slot < blocks * (part + 1) / parts; ++slot) {
        const int32_t* block = p.active.indices + 3 * slot;
        const int64_t n = block[0], i = block[1], j = block[2];
        if (n < 0 || n >= p.x.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) continue;
        const int64_t bottom = std::min<int64_t>((i + 1) * grid.size[0], p.x.size[2]);
        const int64_t left = j * grid.size[1], right = std::min<int64_t>(left + grid.size[1], p.x.size[3]);
        std::fill_n(of_block, 2 * C, 0.0f);
        for (int64_t row = i * grid.size[0]; row < bottom; ++row)
          kernels.norm_sums(p, table, {n, row, left, right}, of_block);
        for (int64_t k = 0; k < 2 * C; ++k) own[k] += of_block[k];
      }
    }
  });
  const float pixels = std::max(p.statistics[2 * C], 1.0f);
  for (int64_t c = 0; c < C; ++c) {
    double of_grad = 0, of_both = 0;
    for (int64_t part = 0; part < parts; ++part)
      of_grad += sums[2 * part * C + c], of_both += sums[(2 * part + 1) * C + c];
    const float scale = 1.0f / std::sqrt(p.statistics[C + c] + p.eps), a = table[C + c];
    p.grad_params[c] = static_cast<float>(of_both) * scale;
    p.grad_params[C + c] = static_cast<float>(of_grad);
    table[3 * C + c] = a;
    table[4 * C + c] = -a * scale * scale * static_cast<float>(of_both / pixels);
    table[5 * C + c] = -a * static_cast<float>(of_grad / pixels);
  }
  for_rows(p, 4 * C, *parallel, [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
    kernels.norm_grad(p, table, {n, row, begin, end});
  });
  return ok_status();
}

sbnet::Status sbnet_batch_norm_follow_cpu(const sbnet::BatchNormFollowParams* p, const sbnet::Parallel*) {
  for (int64_t c = 0; c < p->channels; ++c) sbnet::follow(*p, c);
  return sbnet::ok_status();
}
