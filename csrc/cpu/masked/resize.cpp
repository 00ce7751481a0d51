// sparse_resize2d on the CPU: threads take rows of active blocks.
#include "core/masked/resize.h"

#include <cstring>

#include "cpu/masked/pixels.h"

namespace sbnet {
namespace {

template <class T>
void nearest_row(const ResizeParams& p, const ResizeAxis (&axis)[2], int64_t n, int64_t row, int64_t begin,
                 int64_t end) {
  const TensorView &x = p.x, &y = p.y;
  const int64_t channels = y.size[1];
  const bool packed = x.stride[1] == 1 && y.stride[1] == 1;
  const T* from = static_cast<const T*>(x.data) + n * x.stride[0] + axis[0].nearest(row) * x.stride[2];
  T* to = static_cast<T*>(y.data) + n * y.stride[0] + row * y.stride[2];
  for (int64_t w = begin; w < end; ++w) {
    const T* a = from + axis[1].nearest(w) * x.stride[3];
    T* b = to + w * y.stride[3];
    if (packed)
      std::memcpy(b, a, static_cast<size_t>(channels) * sizeof(T));
    else
      for (int64_t c = 0; c < channels; ++c) b[c * y.stride[1]] = a[c * x.stride[1]];
  }
}

// kTaps each way: 2 of a bilinear, 4 of a bicubic one.
template <class T, int kTaps>
void weighted_row(const ResizeParams& p, const ResizeAxis (&axis)[2], int64_t n, int64_t row, int64_t begin,
                  int64_t end) {
  constexpr int64_t kRun = 64;  // channels at a time
  const TensorView &x = p.x, &y = p.y;
  int top[kTaps], left[kTaps];
  float down[kTaps], across[kTaps];
  axis[0].taps(row, top, down);
  const T* from = static_cast<const T*>(x.data) + n * x.stride[0];
  T* to = static_cast<T*>(y.data) + n * y.stride[0] + row * y.stride[2];
  for (int64_t w = begin; w < end; ++w) {
    axis[1].taps(w, left, across);
    for (int64_t first = 0; first < y.size[1]; first += kRun) {
      const int64_t channels = std::min(kRun, y.size[1] - first);
      float sums[kRun] = {};
      for (int r = 0; r < kTaps; ++r)
        for (int s = 0; s < kTaps; ++s) {
          const T* at = from + top[r] * x.stride[2] + left[s] * x.stride[3] + first * x.stride[1];
          const float weight = down[r] * across[s];
          if (x.stride[1] == 1)
            for (int64_t c = 0; c < channels; ++c) sums[c] += weight * to_float(at[c]);
          else
            for (int64_t c = 0; c < channels; ++c) sums[c] += weight * to_float(at[c * x.stride[1]]);
        }
      T* out = to + w * y.stride[3] + first * y.stride[1];
      for (int64_t c = 0; c < channels; ++c) out[c * y.stride[1]] = from_float<T>(sums[c]);
    }
  }
}

template <class T>
void resize(const ResizeParams& p, const Parallel& parallel) {
  const ResizeAxis axis[2] = {ResizeAxis(p, 0), ResizeAxis(p, 1)};
  const int64_t taps = p.mode == ResizeMode::kBicubic ? 16 : p.mode == ResizeMode::kBilinear ? 4 : 1;
  for_rows(p, p.y.size[1] * taps, parallel, [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
    if (p.mode == ResizeMode::kBicubic)
      weighted_row<T, 4>(p, axis, n, row, begin, end);
    else if (p.mode == ResizeMode::kBilinear)
      weighted_row<T, 2>(p, axis, n, row, begin, end);
    else
      nearest_row<T>(p, axis, n, row, begin, end);
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_resize2d_cpu(const sbnet::ResizeParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  return run_by_dtype(*p, [&](auto t) { resize<decltype(t)>(*p, *parallel); });
}
