// Products with block-sparse weights in plain float32 arithmetic: any strides and dtype, and true float32.
//
// A CTA computes 64 rows x kCols output features of one output block, 16 features of its reduction at a time.
#include <algorithm>

#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/weights/matmul_portable.cuh"
#include "cuda/weights/simt.cuh"
#include "cuda/weights/tile.cuh"

namespace sbnet {
namespace portable {
namespace {

constexpr int kThreads = 128, kRows = 64, kDepth = 16, kWide = 4;
// Sums are gathered in runs of this many features and then added up: over a long reduction, one running sum loses
// several times as much as PyTorch does.
constexpr int kRun = 4 * kDepth;

template <class T, int kCols>
__global__ void __launch_bounds__(kThreads) matmul_simt_kernel(const MatmulArgs a, int64_t tiles, int column_tiles) {
  constexpr int kTall = kRows * kCols / kThreads / kWide;  // rows of a thread, kRows / kTall apart
  constexpr int kRowStep = kRows / kTall;
  __shared__ float left[kDepth][kRows + 1], right[kDepth][kCols];
  __shared__ int64_t x_row[kRows], y_row[kRows];
  const int tid = threadIdx.x, row0 = tid / (kCols / kWide), column0 = tid % (kCols / kWide) * kWide;
  const int size = a.p.layout.shape.block_size, size_bits = 31 - __clz(size);
  const int64_t in_features = a.p.in_features(), out_features = a.p.out_features(), x_step = a.p.x.stride[1];
  const T* const x = static_cast<const T*>(a.p.x.data);
  const T* const weight = static_cast<const T*>(a.p.weight);
  const bool feature_major = x_step != 1;
  grid_dependency_wait();
  const int64_t rows = row_count(a.p.x, a.p.active);

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / column_tiles * kRows;
    if (first_row >= rows) break;
    const int64_t column = tile % column_tiles * kCols;
    const int in_block = static_cast<int>(column) & (size - 1);
    const EntryList entries(a, column >> size_bits);
    if (tid < kRows) {
      x_row[tid] = offset_of_row(a.p.x, a.p.active, first_row + tid, rows);
      y_row[tid] = offset_of_row(a.p.y, a.p.active, first_row + tid, rows);
    }
    float sum[kTall][kWide] = {}, run[kTall][kWide] = {};
    const int depth = entries.count << size_bits;
    for (int d0 = 0; d0 < depth; d0 += kDepth) {
      __syncthreads();
      for (int i = tid; i < kRows * kDepth; i += kThreads) {
        const int row = feature_major ? i % kRows : i / kDepth, d = feature_major ? i / kRows : i % kDepth;
        const int2 e = entries[(d0 + d) >> size_bits];
        const int64_t feature = (int64_t{e.x} << size_bits) + ((d0 + d) & (size - 1));
        const bool in = e.x >= 0 && feature < in_features && x_row[row] >= 0;
        left[d][row] = in ? to_float(x[x_row[row] + feature * x_step]) : 0.f;
      }
      for (int i = tid; i < kCols * kDepth; i += kThreads) {
        const int k = a.p.transposed ? i / kDepth : i % kCols, d = a.p.transposed ? i % kDepth : i / kCols;
        const int2 e = entries[(d0 + d) >> size_bits];
        const int at = (d0 + d) & (size - 1), out = in_block + k;
        const bool in = e.x >= 0 && (int64_t{e.x} << size_bits) + at < in_features;
        const int64_t inside = a.p.transposed ? int64_t{out} * size + at : int64_t{at} * size + out;
        right[d][k] = in ? to_float(weight[(int64_t{e.y} << 2 * size_bits) + inside]) : 0.f;
      }
      __syncthreads();
      multiply_stage<kRowStep>(left, right, row0, column0, run);
      if ((d0 + kDepth) % kRun && d0 + kDepth < depth) continue;
      end_run(sum, run);
    }
    __syncthreads();  // y_row, where no stage has passed
#pragma unroll
    for (int k = 0; k < kWide; ++k) {
      const int64_t out = column + column0 + k;
      const float bias = out < out_features ? bias_of<T>(a.p, out) : 0.f;
#pragma unroll
      for (int i = 0; i < kTall; ++i) sum[i][k] += bias;
    }
    activate(a.p.activation, a.p.activation_param, sum);
#pragma unroll
    for (int i = 0; i < kTall; ++i) {
      const int64_t to = y_row[row0 + i * kRowStep];
      if (to < 0) continue;
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
        const int64_t out = column + column0 + k;
        if (out < out_features) static_cast<T*>(a.p.y.data)[to + out * a.p.y.stride[1]] = from_float<T>(sum[i][k]);
      }
    }
    __syncthreads();  // the next tile's rows
  }
}

}  // namespace

Status launch_matmul_simt(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype_and_tile(a.p.x.dtype, a.p.layout.shape.block_size, [&](auto t, auto tile) {
    return launch_tiles(matmul_simt_kernel<decltype(t), tile()>, kRows, tile(), kThreads, a, device, stream);
  });
}

}  // namespace portable
}  // namespace sbnet
