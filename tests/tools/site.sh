# site.sh: sourced by emulate_amx.sh and sanitize.sh. A build of csrc beside the usual one, and a copy of the package that
# loads it: what the scripts' first argument, an interpreter, imports from then on.

# build_site PYTHON FOLDER [cmake -D...]: builds FOLDER for the CPU; sets $python to its full path, $site to the copy.
build_site() {
  local bin torch version folder=$2
  python=$(command -v "$1") && python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
  shift 2
  bin=$(dirname "$python")
  torch=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
  version=$(sed -n 's/__version__ = "\(.*\)"/\1/p' sbnet/version.py)
  PATH=$bin:$PATH cmake -S csrc -B "$folder" -G Ninja -DSBNET_CUDA=0 "-DSBNET_VERSION=$version" \
    "-DSBNET_TORCH_DIR=$torch" "$@" >/dev/null
  PATH=$bin:$PATH cmake --build "$folder"

  site=$PWD/$folder/site
  rm -rf "$site" && mkdir -p "$site/sbnet"
  cp -r sbnet/. "$site/sbnet/"
  for part in models export benchmarks; do
    rm -rf "${site:?}/sbnet/$part" && cp -r "$part" "$site/sbnet/$part"
  done
  rm -f "$site"/sbnet/*.so && cp "$folder/libsbnet.so" "$folder/libsbnet_torch.so" "$site/sbnet/"
}
