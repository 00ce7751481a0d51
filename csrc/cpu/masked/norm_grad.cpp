// sparse_norm2d_backward on the CPU. Of pixels: threads take parts of the plane's rows, whose number depends on the
// plane alone; a pixel's channels are widened, summed and narrowed. Of images: threads fold parts of the blocks, make a
// table of each image's channels, and write rows by it.
#include "core/masked/norm_grad.h"

#include <algorithm>
#include <cmath>

#include "core/by_dtype.h"
#include "cpu/masked/pixels.h"
#include "cpu/masked/plane_rows.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace {

template <class T>
T* pixel_of(const TensorView& t, int64_t n, int64_t row, int64_t column) {
  return static_cast<T*>(t.data) + n * t.stride[0] + row * t.stride[2] + column * t.stride[3];
}

float weight_of(const NormGradParams& p, int64_t c) {
  if (!p.weight) return 1.0f;
  float found = 0;
  by_dtype<Half, BFloat16>(p.param_dtype,
                           [&](auto t) { found = to_float(static_cast<const decltype(t)*>(p.weight)[c]); });
  return found;
}

// ---- of pixels

template <class T>
void run_row(const NormGradParams& p, const float* weight, const BlockRow& row, float* of_weight, float* of_bias) {
  const int64_t C = p.x.size[1];
  float x[kMostNormChannels], g[kMostNormChannels];
  for (int64_t w = row.column; w < row.column_end; ++w) {
    const T *from = pixel_of<T>(p.x, row.n, row.row, w), *grad = pixel_of<T>(p.grad, row.n, row.row, w);
    double sum = 0, square = 0, of_g = 0, of_both = 0;  // one after the other: float's roundings would add up
    for (int64_t c = 0; c < C; ++c) x[c] = to_float(from[c * p.x.stride[1]]), sum += x[c];
    const float count = static_cast<float>(C), mean = static_cast<float>(sum / count);
    for (int64_t c = 0; c < C; ++c) x[c] -= mean, square += x[c] * x[c];
    const float scale = 1.0f / std::sqrt(static_cast<float>(square / count) + p.eps);
    for (int64_t c = 0; c < C; ++c) {
      const float dy = to_float(grad[c * p.grad.stride[1]]);
      x[c] *= scale;
      of_bias[c] += dy;
      of_weight[c] += dy * x[c];
      g[c] = dy * weight[c];
      of_g += g[c];
      of_both += g[c] * x[c];
    }
    const float mean_g = static_cast<float>(of_g / count), mean_both = static_cast<float>(of_both / count);
    T* to = pixel_of<T>(p.y, row.n, row.row, w);
    for (int64_t c = 0; c < C; ++c) to[c * p.y.stride[1]] = from_float<T>((g[c] - mean_g - x[c] * mean_both) * scale);
  }
}

void run_pixels(const NormGradParams& p, float* sums, const Parallel& parallel) {
  const int64_t C = p.x.size[1], H = p.x.size[2], rows = p.x.size[0] * H;
  float weight[kMostNormChannels];
  for (int64_t c = 0; c < C; ++c) weight[c] = weight_of(p, c);
  const int64_t parts = std::min<int64_t>(kMostLayerNormParts, rows);
  parallel_for(parallel, parts, 1, [&](int64_t begin, int64_t end) {
    const Parallel alone = {nullptr, nullptr, 1};
    for (int64_t part = begin; part < end; ++part) {
      float* const own = sums + 2 * part * C;
      std::fill_n(own, 2 * C, 0.0f);
      for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
        TensorView y = p.y;  // this row alone
        ActiveView active = p.active;
        const int64_t n = r / H, row = r % H;
        y.size[0] = y.size[2] = 1;
        active.block_map += (n * active.grid.count[0] + row / active.grid.size[0]) * active.grid.count[1];
        active.grid.count[0] = 1;
        write_plane<false>(y, active, 16 * C, alone, [&](const BlockRow& at) {
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
  zero_fringe(p.y, p.fringe, parallel);
}

// ---- of images

constexpr int64_t kTogether = 64;  // channels

// Each row by itself, then merged in double.
template <class T>
void fold_part(const NormGradParams& p, const FoldParts& parts, int64_t part, float* values, float* counts) {
  const int64_t C = p.x.size[1];
  counts[part] = 0;
  for (int64_t first = 0; first < C; first += kTogether) {
    const int64_t channels = std::min(kTogether, C - first);
    GradMoments<double> all[kTogether] = {};
    PixelRect rect;
    for (BandWalk walk(parts, part); walk.next(&rect);) {
      for (int32_t row = rect.row; row < rect.row_end; ++row) {
        GradMoments<float> found[kTogether] = {};
        for (int32_t column = rect.column; column < rect.column_end; ++column) {
          const T* x = pixel_of<T>(p.x, walk.image(), row, column) + first * p.x.stride[1];
          const T* grad = pixel_of<T>(p.grad, walk.image(), row, column) + first * p.grad.stride[1];
          for (int64_t c = 0; c < channels; ++c)
            found[c].add(to_float(x[c * p.x.stride[1]]), to_float(grad[c * p.grad.stride[1]]));
        }
        for (int64_t c = 0; c < channels; ++c)
          all[c].merge({found[c].count, found[c].mean, found[c].square, found[c].sum, found[c].both});
      }
    }
    counts[part] = static_cast<float>(all[0].count);
    float* const to = values + 4 * part * C + first;
    for (int64_t c = 0; c < channels; ++c) {
      const double numbers[4] = {all[c].mean, all[c].square, all[c].sum, all[c].both};
      for (int k = 0; k < 4; ++k) to[k * C + c] = static_cast<float>(numbers[k]);
    }
  }
}

// of: what the parts of image n found of a channel.
template <class Of>
void fill_response(const NormGradParams& p, const Of& of, float* to) {
  const int64_t C = p.x.size[1];
  double sum = 0, products = 0;
  for (int64_t c = 0; c < C; ++c) {
    const GradMoments<double> all = of(c);
    const double root = std::sqrt(all.square + all.count * all.mean * all.mean), both = all.both + all.sum * all.mean;
    to[kOfX * C + c] = static_cast<float>(root), to[kOfWeight * C + c] = static_cast<float>(both);
    to[kOfBias * C + c] = static_cast<float>(all.sum);
    sum += root, products += root * both * weight_of(p, c);
  }
  const double scale = 1 / (sum / static_cast<double>(C) + p.eps);
  const double mean = products / static_cast<double>(C) * scale * scale;
  for (int64_t c = 0; c < C; ++c) {
    const double root = to[kOfX * C + c], both = to[kOfWeight * C + c], weight = weight_of(p, c);
    to[kOfGrad * C + c] = static_cast<float>(1 + weight * root * scale);
    to[kOfX * C + c] = root > 0 ? static_cast<float>((weight * both * scale - mean) / root) : 0.0f;
    to[kShift * C + c] = to[kMean * C + c] = 0.0f;
    to[kOfWeight * C + c] = static_cast<float>(both * root * scale);
  }
}

template <class Of>
void fill_groups(const NormGradParams& p, const Of& of, float* to) {
  const int64_t C = p.x.size[1], group = C / p.groups;
  for (int64_t first = 0; first < C; first += group) {
    GradMoments<double> all = {};
    for (int64_t c = first; c < first + group; ++c) all.merge(of(c));
    const double share = 1 / std::max(all.count, 1.0), scale = 1 / std::sqrt(all.square * share + p.eps);
    double of_g = 0, of_both = 0;
    for (int64_t c = first; c < first + group; ++c) {
      const GradMoments<double> own = of(c);
      const double both = (own.both + own.sum * (own.mean - all.mean)) * scale, weight = weight_of(p, c);
      to[kOfGrad * C + c] = static_cast<float>(weight * scale);
      to[kMean * C + c] = static_cast<float>(all.mean);
      to[kOfWeight * C + c] = static_cast<float>(both), to[kOfBias * C + c] = static_cast<float>(own.sum);
      of_g += weight * own.sum, of_both += weight * both;
    }
    for (int64_t c = first; c < first + group; ++c) {
      to[kOfX * C + c] = static_cast<float>(-scale * scale * of_both * share);
      to[kShift * C + c] = static_cast<float>(-scale * of_g * share);
    }
  }
}

template <class T>
void write_row(const NormGradParams& p, const float* table, int64_t n, int64_t row, int64_t begin, int64_t end) {
  const int64_t C = p.x.size[1];
  const float* own = table + kGradRows * n * C;
  const float *of_grad = own + kOfGrad * C, *of_x = own + kOfX * C, *shift = own + kShift * C, *mean = own + kMean * C;
  for (int64_t w = begin; w < end; ++w) {
    const T *x = pixel_of<T>(p.x, n, row, w), *grad = pixel_of<T>(p.grad, n, row, w);
    T* to = pixel_of<T>(p.y, n, row, w);
    for (int64_t c = 0; c < C; ++c)
      to[c * p.y.stride[1]] = from_float<T>(to_float(grad[c * p.grad.stride[1]]) * of_grad[c] +
                                            (to_float(x[c * p.x.stride[1]]) - mean[c]) * of_x[c] + shift[c]);
  }
}

void run_images(const NormGradParams& p, float* values, const Parallel& parallel) {
  const FoldParts parts = parts_of(p, kCpuPartPixels);
  const int64_t C = p.x.size[1], N = p.x.size[0];
  float *const counts = fold_counts(parts, FoldKind::kGradient, values), *const table = grad_table(parts, values);
  parallel_for(parallel, parts.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      by_dtype<Half, BFloat16>(p.x.dtype, [&](auto t) { fold_part<decltype(t)>(p, parts, part, values, counts); });
  });
  parallel_for(parallel, N, 1 + 16384 / (C * parts.slices), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const auto of = [&](int64_t c) {
        GradMoments<double> all = {};
        for (int64_t part = n * parts.slices; part < (n + 1) * parts.slices; ++part) {
          const float* own = values + 4 * part * C + c;
          all.merge({counts[part], own[0], own[C], own[2 * C], own[3 * C]});
        }
        return all;
      };
      float* const to = table + kGradRows * n * C;
      p.kind == NormKind::kGroup ? fill_groups(p, of, to) : fill_response(p, of, to);
    }
  });
  for (int64_t k = 0; k < 2 * C; ++k) {
    double sum = 0;
    for (int64_t n = 0; n < N; ++n) sum += table[(kGradRows * n + kOfWeight) * C + k];
    p.grad_params[k] = static_cast<float>(sum);
  }
  for_rows(p, 8 * C, parallel, [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
    by_dtype<Half, BFloat16>(p.x.dtype, [&](auto t) { write_row<decltype(t)>(p, table, n, row, begin, end); });
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_norm2d_backward_cpu(const sbnet::NormGradParams* params, void* workspace,
                                               const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const NormGradParams& p = *params;
  SBNET_TRY(validate(p));
  if (!p.x.size[0]) {
    std::fill_n(p.grad_params, 2 * p.x.size[1], 0.0f);
    return ok_status();
  }
  const auto run = of_images(p.kind) ? run_images : run_pixels;
  run(p, static_cast<float*>(workspace), *parallel);
  return ok_status();
}
