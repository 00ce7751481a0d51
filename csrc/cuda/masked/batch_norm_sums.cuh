// What batch normalisation sums over parts of the list: a CTA takes a part and some words of channels. Who reads the
// sums merges what the parts found of its channels itself, in order: that costs less than a launch.
#pragma once
#include <algorithm>

#include "core/masked/batch_norm.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/masked/pixels.cuh"

namespace sbnet {
namespace {

struct SumPlan {
  portable::PixelList list;
  FastDiv words;  // of a pixel that a CTA takes together
  int32_t all_words, parts;
  bool alike;  // have all tensors x's strides? A pixel's place is the same in all then.
};

inline bool alike(const TensorView& a, const TensorView& b) {
  return !b.data || std::equal(a.stride, a.stride + 4, b.stride);
}

constexpr int kSumThreads = 256;

// A thread's place in its CTA: one of the CTA's words of channels, and every so manieth pixel of its part.
struct SumThread {
  uint32_t lane, lanes, words;
  int word;         // of the CTA's
  int64_t channel;  // the word's first
  bool taken;

  template <int kN>
  __device__ __forceinline__ static SumThread of(const SumPlan& plan, int64_t channels) {
    SumThread t;
    uint32_t word;
    plan.words.divmod(threadIdx.x, &t.lane, &word);
    t.words = plan.words.divisor, t.lanes = plan.words.quotient(kSumThreads), t.word = static_cast<int>(word);
    t.channel = int64_t{blockIdx.y * t.words + word} * kN;
    t.taken = t.lane < t.lanes && t.channel < channels;
    return t;
  }
};

// Tables of numbers by channel of the CTA in shared memory, read where they are used: registers that held them would be
// room for other CTAs. Of a word of eight channels the first four lie apart from the last, so that the words of a
// warp's threads are free of bank conflicts.
template <int kN>
struct Table {
  static constexpr int kTogether = kN % 4 == 0 ? 4 : 1;  // read as one
  static constexpr int kReads = kN / kTogether;
  float* const numbers;
  const int channels;

  __device__ __forceinline__ float& at(int row, int channel) const {
    const int word = channel / kN, e = channel % kN;
    return numbers[row * channels + e / kTogether * (channels / kReads) + word * kTogether + e % kTogether];
  }
  // Of the thread's word, those from read * kTogether on.
  __device__ __forceinline__ void read(int row, int read, const SumThread& thread, float (&to)[kTogether]) const {
    const float* const from = &at(row, thread.word * kN + read * kTogether);
    if constexpr (kTogether == 4) {
      const float4 all = *reinterpret_cast<const float4*>(from);
      to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
    } else {
      to[0] = *from;
    }
  }
};

// Pixels of the list, as many as a CTA has threads, each found by one of them: that takes longer than what is done with
// a word of channels. Two tables, one of which is written while the other is read.
struct PixelTables {
  int64_t offset[2][kSumThreads];  // of the first channel in x; < 0: no pixel
  portable::Pixel at[2][kSumThreads];
};
__device__ __forceinline__ PixelTables& pixel_tables() {
  __shared__ PixelTables tables;
  return tables;
}
struct Place {
  int64_t offset;
  int slot;  // in the tables
  __device__ __forceinline__ bool in() const { return offset >= 0; }
};

template <class T, int kN>
__device__ __forceinline__ Word<T, kN>* word_at(const TensorView& t, const SumPlan& plan, const Place& place,
                                                int64_t channel) {
  int64_t pixel = place.offset;
  if (!plan.alike) {
    const portable::Pixel& at = pixel_tables().at[0][place.slot];
    pixel = at.n * t.stride[0] + at.row * t.stride[2] + at.column * t.stride[3];
  }
  return reinterpret_cast<Word<T, kN>*>(static_cast<T*>(t.data) + pixel + (kN > 1 ? channel : channel * t.stride[1]));
}

// The list as it is: its pixels, and in how many parts they are summed: no more than are worth a part.
struct SumList {
  int count, parts;
  int64_t entries;
  __device__ __forceinline__ SumList(const Conv2dParams& as_conv, const SumPlan& plan) {
    constexpr int64_t kPixels = 8;  // of each thread
    count = clamped_count(as_conv.active.count, static_cast<int>(as_conv.active.capacity));
    entries = plan.list.tiles(count, 1);
    const int64_t lanes = plan.words.quotient(kSumThreads),
                  wanted = (entries + lanes * kPixels - 1) / (lanes * kPixels);
    parts = static_cast<int>(max(min(wanted, int64_t{plan.parts}), int64_t{1}));
  }
};

// Of so many CTAs that go over the list once more, those that have some pixels of each thread to take.
__device__ __forceinline__ int takers_in_use(const SumPlan& plan, const SumList& list) {
  constexpr int64_t kPixels = 2;
  const int64_t pixels = plan.words.quotient(kSumThreads) * kPixels;
  return static_cast<int>(max(min((list.entries + pixels - 1) / pixels, int64_t{gridDim.x}), int64_t{1}));
}

// use(places, load(place) of each) for the thread's pixels of part blockIdx.x of `parts`, kBatch of them at a time:
// their loads are under way together. What is loaded of no pixel is zeros. For all threads of the CTA.
template <int kBatch, class Load, class Use>
__device__ __forceinline__ void for_part(const Conv2dParams& as_conv, const SumPlan& plan, const SumThread& thread,
                                         const SumList& list, int parts, const Load& load, const Use& use) {
  const TensorView& x = as_conv.y;
  PixelTables& tables = pixel_tables();
  const int64_t entries = list.entries, each = (entries + parts - 1) / parts;
  const int64_t begin = each * blockIdx.x, end = min(begin + each, entries);
  int table = 0;
  for (int64_t first = begin; first < end; first += kSumThreads, table ^= 1) {
    const int pixels = static_cast<int>(min(end - first, int64_t{kSumThreads}));
    if (static_cast<int>(threadIdx.x) < pixels) {
      const portable::Pixel at = portable::locate_pixel(as_conv, plan.list, first + threadIdx.x, list.count);
      tables.at[table][threadIdx.x] = at;
      tables.offset[table][threadIdx.x] =
          at.n < 0 ? -1 : at.n * x.stride[0] + at.row * x.stride[2] + at.column * x.stride[3];
    }
    __syncthreads();  // all have left the other table, which is written next
    if (!thread.taken) continue;
    for (int pixel = static_cast<int>(thread.lane); pixel < pixels; pixel += kBatch * static_cast<int>(thread.lanes)) {
      Place places[kBatch];
      decltype(load(places[0])) loaded[kBatch] = {};
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int own = pixel + k * static_cast<int>(thread.lanes);
        places[k] = {own < pixels ? tables.offset[table][own] : -1, table * kSumThreads + own};
        if (places[k].in()) loaded[k] = load(places[k]);
      }
      use(places, loaded);
    }
  }
}

// Merges what parts found of `channels` neighbouring channels: threads share a channel and take every so manieth part
// of it. read(part, channel, sums) adds a part's. The threads below `channels` get the sums of theirs.
template <int kNumbers, class Read>
__device__ __forceinline__ void merge_parts(int channels, int parts, double (&sums)[kNumbers], const Read& read) {
  __shared__ double found[kNumbers][kSumThreads];
  const int channel = threadIdx.x % channels, sharer = threadIdx.x / channels, sharers = kSumThreads / channels;
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) sums[n] = 0;
  if (sharer < sharers)
#pragma unroll 8
    for (int part = sharer; part < parts; part += sharers) read(part, channel, sums);
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) found[n][threadIdx.x] = sums[n];
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < channels)
    for (int k = 1; k < sharers; ++k)
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) sums[n] += found[n][k * channels + channel];
}

// Mean, and sum of squared distances from it, of each channel of a part. A thread sums about its own first pixel: one
// of the numbers themselves, so that their spread bounds what cancels. Threads' are merged as Chan, Golub and LeVeque
// have it (1979), in double: a thread's mean is no float, but how far it lies from its first pixel is.
template <class T, int kN>
__global__ void __launch_bounds__(kSumThreads, 3)
    moments_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ SumPlan plan, float* values,
                   float* counts) {
  extern __shared__ __align__(16) float shared[];  // [3 * kN][kSumThreads], then counts [kSumThreads]
  grid_dependency_wait();
  grid_dependency_release();
  const TensorView& x = as_conv.y;
  const int64_t C = x.size[1];
  const SumThread thread = SumThread::of<kN>(plan, C);
  const SumList list(as_conv, plan);
  if (static_cast<int>(blockIdx.x) >= list.parts) return;
  const uint32_t words = thread.words, lanes = thread.lanes;
  float about[kN] = {}, sum[kN] = {}, square[kN] = {}, pixels = 0.f;
  for_part<4>(
      as_conv, plan, thread, list, list.parts,
      [&](const Place& place) { return *word_at<T, kN>(x, plan, place, thread.channel); },
      [&](const Place(&places)[4], const Word<T, kN>(&loaded)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (!places[k].in()) continue;
#pragma unroll
          for (int e = 0; e < kN; ++e) {
            const float v = to_float(loaded[k].channel[e]);
            if (pixels == 0.f) about[e] = v;
            sum[e] += v - about[e];
            square[e] += (v - about[e]) * (v - about[e]);
          }
          pixels += 1.f;
        }
      });
  const float some = fmaxf(pixels, 1.f);
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const float apart = sum[e] / some;
    shared[(3 * e) * kSumThreads + threadIdx.x] = about[e];
    shared[(3 * e + 1) * kSumThreads + threadIdx.x] = apart;
    shared[(3 * e + 2) * kSumThreads + threadIdx.x] = fmaxf(square[e] - sum[e] * apart, 0.f);
  }
  const float* const found_pixels = shared + 3 * kN * kSumThreads;
  shared[3 * kN * kSumThreads + threadIdx.x] = pixels;
  __syncthreads();
  for (uint32_t k = threadIdx.x; k < words * kN; k += kSumThreads) {
    const uint32_t of_word = k % words, e = k / words;
    const int64_t c = int64_t{blockIdx.y * words + of_word} * kN + e;
    if (c >= C) continue;
    const float* const own = shared + 3 * e * kSumThreads;
    const auto mean_of = [&](uint32_t at) { return static_cast<double>(own[at]) + own[kSumThreads + at]; };
    float all = 0.f;
    double total = 0;
    for (uint32_t l = 0; l < lanes; ++l) {
      const uint32_t at = l * words + of_word;
      all += found_pixels[at];
      total += found_pixels[at] * mean_of(at);
    }
    const double mean = total / fmaxf(all, 1.f);
    double spread = 0;
    for (uint32_t l = 0; l < lanes; ++l) {
      const uint32_t at = l * words + of_word;
      const double apart = mean_of(at) - mean;
      const float n = found_pixels[at];
      if (n > 0.f) spread += own[2 * kSumThreads + at] + n * (apart * apart);
    }
    values[2 * int64_t{blockIdx.x} * C + c] = static_cast<float>(mean);
    values[(2 * int64_t{blockIdx.x} + 1) * C + c] = static_cast<float>(spread);
    if (c == 0) counts[blockIdx.x] = all;
  }
}

// How a launch over parts of the list is cut: `ctas` sum, `takers` go over the list once more.
template <int kN>
Status plan_sums(const char* op, const TensorView& x, const ActiveView& active, const DeviceInfo& device,
                 Conv2dParams* as_conv, SumPlan* plan, dim3* ctas, dim3* takers) {
  *as_conv = {};  // whose pixel list it is
  as_conv->y = x, as_conv->active = active;
  const int64_t words = x.size[1] / kN;
  // 64 channels, or 32 where a word is one number: few channels a CTA are few to merge.
  const int64_t most = kN == 1 ? 32 : 64 / kN;
  const int64_t together = x.stride[1] <= x.stride[3] ? std::min(words, most) : 1;
  const int64_t columns = (words + together - 1) / together;
  SBNET_CHECK(columns < 65536, "%s: x: expected fewer than 65536 channels, got %lld", op,
              static_cast<long long>(x.size[1]));
  *plan = {portable::PixelList(*as_conv), FastDiv(together), static_cast<int32_t>(words), 1, false};
  const int64_t lanes = kSumThreads / together, entries = plan->list.tiles(active.capacity, 1);
  const auto parts = [&](int64_t pixels, int64_t per_sm, int64_t limit) {
    const int64_t wanted =
        std::min<int64_t>((entries + lanes * pixels - 1) / (lanes * pixels), per_sm * device.sm_count / columns + 1);
    return std::clamp<int64_t>(wanted, 1, limit);
  };
  plan->parts = static_cast<int32_t>(parts(8, 4, kMostNormParts));
  *ctas = dim3(static_cast<unsigned>(plan->parts), static_cast<unsigned>(columns));
  *takers = dim3(static_cast<unsigned>(parts(2, 5, INT32_MAX / 2)), static_cast<unsigned>(columns));
  return ok_status();
}

}  // namespace
}  // namespace sbnet
