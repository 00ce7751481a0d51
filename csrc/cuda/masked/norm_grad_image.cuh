// Gradients of norms whose statistics are an image's (group, response): one launch folds or sums the blocks, one makes
// a table of each image's channels, one writes dx by it and adds up the gradients of weight and bias.
#pragma once
#include "core/masked/norm_grad.h"
#include "cuda/masked/block_fold.cuh"
#include "cuda/masked/norm_image.cuh"

namespace sbnet {

constexpr int kTableThreads = 256, kResponseThreads = 1024;  // few CTAs, which wait for memory

// The sums of two numbers of all threads.
template <int kThreads>
__device__ __forceinline__ float2 sums_of_cta(float2 v, float2* found) {
  return merged_of_cta<kThreads>(v, found, [](float2& to, float2 other) { to.x += other.x, to.y += other.y; });
}

// A CTA takes an image.
template <class T>
__global__ void __launch_bounds__(kResponseThreads)
    response_grad_kernel(const __grid_constant__ NormGradParams p, int parts, const float* given, float* table) {
  __shared__ float2 found[kResponseThreads];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1], n = blockIdx.x;
  float* const to = table + kGradRows * n * C;
  float2 sums = {0.f, 0.f};  // of G, and of G S
  for (int64_t c = threadIdx.x; c < C; c += kResponseThreads) {
    float square = 0.f, both = 0.f, sum = 0.f;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) {
      const float* own = given + (n * parts + part) * 3 * C + c;
      square += own[0], both += own[C], sum += own[2 * C];
    }
    const float root = sqrtf(square);
    to[kOfX * C + c] = root, to[kOfWeight * C + c] = both, to[kOfBias * C + c] = sum;
    sums.x += root, sums.y += root * both * parameter<T>(p.weight, p.param_dtype, c, 1.f);
  }
  sums = sums_of_cta<kResponseThreads>(sums, found);
  const float share = 1.f / static_cast<float>(C), scale = 1.f / (sums.x * share + p.eps);
  const float mean = sums.y * share * scale * scale;
  for (int64_t c = threadIdx.x; c < C; c += kResponseThreads) {
    const float root = to[kOfX * C + c], both = to[kOfWeight * C + c];
    const float weight = parameter<T>(p.weight, p.param_dtype, c, 1.f);
    to[kOfGrad * C + c] = 1.f + weight * root * scale;
    to[kOfX * C + c] = root > 0.f ? (weight * both * scale - mean) / root : 0.f;
    to[kShift * C + c] = to[kMean * C + c] = 0.f;
    to[kOfWeight * C + c] = both * root * scale;
  }
}

// A CTA takes a group of an image.
template <class T>
__global__ void __launch_bounds__(kTableThreads)
    group_grad_kernel(const __grid_constant__ NormGradParams p, const __grid_constant__ FoldParts parts,
                      const float* values, const float* counts, float* table) {
  using PartMoments = GradMoments<double>;
  __shared__ PartMoments moments[kTableThreads];
  __shared__ float2 found[kTableThreads];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1], group = C / p.groups;
  for (int64_t g = blockIdx.x; g < p.x.size[0] * p.groups; g += gridDim.x) {
    const int64_t n = g / p.groups, first = g % p.groups * group;
    PartMoments all = {};
    for (int64_t k = threadIdx.x; k < group * parts.slices; k += kTableThreads) {
      const int64_t part = n * parts.slices + k / group;
      const float* own = values + 4 * part * C + first + k % group;
      all.merge({counts[part], own[0], own[C], 0, 0});
    }
    all = merged_of_cta<kTableThreads>(all, moments, [](PartMoments& to, const PartMoments& o) { to.merge(o); });
    const float share = 1.f / fmaxf(static_cast<float>(all.count), 1.f);
    const float scale = 1.f / sqrtf(static_cast<float>(all.square) * share + p.eps);
    float* const to = table + kGradRows * n * C;
    float2 sums = {0.f, 0.f};  // of g, and of g xhat
    for (int64_t c = first + threadIdx.x; c < first + group; c += kTableThreads) {
      float sum = 0.f, both = 0.f;
      for (int64_t part = n * parts.slices; part < (n + 1) * parts.slices; ++part) {
        const float* own = values + 4 * part * C + c;
        sum += own[2 * C];
        both += own[3 * C] + own[2 * C] * static_cast<float>(own[0] - all.mean);
      }
      both *= scale;
      const float weight = parameter<T>(p.weight, p.param_dtype, c, 1.f);
      to[kOfGrad * C + c] = weight * scale;
      to[kMean * C + c] = static_cast<float>(all.mean);
      to[kOfWeight * C + c] = both, to[kOfBias * C + c] = sum;
      sums.x += weight * sum, sums.y += weight * both;
    }
    sums = sums_of_cta<kTableThreads>(sums, found);
    for (int64_t c = first + threadIdx.x; c < first + group; c += kTableThreads) {
      to[kOfX * C + c] = -scale * scale * sums.y * share;
      to[kShift * C + c] = -scale * sums.x * share;
    }
    __syncthreads();  // before the next group overwrites what this one reads
  }
}

template <class T, int kN>
__global__ void __launch_bounds__(kImageThreads)
    image_grad_kernel(const __grid_constant__ NormGradParams p, const __grid_constant__ ImagePlan plan,
                      const float* table) {
  grid_dependency_wait();
  grid_dependency_release();
  apply_image<T, kN, kMean + 1, true>(p, p.grad, plan, table, kGradRows,
                                      [](const float (&own)[kMean + 1], float x, float dy) {
                                        return dy * own[kOfGrad] + (x - own[kMean]) * own[kOfX] + own[kShift];
                                      });
  const int C = static_cast<int>(p.x.size[1]);
  for (int k = blockIdx.x * kImageThreads + threadIdx.x; k < 2 * C; k += gridDim.x * kImageThreads) {
    float sum = 0.f;
#pragma unroll 8
    for (int64_t n = 0; n < p.x.size[0]; ++n) sum += table[(kGradRows * n + kOfWeight) * C + k];
    p.grad_params[k] = sum;
  }
}

template <class T, int kN>
Status launch_image_grad(const char* op, const NormGradParams& p, float* workspace, const DeviceInfo& device,
                         cudaStream_t stream) {
  const ImagePlan plan(p, kN);
  SBNET_TRY(check_image(op, p, plan));
  const float *found = workspace, *read;
  float* table = workspace;
  const dim3 images(static_cast<unsigned>(p.x.size[0]));
  if (p.kind == NormKind::kResponse) {
    table += p.x.size[0] * plan.parts * 3 * p.x.size[1];
    const dim3 ctas(static_cast<unsigned>(p.x.size[0] * plan.parts * plan.chunks.divisor));
    SBNET_CUDA_TRY(op, launch_dependent(device, image_sums_kernel<T, kN, 3, NormGradParams>, ctas, dim3(kImageThreads),
                                        0, stream, p, p.grad, plan, workspace));
    SBNET_CUDA_TRY(op, launch_dependent(device, response_grad_kernel<T>, images, dim3(kResponseThreads), 0, stream, p,
                                        plan.parts, found, table));
  } else {
    const FoldParts parts = cuda_parts(p);
    SBNET_TRY((launch_fold<T, GradientFold>(op, parts, workspace, device, stream, &p.grad)));
    const float* counts = fold_counts(parts, FoldKind::kGradient, workspace);
    table = grad_table(parts, workspace);
    const int64_t ctas = std::min(p.x.size[0] * p.groups, int64_t{device.sm_count} * 8);
    SBNET_CUDA_TRY(op, launch_dependent(device, group_grad_kernel<T>, dim3(static_cast<unsigned>(ctas)),
                                        dim3(kTableThreads), 0, stream, p, parts, found, counts, table));
  }
  read = table;
  SBNET_CUDA_TRY(op, launch_dependent(device, image_grad_kernel<T, kN>, image_ctas(p, plan, device),
                                      dim3(kImageThreads), 0, stream, p, plan, read));
  return ok_status();
}

}  // namespace sbnet
