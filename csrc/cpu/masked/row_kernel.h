// Rows of batch normalisation and of elementwise gradients. Included once by each row_kernels_<isa>.cpp; see isa.h for
// why. Lanes are channels of a pixel where those lie next to each other, else pixels; the arithmetic is the same.
#pragma once
#include "cpu/masked/lanes.h"
#include "cpu/masked/row_kernels.h"

namespace sbnet {
namespace SBNET_ISA {

// Some tensors at one pixel's channels, or one channel's pixels: `count` neighbours, kLanes at most.
template <class T>
struct Run {
  const T* at;
  int64_t step;
  SBNET_INLINE Vec get(const Run& run, int64_t first, int64_t count) {
    if (run.step == 1 && count == kLanes) return load_lanes(run.at + first);
    float lanes[kLanes] = {};
    load_row(lanes, run.at + first * run.step, run.step, count);
    return load(lanes);
  }
};
template <class T>
SBNET_INLINE void put(T* to, int64_t step, int64_t count, Vec v) {
  if (step == 1 && count == kLanes) return store_lanes(to, v);
  float lanes[kLanes];
  store(lanes, v);
  store_row(to, step, lanes, count);
}

// Numbers of a channel, for lanes that are channels or not.
struct Numbers {
  const float* table;
  int64_t channels, first, count;
  bool of_lanes;
  Vec operator()(int64_t row) const {
    const float* at = table + row * channels + first;
    return of_lanes ? load_some(at, count) : splat(*at);
  }
};

template <class T>
SBNET_INLINE const T* pixel(const TensorView& t, const BlockRow& row) {
  return static_cast<const T*>(t.data) + row.n * t.stride[0] + row.row * t.stride[2] + row.column * t.stride[3];
}

// f(vectors of each input, numbers) -> the vector of y.
template <class T, int kInputs, class F>
SBNET_INLINE void map_row(const TensorView* const (&in)[kInputs], const TensorView& y, const float* table,
                          const BlockRow& row, const F& f) {
  const int64_t C = y.size[1], width = row.column_end - row.column;
  T* to = const_cast<T*>(pixel<T>(y, row));
  const T* from[kInputs];
  for (int k = 0; k < kInputs; ++k) from[k] = pixel<T>(*in[k], row);
  const bool channels = y.stride[1] <= y.stride[3];
  const int outer = channels ? 3 : 1, inner = channels ? 1 : 3;
  const int64_t outers = channels ? width : C, inners = channels ? C : width;
  for (int64_t o = 0; o < outers; ++o)
    for (int64_t i = 0; i < inners; i += kLanes) {
      const int64_t count = smaller(kLanes, inners - i);
      Vec v[kInputs];
      for (int k = 0; k < kInputs; ++k)
        v[k] = Run<T>::get({from[k] + o * in[k]->stride[outer], in[k]->stride[inner]}, i, count);
      const Numbers numbers = {table, C, channels ? i : o, count, channels};
      put(to + o * y.stride[outer] + i * y.stride[inner], y.stride[inner], count, f(v, numbers));
    }
}

// act'(z) dy. Comparisons pass NaN of z on as PyTorch's backward does.
SBNET_INLINE Vec gradient(Activation activation, Vec slope, Vec grad, Vec z) {
  const Vec zero = Vec{};
  switch (activation) {
    case Activation::kRelu:
      return z <= zero ? zero : grad;
    case Activation::kRelu6:
      return (z <= zero) | (z >= 6.0f) ? zero : grad;
    case Activation::kLeakyRelu:
      return z > zero ? grad : grad * slope;
    case Activation::kSilu: {
      const Vec s = 1.0f / (1.0f + exponential(-z));
      return grad * (s * (1.0f + z * (1.0f - s)));
    }
    case Activation::kGelu: {
      const Vec cdf = 0.5f * (1.0f + error_function(z * 0.70710678f));
      return grad * (cdf + z * (exponential(-0.5f * z * z) * 0.39894228f));
    }
    case Activation::kHardswish: {
      const Vec middle = grad * (z * 0.33333333f + 0.5f);
      return z <= -3.0f ? zero : z >= 3.0f ? grad : middle;
    }
    default:
      return grad;
  }
}

template <class T>
static void norm_row(const BatchNormParams& p, const float* table, const BlockRow& row) {
  const auto norm = [](Vec x, const Numbers& n) { return (x - n(0)) * n(1) + n(2); };
  const auto act = [&](Vec z) { return activate(p.activation, p.activation_param, z); };
  if (p.residual.data) {
    const TensorView* const in[2] = {&p.x, &p.residual};
    map_row<T>(in, p.y, table, row, [&](const Vec(&v)[2], const Numbers& n) { return act(norm(v[0], n) + v[1]); });
  } else {
    const TensorView* const in[1] = {&p.x};
    map_row<T>(in, p.y, table, row, [&](const Vec(&v)[1], const Numbers& n) { return act(norm(v[0], n)); });
  }
}

// g, of dy, x and what the activation gave, which is x where that is not there.
SBNET_INLINE Vec through(const BatchNormGradParams& p, Vec grad, Vec x, Vec given, const Numbers& n) {
  if (p.activation == Activation::kNone) return grad;
  return gradient(p.activation, splat(p.activation_param), grad, p.given.data ? given : (x - n(0)) * n(1) + n(2));
}

template <class T>
static void norm_grad_row(const BatchNormGradParams& p, const float* table, const BlockRow& row) {
  const TensorView* const in[3] = {&p.grad, &p.x, p.given.data ? &p.given : &p.x};
  map_row<T>(in, p.y, table, row, [&](const Vec(&v)[3], const Numbers& n) {
    return through(p, v[0], v[1], v[2], n) * n(3) + ((v[1] - n(0)) * n(4) + n(5));
  });
  if (p.grad_residual.data)
    map_row<T>(in, p.grad_residual, table, row,
               [&](const Vec(&v)[3], const Numbers& n) { return through(p, v[0], v[1], v[2], n); });
}

template <class T>
static void norm_sums_row(const BatchNormGradParams& p, const float* table, const BlockRow& row, float* sums) {
  const TensorView& given = p.given.data ? p.given : p.x;
  const int64_t C = p.x.size[1], width = row.column_end - row.column;
  const T *g = pixel<T>(p.grad, row), *x = pixel<T>(p.x, row), *y = pixel<T>(given, row);
  const bool channels = p.x.stride[1] <= p.x.stride[3];
  const int outer = channels ? 3 : 1, inner = channels ? 1 : 3;
  const int64_t inners = channels ? C : width, outers = channels ? width : C;
  // Lanes that are channels keep their sums over all pixels; others add up a channel's pixels at its end.
  const auto add = [&](int64_t o, int64_t i, int64_t count, const Numbers& n, Vec* of_grad, Vec* of_both) {
    const auto get = [&](const T* from, const TensorView& t) {
      return Run<T>::get({from + o * t.stride[outer], t.stride[inner]}, i, count);
    };
    const Vec v = get(x, p.x), own = through(p, get(g, p.grad), v, get(y, given), n);
    *of_grad += own, *of_both += own * (v - n(0));
  };
  if (channels) {
    for (int64_t c = 0; c < C; c += kLanes) {
      const int64_t count = smaller(kLanes, C - c);
      Vec of_grad = Vec{}, of_both = Vec{};
      for (int64_t w = 0; w < outers; ++w) add(w, c, count, {table, C, c, count, true}, &of_grad, &of_both);
      store_some(sums + c, load_some(sums + c, count) + of_grad, count);
      store_some(sums + C + c, load_some(sums + C + c, count) + of_both, count);
    }
    return;
  }
  for (int64_t c = 0; c < C; ++c) {
    Vec of_grad = Vec{}, of_both = Vec{};
    for (int64_t w = 0; w < inners; w += kLanes) {
      const int64_t count = smaller(kLanes, inners - w);  // the lanes past it hold zeros of dy
      add(c, w, count, {table, C, c, count, false}, &of_grad, &of_both);
    }
    for (int e = 0; e < kLanes; ++e) sums[c] += of_grad[e], sums[C + c] += of_both[e];
  }
}

template <class T>
static void activation_grad_row(const ActivationGradParams& p, const float* slopes, const BlockRow& row) {
  const TensorView* const in[2] = {&p.grad, &p.x};
  map_row<T>(in, p.y, slopes, row, [&](const Vec(&v)[2], const Numbers& n) {
    return gradient(p.activation, slopes ? n(0) : splat(p.activation_param), v[0], v[1]);
  });
}

static void activation(const ActivationParams& p, const BlockRow& row) {
  by_dtype<Half, BFloat>(p.y.dtype, [&](auto t) {
    const auto act = [&](Vec v) { return activate(p.activation, p.activation_param, v); };
    if (p.other.data) {
      const TensorView* const in[2] = {&p.y, &p.other};
      map_row<decltype(t)>(in, p.y, nullptr, row, [&](const Vec(&v)[2], const Numbers&) { return act(v[0] + v[1]); });
    } else {
      const TensorView* const in[1] = {&p.y};
      map_row<decltype(t)>(in, p.y, nullptr, row, [&](const Vec(&v)[1], const Numbers&) { return act(v[0]); });
    }
  });
}
static void norm(const BatchNormParams& p, const float* table, const BlockRow& row) {
  by_dtype<Half, BFloat>(p.x.dtype, [&](auto t) { norm_row<decltype(t)>(p, table, row); });
}
static void norm_sums(const BatchNormGradParams& p, const float* table, const BlockRow& row, float* sums) {
  by_dtype<Half, BFloat>(p.x.dtype, [&](auto t) { norm_sums_row<decltype(t)>(p, table, row, sums); });
}
static void norm_grad(const BatchNormGradParams& p, const float* table, const BlockRow& row) {
  by_dtype<Half, BFloat>(p.x.dtype, [&](auto t) { norm_grad_row<decltype(t)>(p, table, row); });
}
static void activation_grad(const ActivationGradParams& p, const float* slopes, const BlockRow& row) {
  by_dtype<Half, BFloat>(p.y.dtype, [&](auto t) { activation_grad_row<decltype(t)>(p, slopes, row); });
}

}  // namespace SBNET_ISA
}  // namespace sbnet
