// Adds the parts of a weight gradient: some threads share an element, and add every so manieth part of it, then what
// they found in order.
#include "cuda/masked/conv_grad.cuh"

namespace sbnet::portable {
namespace {

constexpr int kAddElements = 32, kAddLanes = 8;
constexpr int kQuadThreads = 128, kManyParts = 12;  // of so many on, threads share quads

template <class T>
__global__ void __launch_bounds__(kAddElements* kAddLanes)
    add_parts_kernel(const __grid_constant__ ConvWeightGradParams p, const __grid_constant__ GradParts parts,
                     const float* workspace, FastDiv columns, FastDiv channels, FastDiv taps_per_row) {
  __shared__ float found[kAddLanes][kAddElements];
  grid_dependency_wait();
  grid_dependency_release();
  const int used = parts_in_use(parts, clamped_count(p.conv.active.count, static_cast<int>(p.conv.active.capacity)));
  const int64_t K = p.conv.weight.size[0], all = parts.elements + (parts.with_bias ? K : 0);
  const int e = threadIdx.x % kAddElements, lane = threadIdx.x / kAddElements;
  for (int64_t first = int64_t{blockIdx.x} * kAddElements; first < all; first += int64_t{gridDim.x} * kAddElements) {
    const int64_t element = first + e;
    const bool of_bias = element >= parts.elements;
    const float* from =
        of_bias ? workspace + parts.stored() * parts.elements + (element - parts.elements) : workspace + element;
    const int64_t step = of_bias ? K : parts.elements;
    float sum = 0.f;
    if (element < all)
#pragma unroll 4
      for (int part = lane; part < used; part += kAddLanes) sum += from[part * step];
    found[lane][e] = sum;
    __syncthreads();
    if (lane == 0 && element < all) {
      for (int l = 1; l < kAddLanes; ++l) sum += found[l][e];
      if (of_bias) {
        p.bias[element - parts.elements] = sum;
      } else {
        const int64_t k = element / parts.columns;
        store_gradient<T>(p.weight, channels, taps_per_row, k, static_cast<uint32_t>(element - k * parts.columns), sum);
      }
    }
    __syncthreads();
  }
}

// The same of a gradient that is packed, by quads of elements; kLanes threads share one. Few parts need no more than
// one, and launches that take all quads at once: rounds of them waited for memory one after the other.
template <int kLanes>
__global__ void __launch_bounds__(kQuadThreads)
    add_quads_kernel(const __grid_constant__ ConvWeightGradParams p, const __grid_constant__ GradParts parts,
                     const float* workspace) {
  constexpr int kQuads = kQuadThreads / kLanes;
  __shared__ float4 found[kLanes > 1 ? kQuadThreads : 1];
  grid_dependency_wait();
  grid_dependency_release();
  const int used = parts_in_use(parts, clamped_count(p.conv.active.count, static_cast<int>(p.conv.active.capacity)));
  const int lane = threadIdx.x / kQuads;
  const int64_t quad = int64_t{blockIdx.x} * kQuads + threadIdx.x % kQuads;
  const bool in = quad * 4 < parts.elements;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const auto add = [&sum](const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };
  if (in)
#pragma unroll 4
    for (int part = lane; part < used; part += kLanes)
      add(*reinterpret_cast<const float4*>(workspace + part * parts.elements + quad * 4));
  if constexpr (kLanes > 1) {
    found[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0)
#pragma unroll
      for (int l = 1; l < kLanes; ++l) add(found[l * kQuads + threadIdx.x]);
  }
  if (in && lane == 0) static_cast<float4*>(p.weight.data)[quad] = sum;
}

}  // namespace

Status add_parts(const ConvWeightGradParams& p, const GradParts& parts, const float* workspace,
                 const DeviceInfo& device, cudaStream_t stream) {
  if (parts.packed && parts.quads && !p.bias) {
    const bool many = parts.stored() >= kManyParts;
    const int64_t quads = kQuadThreads / (many ? kAddLanes : 1), ctas = (parts.elements / 4 + quads - 1) / quads;
    SBNET_CUDA_TRY(kGradOp, launch_dependent(device, many ? add_quads_kernel<kAddLanes> : add_quads_kernel<1>,
                                             dim3(static_cast<unsigned>(ctas)), dim3(kQuadThreads), 0, stream, p, parts,
                                             workspace));
    return ok_status();
  }
  const int64_t all = parts.elements + (p.bias ? p.conv.weight.size[0] : 0);
  const int64_t ctas = std::min<int64_t>((all + kAddElements - 1) / kAddElements, int64_t{device.sm_count} * 16);
  const FastDiv columns(parts.columns), channels(p.conv.weight.size[1]), taps(p.conv.weight.size[3]);
  return by_dtype(p.weight.dtype, [&](auto t) -> Status {
    SBNET_CUDA_TRY(kGradOp, launch_dependent(device, add_parts_kernel<decltype(t)>, dim3(static_cast<unsigned>(ctas)),
                                             dim3(kAddElements * kAddLanes), 0, stream, p, parts, workspace, columns,
                                             channels, taps));
    return ok_status();
  });
}

}  // namespace sbnet::portable
