#include "core/attention/layout.h"

#include <algorithm>

namespace sbnet {
namespace {

// to[i][word] of bits from[i * row + j * column] for j = 0 ... columns - 1.
void pack(const uint8_t* from, int64_t row, int64_t column, int64_t rows, int64_t columns, uint32_t* to) {
  const int64_t words = (columns + 31) / 32;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t w = 0; w < words; ++w) {
      uint32_t bits = 0;
      const int64_t count = std::min<int64_t>(32, columns - w * 32);
      for (int64_t j = 0; j < count; ++j)
        bits |= static_cast<uint32_t>(from[i * row + (w * 32 + j) * column] != 0) << j;
      to[i * words + w] = bits;
    }
}

}  // namespace
}  // namespace sbnet

extern "C" sbnet::Status sbnet_pack_attention_blocks_cpu(const sbnet::PackAttentionBlocksParams* p,
                                                         const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  const int64_t Q = p->q_blocks, K = p->k_blocks, q_words = (Q + 31) / 32, k_words = (K + 31) / 32;
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(Q * K, 1));
  sbnet::parallel_for(*parallel, p->planes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      sbnet::pack(p->blocks + i * Q * K, K, 1, Q, K, p->rows + i * Q * k_words);
      sbnet::pack(p->blocks + i * Q * K, 1, K, K, Q, p->columns + i * K * q_words);
    }
  });
  return sbnet::ok_status();
}
