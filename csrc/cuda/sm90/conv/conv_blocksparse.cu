// Convolutions with block-sparse weights for Hopper, on whole planes or active blocks: the general convolution's
// kernel, which here follows a list of pieces (core/weights/conv.h) instead of all input channels. What no piece names
// is neither read nor multiplied.
//
// Filters lie as [block, outputs, inputs, taps], of which TMA could read no tap. One pass over them makes slabs
// [piece][tap][outputs of a tile][64 inputs], zeros where a piece has no block; taps in opposite order for the
// transposed convolution, which then is a plain one. Who calls with the same filters again keeps the slabs.
#include "core/layer.h"
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_blocks.cuh"
#include "cuda/sm90/conv/conv_general_compute.cuh"

namespace sbnet::sm90 {
namespace {

using namespace general;

constexpr int kPackThreads = 256;

struct PackArgs {
  BlocksparsePackParams p;
  int width;  // outputs of a tile
};

// A thread has the taps of one output and input of a piece.
template <class T>
__global__ void __launch_bounds__(kPackThreads) pack_filters_kernel(const __grid_constant__ PackArgs a) {
  grid_dependency_wait();
  grid_dependency_release();
  const BlocksparseConvShape& shape = a.p.layout.shape;
  const BlocksparseConvSide& side = a.p.layout.side[a.p.to()];
  const int64_t thread = int64_t{blockIdx.x} * kPackThreads + threadIdx.x, threads = int64_t{gridDim.x} * kPackThreads;
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
    T* slab = static_cast<T*>(a.p.packed) + (row / a.width * taps * a.width + output) * 64 + input;
    for (int t = 0; t < taps; ++t)
      slab[(a.p.transposed ? taps - 1 - t : t) * a.width * 64] = there ? filter[t] : from_float<T>(0.f);
  }
}

template <class T>
Status pack(const BlocksparsePackParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const PackArgs a = {p, conv_tile_width(p.layout.shape)};
  const int64_t threads = p.layout.shape.pieces[p.to()] * a.width * 64;
  const int64_t ctas = std::min((threads + kPackThreads - 1) / kPackThreads, int64_t{device.sm_count} * 16);
  SBNET_CUDA_TRY(kOp, launch_dependent(device, pack_filters_kernel<T>, dim3(static_cast<unsigned>(ctas)),
                                       dim3(kPackThreads), 0, stream, a));
  return ok_status();
}

template <class T>
Status run(const BlocksparseConvParams& p, const DeviceInfo& device, char* workspace, cudaStream_t stream) {
  const BlocksparseConvShape& s = p.layout.shape;
  const int width = conv_tile_width(s);
  if (!p.packed) SBNET_TRY(pack<T>({p.weight, workspace, p.x.dtype, p.layout, p.transposed}, device, stream));
  Conv2dParams c = conv_of_planes(p);
  const int64_t inputs = c.weight.size[1], outputs = c.weight.size[0], tap = int64_t{width} * 64;
  c.weight = {const_cast<void*>(p.packed ? p.packed : workspace),
              {width, 64, c.weight.size[2], c.weight.size[3]},
              {64, 1, c.weight.size[3] * tap, tap},
              p.x.dtype};
  Args a = {};
  fill_common(c, &a);
  a.merged = 1;
  a.columns = FastDiv(conv_tiles(s, p.to()));
  a.slices = static_cast<int>(std::max<int64_t>(s.pieces[p.to()] / a.columns.divisor, 1));
  fill_operands(c, inputs, outputs, &a);
  a.w_word = 0;
  a.mixed = s.block_size < 64;
  const BlocksparseConvSide& side = p.layout.side[p.to()];
  a.list = {side.piece_start, side.pieces, static_cast<int>(s.pieces[p.to()])};
  if (width == 32 && s.block_size == 32) {
    bool launched = false;
    SBNET_TRY(blocks::launch<T>(c, a, side.tile_order, device, stream, &launched));
    if (launched) return ok_status();
  }
  if (width == 64) return launch<Config<T, 64, true, true>>(c, a, device, stream);
  if (width == 32) return launch<Config<T, 32, true, true>>(c, a, device, stream);
  return launch<Config<T, 16, true, true>>(c, a, device, stream);
}

}  // namespace

int64_t conv_blocksparse_packed_bytes(const BlocksparseConvShape& s, int to) {
  return s.pieces[to] * conv_tile_width(s) * s.taps * 128;
}

Status pack_blocksparse(const BlocksparsePackParams& p, const DeviceInfo& device, CUstream_st* stream) {
  return named("pack_blocksparse_filters",
               p.dtype == DType::kBF16 ? pack<__nv_bfloat16>(p, device, stream) : pack<__half>(p, device, stream));
}

Status conv_blocksparse(const BlocksparseConvParams& p, const DeviceInfo& device, void* workspace,
                        CUstream_st* stream) {
  char* at = static_cast<char*>(workspace);
  return named("blocksparse_conv", p.x.dtype == DType::kBF16 ? run<__nv_bfloat16>(p, device, at, stream)
                                                             : run<__half>(p, device, at, stream));
}

}  // namespace sbnet::sm90
