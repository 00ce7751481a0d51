// Pixels between channels first (a channel's pixels lie side by side) and channels last (a pixel's channels do).
// Included by kernels of each instruction set, which define SBNET_ISA and SBNET_VECTOR, its bytes.
#pragma once
#include <utility>

#include "cpu/simd/stream.h"

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kPixels = 512;                             // of one list, at most
constexpr int64_t kWindow = 64, kMostWindow = kWindow + 16;  // pixels that all channels are moved of before the next

// Elements a side of a tile: a vector each, and no more of them than there are registers for.
template <class T>
constexpr int tile_side() {
  constexpr int fit = SBNET_VECTOR / static_cast<int>(sizeof(T)), most = SBNET_VECTOR == 64 ? 16 : 8;
  return fit < most ? fit : most;
}

template <int kSide, class T>
struct Tile {
  typedef T Row __attribute__((vector_size(kSide * sizeof(T))));
  Row rows[kSide];
};

template <int kSide, class Row, int... k>
SBNET_INLINE void interleave(Row a, Row b, Row* low, Row* high, std::integer_sequence<int, k...>) {
  *low = __builtin_shufflevector(a, b, (k % 2 * kSide + k / 2)...);
  *high = __builtin_shufflevector(a, b, (k % 2 * kSide + k / 2 + kSide / 2)...);
}

// log2(kSide) perfect shuffles of all elements.
template <int kSide, class T>
SBNET_INLINE void transpose(Tile<kSide, T>* tile) {
#pragma GCC unroll 4
  for (int step = 1; step < kSide; step *= 2) {
    Tile<kSide, T> next;
#pragma GCC unroll 8
    for (int r = 0; r < kSide / 2; ++r)
      interleave<kSide>(tile->rows[r], tile->rows[r + kSide / 2], &next.rows[2 * r], &next.rows[2 * r + 1],
                        std::make_integer_sequence<int, kSide>{});
    *tile = next;
  }
}
template <class T>
SBNET_INLINE void transpose(Tile<1, T>*) {}

// The first of a tile that begins at `i` of `n`: the last one overlaps the one before it. n >= kSide.
template <int kSide>
SBNET_INLINE int64_t tile_at(int64_t i, int64_t n) {
  return i + kSide <= n ? i : n - kSide;
}

// Channels last to first: out[c * pitch + p] = in[at[p] + c]. `next`: what the next call reads, at the same pixels.
template <int kSide, class T>
SBNET_INLINE void to_channels_first(T* out, int64_t pitch, const T* in, const int64_t* at, int64_t pixels,
                                    int64_t channels, const T* next, const int64_t* next_at) {
  for (int64_t i = 0; i < pixels; i += kSide) {
    const int64_t p = tile_at<kSide>(i, pixels);
    for (int k = 0; k < kSide; ++k) __builtin_prefetch(next + next_at[p + k], 0, 2);
    for (int64_t j = 0; j < channels; j += kSide) {
      const int64_t c = tile_at<kSide>(j, channels);
      Tile<kSide, T> tile;
      for (int k = 0; k < kSide; ++k) __builtin_memcpy(&tile.rows[k], in + at[p + k] + c, sizeof tile.rows[k]);
      transpose(&tile);
      for (int k = 0; k < kSide; ++k) __builtin_memcpy(out + (c + k) * pitch + p, &tile.rows[k], sizeof tile.rows[k]);
    }
  }
}

// Channels first to last: to(p)[c] = in[c * pitch + p].
template <int kSide, class T, class To>
SBNET_INLINE void to_channels_last(const To& to, const T* in, int64_t pitch, int64_t pixels, int64_t channels,
                                   const T* next) {
  for (int64_t i = 0; i < pixels; i += kSide) {
    const int64_t p = tile_at<kSide>(i, pixels);
    for (int64_t j = 0; j < channels; j += kSide) {
      const int64_t c = tile_at<kSide>(j, channels);
      Tile<kSide, T> tile;
      for (int k = 0; k < kSide; ++k) {
        __builtin_prefetch(next + (c + k) * pitch + p, 0, 2);
        __builtin_memcpy(&tile.rows[k], in + (c + k) * pitch + p, sizeof tile.rows[k]);
      }
      transpose(&tile);
      for (int k = 0; k < kSide; ++k) __builtin_memcpy(to(p + k) + c, &tile.rows[k], sizeof tile.rows[k]);
    }
  }
}

// Pixels that lie side by side in each channel of `first`, and with their channels at last[at[...]]: entry k is pixel
// pixel[k]. Blocks that overlap list a pixel more than once; in all other lists entry k is pixel k.
template <class T>
struct Pixels {
  T* first;
  T* last;
  int64_t pitch;           // of a channel in `first`
  int64_t pixels, listed;  // at most kPixels
  int32_t pixel[kPixels];
  int64_t at[kPixels];
};

template <class T>
constexpr int64_t kGroup = kLine / static_cast<int64_t>(sizeof(T));  // channels of a line

// Calls use(side of tiles) with the largest that fits both dimensions.
template <class T, class Use>
SBNET_INLINE void with_tiles(int64_t pixels, int64_t channels, const Use& use) {
  constexpr int kSide = tile_side<T>(), kSmall = kSide < 4 ? 1 : 4;
  const int64_t shorter = pixels < channels ? pixels : channels;
  if (shorter >= kSide)
    use(std::integral_constant<int, kSide>{});
  else if (shorter >= kSmall)
    use(std::integral_constant<int, kSmall>{});
  else
    use(std::integral_constant<int, 1>{});
}

// Reads that wait for memory are what transposes take their time with: each group of channels fetches the next one, the
// last group the first of the window that follows; the last window the first of the list that follows, which begins at
// `next` on the side that is read. Lines are put together in a buffer and written whole: kStream, past the caches.

// A window that begins at `i` of `n` ends there: no few pixels are left over for a window of their own.
SBNET_INLINE int64_t window_end(int64_t i, int64_t n) { return n - i > kMostWindow ? i + kWindow : n; }

template <bool kStream, class T>
static void write_channels_last(const Pixels<T>& px, int64_t channels, const T* next) {
  alignas(kLine) T buffer[kMostWindow * kGroup<T>];
  for (int64_t k0 = 0, k1; k0 < px.listed; k0 = k1) {
    k1 = window_end(k0, px.listed);
    int64_t p0 = px.pixel[k0], p1 = p0;
    for (int64_t k = k0; k < k1; ++k) {
      if (px.pixel[k] < p0) p0 = px.pixel[k];
      if (px.pixel[k] >= p1) p1 = px.pixel[k] + 1;
    }
    const bool direct = !kStream && p1 - p0 == k1 - k0;
    for (int64_t c = 0; c < channels; c += kGroup<T>) {
      const int64_t left = channels - c, depth = left < kGroup<T> ? left : kGroup<T>;
      const T* in = px.first + p0 + c * px.pitch;
      const T* after = left > kGroup<T> ? in + kGroup<T> * px.pitch : k1 < px.listed ? px.first + p1 : next;
      with_tiles<T>(p1 - p0, depth, [&](auto side) __attribute__((always_inline)) {
        constexpr int kSide = decltype(side)::value;
        if (direct)
          to_channels_last<kSide>([&](int64_t p) { return px.last + px.at[p0 + p] + c; }, in, px.pitch, p1 - p0, depth,
                                  after);
        else
          to_channels_last<kSide>([&](int64_t p) { return buffer + p * kGroup<T>; }, in, px.pitch, p1 - p0, depth,
                                  after);
      });
      if (direct) continue;
      for (int64_t k = k0; k < k1; ++k) {
        T* to = px.last + px.at[k] + c;
        const T* line = buffer + (px.pixel[k] - p0) * kGroup<T>;
        if (depth < kGroup<T>)
          copy_short(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(line), depth * int64_t{sizeof(T)});
        else if (kStream && is_line(to))
          stream_line(to, line);
        else
          __builtin_memcpy(to, line, kLine);
      }
    }
  }
}

template <bool kStream, class T>
static void write_channels_first(const Pixels<T>& px, int64_t channels, const T* next) {
  alignas(kLine) T buffer[kStream ? kMostWindow * kGroup<T> : 1];
  for (int64_t p0 = 0, p1; p0 < px.pixels; p0 = p1) {
    p1 = window_end(p0, px.pixels);
    if (kStream && p1 < px.pixels)  // the next window begins with a line
      p1 -= reinterpret_cast<intptr_t>(px.first + p1) % kLine / int64_t{sizeof(T)};
    const int64_t pixels = p1 - p0, rest = px.pixels - p1;
    const int64_t *at = px.at + p0, *following = px.at + (rest == 0 ? 0 : rest < pixels ? px.pixels - pixels : p1);
    for (int64_t c = 0; c < channels; c += kGroup<T>) {
      const int64_t left = channels - c, depth = left < kGroup<T> ? left : kGroup<T>;
      const bool more = left > kGroup<T>;
      T* first = px.first + c * px.pitch + p0;
      T* out = kStream ? buffer : first;
      const int64_t pitch = kStream ? kMostWindow : px.pitch;
      const T* after = more ? px.last + c + kGroup<T> : rest ? px.last : next;
      with_tiles<T>(pixels, depth, [&](auto side) __attribute__((always_inline)) {
        to_channels_first<decltype(side)::value>(out, pitch, px.last + c, at, pixels, depth, after,
                                                 more ? at : following);
      });
      for (int64_t k = 0; kStream && k < depth; ++k)
        copy_run<true>(reinterpret_cast<char*>(first + k * px.pitch),
                       reinterpret_cast<const char*>(buffer + k * kMostWindow), pixels * int64_t{sizeof(T)});
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet
