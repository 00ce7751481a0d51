#!/usr/bin/env bash
# emulate_amx.sh PYTHON [tests]: builds csrc under build/amx with AMX's instructions in plain C++ (emulator/amx.h), then
# runs tests on it: those named, else those of what AMX computes. For processors with AVX-512 and without AMX.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/tools/site.sh
families=(
  tests/contracts/test_instruction_sets.py
  tests/masked/test_{conv,conv_cpu,conv_quantized,pack,select}.py
  tests/weights/test_{matmul,conv1x1}.py
)

build_site "$1" build/amx "-DSBNET_EMULATE_AMX=$PWD/tests/tools/emulator/amx.h"
shift

export PYTHONPATH=$site:$PWD/tests PYTHONSAFEPATH=1  # the copy, not what is in this folder
"$python" -c "from sbnet import _library; assert _library.cpu_isa() == 'amx-fp16', _library.cpu_isa()"
"$python" -m pytest -p no:cacheprovider -m "not slow and not gpu" "${@:-${families[@]}}"
