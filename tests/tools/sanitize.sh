#!/usr/bin/env bash
# sanitize.sh PYTHON [tests]: builds csrc with AddressSanitizer and UndefinedBehaviorSanitizer under build/sanitize, then
# runs every kernel family (sanitize.py) and tests on it: those named, else those of `quick`. Any finding ends it. Tests that
# start processes of their own (an instruction set each) take a minute and more here: `make nightly` runs them all.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "$1") && python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") && shift
site=$PWD/build/sanitize/site
quick=(
  tests/contracts/test_{hostile_sizes,bad_input_raw}.py
  tests/lists/test_{reduce_mask,pyramid,fringe,window}.py
  tests/masked/test_{fill,gather_scatter}.py
)

bin=$(dirname "$python")
torch=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
version=$(sed -n 's/__version__ = "\(.*\)"/\1/p' sbnet/version.py)
PATH=$bin:$PATH cmake -S csrc -B build/sanitize -G Ninja -DSBNET_SANITIZE=ON -DSBNET_CUDA=0 \
  "-DSBNET_VERSION=$version" "-DSBNET_TORCH_DIR=$torch" >/dev/null
PATH=$bin:$PATH cmake --build build/sanitize

rm -rf "$site" && mkdir -p "$site/sbnet"
cp -r sbnet/. "$site/sbnet/"
for folder in models export benchmarks; do
  rm -rf "${site:?}/sbnet/$folder" && cp -r "$folder" "$site/sbnet/$folder"
done
rm -f "$site"/sbnet/*.so && cp build/sanitize/libsbnet.so build/sanitize/libsbnet_torch.so "$site/sbnet/"

library() { g++ -print-file-name="$1"; }
export LD_PRELOAD="$(library libasan.so) $(library libubsan.so) $(library libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1  # Python's own leaks are not ours
export PYTHONPATH=$site:$PWD/tests PYTHONSAFEPATH=1  # the copy, not what is in this folder
"$python" -c "import sbnet; assert sbnet.__file__.startswith('$site'), sbnet.__file__"
"$python" tests/tools/sanitize.py --device cpu
"$python" -m pytest -p no:cacheprovider -m "not slow and not gpu" "${@:-${quick[@]}}"
