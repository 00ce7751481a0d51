#include "core/settled.h"

namespace sbnet {
namespace {

thread_local bool settled = false;

}  // namespace

bool inputs_settled() { return settled; }

}  // namespace sbnet

extern "C" {

void sbnet_settle_inputs(int32_t settled) { sbnet::settled = settled != 0; }
}
