// sparse_pool2d_grad on the CPU: threads take some rows of dx, whose pixels gather what the windows over them give.
#include "core/masked/pool_grad.h"

#include <algorithm>
#include <vector>

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
  // Adds to `sums` what a window of an average gives a pixel, of channels c ...
  void add_share(int64_t o, int64_t q, int64_t c, int64_t count, float* sums) const {
    const int64_t top = o * p_.stride[0] - p_.padding[0], left = q * p_.stride[1] - p_.padding[1];
    const float share = 1.0f / pool_divisor(p_, static_cast<int32_t>(top), static_cast<int32_t>(left));
    const T* y = grad_of(o, q) + c * p_.y.stride[1];
    for (int64_t k = 0; k < count; ++k) sums[k] += to_float(y[k * p_.y.stride[1]]) * share;
  }
  // The same of a maximum, which it gives the pixel that is its tap `mine`. `at`: the taps of the channels' maxima.
  void add_maximum(int64_t o, int64_t q, int32_t mine, const int32_t* at, int64_t c, int64_t count, float* sums) const {
    const T* y = grad_of(o, q) + c * p_.y.stride[1];
    for (int64_t k = 0; k < count; ++k) sums[k] += at[c + k] == mine ? to_float(y[k * p_.y.stride[1]]) : 0.0f;
  }
  // Which tap the maximum of each channel of the window (o, q) is.
  void find_maxima(int64_t o, int64_t q, int32_t* taps) const {
    const int64_t top = o * p_.stride[0] - p_.padding[0], left = q * p_.stride[1] - p_.padding[1];
    for (int64_t c = 0; c < p_.x.size[1]; c += kChannels) {
      const int64_t count = std::min(kChannels, p_.x.size[1] - c);
      float best[kChannels];
      int32_t* const at = taps + c;
      bool first = true;
      for (int64_t r = 0; r < p_.kernel[0]; ++r) {
        const int64_t row = top + r * p_.dilation[0];
        if (row < 0 || row >= p_.x.size[2]) continue;
        for (int64_t s = 0; s < p_.kernel[1]; ++s) {
          const int64_t column = left + s * p_.dilation[1];
          if (column < 0 || column >= p_.x.size[3]) continue;
          const int32_t tap = static_cast<int32_t>(r * p_.kernel[1] + s);
          const T* x = x_ + row * p_.x.stride[2] + column * p_.x.stride[3] + c * p_.x.stride[1];
          for (int64_t k = 0; k < count; ++k) {
            const float v = to_float(x[k * p_.x.stride[1]]);
            const bool better = first || v > best[k] || v != v;
            best[k] = better ? v : best[k];
            at[k] = better ? tap : at[k];
          }
          first = false;
        }
      }
      if (first) std::fill_n(at, count, -1);
    }
  }

 private:
  const T* grad_of(int64_t o, int64_t q) const { return y_ + o * p_.y.stride[2] + q * p_.y.stride[3]; }

  const PoolParams& p_;
  int64_t n_;
  const int32_t* map_;
  const T *x_, *y_;
};

// Rows i ... of dx of an image. The maxima of the windows over them are found once.
template <class T>
void run_rows(const PoolGradParams& params, int64_t n, int64_t begin, int64_t end) {
  const PoolParams& p = params.pool;
  const PixelGrad<T> grad(params, n);
  const int64_t C = p.x.size[1], width = p.y.size[3];
  const bool maximum = p.kind == PoolKind::kMax;
  const int64_t first_row = Windows(p, 0, begin).first, last_row = Windows(p, 0, end - 1).last;
  const int64_t rows_read = std::max<int64_t>(last_row - first_row + 1, 0);
  std::vector<int32_t> maxima(maximum ? static_cast<size_t>(rows_read * width * C) : 0);
  const auto maxima_of = [&](int64_t o, int64_t q) { return maxima.data() + ((o - first_row) * width + q) * C; };
  if (maximum)
    for (int64_t o = first_row; o <= last_row; ++o)
      for (int64_t q = 0; q < width; ++q)
        if (grad.active(o, q)) grad.find_maxima(o, q, maxima_of(o, q));
  const BlockGrid& grid = params.dx_grid;
  for (int64_t i = begin; i < end; ++i) {
    const Windows rows(p, 0, i);
    T* to = static_cast<T*>(params.dx.data) + n * params.dx.stride[0] + i * params.dx.stride[2];
    const int32_t* const map =
        params.dx_map ? params.dx_map + (n * grid.count[0] + i / grid.size[0]) * grid.count[1] : nullptr;
    for (int64_t j = 0; j < p.x.size[3]; ++j, to += params.dx.stride[3]) {
      if (map && map[j / grid.size[1]] < 0) continue;
      const Windows columns(p, 1, j);
      for (int64_t c = 0; c < C; c += kChannels) {
        const int64_t count = std::min(kChannels, C - c);
        float sums[kChannels] = {};
        for (int64_t o = rows.first; o <= rows.last; ++o) {
          const int64_t row_tap = i + p.padding[0] - o * p.stride[0];
          if (row_tap % p.dilation[0]) continue;
          for (int64_t q = columns.first; q <= columns.last; ++q) {
            const int64_t column_tap = j + p.padding[1] - q * p.stride[1];
            if (column_tap % p.dilation[1] || !grad.active(o, q)) continue;
            if (!maximum) {
              grad.add_share(o, q, c, count, sums);
              continue;
            }
            const int64_t mine = row_tap / p.dilation[0] * p.kernel[1] + column_tap / p.dilation[1];
            grad.add_maximum(o, q, static_cast<int32_t>(mine), maxima_of(o, q), c, count, sums);
          }
        }
        for (int64_t k = 0; k < count; ++k) to[(c + k) * params.dx.stride[1]] = from_float<T>(sums[k]);
      }
    }
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pool2d_grad_cpu(const sbnet::PoolGradParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*params));
  const TensorView& x = params->pool.x;
  constexpr int64_t kRows = 16;  // of a task
  const int64_t bands = (x.size[2] + kRows - 1) / kRows;
  parallel_for(*parallel, x.size[0] * bands, 1, [&](int64_t begin, int64_t end) {
    by_dtype<Half, BFloat16>(x.dtype, [&](auto t) {
      for (int64_t band = begin; band < end; ++band) {
        const int64_t row = band % bands * kRows;
        run_rows<decltype(t)>(*params, band / bands, row, std::min(row + kRows, x.size[2]));
      }
    });
  });
  return ok_status();
}
