// Times blocksparse_weight_grad's CPU kernels of a source tree on two threads, without torch: two builds of it compare
// two trees. Links with csrc/cpu/weights/matmul*.cpp, csrc/core/weights/{matmul,layout,plan}.cpp and
// csrc/core/{grid,layer,memory}.cpp, compiled with -O3 -DSBNET_AMX and each file's flags of csrc/CMakeLists.txt:
//   taskset -c 0,1 ./weight_grad
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/weights/matmul.h"
#include "cpu/simd/isa.h"

using namespace sbnet;

// One thread beside the caller's; both spin, so that starting costs next to nothing.
struct Pool {
  std::atomic<int> started{0}, done{0};
  std::atomic<bool> stop{false};
  void (*body)(void*, int64_t, int64_t);
  void* arg;
  int64_t end;
  std::thread thread{[this] {
    for (int seen = 0; !stop;)
      if (started != seen) ++seen, body(arg, 0, end), ++done;
  }};
  ~Pool() {
    stop = true;
    thread.join();
  }
};

static void run(void* handle, int64_t n, int64_t, void (*body)(void*, int64_t, int64_t), void* arg) {
  Pool& pool = *static_cast<Pool*>(handle);
  const int before = pool.done;
  pool.body = body, pool.arg = arg, pool.end = n / 2;
  ++pool.started;
  body(arg, n / 2, n);
  while (pool.done == before) {
  }
}

// The best of up to nine calls, in ms.
static double best(const BlocksparseWeightGradParams& p, const Parallel& parallel) {
  std::vector<char> memory(sbnet_blocksparse_weight_grad_workspace_bytes_cpu(&p, parallel.threads) + 64);
  char* workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  double least = 1e9;
  for (int call = 0; call < 9 && (call < 3 || least < 60); ++call) {
    const auto begin = std::chrono::steady_clock::now();
    if (!sbnet_blocksparse_weight_grad_cpu(&p, workspace, &parallel).ok()) std::abort();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    least = std::min(least, took.count());
  }
  return least;
}

int main() {
  Pool pool;
  const Parallel parallel = {run, &pool, 2};
  std::mt19937 random(1);
  const char* sets[] = {"generic", "avx2", "avx512", "amx", "amx-fp16"};
  std::printf("instructions: %s\n", sets[static_cast<int>(chosen_isa())]);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (const auto& [rows, side] : {std::pair<int64_t, int64_t>{512, 2048}, {4096, 1024}, {16, 2048}})
      for (const int32_t size : {8, 16, 32, 64})
        for (const double density : {1.0, 0.5, 0.1}) {
          if (size != 32 && (dtype != DType::kBF16 || rows == 4096)) continue;
          const int64_t n = side / size;
          std::vector<int32_t> order(n * n), coords;
          for (int32_t i = 0; i < n * n; ++i) order[i] = i;
          std::shuffle(order.begin(), order.end(), random);
          order.resize(static_cast<size_t>(n * n * density));
          std::sort(order.begin(), order.end());
          for (const int32_t i : order) coords.insert(coords.end(), {i / int32_t(n), i % int32_t(n)});
          const BlockLayoutShape shape = {n, n, int64_t(order.size()), side, side, size};
          std::vector<int32_t> words(block_layout_words(shape));
          if (!make_block_layout(shape, coords.data(), words.data()).ok()) return 1;
          // Bytes of ordinary numbers: exponents of -1 and 0, in each of the three types.
          std::vector<uint16_t> x(rows * side * 2), dw(order.size() * size * size * 2);
          for (uint16_t& v : x) v = (dtype == DType::kF16 ? 0x3800 : 0x3f00) | (random() & 0x80ff);
          BlocksparseWeightGradParams p = {};
          p.pairs = 1, p.dw = dw.data(), p.dw_dtype = dtype, p.layout = block_layout_view(shape, words.data());
          p.x[0] = p.dy[0] = TensorView{x.data(), {1, side, 1, rows}, {0, 1, 0, side}, dtype};
          std::printf("%s, %lld rows, %lld x %lld, blocks of %d, density %.1f: %.3f ms\n",
                      dtype == DType::kBF16  ? "bfloat16"
                      : dtype == DType::kF16 ? "float16"
                                             : "float32",
                      static_cast<long long>(rows), static_cast<long long>(side), static_cast<long long>(side), size,
                      density, best(p, parallel));
          std::fflush(stdout);
        }
}
