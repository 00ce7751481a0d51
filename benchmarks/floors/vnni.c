// What int8 products of a processor with AVX-512 VNNI come to at most, and what reading and writing memory takes:
//   cc -O3 -march=native -fopenmp benchmarks/floors/vnni.c -o /tmp/vnni && OMP_NUM_THREADS=2 /tmp/vnni
#include <immintrin.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kSums = 24, kSteps = 40000000, kBytes = 256 << 20 };

static double products(void) {  // a second, of all threads
  double begin = omp_get_wtime();
#pragma omp parallel
  {
    __m512i sum[kSums], x = _mm512_set1_epi8((char)omp_get_thread_num()), w = _mm512_set1_epi8(3);
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sum[i] = _mm512_setzero_si512();
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
      for (int i = 0; i < kSums; ++i) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sum[i]) : "v"(x), "v"(w));
    }
#pragma GCC unroll 24
    for (int i = 1; i < kSums; ++i) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
    volatile int kept = _mm512_reduce_add_epi32(sum[0]);
    (void)kept;
  }
  return 64.0 * kSums * kSteps * omp_get_max_threads() / (omp_get_wtime() - begin);
}

int main(void) {
  char *from = malloc(kBytes), *to = malloc(kBytes);
  memset(from, 1, kBytes);
  memset(to, 2, kBytes);
  double best = 1e9, most = 0;
  for (int k = 0; k < 5; ++k) {
    double begin = omp_get_wtime(), found = products();
    most = found > most ? found : most;
    begin = omp_get_wtime();
#pragma omp parallel for
    for (int part = 0; part < 64; ++part) memcpy(to + (size_t)part * (kBytes / 64), from + (size_t)part * (kBytes / 64), kBytes / 64);
    double took = omp_get_wtime() - begin;
    best = took < best ? took : best;
  }
  printf("%d threads: %.0f G products/s, copies %.1f GB/s read and as much written\n", omp_get_max_threads(), most / 1e9,
         kBytes / best / 1e9);
}
