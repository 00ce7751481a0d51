// sparse_pool2d_grad on the CPU: threads take rows of dx, which gather what the windows over a pixel give it.
#include "core/masked/pool_grad.h"

#include <algorithm>

#include "core/by_dtype.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace {

constexpr int64_t kChannels = 64;  // summed at once

// The windows along dimension d over coordinate i.
struct Windows {
  int64_t first, last;
  Windows(const PoolParams& p, int d, int64_t i) {
    const int64_t reach = int64_t{p.dilation[d]} * (p.kernel[d] - 1), from = i + p.padding[d] - reach;
    first = from <= 0 ? 0 : (from + p.stride[d] - 1) / p.stride[d];
    last = std::min<int64_t>((i + p.padding[d]) / p.stride[d], p.y.size[2 + d] - 1);
  }
};

template <class T>
class PixelGrad {
 public:
  PixelGrad(const PoolGradParams& params, int64_t n) : p_(params.pool), n_(n) {
    map_ = p_.active.block_map + n * p_.active.grid.count[0] * p_.active.grid.count[1];
    x_ = static_cast<const T*>(p_.x.data) + n * p_.x.stride[0];
    y_ = static_cast<const T*>(p_.y.data) + n * p_.y.stride[0];
  }
  bool active(int64_t row, int64_t column) const {
    const BlockGrid& grid = p_.active.grid;
    return map_[row / grid.size[0] * grid.count[1] + column / grid.size[1]] >= 0;
  }
  // Adds to `sums` what the window (o, q) gives its tap (i, j), of channels c ...
  void add(int64_t o, int64_t q, int64_t i, int64_t j, int64_t c, int64_t count, float* sums) const {
    const T* y = y_ + o * p_.y.stride[2] + q * p_.y.stride[3] + c * p_.y.stride[1];
    const int64_t top = o * p_.stride[0] - p_.padding[0], left = q * p_.stride[1] - p_.padding[1];
    if (p_.kind == PoolKind::kAverage) {
      const float share = 1.0f / pool_divisor(p_, static_cast<int32_t>(top), static_cast<int32_t>(left));
      for (int64_t k = 0; k < count; ++k) sums[k] += to_float(y[k * p_.y.stride[1]]) * share;
      return;
    }
    float best[kChannels];
    int32_t at[kChannels], tap = 0, mine = -1, first = -1;
    for (int64_t r = 0; r < p_.kernel[0]; ++r) {
      const int64_t row = top + r * p_.dilation[0];
      if (row < 0 || row >= p_.x.size[2]) continue;
      for (int64_t s = 0; s < p_.kernel[1]; ++s, ++tap) {
        const int64_t column = left + s * p_.dilation[1];
        if (column < 0 || column >= p_.x.size[3]) continue;
        if (row == i && column == j) mine = tap;
        const T* x = x_ + row * p_.x.stride[2] + column * p_.x.stride[3] + c * p_.x.stride[1];
        if (first < 0) {
          first = tap;
          for (int64_t k = 0; k < count; ++k) best[k] = to_float(x[k * p_.x.stride[1]]), at[k] = tap;
          continue;
        }
        for (int64_t k = 0; k < count; ++k) {
          const float v = to_float(x[k * p_.x.stride[1]]);
          const bool better = v > best[k] || v != v;
          best[k] = better ? v : best[k];
          at[k] = better ? tap : at[k];
        }
      }
    }
    for (int64_t k = 0; k < count; ++k)
      if (at[k] == mine) sums[k] += to_float(y[k * p_.y.stride[1]]);
  }

 private:
  const PoolParams& p_;
  int64_t n_;
  const int32_t* map_;
  const T *x_, *y_;
};

template <class T>
void run_row(const PoolGradParams& params, int64_t n, int64_t i) {
  const PoolParams& p = params.pool;
  const PixelGrad<T> grad(params, n);
  const int64_t C = p.x.size[1];
  const Windows rows(p, 0, i);
  T* to = static_cast<T*>(params.dx.data) + n * params.dx.stride[0] + i * params.dx.stride[2];
  const BlockGrid& grid = params.dx_grid;
  const int32_t* const map =
      params.dx_map ? params.dx_map + (n * grid.count[0] + i / grid.size[0]) * grid.count[1] : nullptr;
  for (int64_t j = 0; j < p.x.size[3]; ++j, to += params.dx.stride[3]) {
    if (map && map[j / grid.size[1]] < 0) continue;
    const Windows columns(p, 1, j);
    for (int64_t c = 0; c < C; c += kChannels) {
      const int64_t count = std::min(kChannels, C - c);
      float sums[kChannels] = {};
      for (int64_t o = rows.first; o <= rows.last; ++o) {
        if ((i + p.padding[0] - o * p.stride[0]) % p.dilation[0]) continue;
        for (int64_t q = columns.first; q <= columns.last; ++q)
          if ((j + p.padding[1] - q * p.stride[1]) % p.dilation[1] == 0 && grad.active(o, q))
            grad.add(o, q, i, j, c, count, sums);
      }
      for (int64_t k = 0; k < count; ++k) to[(c + k) * params.dx.stride[1]] = from_float<T>(sums[k]);
    }
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pool2d_grad_cpu(const sbnet::PoolGradParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*params));
  const TensorView& x = params->pool.x;
  parallel_for(*parallel, x.size[0] * x.size[2], 1 + 4096 / (x.size[1] * x.size[3]), [&](int64_t begin, int64_t end) {
    by_dtype<Half, BFloat16>(x.dtype, [&](auto t) {
      for (int64_t r = begin; r < end; ++r) run_row<decltype(t)>(*params, r / x.size[2], r % x.size[2]);
    });
  });
  return ok_status();
}
