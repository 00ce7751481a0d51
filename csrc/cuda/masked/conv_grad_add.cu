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

// The same of gradients that are packed, by quads of elements, and of biases; some threads share one. Few parts need no
// more than one, and launches that take all quads at once: rounds of them waited for memory one after the other.
__global__ void __launch_bounds__(kQuadThreads) add_quads_kernel(const __grid_constant__ GradAdder::Launch launch) {
  __shared__ float4 found[kQuadThreads];
  int of = 0;
#pragma unroll
  for (int k = 0; k < GradAdder::kTogether - 1; ++k) of += blockIdx.x >= launch.ends[k];
  const GradAdder::Layer& layer = launch.layer[of];
  const uint32_t cta = blockIdx.x - (of ? launch.ends[of - 1] : 0);
  const int lanes = layer.lanes, quads = kQuadThreads / lanes;
  const int lane = threadIdx.x / quads;
  const int64_t quad = int64_t{cta} * quads + threadIdx.x % quads, elements = layer.parts.elements;
  const bool in = quad * 4 < elements;
  grid_dependency_wait();
  grid_dependency_release();
  const int used = parts_in_use(layer.parts, clamped_count(layer.count, layer.capacity));
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const auto add = [&sum](const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };
  if (in)
#pragma unroll 4
    for (int part = lane; part < used; part += lanes)
      add(*reinterpret_cast<const float4*>(layer.workspace + part * elements + quad * 4));
  if (lanes > 1) {
    found[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0)
#pragma unroll
      for (int l = 1; l < kAddLanes; ++l) add(found[l * quads + threadIdx.x]);
  }
  if (in && lane == 0) layer.weight[quad] = sum;
}

}  // namespace

Status GradAdder::add(const GradWork& work) {
  const ConvWeightGradParams& p = work.params;
  const GradParts& parts = work.parts;
  const int64_t K = p.conv.weight.size[0];
  if (parts.packed && parts.elements % 4 == 0 && (!p.bias || K % 4 == 0)) {
    const int lanes = parts.stored() >= kManyParts ? kAddLanes : 1;
    const auto take = [&](float* to, const float* workspace, int64_t elements) -> Status {
      const int64_t quads = kQuadThreads / lanes, ctas = (elements / 4 + quads - 1) / quads;
      if (count_ == kTogether || ctas_ + ctas > INT32_MAX) SBNET_TRY(flush());
      Layer& layer = launch_.layer[count_];
      layer = {reinterpret_cast<float4*>(to),
               workspace,
               p.conv.active.count,
               static_cast<int32_t>(p.conv.active.capacity),
               lanes,
               parts};
      layer.parts.elements = elements;
      launch_.ends[count_++] = static_cast<uint32_t>(ctas_ += ctas);
      return ok_status();
    };
    SBNET_TRY(take(static_cast<float*>(p.weight.data), work.workspace, parts.elements));
    return p.bias ? take(p.bias, work.workspace + parts.stored() * parts.elements, K) : ok_status();
  }
  const int64_t all = parts.elements + (p.bias ? K : 0);
  const int64_t ctas = std::min<int64_t>((all + kAddElements - 1) / kAddElements, int64_t{device_.sm_count} * 16);
  const FastDiv columns(parts.columns), channels(p.conv.weight.size[1]), taps(p.conv.weight.size[3]);
  const float* const workspace = work.workspace;
  return by_dtype(p.weight.dtype, [&](auto t) -> Status {
    SBNET_CUDA_TRY(kGradOp, launch_dependent(device_, add_parts_kernel<decltype(t)>, dim3(static_cast<unsigned>(ctas)),
                                             dim3(kAddElements * kAddLanes), 0, stream_, p, parts, workspace, columns,
                                             channels, taps));
    return ok_status();
  });
}

Status GradAdder::flush() {
  if (!count_) return ok_status();
  std::fill(launch_.ends + count_, launch_.ends + kTogether, static_cast<uint32_t>(ctas_));
  SBNET_CUDA_TRY(kGradOp, launch_dependent(device_, add_quads_kernel, dim3(static_cast<unsigned>(ctas_)),
                                           dim3(kQuadThreads), 0, stream_, launch_));
  count_ = 0, ctas_ = 0;
  return ok_status();
}

}  // namespace sbnet::portable
