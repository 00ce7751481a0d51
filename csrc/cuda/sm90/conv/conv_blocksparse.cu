// Convolutions with block-sparse weights for Hopper, on whole planes or active blocks: the general convolution's
// kernel, which here follows a list of pieces (core/weights/conv.h) instead of all input channels. What no piece names
// is neither read nor multiplied.
//
// Filters lie as [block, outputs, inputs, taps], of which TMA could read no tap. One pass over them makes slabs
// [piece][outputs of a tile][tap][64 inputs], zeros where a piece has no block; taps in opposite order for the
// transposed convolution, which then is a plain one.
#include "core/layer.h"
#include "cuda/sm90/conv/conv_blocksparse.h"
#include "cuda/sm90/conv/conv_general_compute.cuh"

namespace sbnet::sm90 {
namespace {

using namespace general;

constexpr int kPackThreads = 256;

struct PackArgs {
  BlocksparseConvParams p;
  int width;  // outputs of a tile
  void* slabs;
  int32_t* list;  // the count, then a block an image; null where there are active blocks
};

// A thread has the taps of one output and input of a piece.
template <class T>
__global__ void __launch_bounds__(kPackThreads) pack_filters_kernel(const __grid_constant__ PackArgs a) {
  grid_dependency_wait();
  grid_dependency_release();
  const BlocksparseConvShape& shape = a.p.layout.shape;
  const BlocksparseConvSide& side = a.p.layout.side[a.p.to()];
  const int64_t thread = int64_t{blockIdx.x} * kPackThreads + threadIdx.x, threads = int64_t{gridDim.x} * kPackThreads;
  if (a.list) {
    for (int64_t n = thread; n < a.p.y.size[0]; n += threads)
      a.list[1 + 3 * n] = static_cast<int>(n), a.list[2 + 3 * n] = a.list[3 + 3 * n] = 0;
    if (thread == 0) *a.list = static_cast<int>(a.p.y.size[0]);
  }
  const uint32_t size = static_cast<uint32_t>(shape.block_size);
  const int taps = static_cast<int>(shape.taps), words = conv_piece_words(a.width);
  const int64_t rows = shape.pieces[a.p.to()] * a.width;
  for (int64_t i = thread; i < rows * 64; i += threads) {
    const int64_t row = i / 64;
    const int input = static_cast<int>(i % 64), output = static_cast<int>(row % a.width);
    const int32_t* piece = side.pieces + row / a.width * words;
    const int32_t block = piece[kPieceHead + output / 16 * 4 + input / 16];
    const uint32_t from = static_cast<uint32_t>(piece[0] + input) % size,
                   to = static_cast<uint32_t>(piece[2] + output) % size;
    const bool there = block >= 0 && block < shape.blocks;
    const uint32_t first = a.p.transposed ? from : to, second = a.p.transposed ? to : from;
    const T* filter = static_cast<const T*>(a.p.weight) + ((int64_t{block} * size + first) * size + second) * taps;
    T* slab = static_cast<T*>(a.slabs) + row * taps * 64 + input;
    for (int t = 0; t < taps; ++t)
      slab[(a.p.transposed ? taps - 1 - t : t) * 64] = there ? filter[t] : from_float<T>(0.f);
  }
}

int64_t slab_bytes(const BlocksparseConvParams& p) {
  const BlocksparseConvShape& s = p.layout.shape;
  return (s.pieces[p.to()] * conv_tile_width(s) * s.taps * 128 + 255) / 256 * 256;
}

template <class T>
Status run(const BlocksparseConvParams& p, const DeviceInfo& device, char* workspace, cudaStream_t stream) {
  const BlocksparseConvShape& s = p.layout.shape;
  const int width = conv_tile_width(s);
  int32_t* list = p.active.indices ? nullptr : reinterpret_cast<int32_t*>(workspace + slab_bytes(p));
  const PackArgs pack = {p, width, workspace, list};
  const int64_t rows = s.pieces[p.to()] * width;
  const int64_t ctas =
      std::min((std::max(rows * 64, p.y.size[0]) + kPackThreads - 1) / kPackThreads, int64_t{device.sm_count} * 16);
  SBNET_CUDA_TRY(kOp, launch_dependent(device, pack_filters_kernel<T>, dim3(static_cast<unsigned>(ctas)),
                                       dim3(kPackThreads), 0, stream, pack));
  Conv2dParams c = conv_of_planes(p);
  const int64_t inputs = c.weight.size[1], outputs = c.weight.size[0], line = c.weight.size[3] * 64;
  c.weight = {workspace, {rows, 64, c.weight.size[2], c.weight.size[3]}, {s.taps * 64, 1, line, 64}, p.x.dtype};
  if (list) c.active.count = list, c.active.indices = list + 1;
  Args a = {};
  fill_common(c, &a);
  a.merged = 1;
  a.columns = FastDiv(conv_tiles(s, p.to()));
  a.slices = static_cast<int>(std::max<int64_t>(s.pieces[p.to()] / a.columns.divisor, 1));
  fill_operands(c, inputs, outputs, &a);
  a.mixed = s.block_size < 64;
  const BlocksparseConvSide& side = p.layout.side[p.to()];
  a.list = {side.piece_start, side.pieces, static_cast<int>(s.pieces[p.to()])};
  if (width == 64) return launch<Config<T, 64, true, true>>(c, a, device, stream);
  if (width == 32) return launch<Config<T, 32, true, true>>(c, a, device, stream);
  return launch<Config<T, 16, true, true>>(c, a, device, stream);
}

}  // namespace

int64_t conv_blocksparse_workspace_bytes(const BlocksparseConvParams& p) {
  return slab_bytes(p) + (p.active.indices ? 0 : 4 * (1 + 3 * p.y.size[0]));
}

Status conv_blocksparse(const BlocksparseConvParams& p, const DeviceInfo& device, void* workspace,
                        CUstream_st* stream) {
  char* at = static_cast<char*>(workspace);
  return named("blocksparse_conv", p.x.dtype == DType::kBF16 ? run<__nv_bfloat16>(p, device, at, stream)
                                                             : run<__half>(p, device, at, stream));
}

}  // namespace sbnet::sm90
