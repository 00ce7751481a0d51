// How batch normalisation goes over the active pixels twice in one launch: sums, a barrier of the grid, results. CTAs,
// one a multiprocessor and all of them resident, share the list and the channels. What the first pass reads goes
// through a ring in shared memory; the second one goes backwards, so that what the ring holds is not read again.
#pragma once
#include <algorithm>

#include "core/masked/batch_norm.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/masked/pixels.cuh"
#include "cuda/mma.cuh"

namespace sbnet {
namespace {

constexpr int kNormThreads = 512;  // half as many where shared memory is small
constexpr int kMostWords = 8;      // of a pixel, that a CTA takes: 128 bytes
constexpr int kNormBatch = 2;      // steps whose words are copied together
constexpr int kMostAhead = 2;      // batches under way while one is used
constexpr int kLeastSteps = 2;     // of a part
constexpr int kMostNormSums = 3;   // numbers a channel that are added up together

struct NormPlan {
  portable::PixelList list;
  FastDiv height, width;
  int32_t columns, parts;  // of the channels, a CTA's words each; of the list, at most
  int32_t log2_words;      // of a column
  FastDiv ring, thirds;    // batches in shared memory: of the ring, of the third tensor
  int32_t ahead;           // batches under way
  bool even;               // does a pixel lie at its number times a stride, in every tensor?

  __host__ __device__ int channels(int lanes) const { return lanes << log2_words; }
};

inline bool even(const TensorView& t) {
  return !t.data || (t.stride[2] == t.size[3] * t.stride[3] && t.stride[0] == t.size[2] * t.stride[2]);
}

// A thread takes one word of channels, and one of the pixels that its warp takes in a step.
struct NormThread {
  int warp, warps, lane, word, pixel, pixels;

  __device__ __forceinline__ explicit NormThread(const NormPlan& plan)
      : warp(static_cast<int>(threadIdx.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        word(lane & ((1 << plan.log2_words) - 1)),
        pixel(lane >> plan.log2_words),
        pixels(32 >> plan.log2_words) {}
};

// The list as it is, and the CTA's part of it.
struct NormPart {
  int count, parts, batches;
  int64_t begin, end;

  __device__ __forceinline__ NormPart(const Conv2dParams& as_conv, const NormPlan& plan, const NormThread& thread) {
    count = clamped_count(as_conv.active.count, static_cast<int>(as_conv.active.capacity));
    const int64_t entries = plan.list.tiles(count, 1);
    const int step = thread.warps * thread.pixels;
    // A division of 64 bits takes longer than a CTA's first pixels.
    const auto share = [&](int64_t all, int of) {
      return plan.list.wide ? (all + of - 1) / of
                            : int64_t{(static_cast<uint32_t>(all) + of - 1) / static_cast<uint32_t>(of)};
    };
    parts = static_cast<int>(max(min(share(entries, kLeastSteps * step), int64_t{plan.parts}), int64_t{1}));
    const int64_t each = share(entries, parts);
    begin = min(each * blockIdx.x, entries), end = min(begin + each, entries);
    batches = static_cast<int>(share(end - begin, kNormBatch * step));
  }
};

// Shared memory: room for sums; the ring, kTensors words of each thread and step of a batch, and the pixels that they
// are of; batches of a third tensor. A thread reads what it has copied itself, pixels apart.
template <class T, int kN, int kTensors>
struct NormMemory {
  using Item = Word<T, kN>;
  double* sums;
  Item *ring, *thirds;
  int32_t* pixels;

  __device__ __forceinline__ NormMemory(unsigned char* memory, const NormPlan& plan, bool third) {
    const int threads = static_cast<int>(blockDim.x);
    sums = reinterpret_cast<double*>(memory);
    ring = reinterpret_cast<Item*>(memory + sum_bytes(threads, plan.log2_words));
    thirds = ring + static_cast<int>(plan.ring.divisor) * kNormBatch * kTensors * threads;
    pixels =
        reinterpret_cast<int32_t*>(thirds + (third ? static_cast<int>(plan.thirds.divisor) : 0) * kNormBatch * threads);
  }
  __device__ __forceinline__ Item& word(int slot, int step, int tensor) const {
    return ring[((slot * kNormBatch + step) * kTensors + tensor) * static_cast<int>(blockDim.x) +
                static_cast<int>(threadIdx.x)];
  }
  __device__ __forceinline__ Item& third(int slot, int step) const {
    return thirds[(slot * kNormBatch + step) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)];
  }
  // The pixels of the warp's steps of a batch; -1: none.
  __device__ __forceinline__ int32_t* row(const NormThread& thread, int slot) const {
    return pixels + (slot * thread.warps + thread.warp) * kNormBatch * thread.pixels;
  }

  __host__ __device__ static int64_t sum_bytes(int threads, int log2_words) {
    return int64_t{threads / 32} * kMostNormSums * (kN << log2_words) * 8;
  }
  static int64_t bytes(int threads, int log2_words, int64_t batches, int64_t third_batches) {
    const int64_t word = sizeof(Item), pixels = (threads >> log2_words) * 4;
    return sum_bytes(threads, log2_words) +
           kNormBatch * (batches * (threads * kTensors * word + pixels) + third_batches * threads * word);
  }
};

// Copies a word, past the registers where it has 4 bytes or 16.
template <class T, int kN>
__device__ __forceinline__ void copy_word(Word<T, kN>* to, const Word<T, kN>* from) {
  if constexpr (sizeof(Word<T, kN>) == 16)
    cp_async_16_whole(shared_address(to), from);
  else if constexpr (sizeof(Word<T, kN>) == 4)
    cp_async_4(shared_address(to), from, true);
  else
    *to = *from;
}

template <class T, int kN>
__device__ __forceinline__ Word<T, kN>* word_at(const TensorView& t, const NormPlan& plan, int pixel, int channel) {
  int64_t offset = pixel * t.stride[3];
  if (!plan.even) {
    uint32_t n, row, column;
    plan.width.divmod(static_cast<uint32_t>(pixel), &row, &column);
    plan.height.divmod(row, &n, &row);
    offset = n * t.stride[0] + row * t.stride[2] + column * t.stride[3];
  }
  return reinterpret_cast<Word<T, kN>*>(static_cast<T*>(t.data) + offset +
                                        (kN > 1 ? int64_t{channel} : channel * t.stride[1]));
}

__device__ __forceinline__ void find_pixels(const Conv2dParams& as_conv, const NormPlan& plan, const NormThread& thread,
                                            const NormPart& part, int batch, int32_t* row) {
  __syncwarp();  // all have read what the row held
  for (int i = thread.lane; i < kNormBatch * thread.pixels; i += 32) {
    const int step = batch * kNormBatch + (i >> (5 - plan.log2_words)), pixel = i & (thread.pixels - 1);
    const int64_t entry = part.begin + (int64_t{step} * thread.warps + thread.warp) * thread.pixels + pixel;
    int32_t found = -1;
    if (entry < part.end) {
      const portable::Pixel at = portable::locate_pixel(as_conv, plan.list, entry, part.count);
      const TensorView& x = as_conv.y;
      if (at.n >= 0) found = static_cast<int32_t>((at.n * x.size[2] + at.row) * x.size[3] + at.column);
    }
    row[i] = found;
  }
  __syncwarp();
}

// One pass over the thread's words, kBack: from the last batch to the first, after one that went forwards. third(held):
// is a batch's third tensor wanted? copy(slot, step, pixel) and copy_third(slot, step, pixel) start copies;
// use(held, slot, third slot, step, pixel) takes them.
template <bool kBack, class Memory, class Third, class Copy, class CopyThird, class Use>
__device__ __forceinline__ void pass(const Conv2dParams& as_conv, const NormPlan& plan, const NormThread& thread,
                                     const NormPart& part, const Memory& memory, bool taken, const Third& third,
                                     const Copy& copy, const CopyThird& copy_third, const Use& use) {
  struct Batch {
    int slot, third;
    bool held;  // in the ring
  };
  const auto find = [&](int number, int* batch) -> Batch {
    *batch = kBack ? part.batches - 1 - number : number;
    uint32_t round, slot, third_slot;
    plan.ring.divmod(static_cast<uint32_t>(*batch), &round, &slot);
    plan.thirds.divmod(static_cast<uint32_t>(*batch), &round, &third_slot);
    return {static_cast<int>(slot), static_cast<int>(third_slot),
            *batch + static_cast<int>(plan.ring.divisor) >= part.batches};
  };
  const auto start = [&](int number) {
    if (number < part.batches) {
      int batch;
      const Batch at = find(number, &batch);
      int32_t* const row = memory.row(thread, at.slot);
      const bool again = !kBack || !at.held, more = third(at.held);
      if (again) find_pixels(as_conv, plan, thread, part, batch, row);
      if (again || more)
#pragma unroll
        for (int step = 0; step < kNormBatch; ++step) {
          const int pixel = row[step * thread.pixels + thread.pixel];
          if (pixel < 0 || !taken) continue;
          if (again) copy(at.slot, step, pixel);
          if (more) copy_third(at.third, step, pixel);
        }
    }
    cp_async_commit();
  };
  for (int number = 0; number < plan.ahead; ++number) start(number);
  for (int number = 0; number < part.batches; ++number) {
    start(number + plan.ahead);
    if (plan.ahead == kMostAhead)
      cp_async_wait<kMostAhead>();
    else
      cp_async_wait<1>();
    int batch;
    const Batch at = find(number, &batch);
    const int32_t* const row = memory.row(thread, at.slot);
#pragma unroll
    for (int step = 0; step < kNormBatch; ++step) {
      const int pixel = row[step * thread.pixels + thread.pixel];
      if (pixel >= 0 && taken) use(at.held, at.slot, at.third, step, pixel);
    }
  }
}

// Adds up what the warps left in shared memory, by channel: the threads below `channels` get the sums of theirs.
template <int kNumbers>
__device__ __forceinline__ void add_warps(const NormThread& thread, int channels, const double* shared,
                                          double (&sums)[kNumbers]) {
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x);
  if (channel >= channels) return;
#pragma unroll
  for (int k = 0; k < kNumbers; ++k) {
    sums[k] = 0;
#pragma unroll 8
    for (int warp = 0; warp < thread.warps; ++warp) sums[k] += shared[(warp * kNumbers + k) * channels + channel];
  }
}

// Sums over the CTA's threads, in a fixed order: number(e, k) is a thread's number k of channel e of its word.
template <int kN, int kNumbers, class Number>
__device__ __forceinline__ void add_threads(const NormThread& thread, int channels, double* shared,
                                            const Number& number, double (&sums)[kNumbers]) {
#pragma unroll
  for (int e = 0; e < kN; ++e)
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) {
      double own = number(e, k);
      for (int apart = 32 / thread.pixels; apart < 32; apart *= 2) own += __shfl_xor_sync(0xffffffffu, own, apart);
      if (thread.pixel == 0) shared[(thread.warp * kNumbers + k) * channels + thread.word * kN + e] = own;
    }
  add_warps(thread, channels, shared, sums);
}

// Sums over what the parts left in device memory: add(part, channel, to) adds what one has of a channel.
template <int kNumbers, class Add>
__device__ __forceinline__ void add_parts(const NormThread& thread, int channels, int parts, double* shared,
                                          const Add& add, double (&sums)[kNumbers]) {
  for (int channel = thread.lane; channel < channels; channel += 32) {
    double own[kNumbers] = {};
#pragma unroll 4
    for (int part = thread.warp; part < parts; part += thread.warps) add(part, channel, own);
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) shared[(thread.warp * kNumbers + k) * channels + channel] = own[k];
  }
  add_warps(thread, channels, shared, sums);
}

// A row of numbers by channel: those of the thread's word.
template <int kN>
__device__ __forceinline__ void read_row(const float* row, const NormThread& thread, float (&to)[kN]) {
#pragma unroll
  for (int e = 0; e < kN; ++e) to[e] = row[thread.word * kN + e];
}

struct NormLaunch {
  Conv2dParams as_conv;  // whose pixel list it is
  NormPlan plan;
  dim3 ctas;
  int threads, bytes, most_bytes;
};

// How a launch is cut. third: is there a third tensor?
template <class T, int kN, int kTensors>
Status plan_norm(const char* op, const TensorView& x, const ActiveView& active, bool third, const DeviceInfo& device,
                 NormLaunch* launch) {
  const int64_t pixels = x.size[0] * x.size[2] * x.size[3];
  SBNET_CHECK(pixels <= INT32_MAX, "%s: x: expected fewer than 2^31 pixels, got %lld", op,
              static_cast<long long>(pixels));
  int& most = launch->most_bytes;
  SBNET_CUDA_TRY(op, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index));
  most -= 2048;  // of variables
  launch->as_conv = {};
  launch->as_conv.y = x, launch->as_conv.active = active;
  NormPlan& plan = launch->plan;
  plan = {};
  plan.list = portable::PixelList(launch->as_conv);
  plan.height = FastDiv(x.size[2]), plan.width = FastDiv(x.size[3]);
  // Fewer words where a quarter of them would be of no channel.
  const int64_t words = x.size[1] / kN;
  const auto columns = [&] { return ((words - 1) >> plan.log2_words) + 1; };
  for (plan.log2_words = x.stride[1] <= x.stride[3] ? 3 : 0; plan.log2_words; --plan.log2_words)
    if (3 * (columns() << plan.log2_words) <= 4 * words) break;
  plan.columns = static_cast<int32_t>(columns());
  launch->threads = most >= 128 * 1024 ? kNormThreads : kNormThreads / 2;
  const int64_t most_ctas = std::min<int64_t>(device.sm_count, kMostNormCtas),
                step = launch->threads >> plan.log2_words;
  const int64_t entries = plan.list.tiles(active.capacity, 1);
  const int64_t worth = (entries + kLeastSteps * step - 1) / (kLeastSteps * step);
  plan.parts = static_cast<int32_t>(std::clamp<int64_t>(most_ctas / plan.columns, 1, std::max<int64_t>(worth, 1)));
  launch->ctas =
      dim3(static_cast<unsigned>(plan.parts), static_cast<unsigned>(std::min<int64_t>(plan.columns, most_ctas)));
  // The ring is as large as fits, but no larger than a part.
  const auto bytes = [&](int64_t batches) {
    return NormMemory<T, kN, kTensors>::bytes(launch->threads, plan.log2_words, batches, third ? plan.ahead + 1 : 0);
  };
  for (plan.ahead = kMostAhead; plan.ahead > 1 && bytes(plan.ahead + 1) > most;) --plan.ahead;
  const int64_t needed = ((entries + plan.parts - 1) / plan.parts + step * kNormBatch - 1) / (step * kNormBatch);
  int64_t batches = plan.ahead + 1;
  while (batches < needed && bytes(batches + 1) <= most) ++batches;
  plan.ring = FastDiv(batches), plan.thirds = FastDiv(plan.ahead + 1);
  launch->bytes = static_cast<int>(bytes(batches));
  SBNET_CHECK(launch->bytes <= most, "%s: expected a GPU with %d bytes of shared memory a CTA, got %d", op,
              launch->bytes, most);
  return ok_status();
}

// Launches kKernel, whose CTAs wait for one another where there are several parts: cooperative, so that the hardware
// starts all of them or none.
template <auto kKernel, class Params>
Status launch_norm(const char* op, const NormLaunch& launch, const Params& p, float* workspace,
                   const DeviceInfo& device, cudaStream_t stream) {
  SBNET_TRY(allow_shared<kKernel>(op, device, launch.most_bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.ctas;
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (launch.plan.parts > 1) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (device.capability >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = attributes, config.numAttrs = count;
  SBNET_CUDA_TRY(op, cudaLaunchKernelEx(&config, kKernel, launch.as_conv, p, launch.plan, FringePlan(p), workspace));
  return ok_status();
}

}  // namespace
}  // namespace sbnet
