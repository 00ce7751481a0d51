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
// Steps whose words are copied together.
constexpr int norm_batch(int tensors) { return tensors == 1 ? 4 : 2; }
constexpr int kMostAhead = 2;     // batches under way while one is used
constexpr int kLeastSteps = 2;    // of a part
constexpr int kMostNormSums = 3;  // numbers a channel that are added up together

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

  __device__ __forceinline__ NormPart(const Conv2dParams& as_conv, const NormPlan& plan, const NormThread& thread,
                                      int batch_steps) {
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
    batches = static_cast<int>(share(end - begin, batch_steps * step));
  }
};

// Shared memory: room for sums; a table of numbers by channel; the ring, kTensors words of each thread and step of a
// batch, and the pixels that they are of; batches of a third tensor. A thread reads what it has copied itself, pixels
// apart.
template <class T, int kN, int kTensors>
struct NormMemory {
  using Item = Word<T, kN>;
  static constexpr int kBatch = norm_batch(kTensors);
  static constexpr int kChannels = kMostWords * kN, kRows = 5;  // of the table
  double* sums;
  float *table, *warp_pixels;
  Item *ring, *thirds;
  int32_t* pixels;

  __device__ __forceinline__ NormMemory(char* memory, const NormPlan& plan, bool third) {
    const int threads = static_cast<int>(blockDim.x);
    sums = reinterpret_cast<double*>(memory);
    table = reinterpret_cast<float*>(memory + sum_bytes(threads, plan.log2_words));
    warp_pixels = table + kRows * kChannels;
    ring = reinterpret_cast<Item*>(warp_pixels + kNormThreads / 32);
    thirds = ring + static_cast<int>(plan.ring.divisor) * kBatch * kTensors * threads;
    pixels =
        reinterpret_cast<int32_t*>(thirds + (third ? static_cast<int>(plan.thirds.divisor) : 0) * kBatch * threads);
  }
  __device__ __forceinline__ Item& word(int slot, int step, int tensor) const {
    return ring[((slot * kBatch + step) * kTensors + tensor) * static_cast<int>(blockDim.x) +
                static_cast<int>(threadIdx.x)];
  }
  __device__ __forceinline__ Item& third(int slot, int step) const {
    return thirds[(slot * kBatch + step) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)];
  }
  // A thread's words of a batch, together: whatever is there for steps of no pixel.
  __device__ __forceinline__ void load(int slot, int tensor, Item (&to)[kBatch]) const {
#pragma unroll
    for (int step = 0; step < kBatch; ++step) to[step] = word(slot, step, tensor);
  }
  __device__ __forceinline__ float& number(int row, int channel) const { return table[row * kChannels + channel]; }
  // A row of the table: those of the thread's word.
  __device__ __forceinline__ void read(int row, const NormThread& thread, float (&to)[kN]) const {
#pragma unroll
    for (int e = 0; e < kN; ++e) to[e] = number(row, thread.word * kN + e);
  }
  // The pixels of the warp's steps of a batch; -1: none.
  __device__ __forceinline__ int32_t* row(const NormThread& thread, int slot) const {
    return pixels + (slot * thread.warps + thread.warp) * kBatch * thread.pixels;
  }

  __host__ __device__ static int64_t sum_bytes(int threads, int log2_words) {
    return int64_t{threads / 32} * kMostNormSums * (kN << log2_words) * 8;
  }
  static int64_t bytes(int threads, int log2_words, int64_t batches, int64_t third_batches) {
    const int64_t word = sizeof(Item), pixels = (threads >> log2_words) * 4;
    return sum_bytes(threads, log2_words) + (kRows * kChannels + kNormThreads / 32) * 4 +
           kBatch * (batches * (threads * kTensors * word + pixels) + third_batches * threads * word);
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

// An entry of the list: what stands there of its block, which may be anything, and its pixel in that. Read long before
// it is used.
struct NormEntry {
  BlockIndex block;
  int row, column;
};
__device__ __forceinline__ NormEntry read_entry(const Conv2dParams& as_conv, const NormPlan& plan, const NormPart& part,
                                                int64_t entry) {
  NormEntry found = {{-1, 0, 0}, 0, 0};
  if (entry >= part.end) return found;
  int64_t slot;
  if (plan.list.wide) {
    slot = entry / plan.list.pixels_per_block;
    const int64_t rest = entry % plan.list.pixels_per_block;
    found.row = static_cast<int>(rest / plan.list.width), found.column = static_cast<int>(rest % plan.list.width);
  } else {
    uint32_t s, rest, row, column;
    plan.list.block_pixels.divmod(static_cast<uint32_t>(entry), &s, &rest);
    plan.list.block_width.divmod(rest, &row, &column);
    slot = s, found.row = static_cast<int>(row), found.column = static_cast<int>(column);
  }
  const int32_t* const from = as_conv.active.indices + slot * 3;
  found.block = {from[0], from[1], from[2]};
  return found;
}
// Its pixel's number in the plane, or -1.
__device__ __forceinline__ int32_t pixel_of(const Conv2dParams& as_conv, const NormEntry& entry) {
  const TensorView& x = as_conv.y;
  const BlockGrid& grid = as_conv.active.grid;
  if (!is_block(entry.block, static_cast<int>(x.size[0]), grid)) return -1;
  const int row = entry.row + entry.block.i * grid.size[0], column = entry.column + entry.block.j * grid.size[1];
  if (row >= x.size[2] || column >= x.size[3]) return -1;
  return static_cast<int32_t>((entry.block.n * x.size[2] + row) * x.size[3] + column);
}

// A batch of steps: where it is in the ring and among the third tensor's, and whether the ring holds it after the first
// pass.
struct NormBatch {
  int number, slot, third;
  bool held;
};

// One pass over the thread's words, kBack: from the last batch to the first, after one that went forwards. third(held):
// is a batch's third tensor wanted? copy(slot, step, pixel) and copy_third(slot, step, pixel) start copies;
// use(batch, pixels) takes them; of pixels below 0 nothing has come.
template <bool kBack, int kBatch, class Memory, class Third, class Copy, class CopyThird, class Use>
__device__ __forceinline__ void pass(const Conv2dParams& as_conv, const NormPlan& plan, const NormThread& thread,
                                     const NormPart& part, const Memory& memory, bool taken, const Third& third,
                                     const Copy& copy, const CopyThird& copy_third, const Use& use) {
  const auto find = [&](int turn) -> NormBatch {
    const int number = kBack ? part.batches - 1 - turn : turn;
    uint32_t round, slot, third_slot;
    plan.ring.divmod(static_cast<uint32_t>(number), &round, &slot);
    plan.thirds.divmod(static_cast<uint32_t>(number), &round, &third_slot);
    return {number, static_cast<int>(slot), static_cast<int>(third_slot),
            number + static_cast<int>(plan.ring.divisor) >= part.batches};
  };
  const auto entry = [&](const NormBatch& batch, int i) {
    const int step = batch.number * kBatch + (i >> (5 - plan.log2_words)), pixel = i & (thread.pixels - 1);
    return read_entry(as_conv, plan, part,
                      part.begin + (int64_t{step} * thread.warps + thread.warp) * thread.pixels + pixel);
  };
  const auto pixels_of = [&](const NormBatch& batch, int (&pixels)[kBatch]) {
    const int32_t* const row = memory.row(thread, batch.slot);
#pragma unroll
    for (int step = 0; step < kBatch; ++step) pixels[step] = taken ? row[step * thread.pixels + thread.pixel] : -1;
  };
  const int entries = kBatch * thread.pixels;  // of the warp's batch
  NormEntry next = {{-1, 0, 0}, 0, 0};         // the lane's first of the batch that starts next
  const auto look_ahead = [&](int turn) {
    if (turn >= part.batches || thread.lane >= entries) return;
    const NormBatch batch = find(turn);
    if (!kBack || !batch.held) next = entry(batch, thread.lane);
  };
  const auto start = [&](int turn) {
    if (turn < part.batches) {
      const NormBatch batch = find(turn);
      const bool again = !kBack || !batch.held, more = third(batch.held);
      if (again) {
        int32_t* const row = memory.row(thread, batch.slot);
        __syncwarp();  // all have read what the row held
        if (thread.lane < entries) row[thread.lane] = pixel_of(as_conv, next);
        for (int i = thread.lane + 32; i < entries; i += 32) row[i] = pixel_of(as_conv, entry(batch, i));
        __syncwarp();
      }
      if (again || more) {
        int pixels[kBatch];
        pixels_of(batch, pixels);
#pragma unroll
        for (int step = 0; step < kBatch; ++step) {
          if (pixels[step] < 0) continue;
          if (again) copy(batch.slot, step, pixels[step]);
          if (more) copy_third(batch.third, step, pixels[step]);
        }
      }
    }
    cp_async_commit();
    look_ahead(turn + 1);
  };
  look_ahead(0);
  for (int turn = 0; turn < plan.ahead; ++turn) start(turn);
  for (int turn = 0; turn < part.batches; ++turn) {
    start(turn + plan.ahead);
    if (plan.ahead == kMostAhead)
      cp_async_wait<kMostAhead>();
    else
      cp_async_wait<1>();
    const NormBatch batch = find(turn);
    int pixels[kBatch];
    pixels_of(batch, pixels);
    use(batch, pixels);
  }
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
  const int64_t batch = step * norm_batch(kTensors), each = (entries + plan.parts - 1) / plan.parts;
  const int64_t needed = (each + batch - 1) / batch;
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
