// The fringe on CUDA: mark_kernel sets one bit a pixel, a thread settling 32 of them; list_kernel turns bits into
// indices (bitlist.cuh).
#include "cuda/lists/bitlist.cuh"

namespace sbnet {
namespace {

constexpr int kMarkThreads = 128;

struct FringeArgs {
  TiledPlane mine, theirs;
  Reader reader;
  FastDiv words_per_row;
  const int32_t *written, *read;  // block maps
  int words;                      // of the batch
  int64_t capacity;
  int32_t *pixels, *count;
  uint32_t* bits;     // [words]
  int32_t* per_warp;  // [words / 32, rounded up]
};

__global__ void __launch_bounds__(kMarkThreads) mark_kernel(const __grid_constant__ FringeArgs a) {
  grid_dependency_release();
  const int index = blockIdx.x * kMarkThreads + threadIdx.x;
  uint32_t row, column;
  a.words_per_row.divmod(index, &row, &column);
  const int n = static_cast<int>(row) / a.mine.size[0], y = static_cast<int>(row) - n * a.mine.size[0];
  const int x0 = static_cast<int>(column) * 32;
  const MapLookup written = {a.written + static_cast<int64_t>(n) * a.mine.count[0] * a.mine.count[1], a.mine.count[1]};
  const MapLookup read = {a.read + static_cast<int64_t>(n) * a.theirs.count[0] * a.theirs.count[1], a.theirs.count[1]};
  grid_dependency_wait();
  uint32_t found = 0;
  if (index < a.words) found = read_by(a.theirs, a.reader, read, y, x0, unwritten(a.mine, written, y, x0));
  store_counted(found, index / 32 * 32, a.words, a.bits, a.per_warp);
}

__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ FringeArgs a) {
  grid_dependency_release();
  grid_dependency_wait();
  list_pixels(a.bits, a.per_warp, a.words, a.words_per_row, a.mine.size[1], blockIdx.x, gridDim.x, a.capacity, a.pixels,
              a.count);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_fringe_cuda(const sbnet::FringeParams* params, void* workspace, void* stream_handle) {
  using namespace sbnet;
  constexpr const char* kOp = "fringe";
  const FringeParams& p = *params;
  SBNET_TRY(validate(p));
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  FringeArgs a = {};
  a.mine = TiledPlane(p.height, p.width, p.producer.grid.size);
  a.theirs = TiledPlane(p.out_height, p.out_width, p.consumer.grid.size);
  a.reader = Reader(p.window);
  a.words_per_row = FastDiv(a.mine.words());
  a.written = p.producer.block_map, a.read = p.consumer.block_map;
  a.words = static_cast<int>(p.batch * p.height * a.mine.words());
  a.capacity = p.capacity;
  a.pixels = p.pixels, a.count = p.count;
  a.bits = static_cast<uint32_t*>(workspace);
  a.per_warp = static_cast<int32_t*>(workspace) + a.words;
  const int ctas = (a.words + kMarkThreads - 1) / kMarkThreads;
  if (ctas) SBNET_CUDA_TRY(kOp, launch_dependent(device, mark_kernel, dim3(ctas), dim3(kMarkThreads), 0, stream, a));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, list_kernel, dim3(list_chunks(a.words, pixel_words(a.words))),
                                       dim3(kListThreads), 0, stream, a));
  return ok_status();
}
