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
  // All stages of x, then all of the weights: the epilogue takes the place of x, and leaves the weights of the narrow
  // tile alone.
  static constexpr int kStageX = kTileM * kRowBytes, kStageWeight = kTileN * kRowBytes;
  static constexpr int kWeights = kStages * kStageX;
  static constexpr int kPitch = kTileN + 8;  // floats per pixel of the staged sums: conflict-free for the mma layout
  static constexpr int kSums = kTileM * kPitch * 4;
  static constexpr int kSources = kWeights + kStages * kStageWeight;                  // byte offset of the Source table
  static constexpr int kTaps = kSources + kTileM * static_cast<int>(sizeof(Source));  // TapTables, if any
  static constexpr int kBytes = kTaps;
  static constexpr bool kKeepsWeights = kSums + kTileM * static_cast<int>(sizeof(Output)) <= kWeights;
  static_assert(kSums + kTileM * static_cast<int>(sizeof(Output)) <= kSources, "the epilogue reuses the stages");
  static_assert(kBytes <= 99 * 1024, "the least that a device since sm_80 has");
};

template <class T>
__device__ __forceinline__ uint32_t pack(T low, T high) {
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(low)) |
         static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(high)) << 16;
}

// How a stage is filled. Words: 16 bytes of channels of one tap by cp.async. Elements: one by one through registers.
enum class Fetch {
  kWords,     // x and weight channels_last, C/groups a multiple of kLanes
  kWordsOfX,  // x channels_last, other weight strides, or small groups that are merged
  kElements,  // any
};

// Fetch::kElements decodes the reduction elements of a stage once for all rows.
struct TapTable {
  static constexpr int kElements = kRowBytes / 2;  // of 16 bits: float32 does not come here
  Source x[kElements];                             // as a Source's distance; no plane has the row of a dead element
  int64_t weight[kElements];                       // in bytes, < 0 for a dead element
};

// Fetches one stage after another: thread t takes word t%8 of rows t/8, t/8 + 16, ... of both operands.
template <class T, int kTileN, Fetch kFetch>
struct Loader {
  using Smem = Shared<kTileN>;
  static constexpr int kPassesN = kTileN / kRowsPerPass;
  static constexpr int kPassBytes = kRowsPerPass * kRowBytes;
  const Conv2dParams& p;
  const GemmPlan& plan;
  const Source* sources;  // of row0
  const T* x;             // the group's first channel
  const T* weight;        // of the tile's output channel row0
  int64_t weight_pass;    // bytes to the next pass's output channel
  int channels;           // output channels of the tile from row0 on
  int word;
  uint32_t at;               // byte offset of (row0, word) in an operand's stage
  Tap tap;                   // of the words being fetched
  bool issue;                // false past the last step
  bool issue_weight = true;  // false also where the stages hold the weights already
  // Fetch::kElements: thread t takes row t of x, so that the lanes of a warp read neighbouring pixels.
  Source own;
  TapTable* tables;  // one per stage

  __device__ __forceinline__ Loader(const Conv2dParams& p, const GemmPlan& plan, const Source* sources,
                                    TapTable* tables)
      : p(p), plan(plan), sources(sources + threadIdx.x / 8), word(threadIdx.x % 8), tables(tables) {
    const int row0 = threadIdx.x / 8;
    at = row0 * kRowBytes + ((word ^ (row0 % 8)) << 4);
    weight_pass = p.weight.stride[0] * kRowsPerPass * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ void begin_tile(int group, int64_t k, int channels_, const Source& own_) {
    own = own_;
    const int row0 = threadIdx.x / 8;
    x = static_cast<const T*>(p.x.data) + int64_t{group} * plan.group_inputs * p.x.stride[1];
    weight = static_cast<const T*>(p.weight.data) + (k + row0) * p.weight.stride[0];
    channels = channels_ - row0;
  }

  // Decodes this thread's word of a step; every fetch of the step uses it.
  __device__ __forceinline__ void seek(int step, bool issue_, bool fresh) {
    issue = issue_;
    issue_weight = issue_ & fresh;
    if constexpr (kFetch != Fetch::kElements) tap = tap_of(p, plan.reduction, step * 8 + word);
  }
  // Fills the table of a step. A barrier stands between this and the step's fetch.
  __device__ __forceinline__ void tabulate(int step, int slot) const {
    if constexpr (kFetch == Fetch::kElements) {
      const int i = threadIdx.x;
      if (i >= TapTable::kElements) return;
      const Tap t = tap_of(p, plan.reduction, step * TapTable::kElements + i);
      const int size = static_cast<int>(sizeof(T));
      tables[slot].x[i] = {t.x_offset * size, t.in ? t.row : -(1 << 30), t.column};
      tables[slot].weight[i] = t.in ? t.weight_offset * size : -1;
    }
  }
  // A quarter of a stage, so that the fetches mix with the multiplications of the stage before.
  __device__ __forceinline__ void fetch(int slot, char* smem, int quarter) const {
    char* to_x = smem + slot * Smem::kStageX;
    char* to_weight = smem + Smem::kWeights + slot * Smem::kStageWeight;
    if constexpr (kFetch == Fetch::kElements) {
      if (issue) fetch_x_elements(tables[slot], to_x, quarter);
      if (issue_weight) fetch_weight_elements(tables[slot], to_weight, quarter);
    } else {
      fetch_x(shared_address(to_x), quarter);
      fetch_weight(to_weight, quarter);
    }
  }

 private:
  __device__ __forceinline__ void fetch_x(uint32_t to, int quarter) const {
    constexpr int kPassesM = kTileM / kRowsPerPass;
    const char* from = reinterpret_cast<const char*>(x + tap.x_offset);
#pragma unroll
    for (int pass = quarter * (kPassesM / 4); pass < (quarter + 1) * (kPassesM / 4); ++pass) {
      const Source source = load_source(sources + pass * kRowsPerPass);
      cp_async_16(to + at + pass * kPassBytes, from + source.offset, reads_plane(p, source, tap), issue);
    }
  }
  __device__ __forceinline__ void fetch_weight(char* to, int quarter) const {
    const char* from = reinterpret_cast<const char*>(weight + tap.weight_offset);
#pragma unroll
    for (int pass = quarter * (kPassesN / 4); pass < (quarter + 1) * (kPassesN / 4); ++pass) {
      const bool in = tap.in & (pass * kRowsPerPass < channels);
      if constexpr (kFetch == Fetch::kWords) {
        cp_async_16(shared_address(to) + at + pass * kPassBytes, from + pass * weight_pass, in, issue_weight);
      } else {
        // Of merged groups, an output channel has weights for its own group's input channels alone.
        const uint32_t own_group = plan.single_outputs.quotient(threadIdx.x / 8 + pass * kRowsPerPass);
        uint4 elements{0, 0, 0, 0};
        T* part = reinterpret_cast<T*>(&elements);
#pragma unroll
        for (int e = 0; e < kLanes<T>; ++e) {
          const bool same = plan.single_inputs.quotient(tap.channel + e) == own_group;
          const int64_t channel = e - static_cast<int64_t>(own_group) * plan.single_inputs.divisor;
          if (issue_weight & in & same)
            part[e] = reinterpret_cast<const T*>(from + pass * weight_pass)[channel * p.weight.stride[1]];
        }
        if (issue_weight) *reinterpret_cast<uint4*>(to + at + pass * kPassBytes) = elements;
      }
    }
  }

  static __device__ __forceinline__ T load(const T* from, int64_t bytes, bool in) {
    return in ? *reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + bytes) : from_float<T>(0.f);
  }
  // Two words of the thread's own row.
  __device__ __forceinline__ void fetch_x_elements(const TapTable& table, char* to, int quarter) const {
#pragma unroll
    for (int w = quarter * 2; w < quarter * 2 + 2; ++w) {
      uint4 elements;
      T* part = reinterpret_cast<T*>(&elements);
#pragma unroll
      for (int e = 0; e < kLanes<T>; ++e) {
        const Source t = load_source(table.x + w * kLanes<T> + e);
        const bool in = (static_cast<unsigned>(own.row + t.row) < static_cast<unsigned>(p.x.size[2])) &
                        (static_cast<unsigned>(own.column + t.column) < static_cast<unsigned>(p.x.size[3]));
        part[e] = load(x, own.offset + t.offset, in);
      }
      *reinterpret_cast<uint4*>(to + threadIdx.x * kRowBytes + ((w ^ threadIdx.x % 8) << 4)) = elements;
    }
  }
  // Two elements of the thread's word of every row.
  __device__ __forceinline__ void fetch_weight_elements(const TapTable& table, char* to, int quarter) const {
    const int element = word * kLanes<T> + quarter * 2;
    const int64_t low = table.weight[element], high = table.weight[element + 1];
    to += at + quarter * 4;
#pragma unroll
    for (int pass = 0; pass < kPassesN; ++pass) {
      const bool in = pass * kRowsPerPass < channels;
      const int64_t row = pass * weight_pass;
      *reinterpret_cast<uint32_t*>(to + pass * kPassBytes) =
          pack(load(weight, row + low, in & (low >= 0)), load(weight, row + high, in & (high >= 0)));
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
    b_row = ((warp / 2) * (kTileN / 2) + lane / 16 * 8 + lane % 8) * kRowBytes;
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
  __device__ __forceinline__ void load(uint32_t smem, int slot, int half, Operands* o) const {
    using Smem = Shared<kTileN>;
    const uint32_t x = smem + slot * Smem::kStageX + a_row;
    const uint32_t weight = smem + Smem::kWeights + slot * Smem::kStageWeight + b_row;
    const uint32_t swizzle = threadIdx.x % 8;  // the row of every address is this modulo 8
#pragma unroll
    for (int m = 0; m < kM; ++m)
      load_matrix_x4(x + m * 16 * kRowBytes + (((half * 2 + a_word) ^ swizzle) << 4), o->a[m]);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n)
      load_matrix_x4(weight + n * 16 * kRowBytes + (((half * 2 + b_word) ^ swizzle) << 4), o->b[n]);
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

// Merged groups multiply the inputs of each other's channels by zero, which is not zero for an infinity or NaN: an
// output that is not finite is summed again over its own group alone.
template <class T>
__device__ __noinline__ float own_group_sum(const Conv2dParams& p, const GemmPlan& plan, const Source& source,
                                            int64_t k) {
  const int64_t group = plan.single_outputs.quotient(static_cast<uint32_t>(k));
  const char* x = static_cast<const char*>(p.x.data) + source.offset;
  const T* weight = static_cast<const T*>(p.weight.data) + k * p.weight.stride[0];
  float sum = 0.f;
  for (int r = 0; r < p.weight.size[2]; ++r) {
    for (int s = 0; s < p.weight.size[3]; ++s) {
      const int row = r * p.dilation[0], column = s * p.dilation[1];
      if (static_cast<unsigned>(source.row + row) >= static_cast<unsigned>(p.x.size[2]) ||
          static_cast<unsigned>(source.column + column) >= static_cast<unsigned>(p.x.size[3]))
        continue;
      const T* pixel = reinterpret_cast<const T*>(x) + row * p.x.stride[2] + column * p.x.stride[3];
      for (int64_t c = 0; c < p.weight.size[1]; ++c)
        sum += to_float(pixel[(group * p.weight.size[1] + c) * p.x.stride[1]]) *
               to_float(weight[c * p.weight.stride[1] + r * p.weight.stride[2] + s * p.weight.stride[3]]);
    }
  }
  return sum;
}

template <class T, int kTileN, Fetch kFetch>
__global__ void __launch_bounds__(kThreads, kTileN == 128 || kFetch != Fetch::kWords || sizeof(T) == 4 ? 2 : 3)
    conv_implicit_gemm_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ GemmPlan plan) {
  using Smem = Shared<kTileN>;
  extern __shared__ __align__(128) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t shared = shared_address(smem);
  Source* sources = reinterpret_cast<Source*>(smem + Smem::kSources);
  float* staged = reinterpret_cast<float*>(smem);
  Output* outputs = reinterpret_cast<Output*>(smem + Smem::kSums);

  grid_dependency_wait();
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int tiles = static_cast<int>(plan.list.tiles(count, kTileM)) * static_cast<int>(plan.column_tiles.divisor);
  const int steps =
      (plan.reduction.units * plan.reduction.unit_channels + kRowBytes / static_cast<int>(sizeof(T)) - 1) /
      (kRowBytes / static_cast<int>(sizeof(T)));
  Loader<T, kTileN, kFetch> loader(p, plan, sources, reinterpret_cast<TapTable*>(smem + Smem::kTaps));
  WarpTile<T, kTileN> work(warp, lane);

  // A short reduction over the only columns: every step has its own stage, and all tiles the same weights.
  const bool keep_weights = Smem::kKeepsWeights && steps <= kStages && plan.column_tiles.divisor == 1;
  bool fresh = true;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint32_t tile_m, tile_n, group;
    plan.column_tiles.divmod(tile, &tile_m, &tile_n);
    plan.tiles_per_group.divmod(tile_n, &group, &tile_n);
    const int64_t k_end = int64_t{group + 1} * plan.group_outputs, k = k_end - plan.group_outputs + tile_n * kTileN;
    const Pixel pixel = locate_pixel(p, plan.list, int64_t{tile_m} * kTileM + threadIdx.x, count);
    const Source source = source_of<T>(p, pixel);
    sources[threadIdx.x] = source;
    for (int s = 0; s < kStages; ++s) loader.tabulate(s, s);
    __syncthreads();

    loader.begin_tile(group, k, static_cast<int>(min(k_end - k, int64_t{kTileN})), source);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      loader.seek(s, s < steps, fresh);
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) loader.fetch(s, smem, quarter);
      cp_async_commit();
    }
    work.clear();
    typename WarpTile<T, kTileN>::Operands operands[2];
    cp_async_wait<kStages - 2>();
    __syncthreads();
    work.load(shared, 0, 0, &operands[0]);
    int read = 0, write = kStages - 1;
    for (int step = 0; step < steps; ++step) {
      loader.seek(step + kStages - 1, step + kStages - 1 < steps, fresh);
      loader.tabulate(step + kStages, read);
      const int next = read + 1 == kStages ? 0 : read + 1;
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        loader.fetch(write, smem, half);
        if (half < 3) {
          work.load(shared, read, half + 1, &operands[(half + 1) % 2]);
        } else {  // the next stage's first operands, while this stage's last are multiplied
          cp_async_commit();
          cp_async_wait<kStages - 2>();
          __syncthreads();  // stage `next` has landed for all threads, and all are done with stage `read`
          work.load(shared, next, 0, &operands[0]);
        }
        work.multiply(operands[half % 2]);
      }
      write = read;
      read = next;
    }
    fresh = !keep_weights;
    if (tile + gridDim.x >= tiles) grid_dependency_release();

    __syncthreads();  // the stages are free: the sums take their place, so that stores go out in 16-byte words
    work.stage_sums(staged, Smem::kPitch, warp, lane);
    outputs[threadIdx.x] = output_of(p, pixel);
    __syncthreads();
    constexpr int kWords = kTileN / 8;  // eight channels per thread and pass
    const int channel = threadIdx.x % kWords * 8;
    if (k + channel < k_end) {
      float bias[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) bias[e] = k + channel + e < k_end ? bias_at<T>(p, k + channel + e) : 0.f;
      constexpr int kRows = 4, kRowStep = kThreads / kWords;
#pragma unroll 1
      for (int row = threadIdx.x / kWords; row < kTileM; row += kRows * kRowStep) {
        float v[kRows][8];
        Output to[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          to[i] = outputs[row + i * kRowStep];
          const float* from = staged + (row + i * kRowStep) * Smem::kPitch + channel;
#pragma unroll
          for (int e = 0; e < 8; ++e) v[i][e] = from[e] + bias[e];
          if constexpr (kFetch == Fetch::kWordsOfX) {
            if (plan.group_outputs != static_cast<int>(plan.single_outputs.divisor) && to[i].y >= 0) {
#pragma unroll 1
              for (int e = 0; e < 8; ++e)
                if (!isfinite(from[e]) && k + channel + e < k_end)
                  staged[(row + i * kRowStep) * Smem::kPitch + channel + e] =
                      own_group_sum<T>(p, plan, sources[row + i * kRowStep], k + channel + e);
#pragma unroll
              for (int e = 0; e < 8; ++e) v[i][e] = from[e] + bias[e];
            }
          }
        }
        finish_outputs<T>(p, plan.vector_y, plan.vector_residual, v, to, k + channel, k_end);
      }
    }
    __syncthreads();
  }
}

template <class T, int kTileN, Fetch kFetch>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream, int merged = 1) {
  static OccupancyCache cache;
  constexpr auto kernel = conv_implicit_gemm_kernel<T, kTileN, kFetch>;
  constexpr size_t kSmem = Shared<kTileN>::kBytes + (kFetch == Fetch::kElements ? kStages * sizeof(TapTable) : 0);
  const GemmPlan plan(p, kFetch == Fetch::kElements ? 1 : kLanes<T>, kTileN, merged);
  const int64_t tiles = plan.most_tiles(p, kTileM);
  SBNET_CHECK(tiles <= INT32_MAX / 2, "%s: active: %lld tiles; at most 2^30 are wanted", kConvOp,
              static_cast<long long>(tiles));
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kThreads, kSmem, &cache, &ctas));
  const unsigned grid = persistent_grid(device, ctas, tiles, plan.fringe.threads(p), kThreads);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kThreads), kSmem, stream, p, plan));
  return ok_status();
}

// Are 16-byte words of x's channels whole, and within one group of `channels` input channels?
bool words_of_x(const Conv2dParams& p, int64_t channels) {
  return channels_vectorize(p.x) && channels % (16 / dtype_size(p.x.dtype)) == 0;
}

// How many small groups to compute as one, so that they fill a narrow tile: most of its products are with zeros, but
// single groups would leave most of the tile empty. 1 where that does not help.
int groups_to_merge(const Conv2dParams& p) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  int merged = 1;
  if (outputs <= 16 && p.weight.size[1] <= 64)
    for (int m = 2; m <= p.groups && m * outputs <= 64; ++m)
      if (p.groups % m == 0 && words_of_x(p, m * p.weight.size[1])) merged = m;
  return merged;
}

// The wide tile reads x half as often. The narrow one is for few output channels and for few tiles: the device should
// have several waves of them, more so as the list is seldom full.
bool wide_tile(const Conv2dParams& p, const DeviceInfo& device) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  return (outputs + 63) / 64 % 2 == 0 && GemmPlan(p, 1, 128).most_tiles(p, kTileM) >= 4 * device.sm_count;
}

template <class T>
Status launch_words(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return wide_tile(p, device) ? launch<T, 128, Fetch::kWords>(p, device, stream)
                              : launch<T, 64, Fetch::kWords>(p, device, stream);
}
template <class T>
Status launch_half(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int merged = groups_to_merge(p);
  if (merged > 1) return launch<T, 64, Fetch::kWordsOfX>(p, device, stream, merged);
  if (!words_of_x(p, p.weight.size[1])) return launch<T, 64, Fetch::kElements>(p, device, stream);
  if (!channels_vectorize(p.weight)) return launch<T, 64, Fetch::kWordsOfX>(p, device, stream);
  return launch_words<T>(p, device, stream);
}

}  // namespace

bool implicit_gemm_takes(const Conv2dParams& p) {
  return p.x.dtype != DType::kF32 || (p.allow_tf32 && words_of_x(p, p.weight.size[1]) && channels_vectorize(p.weight));
}

Status launch_implicit_gemm(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  switch (p.x.dtype) {
    case DType::kF16:
      return launch_half<__half>(p, device, stream);
    case DType::kBF16:
      return launch_half<__nv_bfloat16>(p, device, stream);
    default:
      return launch_words<float>(p, device, stream);
  }
}

}  // namespace sbnet::portable
