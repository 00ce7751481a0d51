// mask_pyramid on CUDA: a chain of small kernels over the whole GPU, each a launch that the one before hides.
//   strip_kernel  reads the mask, once: a bit for each column of a strip of rows
//   block_kernel  a bit for each block of each plane: is a bit of its rectangle set?
//   plane_kernel  the lists of active blocks; in other CTAs, the bits of the fringes, 32 pixels a thread
//   pixel_kernel  the lists of the fringes, where there are any
// Tables of planes, fringes and consumers are launch parameters (Near); of larger networks they are written into the
// workspace first, by table_kernel, which a CUDA graph captures as it does any other (Far).
// (One launch of one cluster with barriers in between was measured, too: sixteen CTAs are too few,
// docs/log/lists.md.)
#include "core/through.h"
#include "cuda/lists/pyramid_kernels.cuh"

namespace sbnet::pyramid {
namespace {

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

StripArgs strip_args(const PyramidParams& p, Scratch& scratch) {
  StripArgs a = {};
  a.mask = p.mask, a.mask_at = lies_at(p.mask);
  for (int d = 0; d < 3; ++d) a.stride[d] = p.stride[d];
  a.tol = p.tol;
  a.dtype = p.mask_dtype;
  const int64_t per_load = 16 / dtype_size(p.mask_dtype);
  a.vectors =
      p.stride[2] == 1 && p.stride[0] % per_load == 0 && p.stride[1] % per_load == 0 && p.size[2] % per_load == 0;
  a.height = static_cast<int>(p.size[1]), a.width = static_cast<int>(p.size[2]);
  a.margin = static_cast<int>(p.margin);
  a.strip = pyramid_strip(p);
  a.strips = (a.height + a.strip - 1) / a.strip;
  a.words = (a.width + 31) / 32;
  a.units = static_cast<int>(p.size[0] * a.strips * a.words);
  a.bits = scratch.take(a.units);
  return a;
}

PlaneArgs plane_args(const PyramidParams& p, int k, const StripArgs& strips, Scratch& scratch) {
  const PyramidPlane& from = p.plane[k];
  PlaneArgs to = {};
  to.tiles = from.tiles;
  to.words_per_row = (from.tiles.count[1] + 31) / 32;
  to.words = static_cast<int>(p.size[0]) * from.tiles.count[0] * to.words_per_row;
  const Span rows = pyramid_span(from.tiles, 0, 0, strips.height, strips.margin);  // no other block's is so much longer
  const Span columns = pyramid_span(from.tiles, 1, 0, strips.width, strips.margin);
  const int64_t down = (lesser(rows.end + strips.margin, strips.height)) / strips.strip + 1;
  const int64_t search = down * (lesser(columns.end + strips.margin, strips.width) / 32 + 2);  // words, or a few more
  to.threads = search <= 16 ? 1 : 32;
  while (to.threads > 1 && to.threads < kBlockThreads && to.threads * 8 < search) to.threads *= 2;
  to.bits = scratch.take(to.words);
  to.indices = from.indices, to.count = from.count, to.total = from.total, to.block_map = from.block_map;
  return to;
}

FringeArgs fringe_args(const PyramidParams& p, int k, Scratch& scratch) {
  const PyramidFringe& from = p.fringe[k];
  const TiledPlane& t = p.plane[from.plane].tiles;
  FringeArgs to = {from.plane, from.first_consumer, from.consumers};
  to.words = static_cast<int>(p.size[0]) * t.size[0] * t.words();
  to.bits = scratch.take(to.words);
  to.per_warp = reinterpret_cast<int32_t*>(scratch.take((to.words + 31) / 32));
  return to;
}

PixelArgs pixel_args(const PyramidParams& p, int k, const FringeArgs& from) {
  const TiledPlane& t = p.plane[from.plane].tiles;
  return {from.bits,
          from.per_warp,
          from.words,
          t.size[1],
          list_chunks(from.words, pixel_words(from.words)),
          p.pixels(from.plane),
          FastDiv(t.words()),
          p.fringe[k].pixels,
          p.fringe[k].count};
}

// Calls made(index, entry) for each plane, fringe, consumer and fringe's pixels, in this order.
template <class Plane, class Fringe, class Reads, class Pixels>
void make_tables(const PyramidParams& p, const StripArgs& strips, Scratch& scratch, const Plane& plane,
                 const Fringe& fringe, const Reads& reads, const Pixels& pixels) {
  for (int k = 0; k < p.planes; ++k) plane(k, plane_args(p, k, strips, scratch));
  int consumers = 0;
  for (int k = 0; k < p.fringes; ++k) {
    const FringeArgs made = fringe_args(p, k, scratch);
    fringe(k, made);
    pixels(k, pixel_args(p, k, made));
    for (int r = 0; r < made.consumers; ++r, ++consumers)
      reads(consumers, Consumer{p.consumer[consumers].plane, Reader(p.consumer[consumers].window)});
  }
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

constexpr const char* kOp = "mask_pyramid";

// What the launches take of the tables.
struct Grids {
  int64_t blocks = 0, marks = 0, pixels = 0;  // CTAs of block_kernel, warps that mark fringes, CTAs of pixel_kernel
  int lists = 0;                              // CTAs of plane_kernel that list blocks
  void plane(const PlaneArgs& a) { blocks += block_ctas(a), lists += list_chunks(a.words, 1); }
  void fringe(const FringeArgs& a) {
    marks += (a.words + 31) / 32, pixels += list_chunks(a.words, pixel_words(a.words));
  }
};

template <class Tables, class Pixels>
Status launch_all(const DeviceInfo& device, cudaStream_t stream, const StripArgs& strips, Tables& tables,
                  const Pixels& pixels, const Grids& grids) {
  tables.list_ctas = grids.lists;
  const auto launch = [&](auto kernel, int64_t ctas, int threads, auto&&... args) {
    return ctas ? launch_dependent(device, kernel, dim3(static_cast<unsigned>(ctas)), dim3(threads), 0, stream, args...)
                : cudaSuccess;
  };
  constexpr int kStripWarps = kStripThreads / 32;
  SBNET_CUDA_TRY(kOp, launch(strip_kernel, (strips.units + kStripWarps - 1) / kStripWarps, kStripThreads, strips));
  SBNET_CUDA_TRY(kOp, launch(block_kernel<Tables>, grids.blocks, kBlockThreads, strips, tables));
  SBNET_CUDA_TRY(kOp, launch(plane_kernel<Tables>, grids.lists + (grids.marks + kListWarps - 1) / kListWarps,
                             kListThreads, tables));
  SBNET_CUDA_TRY(kOp, launch(pixel_kernel<Pixels>, grids.pixels, kListThreads, pixels));
  return ok_status();
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
  const StripArgs strips = strip_args(p, scratch);
  int consumers = 0;
  for (int k = 0; k < p.fringes; ++k) consumers += p.fringe[k].consumers;
  Grids grids;
  const Counts counts = {p.planes, p.fringes, static_cast<int>(p.size[0]), 0};
  if (p.planes <= kNearPlanes && p.fringes <= kNearFringes && consumers <= kNearConsumers) {
    NearTables tables = {counts, {}, {}, {}};
    NearPixels pixels = {};
    make_tables(
        p, strips, scratch, [&](int k, const PlaneArgs& a) { grids.plane(tables.plane[k] = a); },
        [&](int k, const FringeArgs& a) { grids.fringe(tables.fringe[k] = a); },
        [&](int k, const Consumer& a) { tables.consumer[k] = a; },
        [&](int k, const PixelArgs& a) { pixels.fringe[k] = a; });
    return launch_all(device, stream, strips, tables, pixels, grids);
  }
  Upload<PlaneArgs> planes(device, stream, scratch, p.planes + 1);
  Upload<FringeArgs> fringes(device, stream, scratch, p.fringes + 1);
  Upload<Consumer> readers(device, stream, scratch, consumers + 1);
  Upload<PixelArgs> lists(device, stream, scratch, p.fringes + 1);
  make_tables(
      p, strips, scratch, [&](int, const PlaneArgs& a) { grids.plane(a), planes.add(a); },
      [&](int, const FringeArgs& a) { grids.fringe(a), fringes.add(a); },
      [&](int, const Consumer& a) { readers.add(a); }, [&](int, const PixelArgs& a) { lists.add(a); });
  SBNET_CUDA_TRY(kOp, planes.flush());
  SBNET_CUDA_TRY(kOp, fringes.flush());
  SBNET_CUDA_TRY(kOp, readers.flush());
  SBNET_CUDA_TRY(kOp, lists.flush());
  FarTables tables = {counts, planes.data(), fringes.data(), readers.data()};
  return launch_all(device, stream, strips, tables, FarPixels{lists.data()}, grids);
}
