# SPDX-License-Identifier: Apache-2.0
# What a developer types. Everything Python lives in $(VENV), everything built in build/.
#
#   make demo      build, install and run examples/demo.py
#   make test      C++ tests, then the Python tests
#   make quick     what belongs to the files that changed since the last commit, and a few others
#   make soak      everything long: many examples of each property, slow tests, repeated threads
#   make programs  random programs against an oracle: PROGRAMS_SECONDS, PROGRAMS_SEED
#   make programs-planted
#                  faults that the random programs have to find: PLANTED_SECONDS for each
#   make fuzz      looks for bytes that break what reads them: FUZZ_SECONDS for each target
#   make examples  the tests of the examples and of the documentation's code
#   make portable-wheel TARGET=aarch64-linux
#                  a wheel for manylinux_2_28, by zig's compiler; make portable-check compiles for macOS
#   make lint      formats, lints, types, layers
#   make bench     benchmarks against the peers; make bench-check says what got slower since
#   make docs      the documentation site, into site/
#   make constraints
#                  the newest versions that pyproject.toml allows, into .ci/constraints.txt
#   make jax-suites JAX_TESTS=/path/to/jax/tests
#                  JAX's own tests of callbacks without and with callgate.install(): what differs
#   make ecosystem what programs of equinox, diffrax, numpyro and others do after callgate.install()
#   make executors the tests of gates on loky, Dask, Ray and MPI
#   make gpu-test  the tests that need a CUDA device, into build/gpu; make gpu-bench its benchmarks
#   make virtual-gpu
#                  builds XLA's own CUDA plugin over a GPU that is made of software, for
#                  `.venv/bin/python virtual_gpu/virtual_gpu run PROGRAM`
#   make virtual-gpu-test
#                  tests it, and what is about CUDA on it
#
# Variables: PYTHON (the interpreter of a new $(VENV)), VENV, JAX (a version, such as 0.11.2),
# WHEEL (install this wheel instead of building), PRESET (of CMakePresets.json), PYTEST_ARGS,
# TEST_XLA (quick or default), GPU_JAX (cuda12 or cuda13), GPU_EXTRAS.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(shell sh tools/find_python.sh)
JAX ?=
WHEEL ?=
PRESET ?= asan
# `make examples` runs these; what shows callgate to readers takes a minute and a half.
EXAMPLES := tests/python/project/test_examples.py tests/python/project/test_docs.py
TYPES := tests/python/project/test_types.py  # of `make lint`
SITE := tests/python/project/test_site.py  # of `make docs`
PYTEST_ARGS ?= tests/python $(addprefix --ignore=,$(EXAMPLES) $(TYPES) $(SITE))
# On every core. A process takes a run of neighbouring tests, since those of a file share expensive
# programs, and one that has no more takes half of another's. In place of one that a test brought
# down another runs the rest.
PYTEST_PARALLEL ?= -n auto --maxprocesses 8 --dist worksteal --max-worker-restart 8
# Fails, too, where a run that passed prints an exception that Python has ignored.
PYTEST = $(PY) tests/python/support/stray_output.py $(PY) -m pytest $(PYTEST_PARALLEL)
# "quick": XLA spends less on the arithmetic of the tests' programs; "default": as for users.
TEST_XLA ?= quick
BENCH_ARGS ?=

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# Python compiles what is imported; pip would compile all that is installed, which takes longer.
INSTALL := $(PIP) install --no-compile
# pip-installed tools (cmake, ninja, ...) come before the system's.
export PATH := $(abspath $(BIN)):$(PATH)
# Tests start hundreds of interpreters; to compile JAX in each costs more than its import does.
unexport PYTHONDONTWRITEBYTECODE
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

# Notes the processor time of a command where .ci/run asks for it: $(call timed,KIND,NAME) COMMAND
timed = $(PYTHON) tools/check_times.py run $(1) '$(2)'
# The JUnit files: how long each test took, by the clock and of the processor.
TEST_REPORTS = build/$(1)$(patsubst .venv%,%,$(notdir $(VENV))).xml

MODULE_BUILD := build/module-$(patsubst .%,%,$(notdir $(VENV)))
# Folders too: their time changes when a file is removed.
SOURCES := $(shell find src include python cmake -not -path '*__pycache__*' -not -name '_callgate*' \
  2>/dev/null)

.PHONY: help ecosystem executors demo test quick soak programs programs-planted fuzz cpp-build cpp-test python-test environment package examples lint \
  lint-python lint-types lint-cpp format bench bench-check docs wheel portable-wheel portable-check matrix jax-suites gpu-test gpu-bench \
  virtual-gpu virtual-gpu-test virtual-gpu-quick constraints \
  asan-python system-packages clean

help:
	@sed -n 's/^#  //p' Makefile

# --- environment -------------------------------------------------------------------------------

$(PY):
	$(PYTHON) -m venv $(VENV)

# One stamp a group of requirements (tools/requirements.py): "build" holds callgate's own too.
# Groups joined by + are installed at once.
WITH_JAX = $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
$(VENV)/.stamp-build: pyproject.toml tools/requirements.py | $(PY)
	$(call timed,install,build $(VENV)) \
	  $(INSTALL) $$($(PY) tools/requirements.py run build) $(WITH_JAX)
	touch $@

$(VENV)/.stamp-%: pyproject.toml tools/requirements.py $(VENV)/.stamp-build
	$(call timed,install,$* $(VENV)) \
	  $(INSTALL) $$($(PY) tools/requirements.py $(subst +, ,$*)) $(WITH_JAX)
	touch $@

# PyTorch's CPU build, where pip can find one (its plain wheel brings gigabytes of CUDA with it).
# Without it the tests that need torch are skipped.
$(VENV)/.stamp-torch-cpu: $(VENV)/.stamp-build
	$(INSTALL) 'torch==2.13.0+cpu' 2>/dev/null \
	  || echo "no CPU build of PyTorch found: tests that need torch will be skipped"
	touch $@

build/xla-headers/jaxlib-version: pyproject.toml tools/fetch_xla_headers.py | $(VENV)/.stamp-build
	$(PY) tools/fetch_xla_headers.py
	touch $@

# The package as users get it (a wheel, installed), built in place so that the next build is short.
$(VENV)/.stamp-package: $(SOURCES) CMakeLists.txt pyproject.toml $(WHEEL) \
    build/xla-headers/jaxlib-version $(VENV)/.stamp-build
	$(call timed,build,module $(VENV)) $(PIP) install --no-deps --force-reinstall $(if $(WHEEL),$(WHEEL),\
	  --no-build-isolation -C build-dir=$(MODULE_BUILD) .)
	touch $@

# --- tests and examples ------------------------------------------------------------------------

demo:
	@sh tools/check_machine.sh demo "$(PYTHON)"
	@$(MAKE) $(VENV)/.stamp-demo $(VENV)/.stamp-package
	$(PY) examples/demo.py

# What pip brings and what the compiler makes come at the same time.
test:
	@sh tools/check_machine.sh test "$(PYTHON)"
	@$(MAKE) $(VENV)/.stamp-build
	@$(MAKE) -j2 environment cpp-build
	@$(MAKE) cpp-test python-test
	@$(MAKE) programs PROGRAMS_ARGS="--jobs 1 --most 200"  # the same ones on any machine

cpp-build: build/xla-headers/jaxlib-version system-packages
	cmake --preset $(PRESET)
	$(call timed,build,C++ tests $(PRESET)) cmake --build --preset $(PRESET)

cpp-test: cpp-build
	$(call timed,tests,C++ $(PRESET)) ctest --preset $(PRESET)

# What the Python tests import, callgate aside. One pip after the other, under -j too.
environment: $(VENV)/.stamp-test+demo
	@$(MAKE) --no-print-directory $(VENV)/.stamp-torch-cpu

package: environment $(VENV)/.stamp-package

python-test: package
	CALLGATE_TEST_XLA=$(TEST_XLA) $(call timed,tests,Python $(VENV)) $(PYTEST) \
	  --junitxml=$(call TEST_REPORTS,python-tests) $(PYTEST_ARGS)

examples: package $(VENV)/.stamp-gallery
	$(call timed,tests,$(notdir $(EXAMPLES)) $(VENV)) $(PYTEST) \
	  --junitxml=$(call TEST_REPORTS,examples-tests) $(EXAMPLES)

# After a first `make test`: the C++ tests if C++ has changed, test_smoke.py, and the tests nearest
# to what has changed by their imports, as many as take a minute and a half.
quick: $(VENV)/.stamp-build
	@if $(PY) tools/changed_tests.py --cpp; then $(MAKE) cpp-test; fi
	@$(MAKE) package
	CALLGATE_TEST_XLA=$(TEST_XLA) $(PY) -m pytest $(PYTEST_PARALLEL) \
	  tests/python/project/test_smoke.py $$($(PY) tools/changed_tests.py)

# Takes hours; each Python test may take two. CALLGATE_SOAK reaches the processes of tests, too.
SOAK_REPEATS ?= 20
soak: package
	$(MAKE) cpp-build PRESET=tsan
	ctest --preset tsan --repeat until-fail:$(SOAK_REPEATS)
	$(MAKE) cpp-build PRESET=asan
	ctest --preset asan --repeat until-fail:$(SOAK_REPEATS)
	$(MAKE) lint-cpp CLANG_TIDY_ARGS=--deep
	CALLGATE_SOAK=1 $(PY) -m pytest $(PYTEST_PARALLEL) -o faulthandler_timeout=7200 \
	  -m "not gpu" tests/python
	$(MAKE) programs PROGRAMS_SECONDS=3600 PROGRAMS_SEED=$$(date +%j)
	$(MAKE) virtual-gpu-test

# tests/programs/README.md says what these are. A soak looks for an hour, by another seed each time.
PROGRAMS_SECONDS ?= 60
PROGRAMS_SEED ?= 0
PROGRAMS_ARGS ?=
programs: package
	$(call timed,tests,random programs $(VENV)) $(PY) tests/programs --seconds $(PROGRAMS_SECONDS) \
	  --seed $(PROGRAMS_SEED) $(PROGRAMS_ARGS)

# tests/programs/planted/README.md says what these are, and has the outcomes. PLANTED_ARGS: names.
PLANTED_SECONDS ?= 120
PLANTED_ARGS ?=
programs-planted: package
	$(PY) tests/programs/planted.py $(PLANTED_ARGS) --seconds $(PLANTED_SECONDS) \
	  --outcomes tests/programs/planted/outcomes.json --table tests/programs/planted/README.md

# With clang's libFuzzer; tools/fuzz.py says what to install where it is missing.
FUZZ_SECONDS ?= 120
FUZZ_TARGETS ?=
fuzz: build/xla-headers/jaxlib-version
	$(PY) tools/fuzz.py --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

# JAX_TESTS: of a checkout of JAX at the tag of the JAX in $(VENV). SUITE_ARGS: files, --seconds,
# --compat.
JAX_TESTS ?=
SUITE_ARGS ?=
jax-suites: package
	@test -d "$(JAX_TESTS)" || { echo 'jax-suites: expected JAX_TESTS, the folder "tests" of a' \
	  'checkout of JAX, got "$(JAX_TESTS)"'; exit 2; }
	$(PY) tools/jax_suites.py "$(JAX_TESTS)" $(SUITE_ARGS)

# In an environment of its own, on the newest Python: tools/ecosystem.py compares programs of other
# libraries (tests/ecosystem) without and with callgate.install().
ECOSYSTEM_ARGS ?=
ecosystem: VENV := .venv-ecosystem
ecosystem: PYTHON := $(shell sh tools/find_python.sh --newest)
ecosystem:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-ecosystem $(VENV)/.stamp-package
	$(VENV)/bin/python tools/ecosystem.py $(ECOSYSTEM_ARGS)

# Gates on loky, Dask, Ray and MPI, each from its package.
executors: VENV := .venv-executors
executors:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-test+executors $(VENV)/.stamp-package
	$(VENV)/bin/python -m pytest tests/python/places/test_executors.py $(EXECUTORS_ARGS)

# GoogleTest and Google Benchmark. Where this installs nothing, CMake fetches GoogleTest.
system-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && ! { dpkg -s libgtest-dev libgmock-dev libbenchmark-dev >/dev/null 2>&1; }; then \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
	      libgtest-dev libgmock-dev libbenchmark-dev; } >/dev/null 2>&1 \
	    || echo "could not install GoogleTest and Google Benchmark with apt-get"; \
	fi

# On a machine with a CUDA device: logs, test.xml and the benchmarks' JSON go to build/gpu. Where
# nothing can be installed, `python tools/gpu.py test` does the same with what is there.
GPU_JAX ?= cuda12
GPU_EXTRAS ?= $(if $(findstring 13,$(GPU_JAX)),cuda,cuda12) cupy triton numba-cuda torch
GPU_ARGS ?=

$(VENV)/.stamp-gpu-%: $(VENV)/.stamp-build
	$(INSTALL) "jax[$*]" $$($(PY) tools/requirements.py test bench $(GPU_EXTRAS))
	touch $@

gpu-test: $(VENV)/.stamp-gpu-$(GPU_JAX) $(VENV)/.stamp-package
	$(PY) tools/gpu.py test $(GPU_ARGS)

gpu-bench: $(VENV)/.stamp-gpu-$(GPU_JAX) $(VENV)/.stamp-package
	$(PY) tools/gpu.py bench $(GPU_ARGS)

# XLA's CUDA plugin over virtual_gpu, in build/virtual-gpu: nothing goes into $(VENV).
# JAX's own suites of callbacks take part where JAX_TESTS is given (see jax-suites).
# Twice, so that each JAX is tried: `make virtual-gpu-test VENV=.venv-newest PYTHON=python3.13`.
VIRTUAL_GPU := $(PY) virtual_gpu/virtual_gpu
VIRTUAL_GPU_WITH = $$($(PY) tools/requirements.py virtual-gpu $(VIRTUAL_GPU_EXTRAS))
VIRTUAL_GPU_EXTRAS ?=
VIRTUAL_GPU_PYTEST := run -m pytest -q -p no:cacheprovider -o faulthandler_timeout=120
# Tests of the CPU that say the same of GPUs, and run on the default devices: those that need eight
# devices, and others. Left out is what is about the host's memory.
VIRTUAL_GPU_SHARDED := $(addprefix tests/python/,feed/test_shares.py \
  sharding/test_partitioner.py tap/test_shards.py tap/test_transformations.py \
  call/test_transformations.py call/test_shard_map.py)
# A sum over devices in branches that they take differently, as gradients there have it, waits for
# ever in the kernels that XLA makes for small sums: each waits for the others' in its own branch.
VIRTUAL_GPU_SUMS := --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false
VIRTUAL_GPU_SUITES := $(addprefix tests/python/,call/test_batching.py call/test_derivatives.py \
  call/test_effects.py call/test_export.py feed/test_exit.py gate/test_results.py \
  tap/test_channel.py tap/test_devices.py tap/test_exit.py tap/test_export.py tap/test_files.py \
  tap/test_memory.py tap/test_print.py)
VIRTUAL_GPU_LEFT_OUT := $(addprefix --deselect tests/python/,\
  sharding/test_partitioner.py::test_a_pure_program_whose_result_nobody_keeps_is_waited_for \
  gate/test_results.py::test_masked_arrays_are_refused_where_arrays_come_in)

# Fails where pip has no CUDA plugin. VIRTUAL_GPU_EXTRAS: triton, numba-cuda.
virtual-gpu: package
	$(VIRTUAL_GPU) build --with $(VIRTUAL_GPU_WITH)

# What .ci/run takes: a minute and a half once it is built.
virtual-gpu-quick: package
	@status=0; $(VIRTUAL_GPU) build --with $(VIRTUAL_GPU_WITH) || status=$$?; \
	if [ $$status = 77 ]; then echo "virtual-gpu-quick: skipped, since pip has no CUDA plugin"; exit 0; fi; \
	test $$status = 0; \
	VIRTUAL_GPU_DEVICES=8 VIRTUAL_GPU_CAPABILITY=9.0 $(VIRTUAL_GPU) $(VIRTUAL_GPU_PYTEST) \
	  -m gpu tests/python/gpu tests/python/project/test_docs.py \
	  $(addprefix --ignore=tests/python/gpu/,test_faults.py test_graphs.py)

virtual-gpu-test: VIRTUAL_GPU_EXTRAS := triton numba-cuda
virtual-gpu-test: package system-packages
	$(VIRTUAL_GPU) build --tests --with $(VIRTUAL_GPU_WITH)
	$(MAKE) -C virtual_gpu virtual-gpu-test PYTHON="$(abspath $(PY))" OUT="$(abspath build/virtual-gpu)"
	for delay in 0 3000; do \
	  VIRTUAL_GPU_DELAY=$$delay VIRTUAL_GPU_DEVICES=8 VIRTUAL_GPU_CAPABILITY=9.0 \
	    $(VIRTUAL_GPU) $(VIRTUAL_GPU_PYTEST) -m gpu tests/python/gpu tests/python/project/test_docs.py; \
	done
	VIRTUAL_GPU_DEVICES=8 VIRTUAL_GPU_CAPABILITY=9.0 \
	  $(VIRTUAL_GPU) $(VIRTUAL_GPU_PYTEST) -m gpu tests/python/contract
	XLA_FLAGS="$${XLA_FLAGS:-} $(VIRTUAL_GPU_SUMS)" VIRTUAL_GPU_DEVICES=8 VIRTUAL_GPU_CAPABILITY=9.0 \
	  $(VIRTUAL_GPU) $(VIRTUAL_GPU_PYTEST) $(VIRTUAL_GPU_SHARDED) $(VIRTUAL_GPU_LEFT_OUT)
	VIRTUAL_GPU_CAPABILITY=9.0 \
	  $(VIRTUAL_GPU) $(VIRTUAL_GPU_PYTEST) $(VIRTUAL_GPU_SUITES) $(VIRTUAL_GPU_LEFT_OUT)
	$(if $(JAX_TESTS),VIRTUAL_GPU_DEVICES=2 $(VIRTUAL_GPU) run tools/jax_suites.py $(JAX_TESTS) \
	  $(addsuffix _test.py,python_callback debugging_primitives buffer_callback jaxpr_effects ffi))

# One wheel for the stable ABI, built once against the oldest JAX's headers, run on every JAX that
# its Python can have.
MATRIX_JAX ?= 0.10.2 0.11.2 0.12.0.1
matrix: PYTHON := $(shell sh tools/find_python.sh --newest)
matrix:
	rm -rf build/matrix
	$(MAKE) wheel VENV=.venv-matrix PYTHON="$(PYTHON)" WHEEL_DIR=build/matrix
	for jax in $(MATRIX_JAX); do \
	  $(MAKE) python-test VENV=.venv-jax-$$jax JAX=$$jax PYTHON="$(PYTHON)" TEST_XLA=default \
	    WHEEL="$$(echo build/matrix/callgate-*.whl)"; \
	done

WHEEL_DIR ?= dist
wheel: $(PY)
	$(PIP) wheel --no-deps -w $(WHEEL_DIR) .
	@ls $(WHEEL_DIR)

# By tools/portable.py, in an environment of Python 3.12 or newer. A wheel for another processor
# takes its stub from the installed package.
TARGET ?= x86_64-linux
$(VENV)/.stamp-portable: $(VENV)/.stamp-build build/xla-headers/jaxlib-version
	$(INSTALL) $$($(PY) tools/requirements.py portable)
	touch $@

portable-wheel portable-check: VENV := .venv-portable
portable-wheel portable-check: PYTHON := $(shell sh tools/find_python.sh --newest)
portable-wheel:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-portable \
	  $(if $(filter x86_64-linux,$(TARGET)),,$(VENV)/.stamp-package)
	$(VENV)/bin/python tools/portable.py wheel $(TARGET) --out $(WHEEL_DIR)
	$(VENV)/bin/abi3audit --strict --report $(WHEEL_DIR)/callgate-*-abi3-*$(firstword $(subst -, ,$(TARGET))).whl

portable-check:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-portable
	$(VENV)/bin/python tools/portable.py objects aarch64-macos

# --- checks ------------------------------------------------------------------------------------

CPP_FILES = $(shell find src include tests/cpp tests/ffi_runner tests/fuzz benchmarks python/callgate \
  $(addprefix virtual_gpu/,driver fake_driver libraries ptx) -name '*.cc' -o -name '*.h' 2>/dev/null)
PY_DIRS = $(wildcard python tests benchmarks examples tools virtual_gpu)

# The compiled module's types, generated by its build: pyright and the reference read them.
STUB := python/callgate/_callgate.pyi
$(STUB): $(VENV)/.stamp-package tools/installed_stub.py
	cp -f $$($(PY) tools/installed_stub.py) $@

lint: lint-python lint-types lint-cpp

lint-python: $(VENV)/.stamp-lint+docs
	ruff format --check $(PY_DIRS)
	ruff check $(PY_DIRS)
	$(PY) tests/check_layers.py

lint-types: $(VENV)/.stamp-lint+docs environment $(STUB)
	pyright --pythonpath $(PY)
	$(PY) -m pytest -q $(TYPES)

lint-cpp: $(VENV)/.stamp-lint+docs cpp-build $(VENV)/.stamp-package
	clang-format --dry-run -Werror $(CPP_FILES)
	$(PY) tools/clang_tidy.py $(CLANG_TIDY_ARGS) $(MODULE_BUILD) build/asan

# Rewrites the files that `make lint` finds wrongly formatted.
format: $(VENV)/.stamp-lint+docs
	ruff format $(PY_DIRS)
	ruff check --fix $(PY_DIRS)
	clang-format -i $(CPP_FILES)

# The Python suite with the module under the address and undefined-behaviour sanitizers
# (CONTRIBUTING.md, "Sanitizers"). The sanitized package shadows the installed one.
ASAN_SITE := build/asan-site
asan-python: environment build/xla-headers/jaxlib-version
	rm -rf $(ASAN_SITE)
	$(PIP) install --no-deps --no-build-isolation --target $(ASAN_SITE) \
	  -C build-dir=build/asan-module -C cmake.build-type=RelWithDebInfo \
	  -C cmake.define.CALLGATE_SANITIZE=address,undefined -C install.strip=false .
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:handle_segv=1:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONPATH=$(abspath $(ASAN_SITE)) \
	  $(PY) -m pytest -p no:cacheprovider $(PYTEST_ARGS)

# --- benchmarks, documentation -----------------------------------------------------------------

# PyTorch first: a peer asks for it, and would bring the build with CUDA.
$(VENV)/.stamp-bench: $(VENV)/.stamp-torch-cpu

bench: $(VENV)/.stamp-bench $(VENV)/.stamp-package
	$(PY) -m benchmarks $(BENCH_ARGS)

# Which rows got worse by more than 15 % since benchmarks/results, by ratios to what was measured in
# the same run. On a quiet machine, before a release.
bench-check: $(VENV)/.stamp-bench $(VENV)/.stamp-package
	$(PY) -m benchmarks --check $(BENCH_ARGS)

docs: $(VENV)/.stamp-lint+docs environment $(STUB)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	$(PY) -m pytest -q $(SITE)

# The versions that CI installs, for every Python, without JAX's, of which CI takes several.
constraints: $(VENV)/.stamp-constraints
	$(PY) tools/requirements.py run build test demo gallery lint docs | $(PY) -m uv pip compile -q \
	  --universal --python-version 3.11 --no-annotate --upgrade --no-emit-package jax \
	  --no-emit-package jaxlib --custom-compile-command 'make constraints' -o .ci/constraints.txt -

clean:
	rm -rf build dist site wheelhouse .venv .venv-* $(STUB)
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
