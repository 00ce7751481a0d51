// Pixels between channels first (a channel's pixels lie side by side) and channels last (a pixel's channels do).
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/stream.h"

namespace sbnet {

constexpr int64_t kPixels = 512;  // of one call, at most: a list of where they lie stays small
constexpr int64_t kTile = 16;     // pixels, channels: a cache line of 4-byte elements

typedef uint32_t Quad __attribute__((vector_size(16)));

inline void transpose(Quad (&a)[4]) {
  const Quad low01 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5);
  const Quad low23 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
  const Quad high01 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
  const Quad high23 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
  a[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  a[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  a[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  a[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
}

// Writes a line that was put together elsewhere: past the caches it is to be written in one go.
inline void write_line(void* out, const void* line) {
  is_line(out) ? stream_line(out, line) : static_cast<void>(std::memcpy(out, line, kLine));
}

// Reads that wait for memory are what transposes take their time with: both functions fetch what lies `ahead`. kStream:
// lines that are written whole go past the caches.

// last[at[p] + c] = first[c * pitch + p]; ahead: elements.
template <bool kStream, class T>
void to_channels_last(const T* first, int64_t pitch, T* last, const int64_t* at, int64_t pixels, int64_t channels,
                      int64_t ahead) {
  constexpr bool kQuads = sizeof(T) == 4;
  for (int64_t p0 = 0; p0 < pixels; p0 += kTile) {
    const int64_t p1 = p0 + kTile < pixels ? p0 + kTile : pixels;
    for (int64_t c0 = 0; c0 < channels; c0 += kTile) {
      const int64_t c1 = c0 + kTile < channels ? c0 + kTile : channels;
      for (int64_t c = c0; c < c1; ++c) __builtin_prefetch(first + c * pitch + p0 + ahead, 0, 2);
      const bool line = kStream && kQuads && c1 - c0 == kTile;
      int64_t p = p0;
      if constexpr (kQuads) {
        for (; p + 4 <= p1; p += 4) {
          alignas(64) T lines[4][kTile];
          int64_t c = c0;
          for (; c + 4 <= c1; c += 4) {
            Quad a[4];
            for (int r = 0; r < 4; ++r) std::memcpy(&a[r], first + (c + r) * pitch + p, 16);
            transpose(a);
            for (int r = 0; r < 4; ++r) std::memcpy(line ? &lines[r][c - c0] : last + at[p + r] + c, &a[r], 16);
          }
          for (; c < c1; ++c)
            for (int r = 0; r < 4; ++r) last[at[p + r] + c] = first[c * pitch + p + r];
          for (int r = 0; line && r < 4; ++r) write_line(last + at[p + r] + c0, lines[r]);
        }
      }
      for (; p < p1; ++p)
        for (int64_t c = c0; c < c1; ++c) last[at[p] + c] = first[c * pitch + p];
    }
  }
}

// first[c * pitch + p] = last[at[p] + c]; `at` lists `listed` pixels, those beyond `pixels` are the next call's.
template <bool kStream, class T>
void to_channels_first(T* first, int64_t pitch, const T* last, const int64_t* at, int64_t pixels, int64_t listed,
                       int64_t channels) {
  constexpr bool kQuads = sizeof(T) == 4;
  const int64_t ahead = pixels < 2 * kTile ? pixels : 2 * kTile;
  for (int64_t p0 = 0; p0 < pixels; p0 += kTile) {
    const int64_t p1 = p0 + kTile < pixels ? p0 + kTile : pixels;
    for (int64_t c0 = 0; c0 < channels; c0 += kTile) {
      const int64_t c1 = c0 + kTile < channels ? c0 + kTile : channels;
      for (int64_t p = p0; p < p1 && p + ahead < listed; ++p) __builtin_prefetch(last + at[p + ahead] + c0, 0, 2);
      const bool line = kStream && kQuads && p1 - p0 == kTile;
      int64_t c = c0;
      if constexpr (kQuads) {
        for (; c + 4 <= c1; c += 4) {
          alignas(64) T lines[4][kTile];
          int64_t p = p0;
          for (; p + 4 <= p1; p += 4) {
            Quad a[4];
            for (int r = 0; r < 4; ++r) std::memcpy(&a[r], last + at[p + r] + c, 16);
            transpose(a);
            for (int r = 0; r < 4; ++r) std::memcpy(line ? &lines[r][p - p0] : first + (c + r) * pitch + p, &a[r], 16);
          }
          for (; p < p1; ++p)
            for (int r = 0; r < 4; ++r) first[(c + r) * pitch + p] = last[at[p] + c + r];
          for (int r = 0; line && r < 4; ++r) write_line(first + (c + r) * pitch + p0, lines[r]);
        }
      }
      for (; c < c1; ++c)
        for (int64_t p = p0; p < p1; ++p) first[c * pitch + p] = last[at[p] + c];
    }
  }
}

}  // namespace sbnet
