// What norms of images (group, response) share, forward and backward: a CTA takes some words of channels, which its
// lanes keep, and the pixels of blocks, which its other dimension deals out: a channel's numbers are read once a block.
#pragma once
#include "core/masked/norm.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {

constexpr int kImageThreads = 256;

// A channel's weight or bias, in x's element type or in float32.
template <class T>
__device__ __forceinline__ float parameter(const void* data, DType dtype, int64_t c, float otherwise) {
  if (!data) return otherwise;
  return dtype == DType::kF32 ? static_cast<const float*>(data)[c] : to_float(static_cast<const T*>(data)[c]);
}

// The values of all kThreads threads of a CTA, merged in a tree by merge(into, other). found: [kThreads] in shared
// memory.
template <int kThreads, class V, class Merge>
__device__ __forceinline__ V merged_of_cta(const V& v, V* found, const Merge& merge) {
  found[threadIdx.x] = v;
  __syncthreads();
  for (int half = kThreads / 2; half; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) merge(found[threadIdx.x], found[threadIdx.x + half]);
    __syncthreads();
  }
  return found[0];
}

struct ImagePlan {
  FastDiv chunks;         // CTAs that share a block, each with its words
  FastDiv width, pixels;  // of a block
  int32_t words, log2_words;
  int32_t parts, part_blocks, blocks;  // of an image
  FringePlan fringe;

  template <class Params>
  ImagePlan(const Params& p, int lanes) : words(static_cast<int32_t>(p.x.size[1] / lanes)), fringe(p) {
    const BlockGrid& grid = p.active.grid;
    log2_words = 0;  // where pixels are neighbours, not channels, threads take those
    while (p.x.stride[1] <= p.x.stride[3] && log2_words < 5 && 1 << log2_words < words) ++log2_words;
    chunks = FastDiv((words + (1 << log2_words) - 1) >> log2_words);
    const int64_t columns = std::min<int64_t>(grid.size[1], p.x.size[3]);
    width = FastDiv(columns);
    pixels = FastDiv(columns * std::min<int64_t>(grid.size[0], p.x.size[2]));
    blocks = grid.count[0] * grid.count[1];
    part_blocks = (blocks + kMostImageParts - 1) / kMostImageParts;
    parts = (blocks + part_blocks - 1) / part_blocks;
  }
};

// A thread's share of a CTA.
struct ImageThread {
  int lanes, lane, column;  // threads that share a word, which of them, and of which of the CTA's words
  __device__ explicit ImageThread(const ImagePlan& plan)
      : lanes(kImageThreads >> plan.log2_words),
        lane(static_cast<int>(threadIdx.x) >> plan.log2_words),
        column(static_cast<int>(threadIdx.x) & ((1 << plan.log2_words) - 1)) {}
};

constexpr int kImageBatch = 4;  // pixels that a thread has under way

// For this thread's pixels of block (i, j), kImageBatch at a time: load(k, row, column) of all of them, then
// use(k, row, column). (No load may move above a store.)
template <class Load, class Use>
__device__ __forceinline__ void each_pixel(const ImagePlan& plan, const BlockGrid& grid, const TensorView& x, int i,
                                           int j, const ImageThread& own, const Load& load, const Use& use) {
  const int pixels = static_cast<int>(plan.pixels.divisor);
  for (int first = own.lane; first < pixels; first += kImageBatch * own.lanes) {
    uint32_t row[kImageBatch], column[kImageBatch];
    bool in[kImageBatch];
#pragma unroll
    for (int k = 0; k < kImageBatch; ++k) {
      const int pixel = first + k * own.lanes;
      plan.width.divmod(pixel < pixels ? pixel : 0, &row[k], &column[k]);
      row[k] += i * grid.size[0], column[k] += j * grid.size[1];
      in[k] = pixel < pixels && row[k] < x.size[2] && column[k] < x.size[3];
      if (in[k]) load(k, static_cast<int>(row[k]), static_cast<int>(column[k]));
    }
#pragma unroll
    for (int k = 0; k < kImageBatch; ++k)
      if (in[k]) use(k, static_cast<int>(row[k]), static_cast<int>(column[k]));
  }
}

template <class T, int kN>
__device__ __forceinline__ Word<T, kN> read_pixel(const TensorView& t, int n, int word, int row, int column) {
  return *reinterpret_cast<const Word<T, kN>*>(static_cast<const T*>(t.data) + n * t.stride[0] +
                                               int64_t{word} * kN * t.stride[1] + row * t.stride[2] +
                                               column * t.stride[3]);
}

// kSums of channels [N, parts, kSums, C] over the active pixels of parts of images: of x^2, and with a gradient of dy x
// and of dy. A CTA takes a part and some words.
template <class T, int kN, int kSums, class Params>
__global__ void __launch_bounds__(kImageThreads)
    image_sums_kernel(const __grid_constant__ Params p, const __grid_constant__ TensorView grad,
                      const __grid_constant__ ImagePlan plan, float* sums) {
  __shared__ float found[kImageThreads * kN];
  grid_dependency_wait();
  grid_dependency_release();
  const ImageThread own(plan);
  const BlockGrid& grid = p.active.grid;
  uint32_t part, chunk;
  plan.chunks.divmod(blockIdx.x, &part, &chunk);
  const int n = static_cast<int>(part) / plan.parts, first = static_cast<int>(part) % plan.parts * plan.part_blocks;
  const int word = static_cast<int>(chunk << plan.log2_words) + own.column;
  float sum[kSums][kN] = {};
  for (int block = first; block < min(first + plan.part_blocks, plan.blocks); ++block) {
    if (p.active.block_map[int64_t{n} * plan.blocks + block] < 0 || word >= plan.words) continue;
    Word<T, kN> x[kImageBatch], dy[kImageBatch];
    const auto load = [&](int k, int row, int column) {
      x[k] = read_pixel<T, kN>(p.x, n, word, row, column);
      if constexpr (kSums > 1) dy[k] = read_pixel<T, kN>(grad, n, word, row, column);
    };
    const auto use = [&](int k, int, int) {
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const float v = to_float(x[k].channel[e]);
        sum[0][e] += v * v;
        if constexpr (kSums > 1) {
          const float g = to_float(dy[k].channel[e]);
          sum[1][e] += g * v, sum[2][e] += g;
        }
      }
    };
    each_pixel(plan, grid, p.x, block / grid.count[1], block % grid.count[1], own, load, use);
  }
  // Lanes in order.
  const int64_t C = p.x.size[1];
  const int channels = kN << plan.log2_words;  // of the CTA
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
#pragma unroll
    for (int e = 0; e < kN; ++e) found[(own.lane * kN + e) * (1 << plan.log2_words) + own.column] = sum[k][e];
    __syncthreads();
    for (int c = threadIdx.x; c < channels; c += kImageThreads) {  // (e, column)
      float all = 0.f;
      for (int lane = 0; lane < own.lanes; ++lane) all += found[lane * channels + c];
      const int e = c >> plan.log2_words, of = c & ((1 << plan.log2_words) - 1);
      const int64_t channel = (int64_t{chunk} << plan.log2_words) * kN + of * kN + e;
      if (channel < C) sums[(int64_t{part} * kSums + k) * C + channel] = all;
    }
    __syncthreads();
  }
}

// y of each active pixel by the first kRows of a table [N, table_rows, C] of its image: body(numbers, x, dy).
template <class T, int kN, int kRows, bool kWithGrad, class Params, class Body>
__device__ __forceinline__ void apply_image(const Params& p, const TensorView& grad, const ImagePlan& plan,
                                            const float* table, int table_rows, const Body& body) {
  const ImageThread own(plan);
  const BlockGrid& grid = p.active.grid;
  const int64_t C = p.x.size[1];
  const int64_t thread = int64_t{blockIdx.x} * kImageThreads + threadIdx.x;
  const int64_t tasks =
      int64_t{clamped_count(p.active.count, static_cast<int>(p.active.capacity))} * plan.chunks.divisor;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    uint32_t slot, chunk;
    plan.chunks.divmod(static_cast<uint32_t>(task), &slot, &chunk);
    const int word = static_cast<int>(chunk << plan.log2_words) + own.column;
    BlockIndex b;
    if (word >= plan.words || !load_block(p.active.indices, slot, static_cast<int>(p.x.size[0]), grid, &b)) continue;
    float numbers[kRows][kN];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float* from = table + (int64_t{b.n} * table_rows + k) * C + int64_t{word} * kN;
      if constexpr (kN % 4 == 0) {
#pragma unroll
        for (int e = 0; e < kN; e += 4) {
          const float4 v = *reinterpret_cast<const float4*>(from + e);
          numbers[k][e] = v.x, numbers[k][e + 1] = v.y, numbers[k][e + 2] = v.z, numbers[k][e + 3] = v.w;
        }
      } else {
        numbers[k][0] = from[0];
      }
    }
    Word<T, kN> x[kImageBatch], dy[kImageBatch];
    const auto load = [&](int k, int row, int column) {
      x[k] = read_pixel<T, kN>(p.x, b.n, word, row, column);
      if constexpr (kWithGrad) dy[k] = read_pixel<T, kN>(grad, b.n, word, row, column);
    };
    const auto use = [&](int k, int row, int column) {
      Word<T, kN> out;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        float given[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) given[r] = numbers[r][e];
        float g = 0.f;
        if constexpr (kWithGrad) g = to_float(dy[k].channel[e]);
        out.channel[e] = from_float<T>(body(given, to_float(x[k].channel[e]), g));
      }
      *reinterpret_cast<Word<T, kN>*>(static_cast<T*>(p.y.data) + b.n * p.y.stride[0] +
                                      int64_t{word} * kN * p.y.stride[1] + row * p.y.stride[2] +
                                      column * p.y.stride[3]) = out;
    };
    each_pixel(plan, grid, p.x, b.i, b.j, own, load, use);
  }
  clear_fringe<T>(p, plan.fringe, thread, int64_t{gridDim.x} * kImageThreads);
}

// Most CTAs that a launch of apply_image has.
template <class Params>
dim3 image_ctas(const Params& p, const ImagePlan& plan, const DeviceInfo& device) {
  const int64_t tasks = p.active.capacity * plan.chunks.divisor;
  const int64_t wanted = std::max(tasks, (plan.fringe.threads(p) + kImageThreads - 1) / kImageThreads);
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, int64_t{8} * device.sm_count)));
}
template <class Params>
Status check_image(const char* op, const Params& p, const ImagePlan& plan) {
  const double most = static_cast<double>(p.x.size[0]) * plan.blocks * plan.chunks.divisor;
  SBNET_CHECK(most < INT32_MAX && p.active.capacity * plan.chunks.divisor < INT32_MAX,
              "%s: active: expected fewer than 2^31 blocks and words, got %.0f", op, most);
  return ok_status();
}

}  // namespace sbnet
