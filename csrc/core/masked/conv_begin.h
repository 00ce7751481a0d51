// For measurements: where the search for a convolution's kernel begins, so that rows above serve nothing.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "core/kernels.h"

namespace sbnet {

// The row at which the search in a table begins. SBNET_CONV names one; else it is the first. Where no row from it on
// takes a layer, those above serve it.
template <class Row, int kRows>
std::atomic<int>& first_row(const Row (&table)[kRows]) {
  static std::atomic<int> first = [&] {
    const char* name = std::getenv("SBNET_CONV");
    for (int k = 0; name && k < kRows; ++k)
      if (!std::strcmp(name, table[k].name)) return k;
    return 0;
  }();
  return first;
}

template <class Row, int kRows>
int64_t begin_at(const Row (&table)[kRows], int64_t row) {
  return row < 0 || row >= kRows ? -1 : first_row(table).exchange(static_cast<int>(row));
}

constexpr const char* kAboveTheFirst = "the search begins below it (SBNET_CONV)";

}  // namespace sbnet

extern "C" {
// The search in the table of floats begins at this row from now on. Return where it began before; -1, and nothing
// changes, where there is no such row. Rows of a CPU's that the weights alone decide are searched whatever the row is.
SBNET_EXPORT int64_t sbnet_begin_conv2d_cuda(int64_t row);
SBNET_EXPORT int64_t sbnet_begin_conv2d_cpu(int64_t row);
}
