// sparse_conv_transpose2d on the CPU: a convolution of stride 1 for each phase of the output, which multiplies no
// zeros but those around x; where the stride does not divide the blocks, where a phase has no taps, or where such a
// zero would meet a weight that is no finite number, pixel by pixel.
#include "core/masked/conv_transpose.h"

#include <algorithm>
#include <cmath>

#include "cpu/lists/fringe.h"
#include "cpu/masked/conv_run.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace {

constexpr int64_t kLine = 64, kChannels = 64;  // bytes, channels summed at once

int64_t round_up(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// ---- by phases

// f(convolution, row phase, column phase, their taps) for each phase that has pixels; weights follow one another.
template <class F>
void each_phase(const ConvTransposeParams& p, char* weights, const F& f) {
  for (int32_t i = 0; i < p.stride[0]; ++i)
    for (int32_t j = 0; j < p.stride[1]; ++j) {
      const TransposePhase row = transpose_phase(p, 0, i), column = transpose_phase(p, 1, j);
      if (!row.side || !column.side) continue;
      f(phase_conv(p, row, column, i, j, weights), row, column);
      weights += p.y.size[1] * (p.x.size[1] / p.groups) * row.taps * column.taps * dtype_size(p.x.dtype);
    }
}

// Is some element of T's size an infinity or NaN?
template <class T>
bool any_not_finite(const T* from, int64_t count, T exponent) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= (from[i] & exponent) == exponent;
  return found;
}

// Copies the weights of a phase. Returns whether all are finite numbers, whose exponents have not all of its bits.
template <class T>
bool copy_weights(const ConvTransposeParams& p, const Conv2dParams& c, const TransposePhase& row,
                  const TransposePhase& column, T exponent, const Parallel& parallel) {
  const int64_t channels = c.weight.size[1], per_group = p.weight.size[1];
  const TensorView& w = p.weight;
  int32_t not_finite = 0;
  // Some output channels at once: where they are neighbours in memory, a line holds a weight of each, and the next
  // input channel's may lie pages away.
  constexpr int64_t kTogether = 16;
  const int64_t K = c.weight.size[0], row_length = c.weight.stride[0];
  parallel_for(parallel, (K + kTogether - 1) / kTogether, 1 + 4096 / (channels * row.taps * column.taps * kTogether),
               [&](int64_t begin, int64_t end) {
                 for (int64_t first = begin * kTogether; first < std::min(end * kTogether, K); first += kTogether) {
                   const int64_t count = std::min(kTogether, K - first);
                   const T* from[kTogether];
                   T* const rows = static_cast<T*>(c.weight.data) + first * row_length;
                   for (int64_t k = 0; k < count; ++k)
                     from[k] = static_cast<const T*>(w.data) + (first + k) / per_group * channels * w.stride[0] +
                               (first + k) % per_group * w.stride[1];
                   T* to = rows;
                   for (int32_t r = 0; r < row.taps; ++r)
                     for (int32_t s = 0; s < column.taps; ++s) {
                       const int64_t tap = (row.last_tap - int64_t{r} * row.tap_step) * w.stride[2] +
                                           (column.last_tap - int64_t{s} * column.tap_step) * w.stride[3];
                       for (int64_t channel = 0; channel < channels; ++channel, ++to)
                         for (int64_t k = 0; k < count; ++k) to[k * row_length] = from[k][tap + channel * w.stride[0]];
                     }
                   if (any_not_finite(rows, count * row_length, exponent))
                     __atomic_store_n(&not_finite, 1, __ATOMIC_RELAXED);
                 }
               });
  return !not_finite;
}

// May a phase's weights be read where they are, all of them memory without gaps?
bool reads_in_place(const ConvTransposeParams& p) {
  const int64_t *size = p.weight.size, *stride = p.weight.stride;
  const bool last = stride[1] == 1 && stride[3] == size[1] && stride[2] == size[3] * stride[3];
  const bool first = stride[3] == 1 && stride[2] == size[3] && stride[1] == size[2] * stride[2];
  return p.groups == 1 && (last || first) && stride[0] == size[1] * size[2] * size[3];
}

// Of the workspace, for copies of all phases' weights.
int64_t weight_bytes(const ConvTransposeParams& p) {
  return reads_in_place(p) ? 0 : round_up(transpose_weights(p) * dtype_size(p.x.dtype));
}

// A phase's taps, turned round, as a view of all weights.
TensorView view_of_weights(const ConvTransposeParams& p, const Conv2dParams& c, const TransposePhase& row,
                           const TransposePhase& column) {
  const TensorView& w = p.weight;
  TensorView view = c.weight;
  view.data =
      static_cast<char*>(w.data) + (row.last_tap * w.stride[2] + column.last_tap * w.stride[3]) * dtype_size(p.x.dtype);
  const int64_t strides[4] = {w.stride[1], w.stride[0], -row.tap_step * w.stride[2], -column.tap_step * w.stride[3]};
  std::copy(strides, strides + 4, view.stride);
  return view;
}

template <class T>
bool all_finite(const ConvTransposeParams& p, T exponent, const Parallel& parallel) {
  constexpr int64_t kRun = 1 << 14;
  const int64_t all = p.weight.size[0] * p.weight.stride[0];
  const T* const from = static_cast<const T*>(p.weight.data);
  int32_t not_finite = 0;
  parallel_for(parallel, (all + kRun - 1) / kRun, 4, [&](int64_t begin, int64_t end) {
    if (any_not_finite(from + begin * kRun, std::min(end * kRun, all) - begin * kRun, exponent))
      __atomic_store_n(&not_finite, 1, __ATOMIC_RELAXED);
  });
  return !not_finite;
}

// f(dtype's integer, its exponent's bits).
template <class F>
bool by_exponent(DType dtype, const F& f) {
  if (dtype_size(dtype) == 4) return f(uint32_t{0x7f800000u});
  return f(static_cast<uint16_t>(dtype == DType::kF16 ? 0x7c00u : 0x7f80u));
}

// Does some output of a phase read beyond x?
bool reaches_out(const ConvTransposeParams& p, int d, const TransposePhase& phase) {
  return phase.first < 0 || phase.first + phase.side - 1 + int64_t{phase.taps - 1} * phase.dilation >= p.x.size[2 + d];
}

// False, and nothing is done, where zeros around x would meet weights that are no finite numbers.
bool run_phases(const ConvTransposeParams& p, char* workspace, const Parallel& parallel) {
  const bool in_place = reads_in_place(p);
  char* scratch = workspace + weight_bytes(p);
  bool right = true, reaches = false;
  each_phase(p, workspace, [&](const Conv2dParams& c, const TransposePhase& row, const TransposePhase& column) {
    const bool out = reaches_out(p, 0, row) || reaches_out(p, 1, column);
    reaches |= out;
    if (in_place) return;
    right &= by_exponent(p.x.dtype, [&](auto e) { return copy_weights(p, c, row, column, e, parallel); }) || !out;
  });
  if (in_place && reaches) right = by_exponent(p.x.dtype, [&](auto e) { return all_finite(p, e, parallel); });
  if (!right) return false;
  each_phase(p, workspace, [&](Conv2dParams c, const TransposePhase& row, const TransposePhase& column) {
    if (in_place) c.weight = view_of_weights(p, c, row, column);
    run_conv(c, scratch, parallel);
  });
  return true;
}

// ---- pixel by pixel

float activate(Activation activation, float param, float v) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < 0.f ? 0.f : v;
    case Activation::kRelu6:
      return v < 0.f ? 0.f : v > 6.f ? 6.f : v;
    case Activation::kLeakyRelu:
      return v > 0.f ? v : v * param;
    case Activation::kSilu:
      return v / (1.f + std::exp(-v));
    case Activation::kGelu:
      return 0.5f * v * (1.f + std::erf(v * 0.70710678118654752f));
    case Activation::kHardswish: {
      const float gate = v + 3.f;
      return v * (gate < 0.f ? 0.f : gate > 6.f ? 6.f : gate) * (1.f / 6.f);
    }
  }
  return v;
}

struct Pixel {
  int64_t n, row, column;
};

// One of [K] numbers of T or float.
template <class T>
float number_at(const void* numbers, DType dtype, int64_t k) {
  return dtype == DType::kF32 ? static_cast<const float*>(numbers)[k] : to_float(static_cast<const T*>(numbers)[k]);
}

// Channels [first, first + count) of one group of a pixel.
template <class T>
void run_pixel(const ConvTransposeParams& p, const Pixel& at, int64_t group, int64_t first, int64_t count) {
  const int64_t channels = p.x.size[1] / p.groups, k0 = group * p.weight.size[1] + first;
  double sums[kChannels] = {};
  const T* x = static_cast<const T*>(p.x.data) + at.n * p.x.stride[0] + group * channels * p.x.stride[1];
  const T* w =
      static_cast<const T*>(p.weight.data) + group * channels * p.weight.stride[0] + first * p.weight.stride[1];
  for (int64_t r = 0; r < p.weight.size[2]; ++r) {
    const int64_t i = at.row + p.padding[0] - r * p.dilation[0];
    if (i < 0 || i % p.stride[0] || i / p.stride[0] >= p.x.size[2]) continue;
    for (int64_t s = 0; s < p.weight.size[3]; ++s) {
      const int64_t j = at.column + p.padding[1] - s * p.dilation[1];
      if (j < 0 || j % p.stride[1] || j / p.stride[1] >= p.x.size[3]) continue;
      const T* pixel = x + i / p.stride[0] * p.x.stride[2] + j / p.stride[1] * p.x.stride[3];
      const T* tap = w + r * p.weight.stride[2] + s * p.weight.stride[3];
      for (int64_t c = 0; c < channels; ++c) {
        const double v = to_float(pixel[c * p.x.stride[1]]);
        for (int64_t k = 0; k < count; ++k)
          sums[k] += v * to_float(tap[c * p.weight.stride[0] + k * p.weight.stride[1]]);
      }
    }
  }
  T* y = static_cast<T*>(p.y.data) + at.n * p.y.stride[0] + at.row * p.y.stride[2] + at.column * p.y.stride[3];
  for (int64_t k = 0; k < count; ++k) {
    float v = static_cast<float>(sums[k]);
    if (p.bias) v += number_at<T>(p.bias, p.bias_dtype, k0 + k);
    const float param = p.slope ? number_at<T>(p.slope, p.slope_dtype, k0 + k) : p.activation_param;
    if (p.residual.data)
      v += to_float(
          static_cast<const T*>(p.residual.data)[at.n * p.residual.stride[0] + (k0 + k) * p.residual.stride[1] +
                                                 at.row * p.residual.stride[2] + at.column * p.residual.stride[3]]);
    y[(k0 + k) * p.y.stride[1]] = from_float<T>(activate(p.activation, param, v));
  }
}

template <class T>
void run_pixels(const ConvTransposeParams& p, const Parallel& parallel) {
  const BlockGrid& grid = p.active.grid;
  const int64_t blocks = std::clamp<int64_t>(*p.active.count, 0, p.active.capacity);
  const int64_t height = std::min<int64_t>(grid.size[0], p.y.size[2]),
                width = std::min<int64_t>(grid.size[1], p.y.size[3]);
  parallel_for(parallel, blocks * height, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int32_t* block = p.active.indices + 3 * (r / height);
      const int64_t n = block[0], i = block[1], j = block[2];
      if (n < 0 || n >= p.y.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) continue;
      const int64_t row = i * grid.size[0] + r % height;
      if (row >= p.y.size[2]) continue;
      const int64_t last = std::min(j * grid.size[1] + width, p.y.size[3]);
      for (int64_t column = j * grid.size[1]; column < last; ++column)
        for (int64_t group = 0; group < p.groups; ++group)
          for (int64_t k = 0; k < p.weight.size[1]; k += kChannels)
            run_pixel<T>(p, {n, row, column}, group, k, std::min(kChannels, p.weight.size[1] - k));
    }
  });
}

}  // namespace
}  // namespace sbnet

int64_t sbnet_sparse_conv_transpose2d_workspace_bytes_cpu(const sbnet::ConvTransposeParams* p, int32_t threads) {
  using namespace sbnet;
  if (!validate(*p).ok() || !runs_by_phases(*p)) return 0;
  int64_t most = 0;
  each_phase(*p, nullptr, [&](const Conv2dParams& c, const TransposePhase&, const TransposePhase&) {
    most = std::max(most, conv_workspace_bytes(c, threads));
  });
  return weight_bytes(*p) + most;
}

sbnet::Status sbnet_sparse_conv_transpose2d_cpu(const sbnet::ConvTransposeParams* params, void* workspace,
                                                const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const ConvTransposeParams& p = *params;
  SBNET_TRY(validate(p));
  if (!p.x.size[0]) return ok_status();  // blocks of no image, which a count may claim, have any size
  if (!runs_by_phases(p) || !run_phases(p, static_cast<char*>(workspace), *parallel)) {
    if (p.x.dtype == DType::kF32)
      run_pixels<float>(p, *parallel);
    else if (p.x.dtype == DType::kF16)
      run_pixels<Half>(p, *parallel);
    else
      run_pixels<BFloat16>(p, *parallel);
  }
  zero_fringe(p.y, p.fringe, *parallel);
  return ok_status();
}
