// The convolution of float8 on the CPU: x and weight are widened to float32, whole, in the workspace; the convolution
// of float32 makes the sums, of active blocks alone; scales, residual, activation and rounding follow. Right, not fast:
// it is there to judge a network's accuracy without a GPU.
#include "cpu/masked/conv_float8.h"

#include <algorithm>

#include "core/float8.h"
#include "cpu/masked/conv_run.h"

#define SBNET_ISA conv_float8
#define SBNET_LANES 4
#define SBNET_VECTORS 2
#include "cpu/masked/conv_simd.h"

namespace sbnet {
namespace {

using namespace conv_float8;

struct Float8 {
  uint8_t bits;
};
float widened(Float8 v) { return float8_value(v.bits); }
template <class T>
float widened(T v) {
  return widen(v);
}
void narrowed(Float8* to, float v) { to->bits = float8_bits(v); }
template <class T>
void narrowed(T* to, float v) {
  narrow(to, v);
}

template <class F>
void by_element(DType dtype, const F& f) {
  if (dtype == DType::kF8) return f(Float8{});
  by_dtype<Half, BFloat>(dtype, f);
}

TensorView channels_last(float* data, const int64_t* size) {
  return {data,
          {size[0], size[1], size[2], size[3]},
          {size[1] * size[2] * size[3], 1, size[1] * size[3], size[1]},
          DType::kF32};
}

// Where the workspace has what.
struct Areas {
  int64_t weight, y, scratch, total;  // x comes first
  Conv2dParams conv;

  Areas(const QuantizedConv2dParams& p, char* base, int32_t threads) : conv(p) {
    const auto bytes = [](const int64_t* size) {
      const int64_t elements = size_product({size[0], size[1], size[2], size[3]});
      return std::min(elements, kMost / 4) * 4 / 64 * 64 + 64;
    };
    weight = bytes(p.x.size);
    y = weight + bytes(p.weight.size);
    scratch = y + bytes(p.y.size);
    const auto at = [&](int64_t offset) { return base ? reinterpret_cast<float*>(base + offset) : nullptr; };
    conv.x = channels_last(at(0), p.x.size);
    conv.weight = channels_last(at(weight), p.weight.size);
    conv.y = channels_last(at(y), p.y.size);
    conv.residual = {};
    conv.bias = conv.slope = conv.packed = nullptr;
    conv.fringe = {};
    conv.activation = Activation::kNone;
    total = scratch + (scratch < kMost ? conv_workspace_bytes(conv, threads) : 0);
  }
  static constexpr int64_t kMost = int64_t{1}
                                   << 60;  // bytes of one that no machine has, and a sum of which fits 64 bits
};

// As float32, channels last. per_unit: 1 of a float that is rounded to float8 first, 0 of float8 itself.
void widen_all(const TensorView& from, float per_unit, const TensorView& to, const Parallel& parallel) {
  float table[256];
  for (int bits = 0; bits < 256; ++bits) table[bits] = float8_value(static_cast<uint8_t>(bits));
  const int64_t C = from.size[1], H = from.size[2], W = from.size[3];
  by_element(from.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(parallel, from.size[0] * H, 1 + 4096 / (W * C), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t column = 0; column < W; ++column) {
          const T* in = static_cast<const T*>(from.data) + row / H * from.stride[0] + row % H * from.stride[2] +
                        column * from.stride[3];
          float* out = static_cast<float*>(to.data) + (row * W + column) * C;
          for (int64_t c = 0; c < C; ++c) {
            const T v = in[c * from.stride[1]];
            if constexpr (sizeof(T) == 1)
              out[c] = table[v.bits];
            else
              out[c] = table[float8_bits(widen(v) * per_unit)];
          }
        }
    });
  });
}

// One pixel's outputs of its sums.
void finish_pixel(const QuantizedConv2dParams& p, const float* sums, int64_t n, int64_t row, int64_t column) {
  const auto offset = [=](const TensorView& t) { return n * t.stride[0] + row * t.stride[2] + column * t.stride[3]; };
  const float per_unit = p.out_scale > 0 ? 1 / p.out_scale : 1;
  for (int64_t k0 = 0; k0 < p.y.size[1]; k0 += kLanes) {
    const int64_t channels = std::min<int64_t>(kLanes, p.y.size[1] - k0);
    Vec v = {}, slope = splat(p.activation_param);
    for (int64_t k = 0; k < channels; ++k) {
      v[k] = sums[k0 + k] * p.scale[k0 + k] + (p.bias ? static_cast<const float*>(p.bias)[k0 + k] : 0);
      if (p.slope) slope[k] = static_cast<const float*>(p.slope)[k0 + k];
    }
    if (adds_after(p)) v = activate(p.activation, slope, v);
    if (p.residual.data)
      by_element(p.residual.dtype, [&](auto t) {
        const auto* from = static_cast<const decltype(t)*>(p.residual.data) + offset(p.residual);
        for (int64_t k = 0; k < channels; ++k)
          v[k] += p.residual_scale * widened(from[(k0 + k) * p.residual.stride[1]]);
      });
    if (!adds_after(p)) v = activate(p.activation, slope, v);
    by_element(p.y.dtype, [&](auto t) {
      auto* to = static_cast<decltype(t)*>(p.y.data) + offset(p.y);
      for (int64_t k = 0; k < channels; ++k) narrowed(to + (k0 + k) * p.y.stride[1], v[k] * per_unit);
    });
  }
}

}  // namespace

int64_t float8_conv_workspace_bytes(const QuantizedConv2dParams& p, int32_t threads) {
  return Areas(p, nullptr, threads).total;
}

void run_float8_conv(const QuantizedConv2dParams& p, void* workspace, const Parallel& parallel) {
  const int64_t blocks = std::clamp<int64_t>(*p.active.count, 0, p.active.capacity);
  if (!blocks || !p.x.size[0]) return;
  const Areas areas(p, static_cast<char*>(workspace), parallel.threads);
  widen_all(p.x, p.x_scale > 0 ? 1 / p.x_scale : 0, areas.conv.x, parallel);
  widen_all(p.weight, 0, areas.conv.weight, parallel);
  run_conv(areas.conv, static_cast<char*>(workspace) + areas.scratch, parallel);

  const BlockGrid& grid = p.active.grid;
  const int64_t K = p.y.size[1], H = p.y.size[2], W = p.y.size[3];
  parallel_for(parallel, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int32_t* block = p.active.indices + 3 * b;
      const int64_t n = block[0], i = block[1], j = block[2];
      if (n < 0 || n >= p.y.size[0] || i < 0 || i >= grid.count[0] || j < 0 || j >= grid.count[1]) continue;
      for (int64_t row = i * grid.size[0]; row < std::min<int64_t>(H, (i + 1) * grid.size[0]); ++row)
        for (int64_t column = j * grid.size[1]; column < std::min<int64_t>(W, (j + 1) * grid.size[1]); ++column)
          finish_pixel(p, static_cast<const float*>(areas.conv.y.data) + ((n * H + row) * W + column) * K, n, row,
                       column);
    }
  });
}

}  // namespace sbnet
