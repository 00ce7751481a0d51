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

constexpr int kSumThreads = 384;
// Of a CTA: few channels are few to merge. Two CTAs fill a multiprocessor, and a launch is one wave of them at most.
constexpr int kSumChannels = 32;
constexpr int kSumCtas = 2;
constexpr int64_t kLeastPixels = 2;  // of each thread of a part

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

// The list as it is: its pixels, and in how many parts they are taken: no more than are worth a part.
struct SumList {
  int count, parts;
  int64_t begin, end;  // of the CTA's part
  __device__ __forceinline__ SumList(const Conv2dParams& as_conv, const SumPlan& plan) {
    count = clamped_count(as_conv.active.count, static_cast<int>(as_conv.active.capacity));
    const int64_t entries = plan.list.tiles(count, 1), least = plan.words.quotient(kSumThreads) * kLeastPixels;
    // A division of 64 bits takes longer than a CTA's first pixels.
    const auto share = [&](int64_t all, int64_t of) {
      return plan.list.wide ? (all + of - 1) / of
                            : int64_t{(static_cast<uint32_t>(all + of) - 1) / static_cast<uint32_t>(of)};
    };
    parts = static_cast<int>(max(min(share(entries, least), int64_t{plan.parts}), int64_t{1}));
    const int64_t each = share(entries, parts);
    begin = each * blockIdx.x, end = min(begin + each, entries);
  }
};

// Fills a table with the pixels from entry `first` on, a thread one of them.
__device__ __forceinline__ void find_pixels(const Conv2dParams& as_conv, const SumPlan& plan, const SumList& list,
                                            int64_t first, int table) {
  const int64_t entry = first + threadIdx.x;
  if (entry >= list.end) return;
  const TensorView& x = as_conv.y;
  PixelTables& tables = pixel_tables();
  const portable::Pixel at = portable::locate_pixel(as_conv, plan.list, entry, list.count);
  tables.at[table][threadIdx.x] = at;
  tables.offset[table][threadIdx.x] =
      at.n < 0 ? -1 : at.n * x.stride[0] + at.row * x.stride[2] + at.column * x.stride[3];
}

// use(places, load(place) of each) for the thread's pixels of the CTA's part, kBatch of them at a time: their loads are
// under way together. What is loaded of no pixel is zeros. For all threads of the CTA, which have called
// find_pixels(..., list.begin, 0).
template <int kBatch, class Load, class Use>
__device__ __forceinline__ void for_part(const Conv2dParams& as_conv, const SumPlan& plan, const SumThread& thread,
                                         const SumList& list, const Load& load, const Use& use) {
  const PixelTables& tables = pixel_tables();
  const int64_t begin = list.begin, end = list.end;
  int table = 0;
  for (int64_t first = begin; first < end; first += kSumThreads, table ^= 1) {
    if (first > begin) find_pixels(as_conv, plan, list, first, table);
    const int pixels = static_cast<int>(min(end - first, int64_t{kSumThreads}));
    __syncthreads();  // all have left the other table, which is written next
    if (!thread.taken) continue;
    for (int pixel = static_cast<int>(thread.lane); pixel < pixels; pixel += kBatch * static_cast<int>(thread.lanes)) {
      Place places[kBatch];
      decltype(load(places[0])) loaded[kBatch] = {};
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int own = pixel + k * static_cast<int>(thread.lanes);
        places[k] = {own < pixels ? tables.offset[table][own] : -1, table * kSumThreads + own};
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        if (places[k].in()) loaded[k] = load(places[k]);
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
#pragma unroll 4
    for (int part = sharer; part < parts; part += sharers) read(part, channel, sums);
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) found[n][threadIdx.x] = sums[n];
  __syncthreads();
  const int filled = min(sharers, parts);
  if (static_cast<int>(threadIdx.x) < channels)
#pragma unroll 4
    for (int k = 1; k < filled; ++k)
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) sums[n] += found[n][k * channels + channel];
}

// Adds what the CTA's threads found of each of its channels. For kRound channels of a word at a time, put(e, found)
// writes a thread's numbers, read(e, thread, sums) adds those of a thread, take(channel, sums) gets a channel's, in one
// thread. Neighbouring threads share a channel, each adds every so manieth, then they add in pairs: in fixed order.
template <int kN, int kNumbers, class Put, class Read, class Take>
__device__ __forceinline__ void merge_threads(const SumPlan& plan, const SumThread& thread, int64_t C, const Put& put,
                                              const Read& read, const Take& take) {
  constexpr int kRound = kN < 4 ? kN : 4;
  const int channels = static_cast<int>(thread.words) * kRound;
  const int sharers = min(32, 1 << (31 - __clz(kSumThreads / channels)));
  const int own = static_cast<int>(threadIdx.x) / sharers, sharer = static_cast<int>(threadIdx.x) % sharers;
  uint32_t e, word;
  plan.words.divmod(static_cast<uint32_t>(own), &e, &word);
#pragma unroll
  for (int first = 0; first < kN; first += kRound) {
    if (first) __syncthreads();
#pragma unroll
    for (int i = 0; i < kRound; ++i) put(i, first + i);
    __syncthreads();
    double sums[kNumbers] = {};
    if (own < channels)
      for (uint32_t lane = sharer; lane < thread.lanes; lane += sharers)
        read(static_cast<int>(e), static_cast<int>(lane * thread.words + word), sums);
    for (int apart = 1; apart < sharers; apart *= 2)
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], apart);
    const int64_t c = int64_t{blockIdx.y * thread.words + word} * kN + first + e;
    if (sharer == 0 && own < channels && c < C) take(c, sums);
  }
}

// Mean, and sum of squared distances from it, of each channel of a part. A thread sums about its own first pixel: one
// of the numbers themselves, so that their spread bounds what cancels. Threads' are merged as Chan, Golub and LeVeque
// have it (1979), in double: a thread's mean is no float, but how far it lies from its first pixel is.
template <class T, int kN>
__global__ void __launch_bounds__(kSumThreads, kSumCtas)
    moments_kernel(const __grid_constant__ Conv2dParams as_conv, const __grid_constant__ SumPlan plan, float* values,
                   float* counts) {
  constexpr int kRound = kN < 4 ? kN : 4;
  __shared__ float found[3 * kRound][kSumThreads], found_pixels[kSumThreads];
  grid_dependency_wait();
  grid_dependency_release();
  const TensorView& x = as_conv.y;
  const int64_t C = x.size[1];
  const SumThread thread = SumThread::of<kN>(plan, C);
  const SumList list(as_conv, plan);
  if (static_cast<int>(blockIdx.x) >= list.parts) return;
  find_pixels(as_conv, plan, list, list.begin, 0);
  float about[kN] = {}, sum[kN] = {}, square[kN] = {}, pixels = 0.f;
  for_part<4>(
      as_conv, plan, thread, list, [&](const Place& place) { return *word_at<T, kN>(x, plan, place, thread.channel); },
      [&](const Place(&places)[4], const Word<T, kN>(&loaded)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (!places[k].in()) continue;
#pragma unroll
          for (int e = 0; e < kN; ++e) {
            const float v = to_float(loaded[k].channel[e]);
            if (pixels == 0.f) about[e] = v;
            const float apart = v - about[e];
            sum[e] += apart;
            square[e] += apart * apart;
          }
          pixels += 1.f;
        }
      });
  found_pixels[threadIdx.x] = pixels;
  const float share = 1.f / fmaxf(pixels, 1.f);
  merge_threads<kN, 3>(
      plan, thread, C,
      [&](int i, int e) {
        const float apart = sum[e] * share;
        found[3 * i][threadIdx.x] = about[e];
        found[3 * i + 1][threadIdx.x] = apart;
        found[3 * i + 2][threadIdx.x] = fmaxf(square[e] - sum[e] * apart, 0.f);
      },
      [&](int i, int at, double (&to)[3]) {
        const double n = found_pixels[at], mean = static_cast<double>(found[3 * i][at]) + found[3 * i + 1][at];
        to[0] += n;
        to[1] += n * mean;
        to[2] += found[3 * i + 2][at] + n * mean * mean;
      },
      [&](int64_t c, const double (&all)[3]) {
        const double mean = all[1] / fmax(all[0], 1.), spread = all[2] - all[1] * mean;
        values[2 * int64_t{blockIdx.x} * C + c] = static_cast<float>(mean);
        values[(2 * int64_t{blockIdx.x} + 1) * C + c] = static_cast<float>(spread > 0 || spread != spread ? spread : 0);
        if (c == 0) counts[blockIdx.x] = static_cast<float>(all[0]);
      });
}

// How a launch over parts of the list is cut.
template <int kN>
Status plan_sums(const char* op, const TensorView& x, const ActiveView& active, const DeviceInfo& device,
                 Conv2dParams* as_conv, SumPlan* plan, dim3* ctas) {
  *as_conv = {};  // whose pixel list it is
  as_conv->y = x, as_conv->active = active;
  const int64_t words = x.size[1] / kN;
  const int64_t together = x.stride[1] <= x.stride[3] ? std::min<int64_t>(words, kSumChannels / kN) : 1;
  const int64_t columns = (words + together - 1) / together;
  SBNET_CHECK(columns < 65536, "%s: x: expected fewer than 65536 channels, got %lld", op,
              static_cast<long long>(x.size[1]));
  *plan = {portable::PixelList(*as_conv), FastDiv(together), static_cast<int32_t>(words), 1, false};
  const int64_t least = kSumThreads / together * kLeastPixels, entries = plan->list.tiles(active.capacity, 1);
  const int64_t wanted = std::min((entries + least - 1) / least, int64_t{kSumCtas} * device.sm_count / columns);
  plan->parts = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, kMostNormParts));
  *ctas = dim3(static_cast<unsigned>(plan->parts), static_cast<unsigned>(columns));
  return ok_status();
}

}  // namespace
}  // namespace sbnet
