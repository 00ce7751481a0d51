// Rows of tokens on CUDA: lists by CTAs of some thousand pixels, copies by a warp a row.
#include "core/masked/token_rows.h"
#include "cuda/common.cuh"
#include "cuda/scan.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 1024;  // pixels that a CTA lists at a time
constexpr int kRowThreads = 256, kRowsOfCta = kRowThreads / 32;

struct PackArgs {
  PackTokensParams p;
  FastDiv columns, block_rows, block_columns;
  int32_t parts, rows;  // CTAs of an image, and rows of pixels of each
};

// How many active pixels an image has, and how many of them lie in the rows before `row`: blocks tile the plane.
__device__ int active_pixels(const PackTokensParams& p, const int32_t* map, int row, int* sums, int* before) {
  const BlockGrid& g = p.grid;
  int all = 0, some = 0;
  for (int b = threadIdx.x; b < g.count[0] * g.count[1]; b += kThreads) {
    if (map[b] < 0) continue;
    const int y = b / g.count[1] * g.size[0], x = b % g.count[1] * g.size[1];
    const int high = min(g.size[0], p.height - y), wide = min(g.size[1], p.width - x);
    all += high * wide, some += min(max(row - y, 0), high) * wide;
  }
  sum_before<kThreads>(some, sums, before);
  __syncthreads();
  int count;
  sum_before<kThreads>(all, sums, &count);
  __syncthreads();
  return count;
}

// kTiles: blocks tile the plane. Of other grids, whose blocks may overlap, one CTA counts pixels as it goes.
template <bool kTiles>
__global__ void __launch_bounds__(kThreads) pack_tokens_kernel(const PackArgs a) {
  __shared__ int sums[kThreads / 32];
  const PackTokensParams& p = a.p;
  const int64_t n = blockIdx.x / a.parts, tokens = p.tokens();
  const int part = blockIdx.x % a.parts, first = part * a.rows, end = min(first + a.rows, p.height) * p.width;
  grid_dependency_wait();
  grid_dependency_release();
  const int32_t* map = p.block_map + n * p.grid.count[0] * p.grid.count[1];
  int64_t* order = p.order + n * p.capacity;
  int64_t* rows = p.rows + n * tokens;
  uint8_t* mask = p.mask + n * tokens;
  int before = 0, active = kTiles ? active_pixels(p, map, first, sums, &before) : 0;
  int length = p.prefix + before;  // rows so far
  for (int i = first * p.width + threadIdx.x; i - static_cast<int>(threadIdx.x) < end; i += kThreads) {
    uint32_t y, x;
    a.columns.divmod(i, &y, &x);
    const bool there =
        i < end && (kTiles ? map[a.block_rows.quotient(y) * p.grid.count[1] + a.block_columns.quotient(x)] >= 0
                           : covered(map, p.grid, y, x));
    int all;
    const int at = length + sum_before<kThreads>(there, sums, &all);
    length += all;
    if (i < end) {
      const int64_t token = int64_t{p.prefix} + i;
      mask[token] = there;
      if (there) order[at] = token;
      rows[token] = max(there ? at : at - 1, 0);
    }
    __syncthreads();
  }
  length = kTiles ? p.prefix + active + p.suffix : length + p.suffix;
  if (part == 0) {
    for (int t = threadIdx.x; t < p.prefix; t += kThreads) order[t] = rows[t] = t, mask[t] = 1;
    for (int t = threadIdx.x; t < p.suffix; t += kThreads) {
      const int64_t token = tokens - p.suffix + t;
      order[length - p.suffix + t] = token, rows[token] = length - p.suffix + t, mask[token] = 1;
    }
    if (threadIdx.x == 0) p.lengths[n] = length;
  }
  for (int r = part * kThreads + threadIdx.x; r < p.capacity; r += a.parts * kThreads) {
    p.filled[n * p.capacity + r] = r < length;
    if (r >= length) order[r] = 0;
  }
}

// T: as much as is copied at a time; words of it a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads) move_rows_kernel(const MoveRowsParams p, int words, int ctas) {
  const int64_t n = blockIdx.x / ctas, r = blockIdx.x % ctas * kRowsOfCta + threadIdx.x / 32;
  grid_dependency_wait();
  grid_dependency_release();
  if (r >= p.out.rows || p.stays(n, r)) return;
  uint8_t* to = static_cast<uint8_t*>(p.out.data) + (n * p.out.image_stride + r * p.out.row_stride) * p.element_bytes;
  const auto* from = p.element_bytes == 2 ? reinterpret_cast<const uint8_t*>(source_of<uint16_t>(p, n, r))
                                          : reinterpret_cast<const uint8_t*>(source_of<uint32_t>(p, n, r));
  for (int w = threadIdx.x % 32; w < words; w += 32)
    reinterpret_cast<T*>(to)[w] = from ? reinterpret_cast<const T*>(from)[w] : T{};
}

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    pack_patches_kernel(const PackPatchesParams p, FastDiv width, FastDiv height, int columns, int patches, int ctas) {
  const int64_t n = blockIdx.x / ctas, r = blockIdx.x % ctas * kRowsOfCta + threadIdx.x / 32;
  grid_dependency_wait();
  grid_dependency_release();
  if (r >= p.out.rows || (r >= p.lengths[n] && !p.clear)) return;
  const int64_t t = p.index[n * p.out.rows + r];
  const bool there = r < p.lengths[n] && t >= 0 && t < patches;
  const int count = static_cast<int>(p.x.size[1]) * p.patch[0] * p.patch[1];
  const T* from = static_cast<const T*>(p.x.data) + n * p.x.stride[0] +
                  (there ? t / columns * p.patch[0] * p.x.stride[2] + t % columns * p.patch[1] * p.x.stride[3] : 0);
  T* to = static_cast<T*>(p.out.data) + n * p.out.image_stride + r * p.out.row_stride;
#pragma unroll 4
  for (int e = threadIdx.x % 32; e < count; e += 32) {
    uint32_t row, x, c, y;
    width.divmod(e, &row, &x);
    height.divmod(row, &c, &y);
    to[e] = there ? from[c * p.x.stride[1] + y * p.x.stride[2] + x * p.x.stride[3]] : T{0};
  }
}

// A warp a pixel of out.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    merge_pixels_kernel(const MergePixelsParams p, FastDiv columns, FastDiv block_rows, FastDiv block_columns,
                        int words, int element_bytes, int ctas) {
  const int64_t n = blockIdx.x / ctas, pixel = blockIdx.x % ctas * kRowsOfCta + threadIdx.x / 32;
  if (pixel >= p.out.size[2] * p.out.size[3]) return;
  uint32_t i, j;
  columns.divmod(static_cast<uint32_t>(pixel), &i, &j);
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t row = n * p.grid.count[0] + block_rows.quotient(i);
  if (p.block_map[row * p.grid.count[1] + block_columns.quotient(j)] < 0) return;
  T* to = reinterpret_cast<T*>(static_cast<uint8_t*>(p.out.data) +
                               (n * p.out.stride[0] + i * p.out.stride[2] + j * p.out.stride[3]) * element_bytes);
  for (int s = 0; s < p.count; ++s, to += words) {
    const T* from =
        reinterpret_cast<const T*>(static_cast<const uint8_t*>(p.x.data) +
                                   (n * p.x.stride[0] + (int64_t{i} * p.factor + p.offsets[s][0]) * p.x.stride[2] +
                                    (int64_t{j} * p.factor + p.offsets[s][1]) * p.x.stride[3]) *
                                       element_bytes);
    for (int w = threadIdx.x % 32; w < words; w += 32) to[w] = from[w];
  }
}

// Can everything be copied 16 bytes at a time?
bool aligned(std::initializer_list<const void*> data, std::initializer_list<int64_t> strides, int64_t unit) {
  for (const void* p : data)
    if (reinterpret_cast<uintptr_t>(p) % 16) return false;
  for (const int64_t stride : strides)
    if (stride % unit) return false;
  return true;
}

// CTAs of an image's rows, and of all images.
Status ctas_of(const char* op, int64_t rows, int64_t images, int* each, dim3* grid) {
  const int64_t ctas = (rows + kRowsOfCta - 1) / kRowsOfCta, all = size_product({ctas, images});
  SBNET_CHECK(all <= INT32_MAX, "%s: out: expected fewer than 2^34 rows", op);
  *each = static_cast<int>(ctas), *grid = dim3(static_cast<unsigned>(all));
  return ok_status();
}

// By 16 bytes where that is possible, else by an element.
template <class Launch>
cudaError_t by_width(bool wide, int element_bytes, int64_t channels, const Launch& launch) {
  if (wide) return launch(uint4{}, static_cast<int>(channels * element_bytes / 16));
  return element_bytes == 2 ? launch(uint16_t{}, static_cast<int>(channels))
                            : launch(uint32_t{}, static_cast<int>(channels));
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_pack_tokens_cuda(const sbnet::PackTokensParams* p, void* stream) {
  using namespace sbnet;
  constexpr const char* kOp = "pack_tokens";
  SBNET_TRY(validate(*p));
  if (!p->batch) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const BlockGrid& g = p->grid;
  const auto tiles = [&](int d, int32_t side) {
    return g.stride[d] == g.size[d] && g.offset[d] == 0 && int64_t{g.size[d]} * g.count[d] >= side;
  };
  PackArgs args = {*p, FastDiv(p->width), FastDiv(g.size[0]), FastDiv(g.size[1]), 1, p->height};
  const bool parted = tiles(0, p->height) && tiles(1, p->width) && p->height && p->width;
  if (parted) {
    args.rows = (kThreads + p->width - 1) / p->width;
    args.parts = (p->height + args.rows - 1) / args.rows;
  }
  const int64_t ctas = size_product({p->batch, args.parts});
  SBNET_CHECK(ctas <= INT32_MAX, "%s: active: expected fewer than 2^31 parts of images", kOp);
  SBNET_CUDA_TRY(kOp, launch_dependent(device, parted ? pack_tokens_kernel<true> : pack_tokens_kernel<false>,
                                       dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0,
                                       static_cast<cudaStream_t>(stream), args));
  return ok_status();
}

sbnet::Status sbnet_move_rows_cuda(const sbnet::MoveRowsParams* p, void* stream) {
  using namespace sbnet;
  constexpr const char* kOp = "move_rows";
  SBNET_TRY(validate(*p));
  if (!p->out.images || !p->out.rows || !p->channels) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  dim3 grid;
  int ctas;
  SBNET_TRY(ctas_of(kOp, p->out.rows, p->out.images, &ctas, &grid));
  const bool wide = aligned({p->x.data, p->out.data, p->table.data},
                            {p->channels, p->x.row_stride, p->x.image_stride, p->out.row_stride, p->out.image_stride,
                             p->table.row_stride, p->table.image_stride},
                            16 / p->element_bytes);
  SBNET_CUDA_TRY(kOp, by_width(wide, p->element_bytes, p->channels, [&](auto unit, int words) {
                   return launch_dependent(device, move_rows_kernel<decltype(unit)>, grid, dim3(kRowThreads), 0,
                                           static_cast<cudaStream_t>(stream), *p, words, ctas);
                 }));
  return ok_status();
}

sbnet::Status sbnet_pack_patches_cuda(const sbnet::PackPatchesParams* p, void* stream) {
  using namespace sbnet;
  constexpr const char* kOp = "pack_patches";
  SBNET_TRY(validate(*p));
  if (!p->out.images || !p->out.rows) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  dim3 grid;
  int ctas;
  SBNET_TRY(ctas_of(kOp, p->out.rows, p->out.images, &ctas, &grid));
  const int64_t columns = p->x.size[3] / p->patch[1], patches = p->x.size[2] / p->patch[0] * columns;
  SBNET_CHECK(patches <= INT32_MAX, "%s: x: expected fewer than 2^31 patches", kOp);
  const auto kernel = dtype_size(p->x.dtype) == 2 ? pack_patches_kernel<uint16_t> : pack_patches_kernel<uint32_t>;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, kernel, grid, dim3(kRowThreads), 0, static_cast<cudaStream_t>(stream),
                                       *p, FastDiv(p->patch[1]), FastDiv(p->patch[0]), static_cast<int>(columns),
                                       static_cast<int>(patches), ctas));
  return ok_status();
}

sbnet::Status sbnet_merge_pixels_cuda(const sbnet::MergePixelsParams* p, void* stream) {
  using namespace sbnet;
  constexpr const char* kOp = "merge_pixels";
  SBNET_TRY(validate(*p));
  if (!p->out.size[0] || !p->out.size[2] || !p->out.size[3] || !p->x.size[1]) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  dim3 grid;
  int ctas;
  SBNET_TRY(ctas_of(kOp, p->out.size[2] * p->out.size[3], p->out.size[0], &ctas, &grid));
  const int bytes = static_cast<int>(dtype_size(p->x.dtype));
  const TensorView &x = p->x, &y = p->out;
  const bool wide =
      aligned({x.data, y.data},
              {x.size[1], x.stride[0], x.stride[2], x.stride[3], y.stride[0], y.stride[2], y.stride[3]}, 16 / bytes);
  SBNET_CUDA_TRY(kOp, by_width(wide, bytes, x.size[1], [&](auto unit, int words) {
                   return launch_dependent(device, merge_pixels_kernel<decltype(unit)>, grid, dim3(kRowThreads), 0,
                                           static_cast<cudaStream_t>(stream), *p, FastDiv(y.size[3]),
                                           FastDiv(p->grid.size[0]), FastDiv(p->grid.size[1]), words, bytes, ctas);
                 }));
  return ok_status();
}
