// How layers that compute each pixel by itself walk the active blocks: a thread takes an output pixel and a word of its
// channels, straight from memory, whatever the layout.
#pragma once
#include <algorithm>
#include <type_traits>

#include "core/settled.h"
#include "cuda/by_dtype.cuh"
#include "cuda/masked/layer.cuh"

namespace sbnet {

constexpr int kPixelThreads = 256;

// kN channels of a pixel.
template <class T, int kN>
struct alignas(sizeof(T) * kN) Word {
  T channel[kN];
};

// Pixels that a thread takes after one another: what it works out of its row and block serves them all.
template <int kN>
constexpr int kRunOf = kN == 1 ? 4 : 1;  // 16 bytes of a pixel are work enough

struct PixelPlan {
  int64_t block_items;  // pixels (or runs of some) x words of a block
  FastDiv block, inner, width;
  bool channels_inner;  // neighbouring threads take the words of a pixel, else the pixels of a word
  bool wide;            // too many items for 32 bits
  bool settled;         // the list may be read before the launch ahead has ended
  FringePlan fringe;
};

// Runs body(n, row, column, word) for each pixel and word of the active blocks of p.y's plane, and clears the fringe.
// kRun > 1: body(n, row, column, word, count) for runs of so many pixels of a row, or the fewer that are left of it.
template <class T, int kRun = 1, class Params, class Body>
__device__ __forceinline__ void for_pixels(const Params& p, const PixelPlan& plan, const Body& body) {
  const int64_t thread = int64_t{blockIdx.x} * kPixelThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kPixelThreads;
  const BlockGrid& grid = p.active.grid;
  struct Found {
    int n, y, x, in_block, word;  // n < 0: nothing
  };
  const auto find = [&](int64_t item) -> Found {
    uint32_t slot, rest, pixel, word, row, column;
    if (plan.wide) {
      slot = static_cast<uint32_t>(item / plan.block_items);
      rest = static_cast<uint32_t>(item - slot * plan.block_items);
    } else {
      plan.block.divmod(static_cast<uint32_t>(item), &slot, &rest);
    }
    plan.inner.divmod(rest, &pixel, &word);
    if (!plan.channels_inner) {
      const uint32_t t = pixel;
      pixel = word, word = t;
    }
    plan.width.divmod(pixel, &row, &column);
    BlockIndex b;
    if (slot >= p.active.capacity || !load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b))
      return {-1, 0, 0, 0, 0};
    const int in_block = static_cast<int>(column) * kRun, y = static_cast<int>(row) + b.i * grid.size[0];
    const int x = in_block + b.j * grid.size[1];
    return {y < p.y.size[2] && x < p.y.size[3] ? b.n : -1, y, x, in_block, static_cast<int>(word)};
  };
  // The count and the thread's first block are asked for together, and early where they may be.
  if (!plan.settled) grid_dependency_wait();
  const int64_t items = clamped_count(p.active.count, static_cast<int>(p.active.capacity)) * plan.block_items;
  Found at = find(thread);
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();
  for (int64_t item = thread; item < items;) {
    if (at.n >= 0) {
      if constexpr (kRun == 1)
        body(at.n, at.y, at.x, at.word);
      else
        body(at.n, at.y, at.x, at.word,
             min(kRun, min(grid.size[1] - at.in_block, static_cast<int>(p.y.size[3]) - at.x)));
    }
    item += threads;
    if (item < items) at = find(item);
  }
  clear_fringe<T>(p, plan.fringe, thread, threads);
}

// May x and y be read and written in 16-byte words of channels?
template <class T, class Params>
bool words_of_channels(const Params& p) {
  return channels_vectorize(p.x) && channels_vectorize(p.y) && p.y.size[1] % kLanes<T> == 0;
}

// Launches kKernel(p, plan, more...), whose threads take `lanes` channels of kRun pixels.
template <auto kKernel, int kRun = 1, class Params, class... More>
Status launch_pixels(const char* op, const Params& p, int lanes, const DeviceInfo& device, cudaStream_t stream,
                     const More&... more) {
  // A block larger than the plane is the only one of its direction: no more outputs than the plane has.
  const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
  const int64_t width = (std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) + kRun - 1) / kRun;
  const int64_t words = p.y.size[1] / lanes;
  const double block = static_cast<double>(height) * width * words;
  SBNET_CHECK(block <= INT32_MAX / 2, "%s: active: expected blocks of at most 2^30 words of channels, got %.0f", op,
              block);

  PixelPlan plan;
  plan.block_items = static_cast<int64_t>(block);
  plan.channels_inner = p.y.stride[1] <= p.y.stride[3];
  plan.block = FastDiv(plan.block_items);
  plan.inner = FastDiv(plan.channels_inner ? words : plan.block_items / words);
  plan.width = FastDiv(width);
  const int64_t most = p.active.capacity * plan.block_items;
  plan.wide = most > INT32_MAX;
  plan.fringe = FringePlan(p);
  plan.settled = inputs_settled();

  static std::atomic<int> ctas_per_sm[kMaxDevices];
  int ctas = device.index < kMaxDevices ? ctas_per_sm[device.index].load(std::memory_order_relaxed) : 0;
  if (!ctas) {
    SBNET_CUDA_TRY(op, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kKernel, kPixelThreads, 0));
    if (device.index < kMaxDevices) ctas_per_sm[device.index].store(ctas, std::memory_order_relaxed);
  }
  const int64_t wanted = (std::max(most, plan.fringe.threads(p)) + kPixelThreads - 1) / kPixelThreads;
  const dim3 ctas_used(static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{ctas} * device.sm_count)));
  SBNET_CUDA_TRY(op, launch_dependent(device, kKernel, ctas_used, dim3(kPixelThreads), 0, stream, p, plan, more...));
  return ok_status();
}

// Has the launch anything to write?
template <class Params>
bool writes_nothing(const Params& p) {
  return !p.y.size[0] || (!p.active.capacity && !(p.fringe.pixels && p.fringe.capacity > 0));
}

// What the entry points of these layers are: launch(device, stream), if the params are valid and anything is to write.
template <class Params, class Launch>
Status run_layer(const char* op, const Params& p, void* stream, const Launch& launch) {
  SBNET_TRY(validate(p));
  if (writes_nothing(p)) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(op, &device));
  return launch(device, static_cast<cudaStream_t>(stream));
}

// The same with launch(T{}, device, stream), where T is x's element type.
template <class Params, class Launch>
Status run_layer_by_dtype(const char* op, const Params& p, void* stream, const Launch& launch) {
  return run_layer(op, p, stream, [&](const DeviceInfo& device, cudaStream_t on) {
    return by_dtype(p.x.dtype, [&](auto t) { return launch(t, device, on); });
  });
}

// The same with launch(T{}, lanes, device, stream), where lanes::value channels are a word: 16 bytes of them, or one.
template <class Params, class Launch>
Status run_layer_by_word(const char* op, const Params& p, void* stream, const Launch& launch) {
  return run_layer_by_dtype(op, p, stream, [&](auto t, const DeviceInfo& device, cudaStream_t on) {
    using T = decltype(t);
    return words_of_channels<T>(p) ? launch(t, std::integral_constant<int, kLanes<T>>(), device, on)
                                   : launch(t, std::integral_constant<int, 1>(), device, on);
  });
}

}  // namespace sbnet
