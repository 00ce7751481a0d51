// What batch normalisation sums over parts of the list: a CTA takes a part and some words of channels.
#pragma once
#include "core/masked/batch_norm.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/masked/plane_map.cuh"

namespace sbnet {
namespace {

struct SumPlan {
  portable::PixelList list;
  FastDiv words;  // of a pixel that a CTA takes together
  int32_t all_words, parts;
};

// Mean, and sum of squared distances from it, of each channel of a part. A thread sums about its own first pixel: one
// of the numbers themselves, so that their spread bounds what cancels. Threads' are merged as Chan, Golub and LeVeque
// have it (1979).
template <class T, int kN>
__global__ void __launch_bounds__(kPlaneThreads)
    moments_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ SumPlan plan, float* values,
                   float* counts) {
  extern __shared__ __align__(16) float shared[];  // [2 * kN][kPlaneThreads], then counts [kPlaneThreads]
  grid_dependency_wait();
  grid_dependency_release();
  uint32_t lane, word;
  plan.words.divmod(threadIdx.x, &lane, &word);
  const uint32_t words = plan.words.divisor, lanes = plan.words.quotient(kPlaneThreads);
  const TensorView& x = as_conv.y;
  const int64_t C = x.size[1], channel = int64_t{blockIdx.y * words + word} * kN;
  const bool taken = lane < lanes && channel < C;
  const int count = clamped_count(as_conv.active.count, static_cast<int>(as_conv.active.capacity));
  const int64_t entries = plan.list.tiles(count, 1), each = (entries + plan.parts - 1) / plan.parts;
  const int64_t begin = each * blockIdx.x, end = min(begin + each, entries);
  float about[kN] = {}, sum[kN] = {}, square[kN] = {}, pixels = 0.f;
  constexpr int kBatch = 4;
  for (int64_t first = begin + lane; taken && first < end; first += kBatch * lanes) {
    Word<T, kN> loaded[kBatch];
    bool in[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t entry = first + k * lanes;
      const portable::Pixel pixel = portable::locate_pixel(as_conv, plan.list, entry < end ? entry : first, count);
      in[k] = entry < end && pixel.n >= 0;
      if (in[k]) loaded[k] = *word_at<T, kN>(x, PlanePixel{pixel.n, pixel.row, pixel.column, true}, channel);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!in[k]) continue;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const float v = to_float(loaded[k].channel[e]);
        if (pixels == 0.f) about[e] = v;
        sum[e] += v - about[e];
        square[e] += (v - about[e]) * (v - about[e]);
      }
      pixels += 1.f;
    }
  }
  const float some = fmaxf(pixels, 1.f);
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    shared[(2 * e) * kPlaneThreads + threadIdx.x] = about[e] + sum[e] / some;
    shared[(2 * e + 1) * kPlaneThreads + threadIdx.x] = fmaxf(square[e] - sum[e] * (sum[e] / some), 0.f);
  }
  shared[2 * kN * kPlaneThreads + threadIdx.x] = pixels;
  __syncthreads();
  for (uint32_t k = threadIdx.x; k < words * kN; k += kPlaneThreads) {
    const uint32_t of_word = k % words, e = k / words;
    const int64_t c = int64_t{blockIdx.y * words + of_word} * kN + e;
    if (c >= C) continue;
    float all = 0.f;
    double total = 0;
    for (uint32_t l = 0; l < lanes; ++l) {
      const uint32_t at = l * words + of_word;
      const float n = shared[2 * kN * kPlaneThreads + at];
      all += n;
      total += n * (shared[(2 * e) * kPlaneThreads + at] - shared[(2 * e) * kPlaneThreads + of_word]);
    }
    const float mean = shared[(2 * e) * kPlaneThreads + of_word] + static_cast<float>(total / fmaxf(all, 1.f));
    double spread = 0;
    for (uint32_t l = 0; l < lanes; ++l) {
      const uint32_t at = l * words + of_word;
      const float apart = shared[(2 * e) * kPlaneThreads + at] - mean, n = shared[2 * kN * kPlaneThreads + at];
      if (n > 0.f) spread += shared[(2 * e + 1) * kPlaneThreads + at] + n * apart * apart;
    }
    values[2 * int64_t{blockIdx.x} * C + c] = mean;
    values[(2 * int64_t{blockIdx.x} + 1) * C + c] = static_cast<float>(spread);
    if (c == 0) counts[blockIdx.x] = all;
  }
}

// How a launch over parts of the list is cut. `sums`: that a thread has a channel.
template <int kN>
Status plan_sums(const char* op, const TensorView& x, const ActiveView& active, const DeviceInfo& device,
                 Conv2dParams* as_conv, SumPlan* plan, dim3* ctas) {
  *as_conv = {};  // whose pixel list it is
  as_conv->y = x, as_conv->active = active;
  const int64_t words = x.size[1] / kN;
  const int64_t together = x.stride[1] <= x.stride[3] ? std::min<int64_t>(words, 32) : 1;
  const int64_t columns = (words + together - 1) / together;
  SBNET_CHECK(columns < 65536, "%s: x: expected fewer than 65536 channels, got %lld", op,
              static_cast<long long>(x.size[1]));
  *plan = {portable::PixelList(*as_conv), FastDiv(together), static_cast<int32_t>(words), 1};
  const int64_t lanes = kPlaneThreads / together, entries = plan->list.tiles(active.capacity, 1);
  const int64_t wanted = std::min<int64_t>((entries + lanes * 8 - 1) / (lanes * 8), 4 * device.sm_count / columns + 1);
  plan->parts = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, kMostNormParts));
  *ctas = dim3(static_cast<unsigned>(plan->parts), static_cast<unsigned>(columns));
  return ok_status();
}

}  // namespace
}  // namespace sbnet
