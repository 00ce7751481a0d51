// mask_pyramid on CUDA: two kernels over the whole GPU, the second a launch that the first hides.
//   block_kernel  a bit for each block of each plane: is a pixel of its rectangle of the mask set? It reads the mask
//   once
//                 for each plane
//   list_kernel   lists of active blocks and of fringes, a chunk of one a CTA. A chunk says how many entries it has as
//                 soon as it knows, and waits for the numbers of those before it
// Tables of planes, fringes and consumers are launch parameters; of the largest networks they are written into the
// workspace first, by table_kernel, which a CUDA graph captures as it does any other (Far).
// docs/log/lists.md has what else was measured.
#include <memory>

#include "core/through.h"
#include "cuda/lists/pyramid_kernels.cuh"

namespace sbnet::pyramid {
namespace {

constexpr const char* kOp = "mask_pyramid";
constexpr int kThreadLoads = 8;  // of the mask: no more where there are threads

template <class T>
struct TypeOf {
  using type = T;
};

class Scratch {
 public:
  explicit Scratch(void* workspace) : at_(static_cast<uint32_t*>(workspace)) {}
  uint32_t* take(int64_t words) {
    uint32_t* taken = at_;
    at_ += words;
    return taken;
  }

 private:
  uint32_t* at_;
};

MaskArgs mask_args(const PyramidParams& p) {
  MaskArgs a = {};
  a.mask = p.mask, a.mask_at = lies_at(p.mask);
  for (int d = 0; d < 3; ++d) a.stride[d] = p.stride[d];
  a.tol = p.tol;
  a.dtype = p.mask_dtype;
  const int64_t per_load = 16 / dtype_size(p.mask_dtype);
  a.vectors =
      p.stride[2] == 1 && p.stride[0] % per_load == 0 && p.stride[1] % per_load == 0 && p.size[2] % per_load == 0;
  a.nonzero = dtype_size(p.mask_dtype) == 1 && p.tol >= 0 && p.tol < 1;
  a.height = static_cast<int>(p.size[1]), a.width = static_cast<int>(p.size[2]);
  a.margin = static_cast<int>(p.margin);
  return a;
}

// Of a plane and of a fringe; flags: how many those before have, to which its own are added.
PlaneArgs plane_args(const PyramidParams& p, int k, const MaskArgs& mask, Scratch& scratch, int* flags) {
  const PyramidPlane& from = p.plane[k];
  PlaneArgs to = {};
  to.tiles = from.tiles;
  to.words_per_row = (from.tiles.count[1] + 31) / 32;
  to.words = static_cast<int>(p.size[0]) * from.tiles.count[0] * to.words_per_row;
  // The columns that 32 blocks look at, and the rows: no others' are so many more.
  const Span rows = pyramid_span(from.tiles, 0, 0, mask.height, mask.margin);
  const int64_t down = std::min<int64_t>(int64_t{rows.end} + mask.margin + 1, mask.height);
  const int64_t side = int64_t{from.tiles.side(1)} * 32, wide = from.tiles.size[1];
  const int64_t columns = (std::min(side, wide) * mask.width + wide - 1) / wide + 2 * int64_t{mask.margin};
  const int64_t words = std::min<int64_t>(columns / 32 + 3, (mask.width + 31) / 32);
  const int64_t loads = down * words * 32 / (16 / dtype_size(p.mask_dtype));
  to.warps = 1;
  while (to.warps < kBlockWarps && to.warps * 32 * kThreadLoads < loads) to.warps *= 2;
  to.segments = static_cast<int>((words + to.warps * kWarpColumns - 1) / (to.warps * kWarpColumns));
  to.bits = scratch.take(to.words);
  to.flags = *flags;
  *flags += chunks_of(to);
  to.indices = from.indices, to.count = from.count, to.total = from.total, to.block_map = from.block_map;
  return to;
}

FringeArgs fringe_args(const PyramidParams& p, int k, int* flags) {
  const PyramidFringe& from = p.fringe[k];
  const TiledPlane& t = p.plane[from.plane].tiles;
  FringeArgs to = {from.plane, from.first_consumer, from.consumers};
  to.words = static_cast<int>(p.size[0]) * t.size[0] * t.words();
  to.flags = *flags;
  *flags += chunks_of(to);
  to.pixels = from.pixels, to.count = from.count;
  return to;
}

// Calls made(index, entry) for each plane, fringe and consumer, in this order. Gives the number of chunks.
template <class Plane, class Fringe, class Reads>
int make_tables(const PyramidParams& p, const MaskArgs& mask, Scratch& scratch, const Plane& plane,
                const Fringe& fringe, const Reads& reads) {
  int chunks = 0, consumers = 0;
  for (int k = 0; k < p.planes; ++k) plane(k, plane_args(p, k, mask, scratch, &chunks));
  for (int k = 0; k < p.fringes; ++k) {
    const FringeArgs made = fringe_args(p, k, &chunks);
    fringe(k, made);
    for (int r = 0; r < made.consumers; ++r, ++consumers)
      reads(consumers, Consumer{p.consumer[consumers].plane, Reader(p.consumer[consumers].window)});
  }
  return chunks;
}

// A table on its way into device memory, a launch's parameters full at a time.
template <class T>
class Upload {
 public:
  Upload(const DeviceInfo& device, cudaStream_t stream, Scratch& scratch, int64_t entries)
      : device_(device), stream_(stream) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(scratch.take(entries * kPyramidTableEntry / 4));
    to_ = reinterpret_cast<T*>((at + 15) / 16 * 16);
  }
  const T* data() const { return to_; }
  void add(const T& entry) {
    part_.entry[held_++] = entry;
    if (held_ == TablePart<T>::kRoom) flush();
  }
  cudaError_t flush() {
    if (held_ && error_ == cudaSuccess)
      error_ = launch_dependent(device_, table_kernel<T>, dim3(1), dim3(64), 0, stream_, part_, to_ + done_, held_);
    done_ += held_, held_ = 0;
    return error_;
  }

 private:
  const DeviceInfo& device_;
  cudaStream_t stream_;
  TablePart<T> part_;
  T* to_;
  int held_ = 0, done_ = 0;
  cudaError_t error_ = cudaSuccess;
};

// ctas: of block_kernel.
template <class Tables>
Status launch_both(const DeviceInfo& device, cudaStream_t stream, MaskArgs mask, const Tables& tables, int chunks,
                   int64_t ctas, Scratch& scratch) {
  mask.flags = reinterpret_cast<int32_t*>(scratch.take(chunks)), mask.flag_count = chunks;
  if (ctas)
    SBNET_CUDA_TRY(kOp, launch_dependent(device, block_kernel<Tables>, dim3(static_cast<unsigned>(ctas)),
                                         dim3(kBlockThreads), 0, stream, mask, tables));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, list_kernel<Tables>, dim3(static_cast<unsigned>(chunks)),
                                       dim3(kChunkThreads), 0, stream, mask, tables));
  return ok_status();
}

template <class Tables>
Status run_near(const PyramidParams& p, const DeviceInfo& device, cudaStream_t stream, const MaskArgs& mask,
                const Counts& counts, Scratch& scratch) {
  const auto tables = std::make_unique<Tables>();
  static_cast<Counts&>(*tables) = counts;
  int64_t ctas = 0;
  const int chunks = make_tables(
      p, mask, scratch, [&](int k, const PlaneArgs& a) { ctas += block_ctas(tables->plane[k] = a); },
      [&](int k, const FringeArgs& a) { tables->fringe[k] = a; },
      [&](int k, const Consumer& a) { tables->consumer[k] = a; });
  return launch_both(device, stream, mask, *tables, chunks, ctas, scratch);
}

}  // namespace
}  // namespace sbnet::pyramid

sbnet::Status sbnet_mask_pyramid_cuda(const sbnet::PyramidParams* params, void* workspace, void* stream_handle) {
  using namespace sbnet;
  using namespace sbnet::pyramid;
  const PyramidParams& p = *params;
  SBNET_TRY(validate(p));
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  if (p.planes == 0) return ok_status();
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  Scratch scratch(workspace);
  const MaskArgs mask = mask_args(p);
  int consumers = 0;
  for (int k = 0; k < p.fringes; ++k) consumers += p.fringe[k].consumers;
  const Counts counts = {p.planes, p.fringes, static_cast<int>(p.size[0])};
  const auto fit = [&](auto tables) {
    using Tables = typename decltype(tables)::type;
    return p.planes <= Tables::kMostPlanes && p.fringes <= Tables::kMostFringes && consumers <= Tables::kMostConsumers;
  };
  if (fit(TypeOf<SmallTables>{})) return run_near<SmallTables>(p, device, stream, mask, counts, scratch);
  if (fit(TypeOf<LargeTables>{})) return run_near<LargeTables>(p, device, stream, mask, counts, scratch);
  Upload<PlaneArgs> planes(device, stream, scratch, p.planes + 1);
  Upload<FringeArgs> fringes(device, stream, scratch, p.fringes + 1);
  Upload<Consumer> readers(device, stream, scratch, consumers + 1);
  int64_t ctas = 0;
  const int chunks = make_tables(
      p, mask, scratch, [&](int, const PlaneArgs& a) { ctas += block_ctas(a), planes.add(a); },
      [&](int, const FringeArgs& a) { fringes.add(a); }, [&](int, const Consumer& a) { readers.add(a); });
  SBNET_CUDA_TRY(kOp, planes.flush());
  SBNET_CUDA_TRY(kOp, fringes.flush());
  SBNET_CUDA_TRY(kOp, readers.flush());
  const FarTables tables = {counts, planes.data(), fringes.data(), readers.data()};
  return launch_both(device, stream, mask, tables, chunks, ctas, scratch);
}
