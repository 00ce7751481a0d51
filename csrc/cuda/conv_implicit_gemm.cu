// Convolution as a GEMM on the tensor cores of every device since sm_80: y[pixels, K] = x[pixels, R*S*C] w[K, R*S*C]^T,
// whose left operand is gathered from x by the tile loader and never stored.
//
// A CTA owns 128 entries of the pixel list and kTileN output channels of one group. A pipeline stage holds 128 bytes of
// the reduction per pixel and per output channel: eight 16-byte words, each from one kernel tap, stored at word
// position w ^ (row % 8), which keeps both cp.async and ldmatrix free of bank conflicts.
#include "cuda/conv_portable.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 128;  // four warps, two by two; also one thread per pixel of the tile
constexpr int kTileM = 128;
constexpr int kRowBytes = 128;
constexpr int kStages = 3;
constexpr int kRowsPerPass = kThreads / 8;  // eight threads fetch a row

template <int kTileN>
struct Shared {
  static constexpr int kStageBytes = (kTileM + kTileN) * kRowBytes;
  static constexpr int kPitch = kTileN + 8;  // floats per pixel of the staged sums: conflict-free for the mma layout
  static constexpr int kSums = kTileM * kPitch * 4;
  static constexpr int kSources = kStages * kStageBytes;  // byte offset of the Source table
  static constexpr int kBytes = kSources + kTileM * static_cast<int>(sizeof(Source));
  static_assert(kSums + kTileM * static_cast<int>(sizeof(longlong2)) <= kSources, "the epilogue reuses the stages");
  static_assert(kBytes <= 99 * 1024, "the least that a device since sm_80 has");
};

template <class T>
__device__ __forceinline__ uint32_t pack(T low, T high) {
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(low)) |
         static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(high)) << 16;
}

// Fetches one stage after another: thread t takes word t%8 of rows t/8, t/8 + 16, ...
// kVector: words of x are whole (channels_last, C/groups a multiple of kLanes): a word has one tap, shared by all rows.
// Otherwise every element is decoded on its own and goes through registers.
template <class T, int kTileN, bool kVector>
struct Loader {
  const Conv2dParams& p;
  const GemmPlan& plan;
  const Source* sources;
  const T* x;       // the group's first channel
  const T* weight;  // the tile's first output channel
  int channels;     // output channels that the tile has
  int word, row0;
  uint32_t slot;  // byte offset of (row0, word) in an operand's stage

  __device__ __forceinline__ Loader(const Conv2dParams& p, const GemmPlan& plan, const Source* sources)
      : p(p), plan(plan), sources(sources), word(threadIdx.x % 8), row0(threadIdx.x / 8) {
    slot = row0 * kRowBytes + ((word ^ (row0 % 8)) << 4);
  }
  __device__ __forceinline__ void begin_tile(int group, int64_t k, int channels_) {
    x = static_cast<const T*>(p.x.data) + group * p.weight.size[1] * p.x.stride[1];
    weight = static_cast<const T*>(p.weight.data) + k * p.weight.stride[0];
    channels = channels_;
  }

  // A quarter of a stage, so that the fetches mix with the multiplications of the stage before.
  __device__ __forceinline__ void fetch(int step, uint32_t stage, char* stage_pointer, int quarter) const {
    if constexpr (kVector) {
      fetch_words(tap_of(p, plan.reduction, step * 8 + word), stage, stage_pointer, quarter);
    } else if (quarter == 0) {
      constexpr int kPairs = kLanes<T> / 2;
#pragma unroll 1
      for (int pair = 0; pair < kPairs; ++pair)
        fetch_pair((step * 8 + word) * kLanes<T> + pair * 2, stage_pointer, pair);
    }
  }

 private:
  __device__ __forceinline__ void fetch_words(const Tap& tap, uint32_t stage, char* stage_pointer, int quarter) const {
    constexpr int kPerQuarterM = kTileM / kRowsPerPass / 4, kPerQuarterN = kTileN / kRowsPerPass / 4;
#pragma unroll
    for (int i = 0; i < kPerQuarterM; ++i) {
      const int pass = quarter * kPerQuarterM + i;
      const Source source = sources[row0 + pass * kRowsPerPass];
      cp_async_16(stage + slot + pass * kRowsPerPass * kRowBytes, x + source.offset + tap.x_offset,
                  reads_plane(p, source, tap));
    }
#pragma unroll
    for (int i = 0; i < kPerQuarterN; ++i) {
      const int pass = quarter * kPerQuarterN + i, n = row0 + pass * kRowsPerPass;
      const uint32_t at = kTileM * kRowBytes + slot + pass * kRowsPerPass * kRowBytes;
      const T* from = weight + n * p.weight.stride[0] + tap.weight_offset;
      const bool in = tap.in && n < channels;
      if (plan.vector_weight) {
        cp_async_16(stage + at, from, in);
      } else {
        uint4 elements{0, 0, 0, 0};
        T* part = reinterpret_cast<T*>(&elements);
#pragma unroll
        for (int e = 0; e < kLanes<T>; ++e)
          if (in) part[e] = from[e * p.weight.stride[1]];
        *reinterpret_cast<uint4*>(stage_pointer + at) = elements;
      }
    }
  }

  // Two neighbouring elements of the reduction for all rows.
  __device__ __forceinline__ void fetch_pair(int element, char* stage_pointer, int pair) const {
    const Tap low = tap_of(p, plan.reduction, element), high = tap_of(p, plan.reduction, element + 1);
    const T zero = from_float<T>(0.f);
#pragma unroll
    for (int pass = 0; pass < kTileM / kRowsPerPass; ++pass) {
      const Source source = sources[row0 + pass * kRowsPerPass];
      const T a = reads_plane(p, source, low) ? x[source.offset + low.x_offset] : zero;
      const T b = reads_plane(p, source, high) ? x[source.offset + high.x_offset] : zero;
      *reinterpret_cast<uint32_t*>(stage_pointer + slot + pair * 4 + pass * kRowsPerPass * kRowBytes) = pack(a, b);
    }
#pragma unroll
    for (int pass = 0; pass < kTileN / kRowsPerPass; ++pass) {
      const int n = row0 + pass * kRowsPerPass;
      const T* from = weight + n * p.weight.stride[0];
      const T a = low.in && n < channels ? from[low.weight_offset] : zero;
      const T b = high.in && n < channels ? from[high.weight_offset] : zero;
      *reinterpret_cast<uint32_t*>(stage_pointer + kTileM * kRowBytes + slot + pair * 4 +
                                   pass * kRowsPerPass * kRowBytes) = pack(a, b);
    }
  }
};

// The warp's quadrant of the tile: 64 pixels by kTileN/2 channels.
template <class T, int kTileN>
struct WarpTile {
  static constexpr int kM = 4, kN = kTileN / 16;  // 16-pixel and 8-channel pieces
  struct Operands {
    uint32_t a[kM][4], b[kN / 2][4];
  };
  float sums[kM][kN][4];
  uint32_t a_row, b_row, a_word, b_word;  // this lane's ldmatrix row in bytes, and its word's distance from the first

  __device__ __forceinline__ WarpTile(int warp, int lane) {
    a_row = ((warp % 2) * 64 + lane % 16) * kRowBytes;
    a_word = lane / 16;
    b_row = (kTileM + (warp / 2) * (kTileN / 2) + lane / 16 * 8 + lane % 8) * kRowBytes;
    b_word = lane / 8 % 2;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] = 0.f;
  }
  // `half` counts pairs of words: 32 bytes of the reduction.
  __device__ __forceinline__ void load(uint32_t stage, int half, Operands* o) const {
    const uint32_t swizzle = threadIdx.x % 8;  // the row of every address is this modulo 8
#pragma unroll
    for (int m = 0; m < kM; ++m)
      load_matrix_x4(stage + a_row + m * 16 * kRowBytes + (((half * 2 + a_word) ^ swizzle) << 4), o->a[m]);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n)
      load_matrix_x4(stage + b_row + n * 16 * kRowBytes + (((half * 2 + b_word) ^ swizzle) << 4), o->b[n]);
    if constexpr (sizeof(T) == 4) {  // the tensor core would cut the low bits off, a bias towards zero
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int m = 0; m < kM; ++m) o->a[m][e] = round_to_tf32(o->a[m][e]);
#pragma unroll
        for (int n = 0; n < kN / 2; ++n) o->b[n][e] = round_to_tf32(o->b[n][e]);
      }
    }
  }
  __device__ __forceinline__ void multiply(const Operands& o) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) mma_16x8<T>(sums[m][n], o.a[m], o.b[n / 2][n % 2 * 2], o.b[n / 2][n % 2 * 2 + 1]);
  }
  __device__ __forceinline__ void stage_sums(float* to, int pitch, int warp, int lane) const {
    float* base = to + ((warp % 2) * 64 + lane / 4) * pitch + (warp / 2) * (kTileN / 2) + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<float2*>(base + (m * 16 + h * 8) * pitch + n * 8) =
              float2{sums[m][n][h * 2], sums[m][n][h * 2 + 1]};
  }
};

template <class T, int kTileN, bool kVector>
__global__ void __launch_bounds__(kThreads, kTileN == 128 || !kVector || sizeof(T) == 4 ? 2 : 3)
    conv_implicit_gemm_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ GemmPlan plan) {
  using Smem = Shared<kTileN>;
  extern __shared__ __align__(128) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(smem);
  Source* sources = reinterpret_cast<Source*>(smem + Smem::kSources);
  float* staged = reinterpret_cast<float*>(smem);
  longlong2* outputs = reinterpret_cast<longlong2*>(smem + Smem::kSums);  // offsets in y and residual, y < 0: none

  grid_dependency_wait();
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int tiles = static_cast<int>(plan.list.tiles(count, kTileM)) * static_cast<int>(plan.column_tiles.divisor);
  const int steps =
      (plan.reduction.units * plan.reduction.unit_channels + kRowBytes / static_cast<int>(sizeof(T)) - 1) /
      (kRowBytes / static_cast<int>(sizeof(T)));
  const int group_outputs = static_cast<int>(p.weight.size[0]) / p.groups;
  Loader<T, kTileN, kVector> loader(p, plan, sources);
  WarpTile<T, kTileN> work(warp, lane);

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint32_t tile_m, tile_n, group;
    plan.column_tiles.divmod(tile, &tile_m, &tile_n);
    plan.tiles_per_group.divmod(tile_n, &group, &tile_n);
    const int64_t k_end = int64_t{group + 1} * group_outputs, k = k_end - group_outputs + tile_n * kTileN;
    const Pixel pixel = locate_pixel(p, plan.list, int64_t{tile_m} * kTileM + threadIdx.x, count);
    sources[threadIdx.x] = source_of(p, pixel);
    __syncthreads();

    loader.begin_tile(group, k, static_cast<int>(min(k_end - k, int64_t{kTileN})));
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps)
        for (int quarter = 0; quarter < 4; ++quarter)
          loader.fetch(s, stages + s * Smem::kStageBytes, smem + s * Smem::kStageBytes, quarter);
      cp_async_commit();
    }
    work.clear();
    int read = 0, write = kStages - 1;
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // stage `read` has landed for all threads, and all are done with stage `write`
      const uint32_t stage = stages + read * Smem::kStageBytes;
      typename WarpTile<T, kTileN>::Operands operands[2];
      work.load(stage, 0, &operands[0]);
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        if (half < 3) work.load(stage, half + 1, &operands[(half + 1) % 2]);
        if (step + kStages - 1 < steps)
          loader.fetch(step + kStages - 1, stages + write * Smem::kStageBytes, smem + write * Smem::kStageBytes, half);
        work.multiply(operands[half % 2]);
      }
      cp_async_commit();
      read = read + 1 == kStages ? 0 : read + 1;
      write = write + 1 == kStages ? 0 : write + 1;
    }
    if (tile + gridDim.x >= tiles) grid_dependency_release();

    __syncthreads();  // the stages are free: the sums take their place, so that stores go out in 16-byte words
    work.stage_sums(staged, Smem::kPitch, warp, lane);
    outputs[threadIdx.x] =
        pixel.n < 0 ? longlong2{-1, 0} : longlong2{pixel_offset(p.y, pixel), pixel_offset(p.residual, pixel)};
    __syncthreads();
    constexpr int kWords = kTileN / 8;  // eight channels per thread and pass
    const int channel = threadIdx.x % kWords * 8;
    if (k + channel < k_end) {
      float bias[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) bias[e] = k + channel + e < k_end ? bias_at<T>(p, k + channel + e) : 0.f;
#pragma unroll 2
      for (int row = threadIdx.x / kWords; row < kTileM; row += kThreads / kWords) {
        const longlong2 to = outputs[row];
        if (to.x < 0) continue;
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = staged[row * Smem::kPitch + channel + e] + bias[e];
        finish_outputs<T>(p, plan.vector_y, plan.vector_residual, v, to.x, to.y, k + channel, k_end);
      }
    }
    __syncthreads();
  }
}

template <class T, int kTileN, bool kVector>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  constexpr auto kernel = conv_implicit_gemm_kernel<T, kTileN, kVector>;
  constexpr size_t kSmem = Shared<kTileN>::kBytes;
  const GemmPlan plan(p, kVector ? kLanes<T> : 1, kTileN);
  const int64_t tiles = plan.most_tiles(p, kTileM);
  SBNET_CHECK(tiles <= INT32_MAX / 2, "%s: active: %lld tiles; at most 2^30 are wanted", kConvOp,
              static_cast<long long>(tiles));
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kThreads, kSmem, &cache, &ctas));
  const unsigned grid = persistent_grid(device, ctas, tiles, plan.fringe.threads(p), kThreads);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kThreads), kSmem, stream, p, plan));
  return ok_status();
}

bool vector_x(const Conv2dParams& p) {
  return channels_vectorize(p.x) && p.weight.size[1] % (16 / dtype_size(p.x.dtype)) == 0;
}

// The wide tile reads x half as often; the narrow one is for few output channels, and where it wastes fewer of them.
bool wide_tile(const Conv2dParams& p) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  return (outputs + 63) / 64 % 2 == 0;
}

template <class T>
Status launch_half(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (!vector_x(p)) return launch<T, 64, false>(p, device, stream);
  return wide_tile(p) ? launch<T, 128, true>(p, device, stream) : launch<T, 64, true>(p, device, stream);
}

}  // namespace

bool implicit_gemm_takes(const Conv2dParams& p) { return p.x.dtype != DType::kF32 || (p.allow_tf32 && vector_x(p)); }

Status launch_implicit_gemm(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  switch (p.x.dtype) {
    case DType::kF16:
      return launch_half<__half>(p, device, stream);
    case DType::kBF16:
      return launch_half<__nv_bfloat16>(p, device, stream);
    default:
      return wide_tile(p) ? launch<float, 128, true>(p, device, stream) : launch<float, 64, true>(p, device, stream);
  }
}

}  // namespace sbnet::portable
