#!/usr/bin/env bash
# sanitize.sh PYTHON [tests]: builds csrc with AddressSanitizer and UndefinedBehaviorSanitizer under build/sanitize, then
# runs every kernel family (sanitize.py) and tests on it: those named, else those of `quick`. Any finding ends it. Tests that
# start processes of their own (an instruction set each) take a minute and more here: `make nightly` runs them all.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tests/tools/site.sh
quick=(
  tests/contracts/test_{hostile_sizes,bad_input_raw}.py
  tests/lists/test_{reduce_mask,pyramid,fringe,window}.py
  tests/masked/test_{fill,gather_scatter}.py
)

build_site "$1" build/sanitize -DSBNET_SANITIZE=ON
shift

library() { g++ -print-file-name="$1"; }
export LD_PRELOAD="$(library libasan.so) $(library libubsan.so) $(library libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1  # Python's own leaks are not ours
export PYTHONPATH=$site:$PWD/tests PYTHONSAFEPATH=1  # the copy, not what is in this folder
"$python" -c "import sbnet; assert sbnet.__file__.startswith('$site'), sbnet.__file__"
export OMP_WAIT_POLICY=PASSIVE  # both run at once, each on some of the cores
families=$PWD/build/sanitize/families.log
"$python" tests/tools/sanitize.py --device cpu >"$families" 2>&1 &
cases=$! failed=0
"$python" -m pytest -p no:cacheprovider -m "not slow and not gpu" "${@:-${quick[@]}}" || failed=1
wait "$cases" || failed=1
cat "$families"
exit "$failed"
