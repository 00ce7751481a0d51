#include "core/through.h"

namespace sbnet {
namespace {

struct Entry {
  const void *data, *address;
  int64_t reads;
};
thread_local Entry entries[kMostThrough] = {};

Entry* find(const void* data) {
  for (Entry& entry : entries)
    if (entry.data == data) return &entry;
  return nullptr;
}

}  // namespace

const void* const* lies_at(const void* data) {
  Entry* entry = data ? find(data) : nullptr;
  if (!entry) return nullptr;
  ++entry->reads;
  return static_cast<const void* const*>(entry->address);
}

}  // namespace sbnet

extern "C" {

bool sbnet_read_through(const void* data, const void* address) {
  sbnet::Entry* entry = sbnet::find(data);
  if (!entry && address) entry = sbnet::find(nullptr);
  if (entry) *entry = {address ? data : nullptr, address, 0};
  return entry || !address;
}

int64_t sbnet_reads_through(const void* data) {
  const sbnet::Entry* entry = sbnet::find(data);
  return entry ? entry->reads : 0;
}
}
