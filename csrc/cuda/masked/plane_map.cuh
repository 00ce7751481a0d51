// Kernels that write a whole plane of which the active blocks alone hold anything, in one pass: zeros elsewhere. A
// thread keeps one word of channels, so that the numbers of its channels stay in registers, and goes through pixels.
#pragma once
#include "cuda/masked/pixels.cuh"

namespace sbnet {

constexpr int kPlaneThreads = 256;

struct PlaneMap {
  const int32_t* block_map;  // null: all pixels are active
  FastDiv words;             // of a pixel that a CTA takes together; 1 where pixels of a channel are neighbours
  FastDiv width, height;     // of the plane
  FastDiv block_width, block_height;
  int32_t block_rows, block_columns, all_words;
  int64_t pixels;  // of the batch

  PlaneMap(const TensorView& y, const ActiveView& active, int lanes)
      : block_map(active.block_map),
        width(y.size[3]),
        height(y.size[2]),
        block_width(active.grid.size[1]),
        block_height(active.grid.size[0]),
        block_rows(active.grid.count[0]),
        block_columns(active.grid.count[1]),
        all_words(static_cast<int32_t>(y.size[1] / lanes)),
        pixels(y.size[0] * y.size[2] * y.size[3]) {
    words = FastDiv(y.stride[1] <= y.stride[3] ? std::min<int64_t>(all_words, kPlaneThreads) : 1);
  }
  int lanes() const { return kPlaneThreads / static_cast<int>(words.divisor); }
};

struct PlanePixel {
  int64_t n;
  int row, column;
  bool active;
};

// begin(first channel), then for each pixel of the batch's planes store(pixel, load(pixel)): load is called of active
// pixels alone, and gives anything for others. (Two or four pixels of a thread at once were slower on an H100, a step
// of a ResNet-50 by 3 and 10 %: their registers cost occupancy.)
template <int kN, class Begin, class Load, class Store>
__device__ __forceinline__ void for_plane(const PlaneMap& map, const Begin& begin, const Load& load,
                                          const Store& store) {
  uint32_t lane, word;
  map.words.divmod(threadIdx.x, &lane, &word);
  word += blockIdx.y * map.words.divisor;
  const uint32_t lanes = map.words.quotient(kPlaneThreads);
  if (lane >= lanes || word >= static_cast<uint32_t>(map.all_words)) return;
  begin(int64_t{word} * kN);
  const int64_t step = int64_t{gridDim.x} * lanes;
  for (int64_t at = int64_t{blockIdx.x} * lanes + lane; at < map.pixels; at += step) {
    uint32_t rest, row, column, n;
    map.width.divmod(static_cast<uint32_t>(at), &rest, &column);
    map.height.divmod(rest, &n, &row);
    const int32_t slot =
        !map.block_map
            ? 0
            : map.block_map[(int64_t{n} * map.block_rows + map.block_height.quotient(row)) * map.block_columns +
                            map.block_width.quotient(column)];
    const PlanePixel pixel = {n, static_cast<int>(row), static_cast<int>(column), slot >= 0};
    decltype(load(pixel)) loaded;
    if (pixel.active) loaded = load(pixel);
    store(pixel, loaded);
  }
}

// What load gives of one tensor, or of two.
template <class T, int kN>
struct OneWord {
  Word<T, kN> a;
};
template <class T, int kN>
struct TwoWords {
  Word<T, kN> a, b;
};

template <class T, int kN>
__device__ __forceinline__ Word<T, kN>* word_at(const TensorView& t, const PlanePixel& at, int64_t channel) {
  return reinterpret_cast<Word<T, kN>*>(static_cast<T*>(t.data) + at.n * t.stride[0] + channel * t.stride[1] +
                                        at.row * t.stride[2] + at.column * t.stride[3]);
}

// Writes a word: f(e) of each channel where the pixel is active, else 0.
template <class T, int kN, class F>
__device__ __forceinline__ void store_word(const TensorView& y, const PlanePixel& at, int64_t channel, const F& f) {
  Word<T, kN> out;
#pragma unroll
  for (int e = 0; e < kN; ++e) out.channel[e] = from_float<T>(at.active ? f(e) : 0.f);
  *word_at<T, kN>(y, at, channel) = out;
}

// Launches kKernel(p, map, more...), whose threads take kN channels.
template <int kN, class Kernel, class Params, class... More>
Status launch_plane(const char* op, Kernel kernel, const Params& p, const DeviceInfo& device, cudaStream_t stream,
                    const More&... more) {
  const PlaneMap map(p.y, p.active, kN);
  SBNET_CHECK(map.pixels < INT32_MAX, "%s: x: expected fewer than 2^31 pixels, got %lld", op,
              static_cast<long long>(map.pixels));
  const int64_t words = map.words.divisor, columns = (map.all_words + words - 1) / words;
  SBNET_CHECK(columns < 65536, "%s: x: expected fewer than 65536 channels, got %lld", op,
              static_cast<long long>(p.y.size[1]));
  const int64_t wanted = (map.pixels + map.lanes() - 1) / map.lanes();
  const int64_t most = std::max<int64_t>(1, int64_t{device.sm_count} * 8 / columns);
  const dim3 ctas(static_cast<unsigned>(std::min(wanted, most)), static_cast<unsigned>(columns));
  SBNET_CUDA_TRY(op, launch_dependent(device, kernel, ctas, dim3(kPlaneThreads), 0, stream, p, map, more...));
  return ok_status();
}

}  // namespace sbnet
