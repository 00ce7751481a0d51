// sparse_squeeze_excite2d on the CPU: threads fold the blocks of parts; one takes a sample's products.
#include "core/masked/squeeze_excite.h"

#include <algorithm>

#include "core/by_dtype.h"
#include "cpu/masked/block_fold.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace {

template <class T>
float bias_at(const void* data, DType dtype, int64_t k) {
  if (!data) return 0.f;
  return dtype == DType::kF32 ? static_cast<const float*>(data)[k] : to_float(static_cast<const T*>(data)[k]);
}

// A row of a matrix times a vector: eight sums side by side, whose roundings stay short.
template <class T>
float product(const T* row, const float* vector, int64_t n) {
  float sums[8] = {};
  for (int64_t k = 0; k < n; ++k) sums[k % 8] += to_float(row[k]) * vector[k];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <class T>
void finish(const SqueezeExciteParams& p, const FoldParts& parts, void* workspace, const Parallel& parallel) {
  const int64_t N = p.x.size[0], C = p.x.size[1], R = p.hidden, pixels = p.x.size[2] * p.x.size[3];
  const float* const values = static_cast<const float*>(workspace);
  float* const means = gate_means(parts, workspace);
  const T *const weight1 = static_cast<const T*>(p.weight1), *const weight2 = static_cast<const T*>(p.weight2);
  parallel_for(parallel, N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float *const mean = means + n * C, *const hidden = means + N * C + n * R;
      for (int64_t c = 0; c < C; ++c) {
        float sum = 0;
        for (int64_t s = 0; s < parts.slices; ++s) sum += values[(n * parts.slices + s) * C + c];
        mean[c] = sum / static_cast<float>(pixels);
      }
      for (int64_t r = 0; r < R; ++r)
        hidden[r] = gate_step(p.activation, product(weight1 + r * C, mean, C) + bias_at<T>(p.bias1, p.bias_dtype, r));
      T* const y = static_cast<T*>(p.y.data) + n * p.y.stride[0];
      for (int64_t c = 0; c < C; ++c)
        y[c * p.y.stride[1]] = from_float<T>(
            gate_step(p.gate, product(weight2 + c * R, hidden, R) + bias_at<T>(p.bias2, p.bias_dtype, c)));
    }
  });
}

// x times the gate, on the active blocks.
template <class T>
void scale(const SqueezeExciteParams& p, const Parallel& parallel) {
  const BlockGrid& grid = p.grid;
  const int64_t blocks = int64_t{grid.count[0]} * grid.count[1], C = p.x.size[1];
  parallel_for(parallel, p.x.size[0] * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      if (p.block_map[block] < 0) continue;
      const int64_t n = block / blocks, i = block % blocks / grid.count[1], j = block % grid.count[1];
      const int64_t bottom = std::min((i + 1) * grid.size[0], p.x.size[2]),
                    right = std::min((j + 1) * grid.size[1], p.x.size[3]);
      const T* gate = static_cast<const T*>(p.y.data) + n * p.y.stride[0];
      for (int64_t row = i * grid.size[0]; row < bottom; ++row)
        for (int64_t column = j * grid.size[1]; column < right; ++column) {
          const auto at = [&](const TensorView& t) {
            return static_cast<T*>(t.data) + n * t.stride[0] + row * t.stride[2] + column * t.stride[3];
          };
          const T* from = at(p.x);
          T* to = at(p.scaled);
          for (int64_t c = 0; c < C; ++c)
            to[c * p.scaled.stride[1]] =
                from_float<T>(to_float(from[c * p.x.stride[1]]) * to_float(gate[c * p.y.stride[1]]));
        }
    }
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_squeeze_excite2d_cpu(const sbnet::SqueezeExciteParams* p, void* workspace,
                                                const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  if (!p->x.size[0]) return ok_status();
  const FoldParts parts = parts_of(*p, kCpuPartPixels);
  fold_blocks(parts, FoldKind::kSum, workspace, *parallel);
  by_dtype<Half, BFloat16>(p->x.dtype, [&](auto t) {
    finish<decltype(t)>(*p, parts, workspace, *parallel);
    if (p->scaled.data) scale<decltype(t)>(*p, *parallel);
  });
  return ok_status();
}
