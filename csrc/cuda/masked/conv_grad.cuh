// What the kernels of a convolution's weight gradient share: how the list is cut into parts, and who adds them.
//
// A part sums the products of a range of the pixel list (conv_portable.cuh), in float32, into its own [K, R*S*C/groups]
// of the workspace; one more launch adds the parts in order, of all layers of a call. Where there are clusters, the
// CTAs of some parts add theirs in shared memory first; what is one part, or one cluster, is written as the gradient
// itself. How many parts there are depends on the count, which is read on the device, and on nothing that differs from
// run to run: the same list gives the same bits.
//
// Layers that the same instantiation takes share a launch: a small layer by itself waits for its first pixels and ends
// as long as it works. Together they are cut into parts of about the same work, some for each slot of the device, so
// that most layers need few parts or one, and no clusters.
#pragma once
#include "core/masked/conv_grad.h"
#include "cuda/capability.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/products.cuh"

namespace sbnet::portable {

constexpr const char* kGradOp = "sparse_conv2d_weight_grad";

struct GradParts {
  int64_t block_pixels;  // list entries of a block
  int32_t most;          // parts
  int32_t cluster = 1;   // parts that are added before they are stored: a divisor of `most`
  int32_t chunk;         // entries
  int32_t part_chunks;   // that a part has at least
  int64_t columns;       // R * S * C/groups
  int64_t elements;      // K * columns
  bool with_bias;
  bool packed, quads;  // is the gradient float32, packed as [K, R, S, C/groups]? May four neighbours be stored as one?

  GradParts() = default;
  GradParts(const ConvWeightGradParams& p, int64_t block_pixels, int64_t parts, int chunk_pixels, int least_chunks)
      : block_pixels(block_pixels), chunk(chunk_pixels), part_chunks(least_chunks), with_bias(p.bias) {
    const Conv2dParams& c = p.conv;
    columns = c.weight.size[1] * c.weight.size[2] * c.weight.size[3];
    elements = c.weight.size[0] * columns;
    const int64_t room = (int64_t{256} << 20) / (4 * elements);
    parts = std::min({parts, (chunks(c.active.capacity) + least_chunks - 1) / least_chunks, room});
    const TensorView& w = p.weight;
    const int64_t strides[4] = {columns, 1, w.size[3] * w.size[1], w.size[1]};
    packed = w.dtype == DType::kF32 && reinterpret_cast<uintptr_t>(w.data) % 16 == 0;
    for (int d = 0; d < 4; ++d) packed &= w.size[d] == 1 || w.stride[d] == strides[d];
    most = static_cast<int32_t>(std::max<int64_t>(parts, 1));
    cut();
  }
  void cut() { quads = columns % 4 == 0 && (stored() > 1 || packed); }
  // Adds parts in clusters, of `slots` CTAs that a device holds at once. Clusters of four fill ten elevenths of an
  // H200, of eight no more; of two all of it. What does not fit would be a second wave.
  void join(int64_t slots, int64_t tiles) {
    const int32_t four = static_cast<int32_t>(std::min<int64_t>(most, slots * 10 / 11 / tiles)) / 4 * 4;
    const int32_t two = most / 2 * 2;
    if (four && four * 10 >= two * 9)
      cluster = 4, most = four;
    else if (two)
      cluster = 2, most = two;
    cut();
  }
  __host__ __device__ int64_t chunks(int64_t blocks) const { return (blocks * block_pixels + chunk - 1) / chunk; }
  __host__ __device__ int32_t stored() const { return most / cluster; }
  int64_t workspace_floats(int64_t K) const { return stored() * (elements + (with_bias ? K : 0)); }
  __device__ __forceinline__ float* sums(float* workspace, int part) const { return workspace + part * elements; }
  __device__ __forceinline__ float* biases(float* workspace, int part, int64_t K) const {
    return workspace + stored() * elements + part * K;
  }
};

// The chunks of a part. Parts past the last chunk have none, and are not added.
struct PartRange {
  int64_t begin, end;
};
__device__ __forceinline__ int64_t chunks_of_part(const GradParts& parts, int64_t chunks) {
  const int64_t even = (chunks + parts.most - 1) / parts.most;
  return even > parts.part_chunks ? even : parts.part_chunks;
}
__device__ __forceinline__ PartRange range_of_part(const GradParts& parts, int count, int part) {
  const int64_t chunks = parts.chunks(count), each = chunks_of_part(parts, chunks);
  const int64_t begin = min(part * each, chunks);
  return {begin, min(begin + each, chunks)};
}
// Of those that are stored.
__device__ __forceinline__ int parts_in_use(const GradParts& parts, int count) {
  const int64_t chunks = parts.chunks(count);
  return chunks ? static_cast<int>((chunks - 1) / chunks_of_part(parts, chunks) / parts.cluster + 1) : 0;
}

// One element of the gradient: output channel k, column (r, s, c).
template <class T>
__device__ __forceinline__ void store_gradient(const TensorView& weight, const FastDiv& channels,
                                               const FastDiv& taps_per_row, int64_t k, uint32_t column, float sum) {
  uint32_t tap, c, r, s;
  channels.divmod(column, &tap, &c);
  taps_per_row.divmod(tap, &r, &s);
  static_cast<T*>(
      weight.data)[k * weight.stride[0] + c * weight.stride[1] + r * weight.stride[2] + s * weight.stride[3]] =
      from_float<T>(sum);
}

// A layer of a call.
struct GradWork {
  ConvWeightGradParams params;
  GradParts parts;
  float* workspace;
};

// Adds the parts of layers, up to kTogether in one launch: conv_grad_add.cu.
class GradAdder {
 public:
  GradAdder(const DeviceInfo& device, cudaStream_t stream) : device_(device), stream_(stream) {}
  Status add(const GradWork& work);  // is launched now or by a later call, by flush() at the latest
  Status flush();

  static constexpr int kTogether = 32;
  struct Layer {
    float4* weight;
    const float* workspace;
    const int32_t* count;
    int32_t capacity, lanes;  // threads that share a quad
    GradParts parts;
  };
  struct Launch {
    uint32_t ends[kTogether];  // CTAs of this layer and those before it
    Layer layer[kTogether];
  };
  static_assert(sizeof(Launch) <= 4096, "arguments of a launch");

 private:
  const DeviceInfo& device_;
  cudaStream_t stream_;
  Launch launch_;
  int count_ = 0;
  int64_t ctas_ = 0;
};

// CTAs of these kernels that a device holds at once, and parts so that it holds all.
inline int64_t grad_slots(const DeviceInfo& device) { return int64_t{2} * device.sm_count; }
inline int64_t parts_for(const DeviceInfo& device, int64_t tiles) {
  return grad_slots(device) / std::max<int64_t>(tiles, 1);
}
// Layers of a launch, whose arguments take 32 KB at most.
#if CUDART_VERSION >= 12010
constexpr int kGradTogether = 40;
#else
constexpr int kGradTogether = 4;
#endif

// May all pixels' places be told in 32 bits of words?
inline bool grad_in_reach(const TensorView& t) { return pixel_strides(t).n * t.size[0] / 8 < INT32_MAX / 2; }

// A kernel: how it cuts the list into parts, and its launch, with a workspace for those that are stored.
struct GradKernel {
  int (*variant)(const ConvWeightGradParams& p);  // layers of the same one share a launch; null: none do
  int64_t (*tiles)(const ConvWeightGradParams& p);
  // wanted: parts of a layer that shares a launch; 0: as many as one by itself needs.
  GradParts (*parts)(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t wanted);
  Status (*launch)(const GradWork* layers, int count, const DeviceInfo& device, cudaStream_t stream);
};
// One input channel a group.
extern const GradKernel kGradDepthwise;
// float16 and bfloat16 in whole words of channels: 3x3 with a stride of 1 or 2 by cells of 8x8 pixels; all others.
extern const GradKernel kGradCells, kGradRows;
// The same, with few input channels of any layout.
extern const GradKernel kGradFew;
bool grad_few_takes(const ConvWeightGradParams& p);
bool grad_cells_takes(const ConvWeightGradParams& p);
bool grad_rows_takes(const ConvWeightGradParams& p);
// The rest: float32, as tf32 or as it is, and channels that are no whole words.
extern const GradKernel kGradElements;

}  // namespace sbnet::portable
