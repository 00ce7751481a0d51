// sparse_fill on CUDA, and the device copy that ONNX Runtime's in-place ops fall back to.
// A CTA takes a row (n, y) of the plane; its threads run over columns and channels, the packed one fastest.
#include "core/masked/fill.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256;

template <class V>
struct FillArgs {
  const V* x;
  V* y;
  const int32_t* block_map;
  int64_t x_stride[4], y_stride[4];  // N, C, H, W in units of V
  int64_t rows;
  int height, elements, columns, block_rows;  // elements: columns x channels of a row
  FastDiv inner, block_height, block_width;   // inner: channels where they are packed, else the width
  bool channels_inner, in_place;
  V value;
};

template <class V>
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ FillArgs<V> a) {
  grid_dependency_wait();
  grid_dependency_release();
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const int64_t n = r / a.height;
    const uint32_t row = static_cast<uint32_t>(r - n * a.height);
    const int32_t* map = a.block_map + (n * a.block_rows + a.block_height.quotient(row)) * a.columns;
    const V* x = a.x + n * a.x_stride[0] + row * a.x_stride[2];
    V* y = a.y + n * a.y_stride[0] + row * a.y_stride[2];
    for (uint32_t e = threadIdx.x; e < static_cast<uint32_t>(a.elements); e += kThreads) {
      uint32_t outer, inner;
      a.inner.divmod(e, &outer, &inner);
      const uint32_t column = a.channels_inner ? outer : inner, channel = a.channels_inner ? inner : outer;
      const bool active = map[a.block_width.quotient(column)] >= 0;
      if (active && a.in_place) continue;
      V v = a.value;
      if (active) v = x[channel * a.x_stride[1] + column * a.x_stride[3]];
      y[channel * a.y_stride[1] + column * a.y_stride[3]] = v;
    }
  }
}

bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <class V>
cudaError_t launch(const FillParams& p, const DeviceInfo& device, int64_t vector, V value, cudaStream_t stream) {
  FillArgs<V> a = {};
  a.x = static_cast<const V*>(p.x.data);
  a.y = static_cast<V*>(p.y.data);
  a.block_map = p.block_map;
  for (int d = 0; d < 4; ++d) {
    a.x_stride[d] = d == 1 ? p.x.stride[d] : p.x.stride[d] / vector;
    a.y_stride[d] = d == 1 ? p.y.stride[d] : p.y.stride[d] / vector;
  }
  const int64_t C = p.y.size[1] / vector, H = p.y.size[2], W = p.y.size[3];
  a.rows = p.y.size[0] * H;
  a.height = static_cast<int>(H);
  a.elements = static_cast<int>(C * W);
  a.columns = p.grid.count[1];
  a.block_rows = p.grid.count[0];
  a.channels_inner = p.y.stride[1] == 1;
  a.inner = FastDiv(a.channels_inner ? C : W);
  a.block_height = FastDiv(p.grid.size[0]);
  a.block_width = FastDiv(p.grid.size[1]);
  a.in_place = p.in_place();
  a.value = value;
  const int64_t most = int64_t{device.sm_count} * 8;
  return launch_dependent(device, fill_kernel<V>, dim3(static_cast<unsigned>(a.rows < most ? a.rows : most)),
                          dim3(kThreads), 0, stream, a);
}

// Channels as 16-byte vectors, where they are packed and every stride keeps the alignment.
bool vectorises(const FillParams& p, int64_t vector) {
  const TensorView* views[2] = {&p.x, &p.y};
  for (const TensorView* v : views) {
    if (v->stride[1] != 1 || v->size[1] % vector || !aligned(v->data, 16)) return false;
    for (int d = 0; d < 4; ++d)
      if (d != 1 && v->size[d] > 1 && v->stride[d] % vector) return false;
  }
  return true;
}

template <class T>
uint32_t bits_of(float value) {
  const T v = static_cast<T>(value);
  uint32_t bits = 0;
  memcpy(&bits, &v, sizeof(T));
  return bits;
}

cudaError_t dispatch(const FillParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool wide = p.x.dtype == DType::kF32;
  uint32_t bits = wide                       ? bits_of<float>(p.value)
                  : p.x.dtype == DType::kF16 ? bits_of<__half>(p.value)
                                             : bits_of<__nv_bfloat16>(p.value);
  const bool byte = dtype_size(p.x.dtype) == 1;  // the value is 0 then
  const int64_t vector = 16 / dtype_size(p.x.dtype);
  if (vectorises(p, vector)) {
    if (!wide) bits |= bits << 16;
    return launch<uint4>(p, device, vector, make_uint4(bits, bits, bits, bits), stream);
  }
  if (byte) return launch<uint8_t>(p, device, 1, 0, stream);
  return wide ? launch<uint32_t>(p, device, 1, bits, stream)
              : launch<uint16_t>(p, device, 1, static_cast<uint16_t>(bits), stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_fill_cuda(const sbnet::FillParams* params, void* stream) {
  using namespace sbnet;
  constexpr const char* kOp = "sparse_fill";
  const FillParams& p = *params;
  SBNET_TRY(validate(p));
  SBNET_CHECK(p.y.size[1] * p.y.size[3] <= INT32_MAX, "%s: x: expected fewer than 2^31 elements a row, got %lld", kOp,
              static_cast<long long>(p.y.size[1] * p.y.size[3]));
  if (!(p.y.size[0] * p.y.size[1] * p.y.size[2] * p.y.size[3])) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  SBNET_CUDA_TRY(kOp, dispatch(p, device, static_cast<cudaStream_t>(stream)));
  return ok_status();
}

sbnet::Status sbnet_copy_cuda(void* to, const void* from, int64_t bytes, void* stream) {
  using namespace sbnet;
  if (bytes)
    SBNET_CUDA_TRY("copy", cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                                           static_cast<cudaStream_t>(stream)));
  return ok_status();
}
