// sparse_layer_norm2d_backward on the CPU: threads take parts of the plane's rows, whose number depends on the plane
// alone; a pixel's channels are widened, summed and narrowed.
#include "core/masked/layer_norm_grad.h"

#include <algorithm>
#include <cmath>

#include "core/by_dtype.h"
#include "cpu/masked/plane_rows.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace {

template <class T>
void run_row(const LayerNormGradParams& p, const float* weight, const BlockRow& row, float* of_weight, float* of_bias) {
  const int64_t C = p.x.size[1];
  float x[kMostNormChannels], g[kMostNormChannels];
  const auto at = [&](const TensorView& t, int64_t w) {
    return static_cast<T*>(t.data) + row.n * t.stride[0] + row.row * t.stride[2] + w * t.stride[3];
  };
  for (int64_t w = row.column; w < row.column_end; ++w) {
    const T *from = at(p.x, w), *grad = at(p.grad, w);
    float sum = 0, square = 0, of_g = 0, of_both = 0;
    for (int64_t c = 0; c < C; ++c) x[c] = to_float(from[c * p.x.stride[1]]), sum += x[c];
    const float mean = sum / static_cast<float>(C);
    for (int64_t c = 0; c < C; ++c) x[c] -= mean, square += x[c] * x[c];
    const float scale = 1.0f / std::sqrt(square / static_cast<float>(C) + p.eps);
    for (int64_t c = 0; c < C; ++c) {
      const float dy = to_float(grad[c * p.grad.stride[1]]);
      x[c] *= scale;
      of_bias[c] += dy;
      of_weight[c] += dy * x[c];
      g[c] = dy * weight[c];
      of_g += g[c];
      of_both += g[c] * x[c];
    }
    of_g /= static_cast<float>(C), of_both /= static_cast<float>(C);
    T* to = at(p.y, w);
    for (int64_t c = 0; c < C; ++c) to[c * p.y.stride[1]] = from_float<T>((g[c] - of_g - x[c] * of_both) * scale);
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_layer_norm2d_backward_cpu(const sbnet::LayerNormGradParams* params, void* workspace,
                                                     const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const LayerNormGradParams& p = *params;
  SBNET_TRY(validate(p));
  const int64_t C = p.x.size[1], H = p.x.size[2], rows = p.x.size[0] * H;
  float weight[kMostNormChannels];
  for (int64_t c = 0; c < C; ++c) weight[c] = 1.0f;
  if (p.weight)
    by_dtype<Half, BFloat16>(p.param_dtype, [&](auto t) {
      for (int64_t c = 0; c < C; ++c) weight[c] = to_float(static_cast<const decltype(t)*>(p.weight)[c]);
    });
  float* const sums = static_cast<float*>(workspace);
  const int64_t parts = std::min<int64_t>(kMostLayerNormParts, rows);
  parallel_for(*parallel, parts, 1, [&](int64_t begin, int64_t end) {
    const Parallel alone = {nullptr, nullptr, 1};
    for (int64_t part = begin; part < end; ++part) {
      float* const own = sums + 2 * part * C;
      std::fill_n(own, 2 * C, 0.0f);
      for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
        TensorView y = p.y;  // this row alone
        ActiveView active = p.active;
        const int64_t n = r / H, row = r % H;
        y.data = static_cast<char*>(y.data) + (n * y.stride[0] + row * y.stride[2]) * dtype_size(y.dtype);
        y.size[0] = y.size[2] = 1;
        active.block_map += (n * active.grid.count[0] + row / active.grid.size[0]) * active.grid.count[1];
        active.grid.count[0] = 1;
        write_plane(y, active, 16 * C, alone, [&](const BlockRow& at) {
          by_dtype<Half, BFloat16>(p.x.dtype, [&](auto t) {
            run_row<decltype(t)>(p, weight, {n, row, at.column, at.column_end}, own, own + C);
          });
        });
      }
    }
  });
  for (int64_t k = 0; k < 2 * C; ++k) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += sums[2 * part * C + k];
    p.grad_params[k] = static_cast<float>(sum);
  }
  return ok_status();
}
