#!/usr/bin/env bash
# emulate_amx.sh PYTHON [tests]: builds csrc under build/amx with AMX's instructions in plain C++ (emulator/amx.h), then
# runs tests on it: those named, else those of what AMX computes. For processors with AVX-512 and without AMX.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "$1") && python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") && shift
site=$PWD/build/amx/site
families=(
  tests/masked/test_{conv,conv_cpu,conv_quantized,pack,select}.py
  tests/weights/test_{matmul,blocksparse_rows,conv1x1}.py
)

bin=$(dirname "$python")
torch=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
version=$(sed -n 's/__version__ = "\(.*\)"/\1/p' sbnet/version.py)
PATH=$bin:$PATH cmake -S csrc -B build/amx -G Ninja -DSBNET_CUDA=0 "-DSBNET_VERSION=$version" \
  "-DSBNET_TORCH_DIR=$torch" "-DSBNET_EMULATE_AMX=$PWD/tests/tools/emulator/amx.h" >/dev/null
PATH=$bin:$PATH cmake --build build/amx

rm -rf "$site" && mkdir -p "$site/sbnet"
cp -r sbnet/. "$site/sbnet/"
for folder in models export benchmarks; do
  rm -rf "${site:?}/sbnet/$folder" && cp -r "$folder" "$site/sbnet/$folder"
done
rm -f "$site"/sbnet/*.so && cp build/amx/libsbnet.so build/amx/libsbnet_torch.so "$site/sbnet/"

export PYTHONPATH=$site:$PWD/tests PYTHONSAFEPATH=1  # the copy, not what is in this folder
"$python" -c "from sbnet import _library; assert _library.cpu_isa() == 'amx-fp16', _library.cpu_isa()"
"$python" -m pytest -p no:cacheprovider -m "not slow and not gpu" "${@:-${families[@]}}"
