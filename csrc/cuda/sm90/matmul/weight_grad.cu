// Weight gradient of a block-sparse matmul: dW[b] = sum over pairs of x[:, c(b)]^T dy[:, k(b)], for the stored blocks.
//
// A unit is 128 input features x up to four pieces of 64 output features in which the layout has a block (any four:
// each is a TMA box of its own). Both warpgroups share the pieces of dy; each has 64 of the input features, m64n256 or,
// for units of two pieces, m64n128. The reduction runs over the rows of all pairs, 64 to a stage. Products outside of
// the layout are computed where a piece holds other blocks, and dropped.
//
//   warp 0        producer
//   warps 4-11    two warpgroups: WGMMA, stores
#include "cuda/sm90/matmul/launch.cuh"

namespace sbnet::sm90::matmul {
namespace {

constexpr const char* kOp = "blocksparse_weight_grad";
constexpr int kThreads = 384, kDepth = 64;  // rows of a stage
constexpr int kBox = kDepth * 128, kStage = (2 + kUnitPieces) * kBox, kStages = 4;
constexpr int kStaging = 16 * 128;  // of a warp
constexpr int kFull = kStages * kStage + 8 * kStaging, kEmpty = kFull + 8 * kStages, kShared = kEmpty + 8 * kStages;
static_assert(kShared <= 227 * 1024);

struct GradMaps {
  CUtensorMap x[kMaxWeightGradPairs], dy[kMaxWeightGradPairs];
};
struct GradArgs {
  const int32_t* plan;
  void* dw;
  int plan_words, block_size, blocks, pairs;
  int steps[kMaxWeightGradPairs];  // stages of each pair
  int all_steps;
  bool f32;
};

// The units of this CTA, there and back: the small ones come last.
struct Units {
  const GradArgs& a;
  int count, round = 0;
  __device__ __forceinline__ explicit Units(const GradArgs& args)
      : a(args), count(min(__ldg(a.plan), (a.plan_words - 1) / unit_words(a.block_size))) {}
  __device__ __forceinline__ const int32_t* next() {
    const int ctas = gridDim.x, cta = blockIdx.x;
    const int64_t unit = static_cast<int64_t>(round) * ctas + (round & 1 ? ctas - 1 - cta : cta);
    ++round;
    return unit < count ? a.plan + 1 + unit * unit_words(a.block_size) : nullptr;
  }
};

__device__ __forceinline__ void produce(const GradArgs& a, const GradMaps& maps, uint32_t smem) {
  grid_dependency_wait();
  Units units(a);
  int stage = 0, phase = 1;
  while (const int32_t* unit = units.next()) {
    const int first = __ldg(unit), pieces = __ldg(unit + 1) > 2 ? 4 : 2;
    int columns[kUnitPieces];
#pragma unroll
    for (int i = 0; i < kUnitPieces; ++i) columns[i] = __ldg(unit + 2 + i);
    for (int pair = 0; pair < a.pairs; ++pair)
      for (int row = 0; row < a.steps[pair] * kDepth; row += kDepth) {
        const uint32_t at = smem + stage * kStage, full = smem + kFull + 8 * stage;
        mbar_wait(smem + kEmpty + 8 * stage, phase);
        mbar_expect(full, (2 + pieces) * kBox);
        tma_load(at, &maps.x[pair], full, first, row);
        tma_load(at + kBox, &maps.x[pair], full, first + 64, row);
#pragma unroll
        for (int i = 0; i < kUnitPieces; ++i)
          if (i < pieces) tma_load(at + (2 + i) * kBox, &maps.dy[pair], full, columns[i], row);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
  }
}

// The block of row `row` (of 128) and column `column` (of 64) of a piece, and where in it they are; -1: none is stored.
__device__ __forceinline__ int64_t place(const GradArgs& a, const int32_t* blocks, int piece, int row, int column) {
  const int size = a.block_size, columns = size >= 64 ? 1 : 64 / size;
  const int part = row / size * columns + (size < 64 ? column / size : 0);
  const int id = __ldg(blocks + piece % kUnitPieces * unit_blocks(size) + part);
  if (static_cast<unsigned>(id) >= static_cast<unsigned>(a.blocks)) return -1;
  const int within = size == 128 ? column + (__ldg(blocks - kUnitPieces + piece) & 64) : column & (size - 1);
  return (static_cast<int64_t>(id) * size + (row & (size - 1))) * size + within;
}

// This warp's 16 rows of a piece. Halves go through 2 KB of shared memory of its own, 16 rows of 128 bytes, so that
// whole words of 16 bytes are written.
template <class T>
__device__ __forceinline__ void store_piece(const GradArgs& a, const int32_t* blocks, int piece, const float* sums,
                                            uint32_t staging) {
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 16 - 64;
  if (a.f32) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int64_t at = place(a, blocks, piece, first + lane / 4 + h * 8, j * 8 + lane % 4 * 2);
        if (at >= 0)
          *reinterpret_cast<float2*>(static_cast<float*>(a.dw) + at) =
              make_float2(sums[j * 4 + h * 2], sums[j * 4 + h * 2 + 1]);
      }
    return;
  }
  const int i = lane & 7, mat = lane >> 3;
  const uint32_t to = staging + ((mat & 1) * 8 + i) * 128;
  __syncwarp();  // the piece before has been read
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const float* p = sums + j * 4;
    stmatrix(to + (((j + (mat >> 1)) ^ i) << 4), pack<T>(p[0], p[1]), pack<T>(p[2], p[3]), pack<T>(p[4], p[5]),
             pack<T>(p[6], p[7]));
  }
  __syncwarp();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = q * 4 + lane / 8, word = lane & 7;
    const int64_t at = place(a, blocks, piece, first + row, word * 8);
    const float4 v = load_shared(staging + row * 128 + ((word ^ (row & 7)) << 4));
    if (at >= 0) *reinterpret_cast<float4*>(static_cast<T*>(a.dw) + at) = v;
  }
}

template <class T>
__device__ __forceinline__ void consume(const GradArgs& a, uint32_t smem) {
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1, lane = threadIdx.x & 31;
  const uint32_t x = operand(smem + wg * kBox, kBox), dy = operand(smem + 2 * kBox, kBox);
  const uint32_t staging = smem + kStages * kStage + ((threadIdx.x >> 5) - 4) * kStaging;
  grid_dependency_wait();
  Units units(a);
  int stage = 0, phase = 0;
  // Two widths, sums of their own: sharing registers would make ptxas serialise WGMMA.
  auto compute = [&](auto width, const int32_t* unit) {
    constexpr int kN = decltype(width)::value;
    float sums[kN / 2] = {};
    int held = -1;
    for (int step = 0; step < a.all_steps; ++step) {
      mbar_wait(smem + kFull + 8 * stage, phase);
      const uint32_t at = stage * (kStage >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k)
        multiply_add<T, kN, true, true>(sums, wgmma_layout(1024) | (x + at + k * (2048 >> 4)),
                                        wgmma_layout(1024) | (dy + at + k * (2048 >> 4)));
      wgmma_commit();
      if (held >= 0) {
        wgmma_wait<1>();
        if (lane == 0) mbar_arrive(smem + kEmpty + 8 * held);
      }
      held = stage;
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    if (held >= 0 && lane == 0) mbar_arrive(smem + kEmpty + 8 * held);
#pragma unroll
    for (int piece = 0; piece < kN / 64; ++piece)
      store_piece<T>(a, unit + 2 + kUnitPieces, piece, sums + piece * 32, staging);
  };
  while (const int32_t* unit = units.next()) {
    if (__shfl_sync(~0u, __ldg(unit + 1), 0) > 2)
      compute(std::integral_constant<int, 256>(), unit);
    else
      compute(std::integral_constant<int, 128>(), unit);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    weight_grad_kernel(const __grid_constant__ GradMaps maps, const __grid_constant__ GradArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = smem_address(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  grid_dependency_release();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(smem + kFull + 8 * i, 1);
      mbar_init(smem + kEmpty + 8 * i, 8);  // the consumers' warps
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (warp >= 4) {
    registers_up<208>();
    consume<T>(a, smem);
  } else {
    registers_down<88>();
    if (warp == 0 && lane == 0) produce(a, maps, smem);
  }
}

}  // namespace

Status launch_weight_grad(const BlocksparseWeightGradParams& p, const DeviceInfo& device, cudaStream_t stream) {
  GradMaps maps;
  GradArgs args = {};
  args.plan = p.plan, args.plan_words = static_cast<int>(p.plan_words);
  args.dw = p.dw, args.f32 = p.dw_dtype == DType::kF32;
  args.block_size = p.layout.shape.block_size, args.blocks = static_cast<int>(p.layout.shape.blocks);
  args.pairs = p.pairs;
  for (int i = 0; i < p.pairs; ++i) {
    Matrix x, dy;
    matrix_of(p.x[i], &x), matrix_of(p.dy[i], &dy);
    SBNET_TRY(matrix_map(&maps.x[i], kOp, "x", x, kDepth));
    SBNET_TRY(matrix_map(&maps.dy[i], kOp, "dy", dy, kDepth));
    args.steps[i] = static_cast<int>((x.rows + kDepth - 1) / kDepth);
    args.all_steps += args.steps[i];
  }
  const auto launch = [&](auto type) {
    constexpr auto kKernel = weight_grad_kernel<decltype(type)>;
    int workers = 0;
    SBNET_TRY(workers_of<kKernel>(kOp, device, kThreads, kShared, 0, &workers));
    const ClusterLaunch launch(workers, kThreads, kShared, 0, stream);
    SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&launch.config, kKernel, maps, args));
    return ok_status();
  };
  return p.x[0].dtype == DType::kBF16 ? launch(__nv_bfloat16()) : launch(__half());
}

}  // namespace sbnet::sm90::matmul
