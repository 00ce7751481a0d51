// sparse_norm2d on CUDA. Of images: one launch folds the blocks (block_fold.cuh) or sums squares (norm_image.cuh), one
// makes each channel's mean, scale and shift, one applies them. Of pixels: some lanes of a warp take the channels of a
// pixel; LayerNorm of words of channels has a kernel of its own (norm_layer.cuh).
#include "core/masked/norm.h"
#include "cuda/masked/block_fold.cuh"
#include "cuda/masked/norm_image.cuh"
#include "cuda/masked/norm_layer.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_norm2d";
constexpr int kThreads = 256;

// ---- of images

constexpr int kResponseThreads = 1024;  // few CTAs, which wait for memory

// A CTA takes an image.
template <class T>
__global__ void __launch_bounds__(kResponseThreads)
    response_kernel(const __grid_constant__ NormParams p, int parts, const float* sums, float* table) {
  __shared__ float found[kResponseThreads];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1], n = blockIdx.x;
  float* const to = table + 3 * n * C;
  float sum = 0.f;
  for (int64_t c = threadIdx.x; c < C; c += kResponseThreads) {
    float square = 0.f;
#pragma unroll 16
    for (int part = 0; part < parts; ++part) square += sums[(n * parts + part) * C + c];
    to[C + c] = sqrtf(square);
    sum += to[C + c];
  }
  sum = merged_of_cta<kResponseThreads>(sum, found, [](float& to, float other) { to += other; });
  const float scale = 1.f / (sum / static_cast<float>(C) + p.eps);
  for (int64_t c = threadIdx.x; c < C; c += kResponseThreads) {
    to[c] = 0.f;
    to[C + c] = 1.f + parameter<T>(p.weight, p.param_dtype, c, 1.f) * to[C + c] * scale;
    to[2 * C + c] = parameter<T>(p.bias, p.param_dtype, c, 0.f);
  }
}

// A CTA takes a group of an image.
template <class T>
__global__ void __launch_bounds__(kThreads)
    table_kernel(const __grid_constant__ NormParams p, const __grid_constant__ FoldParts parts, const float* values,
                 const float* counts, float* table) {
  __shared__ PartMoments found[kThreads];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1], group = C / p.groups;
  for (int64_t g = blockIdx.x; g < p.x.size[0] * p.groups; g += gridDim.x) {
    const int64_t n = g / p.groups, first = g % p.groups * group;
    PartMoments all = {};
    for (int64_t k = threadIdx.x; k < group * parts.slices; k += kThreads) {
      const int64_t part = n * parts.slices + k / group, c = first + k % group;
      all.merge({counts[part], values[2 * part * C + c], values[(2 * part + 1) * C + c]});
    }
    all = merged_of_cta<kThreads>(all, found, [](PartMoments& to, const PartMoments& other) { to.merge(other); });
    const float scale = 1.f / sqrtf(static_cast<float>(all.square) / fmaxf(all.count, 1.f) + p.eps);
    float* to = table + 3 * n * C;
    for (int64_t c = first + threadIdx.x; c < first + group; c += kThreads) {
      to[c] = static_cast<float>(all.mean);
      to[C + c] = scale * parameter<T>(p.weight, p.param_dtype, c, 1.f);
      to[2 * C + c] = parameter<T>(p.bias, p.param_dtype, c, 0.f);
    }
    __syncthreads();  // before the next group overwrites what this one reads
  }
}

template <class T, int kN>
__global__ void __launch_bounds__(kImageThreads)
    image_kernel(const __grid_constant__ NormParams p, const __grid_constant__ ImagePlan plan, const float* table) {
  grid_dependency_wait();
  grid_dependency_release();
  apply_image<T, kN, 3, false>(p, p.x, plan, table, 3,
                               [](const float (&own)[3], float x, float) { return (x - own[0]) * own[1] + own[2]; });
}

template <class T, int kN>
Status launch_image(const NormParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  const ImagePlan plan(p, kN);
  SBNET_TRY(check_image(kOp, p, plan));
  float *const sums = static_cast<float*>(workspace), *table = sums;
  const float *found = sums, *read;
  const dim3 images(static_cast<unsigned>(p.x.size[0]));
  if (p.kind == NormKind::kResponse) {
    table += p.x.size[0] * plan.parts * p.x.size[1];
    const dim3 ctas(static_cast<unsigned>(p.x.size[0] * plan.parts * plan.chunks.divisor));
    SBNET_CUDA_TRY(kOp, launch_dependent(device, image_sums_kernel<T, kN, 1, NormParams>, ctas, dim3(kImageThreads), 0,
                                         stream, p, p.x, plan, sums));
    SBNET_CUDA_TRY(kOp, launch_dependent(device, response_kernel<T>, images, dim3(kResponseThreads), 0, stream, p,
                                         plan.parts, found, table));
  } else {
    const FoldParts parts = cuda_parts(p);
    SBNET_TRY((launch_fold<T, MomentsFold>(kOp, parts, workspace, device, stream)));
    const float* counts = fold_counts(parts, FoldKind::kMoments, workspace);
    table = group_table(parts, workspace);
    const int64_t ctas = std::min(p.x.size[0] * p.groups, int64_t{device.sm_count} * 8);
    SBNET_CUDA_TRY(kOp, launch_dependent(device, table_kernel<T>, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0,
                                         stream, p, parts, found, counts, table));
  }
  read = table;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, image_kernel<T, kN>, image_ctas(p, plan, device), dim3(kImageThreads), 0,
                                       stream, p, plan, read));
  return ok_status();
}

// ---- pixels

struct ChannelPlan {
  FastDiv width;   // of a block
  int64_t pixels;  // of a block
  int log2_lanes;  // lanes of a warp that share a pixel
  int words;       // of a pixel
  FringePlan fringe;
};

// A lane adds up to thousands of numbers one after the other. What each addition rounds off is kept: the errors of
// float sums would grow with the root of their length (Kahan, 1965).
struct LaneSum {
  float value, lost;
  __device__ void add(float v) {
    const float wanted = v - lost, all = value + wanted;
    lost = (all - value) - wanted;
    value = all;
  }
};

struct LaneMoments {
  float count;
  LaneSum mean, square;
  __device__ void merge(const Moments& other) {  // as Moments::merge
    const float all = count + other.count, share = other.count / all, apart = other.mean - mean.value;
    mean.add(apart * share);
    square.add(other.square + apart * apart * (count * share));
    count = all;
  }
};

__device__ __forceinline__ Moments shared_with(Moments v, int lanes) {
  for (int away = 1; away < lanes; away *= 2)
    v.merge({__shfl_xor_sync(0xffffffffu, v.count, away), __shfl_xor_sync(0xffffffffu, v.mean, away),
             __shfl_xor_sync(0xffffffffu, v.square, away)});
  return v;
}

// What lanes found of exp(x - most): the largest x, and the sum.
struct Exponents {
  float most, sum;
  __device__ void merge(float other_most, float other_sum) {
    const float both = max_nan(most, other_most);
    // -inf less -inf is NaN: a lane without channels has a sum of 0.
    sum = (sum == 0.f ? 0.f : sum * expf(most - both)) + (other_sum == 0.f ? 0.f : other_sum * expf(other_most - both));
    most = both;
  }
};

template <class T, int kN>
__global__ void __launch_bounds__(kThreads)
    channel_kernel(const __grid_constant__ NormParams p, const __grid_constant__ ChannelPlan plan) {
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, threads = int64_t{gridDim.x} * kThreads;
  clear_fringe<T>(p, plan.fringe, thread, threads);

  const BlockGrid& grid = p.active.grid;
  const int lanes = 1 << plan.log2_lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t pixels = clamped_count(p.active.count, static_cast<int>(p.active.capacity)) * plan.pixels;
  const bool layer = p.kind == NormKind::kLayer;
  // All lanes of a warp go round together: they exchange what they found.
  for (int64_t first = int64_t{blockIdx.x} * kThreads; first >> plan.log2_lanes < pixels; first += threads) {
    const int64_t pixel = (first + threadIdx.x) >> plan.log2_lanes, slot = pixel / plan.pixels;
    uint32_t row, column;
    plan.width.divmod(static_cast<uint32_t>(pixel - slot * plan.pixels), &row, &column);
    BlockIndex b = {};
    bool inside = pixel < pixels && load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b);
    row += b.i * grid.size[0], column += b.j * grid.size[1];
    inside = inside && row < p.y.size[2] && column < p.y.size[3];
    const T* x = static_cast<const T*>(p.x.data) + b.n * p.x.stride[0] + row * p.x.stride[2] + column * p.x.stride[3];
    T* y = static_cast<T*>(p.y.data) + b.n * p.y.stride[0] + row * p.y.stride[2] + column * p.y.stride[3];
    const int words = inside ? plan.words : 0;

    LaneMoments own = {};
    Exponents exponents = {-INFINITY, 0.f};
    for (int w = lane; w < words; w += lanes) {
      const Word<T, kN> in = *reinterpret_cast<const Word<T, kN>*>(x + int64_t{w} * kN * p.x.stride[1]);
      float sum = 0.f, most = -INFINITY, rest = 0.f;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        sum += to_float(in.channel[e]);
        most = max_nan(most, to_float(in.channel[e]));
      }
      const float about = layer ? sum / kN : most == -INFINITY ? 0.f : most;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const float apart = to_float(in.channel[e]) - about;
        rest += layer ? apart * apart : expf(apart);
      }
      if (layer)
        own.merge({static_cast<float>(kN), about, rest});
      else
        exponents.merge(most, rest);
    }
    Moments moments = {own.count, own.mean.value, own.square.value};
    if (layer) moments = shared_with(moments, lanes);
    for (int away = 1; away < lanes && !layer; away *= 2)
      exponents.merge(__shfl_xor_sync(0xffffffffu, exponents.most, away),
                      __shfl_xor_sync(0xffffffffu, exponents.sum, away));
    const float about = layer ? moments.mean : exponents.most;
    const float scale = layer ? 1.f / sqrtf(moments.square / static_cast<float>(p.x.size[1]) + p.eps)
                        : p.kind == NormKind::kSoftmax ? 1.f / exponents.sum
                                                       : logf(exponents.sum);
    for (int w = lane; w < words; w += lanes) {
      const Word<T, kN> in = *reinterpret_cast<const Word<T, kN>*>(x + int64_t{w} * kN * p.x.stride[1]);
      Word<T, kN> out;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const int64_t c = int64_t{w} * kN + e;
        float v = to_float(in.channel[e]) - about;
        if (layer)
          v = v * scale * parameter<T>(p.weight, p.param_dtype, c, 1.f) + parameter<T>(p.bias, p.param_dtype, c, 0.f);
        else
          v = p.kind == NormKind::kSoftmax ? expf(v) * scale : v - scale;
        out.channel[e] = from_float<T>(v);
      }
      *reinterpret_cast<Word<T, kN>*>(y + int64_t{w} * kN * p.y.stride[1]) = out;
    }
  }
}

template <class T, int kN>
Status launch_channels(const NormParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
  const int64_t width = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  ChannelPlan plan;
  plan.pixels = height * width;
  SBNET_CHECK(plan.pixels <= INT32_MAX / 2, "%s: active: expected blocks of at most 2^30 pixels, got %lld", kOp,
              static_cast<long long>(plan.pixels));
  plan.width = FastDiv(width);
  plan.words = static_cast<int>(p.x.size[1] / kN);
  plan.log2_lanes = 0;
  if (p.y.stride[1] <= p.y.stride[3])  // else neighbouring lanes take neighbouring pixels
    while (plan.log2_lanes < 5 && 1 << plan.log2_lanes < plan.words) ++plan.log2_lanes;
  plan.fringe = FringePlan(p);
  const int64_t most = (p.active.capacity * plan.pixels) << plan.log2_lanes;
  const int64_t wanted = (std::max(most, plan.fringe.threads(p)) + kThreads - 1) / kThreads;
  const dim3 ctas(static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{device.sm_count} * 8)));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, channel_kernel<T, kN>, ctas, dim3(kThreads), 0, stream, p, plan));
  return ok_status();
}

template <class T>
Status launch_type(const NormParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  if (of_images(p.kind))
    return words_of_channels<T>(p) ? launch_image<T, kLanes<T>>(p, workspace, device, stream)
                                   : launch_image<T, 1>(p, workspace, device, stream);
  LayerPlan plan;
  if (p.kind == NormKind::kLayer && plan_layer<T>(p, &plan)) return launch_layer<T>(kOp, p, plan, device, stream);
  return words_of_channels<T>(p) ? launch_channels<T, kLanes<T>>(p, device, stream)
                                 : launch_channels<T, 1>(p, device, stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_norm2d_cuda(const sbnet::NormParams* params, void* workspace, void* stream_handle) {
  using namespace sbnet;
  return run_layer_by_dtype(kOp, *params, stream_handle, [&](auto t, const DeviceInfo& device, cudaStream_t stream) {
    return launch_type<decltype(t)>(*params, workspace, device, stream);
  });
}
