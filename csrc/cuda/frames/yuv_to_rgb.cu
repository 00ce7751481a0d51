// yuv_to_rgb on CUDA, one launch: a thread makes four pixels of a row. It reads one and a half bytes a pixel and writes
// three numbers, once each: bound by memory.
#include "core/frames/yuv_to_rgb.h"
#include "cuda/by_dtype.cuh"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256, kQuad = 4;

template <class T>
__device__ __forceinline__ T unit_of(int level) {
  return static_cast<T>(static_cast<float>(level) / 255.0f);
}
template <>
__device__ __forceinline__ uint8_t unit_of<uint8_t>(int level) {
  return static_cast<uint8_t>(level);
}

// kWhole: rows are whole numbers of quads of a picture that lies as it is shown, so each access is aligned to its size.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ YuvToRgbParams p, const FastDiv quads_of_row, const int quads,
                   const int parts) {  // parts: CTAs of an image
  grid_dependency_release();
  grid_dependency_wait();
  const int64_t n = blockIdx.x / parts;
  const int quad = static_cast<int>(blockIdx.x - n * parts) * kThreads + threadIdx.x;
  if (quad >= quads) return;
  uint32_t y, first;
  quads_of_row.divmod(static_cast<uint32_t>(quad), &y, &first);
  const int64_t x = static_cast<int64_t>(first) * kQuad, wide = p.rgb.size[3];
  const uint8_t* image = p.planes + n * (p.height / 2 * 3) * p.width;
  T* to = static_cast<T*>(p.rgb.data) + ((n * p.rgb.size[2] + y) * wide + x) * 3;
  if (kWhole && x < p.width) {
    const int64_t row = min(static_cast<int64_t>(y), p.height - 1);
    const YuvPlace at = yuv_place(p, row, x);
    const uchar4 light = *reinterpret_cast<const uchar4*>(image + at.y);
    uchar2 u, v;
    if (p.planar) {
      u = *reinterpret_cast<const uchar2*>(image + at.u), v = *reinterpret_cast<const uchar2*>(image + at.v);
    } else {
      const uchar4 both = *reinterpret_cast<const uchar4*>(image + at.u);
      u = {both.x, both.z}, v = {both.y, both.w};
    }
    Pack<T, kQuad> made[3];
    int rgb[3];
    const int lights[kQuad] = {light.x, light.y, light.z, light.w};
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      rgb_of(p, lights[e], e < 2 ? u.x : u.y, e < 2 ? v.x : v.y, rgb);
#pragma unroll
      for (int c = 0; c < 3; ++c) made[(e * 3 + c) / kQuad].v[(e * 3 + c) % kQuad] = unit_of<T>(rgb[c]);
    }
#pragma unroll
    for (int k = 0; k < 3; ++k) reinterpret_cast<Pack<T, kQuad>*>(to)[k] = made[k];
    return;
  }
  for (int e = 0; e < kQuad && x + e < wide; ++e) {
    int64_t row, column;
    shown_at(p, y, x + e, &row, &column);
    const YuvPlace at = yuv_place(p, row, column);
    int rgb[3];
    rgb_of(p, image[at.y], image[at.u], image[at.v], rgb);
    for (int c = 0; c < 3; ++c) to[e * 3 + c] = unit_of<T>(rgb[c]);
  }
}

template <class T>
cudaError_t launch(const YuvToRgbParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t of_row = (p.rgb.size[3] + kQuad - 1) / kQuad, quads = of_row * p.rgb.size[2];
  // Chroma of four pixels is two bytes where it is planar: a quarter of luma's area has to be even for V, too.
  const bool whole = !p.turned && !p.over && !p.across && p.width % (2 * kQuad) == 0 && p.rgb.size[3] % kQuad == 0 &&
                     reinterpret_cast<uintptr_t>(p.planes) % 4 == 0 &&
                     reinterpret_cast<uintptr_t>(p.rgb.data) % (kQuad * sizeof(T)) == 0;
  const auto kernel = whole ? convert_kernel<T, true> : convert_kernel<T, false>;
  const int64_t parts = (quads + kThreads - 1) / kThreads;
  return launch_dependent(device, kernel, dim3(static_cast<unsigned>(p.images * parts)), dim3(kThreads), 0, stream, p,
                          FastDiv(static_cast<uint32_t>(of_row)), static_cast<int>(quads), static_cast<int>(parts));
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_yuv_to_rgb_cuda(const sbnet::YuvToRgbParams* params, void* stream_handle) {
  using namespace sbnet;
  const YuvToRgbParams& p = *params;
  constexpr const char* kOp = "yuv_to_rgb";
  SBNET_TRY(validate(p));
  SBNET_CHECK(size_product({p.rgb.size[2], p.rgb.size[3]}) <= INT32_MAX / kQuad &&
                  size_product({p.images, p.rgb.size[2], p.rgb.size[3] / kQuad + 1}) <= INT32_MAX,
              "%s: rgb: expected at most 2^29 pixels an image and 2^33 in all, got %lld of %lldx%lld", kOp,
              static_cast<long long>(p.images), static_cast<long long>(p.rgb.size[2]),
              static_cast<long long>(p.rgb.size[3]));
  if (p.images == 0) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (p.rgb.dtype == DType::kU8)
    SBNET_CUDA_TRY(kOp, launch<uint8_t>(p, device, stream));
  else
    SBNET_CUDA_TRY(kOp, by_dtype(p.rgb.dtype, [&](auto t) { return launch<decltype(t)>(p, device, stream); }));
  return ok_status();
}
