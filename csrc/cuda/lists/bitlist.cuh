// Lists of the set bits of a bitmap, in order: shared by fringe and mask_pyramid.
//
// A bitmap is rows of words, 32 columns a word. Like reduce_mask: no atomics, no state that outlives a launch. Each
// CTA that lists a part counts the bits before that part by itself.
#pragma once
#include "core/lists/fringe.h"
#include "cuda/common.cuh"

namespace sbnet {

constexpr int kListThreads = 512, kListWarps = kListThreads / 32;

// Words that a warp lists, of a bitmap of pixels: every CTA reads all counts, so that a large bitmap (2880 x 5120
// pixels have 14,400 counts) has fewer of them.
SBNET_HOST_DEVICE inline int pixel_words(int words) { return words > 1 << 16 ? 32 : 8; }

// CTAs that list a bitmap; one at least, which writes the count.
SBNET_HOST_DEVICE inline int list_chunks(int words, int per_warp) {
  const int chunks = (words + kListWarps * per_warp - 1) / (kListWarps * per_warp);
  return chunks ? chunks : 1;
}

// The bits of 32 words, one a lane of a full warp, go to `words` from `first` on and their sum to counts[first / 32].
__device__ __forceinline__ void store_counted(uint32_t word, int first, int total, uint32_t* words, int32_t* counts) {
  const int lane = threadIdx.x % 32;
  if (first >= total) return;
  if (first + lane < total) words[first + lane] = word;
  const int sum = __reduce_add_sync(0xffffffff, __popc(word));
  if (lane == 0) counts[first / 32] = sum;
}

// A CTA lists its chunk, kPerWarp words a warp, of a bitmap of `total` words. visit(word, bit, slot) is called for
// every bit of these words; slot is -1 for a clear one. `counts`: set bits of each 32 words, or null. Returns the set
// bits of the whole bitmap. To be called once a CTA.
template <int kPerWarp, class Visit>
__device__ __forceinline__ int list_bits(const uint32_t* words, const int32_t* counts, int total, int chunk,
                                         const Visit& visit) {
  struct Part {
    int before, total, own;
  };
  __shared__ Part parts[kListWarps];
  constexpr unsigned kAll = 0xffffffff;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(kPerWarp == 1 || kListWarps * kPerWarp % 32 == 0, "a chunk of pixels starts on a count");
  const int first = chunk * kListWarps * kPerWarp, mine = first + warp * kPerWarp;
  const uint32_t word = lane < kPerWarp && mine + lane < total ? words[mine + lane] : 0;
  int before = 0, sum = 0;
  const int scale = counts ? 32 : 1;
#pragma unroll 8  // loads in flight together
  for (int k = threadIdx.x; k * scale < total; k += kListThreads) {
    const int n = counts ? counts[k] : __popc(words[k]);
    sum += n;
    before += k * scale < first ? n : 0;
  }
  const int set = __popc(word), own = __reduce_add_sync(kAll, set);
  before = __reduce_add_sync(kAll, before);
  sum = __reduce_add_sync(kAll, sum);
  if (lane == 0) parts[warp] = {before, sum, own};
  __syncthreads();
  const Part part = lane < kListWarps ? parts[lane] : Part{0, 0, 0};
  int slot = __reduce_add_sync(kAll, part.before + (lane < warp ? part.own : 0));
#pragma unroll
  for (int k = 0; k < kPerWarp; ++k) {
    const uint32_t bits = __shfl_sync(kAll, word, k);
    if (mine + k < total) visit(mine + k, lane, bits >> lane & 1 ? slot + __popc(bits & ((1u << lane) - 1)) : -1);
    slot += __popc(bits);
  }
  return __reduce_add_sync(kAll, part.total);
}

// One chunk of a list of pixels: its share of the set bits and of the -1 behind them; the first one writes the count.
__device__ __forceinline__ void list_pixels(const uint32_t* words, const int32_t* counts, int total_words,
                                            const FastDiv& words_per_row, int width, int chunk, int chunks,
                                            int64_t capacity, int32_t* pixels, int32_t* count) {
  const auto visit = [&](int word, int bit, int slot) {
    uint32_t row, column;
    words_per_row.divmod(word, &row, &column);
    if (slot >= 0 && slot < capacity)
      pixels[slot] = static_cast<int>(row) * width + static_cast<int>(column) * 32 + bit;
  };
  const int total = pixel_words(total_words) == 8 ? list_bits<8>(words, counts, total_words, chunk, visit)
                                                  : list_bits<32>(words, counts, total_words, chunk, visit);
  for (int64_t k = total + static_cast<int64_t>(chunk) * kListThreads + threadIdx.x; k < capacity;
       k += static_cast<int64_t>(chunks) * kListThreads)
    pixels[k] = -1;
  if (chunk == 0 && threadIdx.x == 0) *count = static_cast<int>(total < capacity ? total : capacity);
}

}  // namespace sbnet
