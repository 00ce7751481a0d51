// A row of one active block: what the instruction-set dependent half of a layer on the CPU computes in a call.
#pragma once
#include <cstdint>

namespace sbnet {

// Outputs (row, column ... column_end) of image n, all channels.
struct BlockRow {
  int64_t n, row, column, column_end;
};

}  // namespace sbnet
