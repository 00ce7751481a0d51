// Attention within windows in float32, by fused multiply-adds. A CTA has 64 active rows of a window, for one head of an
// image, and all columns of the output; lists as window_attention.cu has them.
#include "cuda/attention/simt.cuh"
#include "cuda/attention/window_attention.cuh"

namespace sbnet::portable {
namespace simt {
namespace {

// The tile's first bytes.
struct Chunks {
  float left[kTile * kChunkPitch], right[kTile * kChunkPitch], weights[kTile * kWeightPitch], rows[kChunk * 128];
};
static_assert(sizeof(Chunks) == WindowTile::of_floats().pixels, "what core says of shared memory");
constexpr int kPadding = -1, kNone = -2;

// Rows of the pixels that are listed; of padding `fill`, if there is one, else zeros.
struct Pixels {
  const float *data, *fill;
  int64_t stride;
  const int* pixels;
  __device__ const float* row(int r) const {
    const int pixel = pixels[r];
    return pixel >= 0 ? data + pixel * stride : pixel == kPadding ? fill : nullptr;
  }
};

__device__ float length_factor(const float* row, int dim, float least) {
  float sum = 0.f;
  for (int d = 0; row && d < dim; ++d) sum = fmaf(row[d], row[d], sum);
  return 1.f / fmaxf(sqrtf(sum), least);
}

template <int kColumns, Bias kBias>
__global__ void __launch_bounds__(kThreads) window_attention_simt_kernel(const __grid_constant__ Args a) {
  constexpr WindowTile kParts = WindowTile::of_floats();
  constexpr bool kTables = kBias == Bias::kTables;
  extern __shared__ __align__(1024) uint8_t shared[];
  const WindowAttentionParams& p = a.p;
  Chunks& b = *reinterpret_cast<Chunks*>(shared);
  const auto ints = [&](int at) { return reinterpret_cast<int*>(shared + at); };
  const auto floats = [&](int at) { return reinterpret_cast<float*>(shared + at); };
  int *row_pixels = ints(kParts.pixels), *row_places = ints(kParts.places), *key_pixels = ints(kParts.key_pixels);
  float *row_factors = floats(kParts.row_factors), *key_factors = floats(kParts.key_factors);
  uint16_t* list = reinterpret_cast<uint16_t*>(shared + kParts.list);
  float* relative = floats(kParts.relative(p.keys));
  const WindowWork work(a, kTile);
  for (int i = threadIdx.x; i < kTile; i += kThreads) row_pixels[i] = kNone, row_places[i] = 0;
  __syncthreads();
  grid_dependency_wait();
  const int rows = list_rows<kThreads, kTile>(a, work, row_pixels, row_places, ints(kParts.sums));
  if (!rows) return;
  const int keys = list_keys<kThreads, kBias>(a, work, list, ints(kParts.sums));
  const int64_t* key_index = p.key_index + int64_t{work.window} * p.keys;
  const int64_t at = int64_t{work.head} * p.dim, value_at = int64_t{work.head} * p.value_dim;
  const auto fill = [](const void* numbers, int64_t first) {
    return numbers ? static_cast<const float*>(numbers) + first : nullptr;
  };
  const Pixels q = {head_of<float>(p.q, work.n, p.starts[0], at), nullptr, p.stride(p.q), row_pixels};
  const Pixels k = {head_of<float>(p.k, work.n, p.starts[1], at), fill(p.k_fill, at), p.stride(p.k), key_pixels};
  const Pixels v = {head_of<float>(p.v, work.n, p.starts[2], value_at), fill(p.v_fill, value_at), p.stride(p.v),
                    key_pixels};
  if (p.normalize > 0.f && threadIdx.x < kTile)
    row_factors[threadIdx.x] = length_factor(q.row(threadIdx.x), p.dim, p.normalize);
  if constexpr (kTables)
    relative_products<float, kThreads>(a, row_places, rows, relative, [&](int r, const float* table) {
      const float* row = q.row(r);
      float sum = 0.f;
      for (int d = 0; row && d < p.dim; ++d) sum = fmaf(row[d], table[d], sum);
      return sum;
    });
  __syncthreads();
  const float factor = p.scale * (p.scales.data ? number<float>(p.scales, work.head) : 1.f);
  const int64_t bias_at = ((p.bias_windows > 1 ? work.window : 0) * int64_t{p.heads} + work.head) * p.rows * p.keys;
  float sums[4][kColumns / 16] = {}, largest[4], total[4] = {};
#pragma unroll
  for (float& m : largest) m = -INFINITY;
  for (int k0 = 0; k0 < keys; k0 += kTile) {
    if (threadIdx.x < kTile) {
      const int key = k0 + threadIdx.x;
      key_pixels[threadIdx.x] = key < keys ? static_cast<int>(pixel_of_key<kBias>(a, key_index, list[key])) : kNone;
      if (p.normalize > 0.f) key_factors[threadIdx.x] = length_factor(k.row(threadIdx.x), p.dim, p.normalize);
    }
    float score[4][4];
    multiply(q, k, p.dim, b, score);  // after a sync
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = thread_y() * 4 + i;
      const float by = factor * (p.normalize > 0.f ? row_factors[r] : 1.f);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int c = thread_x() + 16 * j;
        float& s = score[i][j];
        if (k0 + c < keys) {
          s *= p.normalize > 0.f ? by * key_factors[c] : by;
          const int place = kBias == Bias::kNone ? 0 : list[k0 + c];
          if constexpr (kBias == Bias::kMatrix)
            s += number<float>(p.bias, bias_at + int64_t{row_places[r]} * p.keys + place);
          if constexpr (kTables) {
            const float* added = relative + r * WindowTile::relative_stride(p.table_rows, p.table_columns);
            if (r < rows) s += added[place >> 8] + added[p.table_rows + (place & 255)];
          }
        } else {
          s = -INFINITY;
        }
      }
      const auto keep = [](int) { return true; };
      weigh(score[i], b.weights + r * kWeightPitch + thread_x(), keep, largest[i], total[i], sums[i]);
    }
    accumulate<kColumns>(b.weights, v, p.value_dim, 0, b, sums);
    __syncthreads();  // before the next tile's keys and weights
  }
  float* out = static_cast<float*>(p.out.data) + work.n * p.out.stride[0] + value_at;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int pixel = row_pixels[thread_y() * 4 + i];
    if (pixel < 0) continue;
    const float by = total[i] == 0.f ? 0.f : 1.f / total[i];
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j)
      if (const int d = thread_x() + 16 * j; d < p.value_dim) out[pixel * p.stride(p.out) + d] = sums[i][j] * by;
  }
}

template <Bias kBias>
Status launch(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr WindowTile kParts = WindowTile::of_floats();
  return p.value_dim <= 64
             ? launch_windows<kThreads, window_attention_simt_kernel<64, kBias>>(p, kParts, device, stream)
             : launch_windows<kThreads, window_attention_simt_kernel<128, kBias>>(p, kParts, device, stream);
}

}  // namespace
}  // namespace simt

Status launch_window_attention_simt(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.row_table) return simt::launch<Bias::kTables>(p, device, stream);
  return p.bias.data ? simt::launch<Bias::kMatrix>(p, device, stream) : simt::launch<Bias::kNone>(p, device, stream);
}

}  // namespace sbnet::portable
