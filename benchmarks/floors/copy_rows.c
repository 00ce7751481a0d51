/* What the memory accesses of block copies cost by themselves, one thread: plain loops that move a tile between a
 * buffer in the L1 cache and a map of NCHW rows, or a stack of blocks, and do nothing else. A transposed copy makes the
 * accesses of two of them: it takes as long as the slower one at least, and as both where they do not overlap.
 *
 * Then both sides' accesses together, in the order of csrc/cpu, by two threads: the scatter of all rows of 18x18
 * blocks, and 50 blocks that stay in the caches.
 *
 *   cc -O3 -march=native -fopenmp benchmarks/floors/copy_rows.c -o /tmp/copy_rows && /tmp/copy_rows
 */
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  H = 800,
  W = 704,
  LINE = 16,
  GROUP = 8,
  ROUNDS = 5
}; /* LINE: channels of 64 bytes; GROUP: neighbouring blocks */

static float tile[LINE * 18 * 18];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

#define INLINE static inline __attribute__((always_inline))

INLINE void move(float* memory, float* buffer, int floats, int write) {
  memcpy(write ? memory : buffer, write ? buffer : memory, 4 * floats);
}

/* Rows of b floats of an NCHW map; neighbouring blocks take turns at each channel: they share pages and lines. */
INLINE void map_rows(float* map, int channels, int b, int write) {
  const long across = W / b, blocks = H / b * across;
  for (long first = 0; first < blocks; first += GROUP)
    for (int c = 0; c < channels; ++c)
      for (long s = first; s < first + GROUP && s < blocks; ++s)
        for (int r = 0; r < b; ++r)
          move(map + ((long)c * H + s / across * b + r) * W + s % across * b, tile + r * b, b, write);
}

/* A stack of [block][pixel][channel] by lines of 16 channels: what a transpose to or from the order above asks of it.
 */
INLINE void stack_lines(float* stack, int channels, int b, int write) {
  const long blocks = H / b * (W / b), pixels = (long)b * b;
  for (long first = 0; first < blocks; first += GROUP)
    for (int c = 0; c < channels; c += LINE)
      for (long s = first; s < first + GROUP && s < blocks; ++s)
        for (long p = 0; p < pixels; ++p) move(stack + (s * pixels + p) * channels + c, tile + p * LINE, LINE, write);
}

/* The same stack, or one of [block][channel][pixel], from its beginning to its end. */
INLINE void stack_in_order(float* stack, int channels, int b, int write) {
  const long blocks = H / b * (W / b), floats = (long)b * b * LINE;
  for (long s = 0; s < blocks * channels / LINE; ++s) move(stack + s * floats, tile, floats, write);
}

#define BEST(ms, run)                            \
  double ms = 1e9;                               \
  for (int round = 0; round < ROUNDS; ++round) { \
    const double start = now();                  \
    run;                                         \
    const double took = now() - start;           \
    if (took < ms) ms = took;                    \
  }

INLINE void measure(int channels, int b) {
  const size_t bytes = 4l * channels * (H / b * b) * (W / b * b);
  float *map = malloc(4l * channels * H * W), *stack = malloc(bytes), *other = malloc(bytes);
  if (!map || !stack || !other) exit(1);
  memset(map, 1, 4l * channels * H * W), memset(stack, 1, bytes), memset(other, 1, bytes);
  BEST(copy, memcpy(other, stack, bytes))
  printf("%3d channels, blocks of %dx%d: copy %.1f ms\n", channels, b, b, copy);
  for (int write = 0; write < 2; ++write) {
    BEST(rows, map_rows(map, channels, b, write))
    BEST(lines, stack_lines(stack, channels, b, !write))
    BEST(ordered, stack_in_order(stack, channels, b, !write))
    printf("  %s: map rows %.1f ms, stack in order %.1f, by lines %.1f\n", write ? "scatter" : "gather ", rows, ordered,
           lines);
  }
  free(map), free(stack), free(other);
}

/* `floats` a multiple of LINE; past the caches, to a whole line each. */
INLINE void stream(float* memory, const float* buffer, int floats) {
  for (int i = 0; i < floats; i += 4) _mm_stream_ps(memory + i, _mm_loadu_ps(buffer + i));
}

enum { B = 18, ACROSS = W / B, DOWN = H / B, MOST = 352, SOME = 50 };

/* channels_last blocks to rows of an NCHW map: windows of neighbouring pixels, all channels, then the next window. */
INLINE void scatter_rows(float* map, const float* stack, int channels, int window, int streamed) {
#pragma omp parallel for schedule(static) num_threads(2)
  for (int i = 0; i < DOWN; ++i) {
    float lines[MOST * LINE] __attribute__((aligned(64)));
    for (int r = 0; r < B; ++r)
      for (int x = 0; x + window <= W; x += window)
        for (int c = 0; c < channels; c += LINE) {
          for (int p = 0; p < window; ++p) {
            const long block = (long)i * (ACROSS + 1) + (x + p) / B, pixel = r * B + (x + p) % B;
            const float* from = stack + (block * B * B + pixel) * channels + c;
            __builtin_prefetch(from + LINE, 0, 2);
            move((float*)from, lines + p * LINE, LINE, 0);
          }
          for (int k = 0; k < LINE; ++k) {
            float* to = map + ((long)(c + k) * H + i * B + r) * W + x;
            streamed ? stream(to, lines + k * window, window) : move(to, lines + k * window, window, 1);
          }
        }
    _mm_sfence();
  }
}

/* channels_last map to NCHW blocks, `apart` pixels from one to the next. */
INLINE void gather_some(float* map, float* stack, int channels, int b, long apart) {
#pragma omp parallel for schedule(static) num_threads(2)
  for (int s = 0; s < SOME; ++s) {
    float lines[B * B * LINE] __attribute__((aligned(64)));
    for (int c = 0; c < channels; c += LINE) {
      for (int p = 0; p < b * b; ++p)
        move(map + (s * apart + p / b * W + p % b) * channels + c, lines + p * LINE, LINE, 0);
      for (int k = 0; k < LINE; ++k) move(stack + ((long)s * channels + c + k) * b * b, lines + k * b * b, b * b, 1);
    }
  }
}

INLINE void copy_halves(float* to, const float* from, size_t floats) {
#pragma omp parallel for schedule(static) num_threads(2)
  for (int half = 0; half < 2; ++half) memcpy(to + half * (floats / 2), from + half * (floats / 2), floats / 2 * 4);
}

INLINE void measure_both(int channels) {
  const size_t floats = (size_t)channels * (DOWN + 1) * (ACROSS + 1) * B * B;
  float *map = aligned_alloc(64, 4l * channels * H * W), *stack = aligned_alloc(64, 4 * floats);
  float* other = aligned_alloc(64, 4 * floats);
  if (!map || !stack || !other) exit(1);
  memset(map, 1, 4l * channels * H * W), memset(stack, 1, 4 * floats), memset(other, 1, 4 * floats);
  BEST(copy, copy_halves(other, stack, (size_t)channels * DOWN * ACROSS * B * B))
  BEST(narrow, scatter_rows(map, stack, channels, 64, 1))
  BEST(wide, scatter_rows(map, stack, channels, MOST, 1))
  BEST(plain, scatter_rows(map, stack, channels, 64, 0))
  printf("%3d channels, 18x18, two threads: copy %.1f ms; scatter by 64 pixels %.1f, by %d %.1f, plain stores %.1f\n",
         channels, copy, narrow, MOST, wide, plain);
  for (int b = 16; b <= B; b += 2) {
    const size_t some = (size_t)SOME * channels * b * b;
    BEST(cached, for (int k = 0; k < 20; ++k) copy_halves(other, stack, some))
    BEST(gather, for (int k = 0; k < 20; ++k) gather_some(map, stack, channels, b, 7019))
    printf("  %d blocks of %dx%d: copy %.3f ms, gather %.3f\n", SOME, b, b, cached / 20, gather / 20);
  }
  free(map), free(stack), free(other);
}

int main(void) {
  measure(64, 16), measure(64, 18), measure(256, 16), measure(256, 18);
  measure_both(64), measure_both(256);
  return 0;
}
