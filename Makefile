# SPDX-License-Identifier: Apache-2.0
# The commands of developers. Python packages go to $(VENV), build outputs to build/.
#
#   make demo      build, install and run examples/demo.py
#   make test      run the C++ tests, then the Python tests
#   make quick     run the tests nearest to the files changed since the last commit
#   make soak      run all long tests: many examples per property, slow tests, repeated threads
#   make programs  test random programs against a reference: PROGRAMS_SECONDS, PROGRAMS_SEED
#   make programs-planted
#                  check that random programs find planted faults: PLANTED_SECONDS for each
#   make fuzz      fuzz the parsers: FUZZ_SECONDS for each target
#   make free-threaded-test
#                  run the tests on a Python without the GIL, which it builds if none is found
#   make examples  test the examples and the code in the documentation
#   make portable-wheel TARGET=aarch64-linux
#                  build a manylinux_2_28 wheel with zig, or one for macOS (aarch64-macos), which has
#                  never been run; make portable-check only compiles for macOS
#   make lint      check formatting, lints, types and layers
#   make format    fix the formatting
#   make bench     run the benchmarks against other libraries; make bench-check lists regressions
#   make docs      build the documentation site into site/
#   make constraints
#                  pin the newest versions that pyproject.toml allows in .ci/constraints.txt
#   make jax-suites JAX_TESTS=/path/to/jax/tests
#                  run JAX's callback tests with and without callgate.install(); list differences
#   make ecosystem run programs of equinox, diffrax, numpyro and others after callgate.install()
#   make executors test gates on loky, Dask, Ray and MPI
#   make gpu-test  run the tests that need a CUDA device, into build/gpu; gpu-bench its benchmarks
#   make virtual-gpu
#                  build XLA's CUDA plugin over a software GPU, for
#                  `.venv/bin/python virtual_gpu/virtual_gpu run PROGRAM`
#   make virtual-gpu-test
#                  test the software GPU and callgate's CUDA code on it
#
# Variables: PYTHON (the interpreter for a new $(VENV)), VENV, JAX (a version, such as 0.11.2),
# WHEEL (install this wheel instead of building), PRESET (from CMakePresets.json), PYTEST_ARGS,
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
# The tests of `make examples`, which take a minute and a half.
EXAMPLES := tests/python/project/test_examples.py tests/python/project/test_docs.py
TYPES := tests/python/project/test_types.py  # of `make lint`
SITE := tests/python/project/test_site.py  # of `make docs`
PYTEST_ARGS ?= tests/python $(addprefix --ignore=,$(EXAMPLES) $(TYPES) $(SITE))
# On every core. A process takes neighboring tests, because tests of a file share expensive
# programs. An idle process takes half of another's tests, and a new process replaces a crashed one.
PYTEST_PARALLEL ?= -n auto --maxprocesses 8 --dist worksteal --max-worker-restart 8
# Also fails if a passing run prints an exception that Python ignored.
PYTEST = $(PY) tests/python/support/stray_output.py $(PY) -m pytest $(PYTEST_PARALLEL)
# "quick": XLA optimizes the tests' programs less; "default": XLA's settings for users.
TEST_XLA ?= quick
BENCH_ARGS ?=

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# Python compiles imported files; compiling all installed files takes pip longer.
INSTALL := $(PIP) install --no-compile
# pip-installed tools (cmake, ninja, ...) take precedence over the system's.
export PATH := $(abspath $(BIN)):$(PATH)
# Tests start hundreds of interpreters; compiling JAX in each would cost more than its import.
unexport PYTHONDONTWRITEBYTECODE
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

# Records a command's CPU time if .ci/run requests it: $(call timed,KIND,NAME) COMMAND
timed = $(PYTHON) tools/check_times.py run $(1) '$(2)'
# The JUnit files, with the wall time and CPU time of each test.
TEST_REPORTS = build/$(1)$(patsubst .venv%,%,$(notdir $(VENV))).xml

MODULE_BUILD := build/module-$(patsubst .%,%,$(notdir $(VENV)))
# Folders, too: their modification time changes when a file is removed.
SOURCES := $(shell find src include python cmake -not -path '*__pycache__*' -not -name '_callgate*' \
  2>/dev/null)

.PHONY: help ecosystem executors demo test free-threaded-test free-threaded-tsan quick soak programs programs-planted fuzz cpp-build cpp-test python-test environment package examples lint \
  lint-python lint-types lint-cpp format bench bench-check docs wheel portable-wheel portable-check matrix jax-suites gpu-test gpu-bench \
  virtual-gpu virtual-gpu-test virtual-gpu-quick constraints \
  asan-python system-packages clean

help:
	@sed -n 's/^#  //p' Makefile

# --- environment -------------------------------------------------------------------------------

$(PY):
	$(PYTHON) -m venv $(VENV)

# One stamp per group of requirements (tools/requirements.py). "build" includes callgate's own
# dependencies; groups joined by + are installed at once.
WITH_JAX = $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
$(VENV)/.stamp-build: pyproject.toml tools/requirements.py | $(PY)
	$(call timed,install,build $(VENV)) \
	  $(INSTALL) $$($(PY) tools/requirements.py run build) $(WITH_JAX)
	touch $@

$(VENV)/.stamp-%: pyproject.toml tools/requirements.py $(VENV)/.stamp-build
	$(call timed,install,$* $(VENV)) \
	  $(INSTALL) $$($(PY) tools/requirements.py $(WITH_WHEELS) $(subst +, ,$*)) $(WITH_JAX)
	touch $@

# PyTorch's CPU build, if pip finds one (the default wheel downloads gigabytes of CUDA). Without it,
# the tests that need torch are skipped.
$(VENV)/.stamp-torch-cpu: $(VENV)/.stamp-build
	$(INSTALL) 'torch==2.13.0+cpu' 2>/dev/null \
	  || echo "no CPU build of PyTorch found: tests that need torch will be skipped"
	touch $@

build/xla-headers/jaxlib-version: pyproject.toml tools/fetch_xla_headers.py | $(VENV)/.stamp-build
	$(PY) tools/fetch_xla_headers.py
	touch $@

# The package as users get it, from a wheel; built in place, so the next build is short.
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

# The installation and the C++ build run in parallel.
test:
	@sh tools/check_machine.sh test "$(PYTHON)"
	@$(MAKE) $(VENV)/.stamp-build
	@$(MAKE) -j2 environment cpp-build
	@$(MAKE) cpp-test python-test
	@$(MAKE) programs PROGRAMS_ARGS="--jobs 1 --most 200"  # the same programs on each machine

cpp-build: build/xla-headers/jaxlib-version system-packages
	cmake --preset $(PRESET)
	$(call timed,build,C++ tests $(PRESET)) cmake --build --preset $(PRESET)

cpp-test: cpp-build
	$(call timed,tests,C++ $(PRESET)) ctest --preset $(PRESET)

# The Python tests' dependencies without callgate. The pips run one after another, also under -j.
environment: $(VENV)/.stamp-test+demo
	@$(MAKE) --no-print-directory $(VENV)/.stamp-torch-cpu

package: environment $(VENV)/.stamp-package

python-test: package
	CALLGATE_TEST_XLA=$(TEST_XLA) $(call timed,tests,Python $(VENV)) $(PYTEST) \
	  --junitxml=$(call TEST_REPORTS,python-tests) $(PYTEST_ARGS)

examples: package $(VENV)/.stamp-gallery
	$(call timed,tests,$(notdir $(EXAMPLES)) $(VENV)) $(PYTEST) \
	  --junitxml=$(call TEST_REPORTS,examples-tests) $(EXAMPLES)

# After a first `make test`: the C++ tests if C++ has changed, test_smoke.py, and the tests whose
# imports are nearest to the changes, for about a minute and a half.
quick: $(VENV)/.stamp-build
	@if $(PY) tools/changed_tests.py --cpp; then $(MAKE) cpp-test; fi
	@$(MAKE) package
	CALLGATE_TEST_XLA=$(TEST_XLA) $(PY) -m pytest $(PYTEST_PARALLEL) \
	  tests/python/project/test_smoke.py $$($(PY) tools/changed_tests.py)

# Takes hours; a Python test may take two. CALLGATE_SOAK also reaches the subprocesses of tests.
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

# See tests/programs/README.md. A soak runs for an hour, each day with another seed.
PROGRAMS_SECONDS ?= 60
PROGRAMS_SEED ?= 0
PROGRAMS_ARGS ?=
programs: package
	$(call timed,tests,random programs $(VENV)) $(PY) tests/programs --seconds $(PROGRAMS_SECONDS) \
	  --seed $(PROGRAMS_SEED) $(PROGRAMS_ARGS)

# See tests/programs/planted/README.md, which has the outcomes. PLANTED_ARGS: names.
PLANTED_SECONDS ?= 120
PLANTED_ARGS ?=
programs-planted: package
	$(PY) tests/programs/planted.py $(PLANTED_ARGS) --seconds $(PLANTED_SECONDS) \
	  --outcomes tests/programs/planted/outcomes.json --table tests/programs/planted/README.md

# With clang's libFuzzer; if it is missing, tools/fuzz.py prints what to install.
FUZZ_SECONDS ?= 120
FUZZ_TARGETS ?=
fuzz: build/xla-headers/jaxlib-version
	$(PY) tools/fuzz.py --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

# JAX_TESTS: the folder "tests" of a JAX checkout at the tag of the JAX in $(VENV). SUITE_ARGS:
# files, --seconds, --compat.
JAX_TESTS ?=
SUITE_ARGS ?=
jax-suites: package
	@test -d "$(JAX_TESTS)" || { echo 'jax-suites: expected JAX_TESTS, the folder "tests" of a' \
	  'checkout of JAX, got "$(JAX_TESTS)"'; exit 2; }
	$(PY) tools/jax_suites.py "$(JAX_TESTS)" $(SUITE_ARGS)

# tools/ecosystem.py compares programs of other libraries (tests/ecosystem) with and without
# callgate.install(), in a separate environment with the newest Python.
ECOSYSTEM_ARGS ?=
ecosystem: VENV := .venv-ecosystem
ecosystem: PYTHON := $(shell sh tools/find_python.sh --newest)
ecosystem:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-ecosystem $(VENV)/.stamp-package
	$(VENV)/bin/python tools/ecosystem.py $(ECOSYSTEM_ARGS)

# Gates on loky, Dask, Ray and MPI, each installed from its package.
executors: VENV := .venv-executors
executors:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-test+executors $(VENV)/.stamp-package
	$(VENV)/bin/python -m pytest tests/python/places/test_executors.py $(EXECUTORS_ARGS)

# GoogleTest and Google Benchmark. If this installs nothing, CMake fetches GoogleTest.
system-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && ! { dpkg -s libgtest-dev libgmock-dev libbenchmark-dev >/dev/null 2>&1; }; then \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
	      libgtest-dev libgmock-dev libbenchmark-dev; } >/dev/null 2>&1 \
	    || echo "could not install GoogleTest and Google Benchmark with apt-get"; \
	fi

# On a machine with a CUDA device: logs, test.xml and the benchmarks' JSON go to build/gpu. Without
# installations, `python tools/gpu.py test` does the same with the installed packages.
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

# XLA's CUDA plugin over virtual_gpu, in build/virtual-gpu; nothing goes into $(VENV). With JAX_TESTS,
# JAX's own callback tests run, too (see jax-suites). Run it twice to test each JAX: `make virtual-gpu-test VENV=.venv-newest PYTHON=python3.13`.
VIRTUAL_GPU := $(PY) virtual_gpu/virtual_gpu
VIRTUAL_GPU_WITH = $$($(PY) tools/requirements.py virtual-gpu $(VIRTUAL_GPU_EXTRAS))
VIRTUAL_GPU_EXTRAS ?=
VIRTUAL_GPU_PYTEST := run -m pytest -q -p no:cacheprovider -o faulthandler_timeout=120
# CPU tests that also hold for GPUs and run on the default devices: those that need eight devices,
# and the others. Tests of host memory are left out.
VIRTUAL_GPU_SHARDED := $(addprefix tests/python/,feed/test_shares.py \
  sharding/test_partitioner.py tap/test_shards.py tap/test_transformations.py \
  call/test_transformations.py call/test_shard_map.py)
# A sum over devices in branches that differ by device, as in gradients, hangs in XLA's kernels for
# small sums: each device waits for the other devices' kernels in its own branch.
VIRTUAL_GPU_SUMS := --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false
VIRTUAL_GPU_SUITES := $(addprefix tests/python/,call/test_batching.py call/test_derivatives.py \
  call/test_effects.py call/test_export.py feed/test_exit.py gate/test_results.py \
  tap/test_channel.py tap/test_devices.py tap/test_exit.py tap/test_export.py tap/test_files.py \
  tap/test_memory.py tap/test_print.py)
VIRTUAL_GPU_LEFT_OUT := $(addprefix --deselect tests/python/,\
  sharding/test_partitioner.py::test_a_pure_program_whose_result_nobody_keeps_is_waited_for \
  gate/test_results.py::test_masked_arrays_are_refused_where_arrays_come_in)

# Fails if pip has no CUDA plugin. VIRTUAL_GPU_EXTRAS: triton, numba-cuda.
virtual-gpu: package
	$(VIRTUAL_GPU) build --with $(VIRTUAL_GPU_WITH)

# The part that .ci/run uses: a minute and a half after the build.
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

# One wheel for the stable ABI, built once against the oldest JAX's headers, tested on every JAX that
# its Python supports.
MATRIX_JAX ?= 0.10.2 0.11.2 0.12.0.1
matrix: PYTHON := $(shell sh tools/find_python.sh --newest)
matrix:
	rm -rf build/matrix
	$(MAKE) wheel VENV=.venv-matrix PYTHON="$(PYTHON)" WHEEL_DIR=build/matrix
	for jax in $(MATRIX_JAX); do \
	  $(MAKE) python-test VENV=.venv-jax-$$jax JAX=$$jax PYTHON="$(PYTHON)" TEST_XLA=default \
	    WHEEL="$$(echo build/matrix/callgate-*.whl)"; \
	done

# On a Python without the GIL, with those of the tests' libraries that have wheels for it. It is not
# part of `.ci/run` unless such a Python is found.
free-threaded-test: export PIP_ONLY_BINARY = :all:
free-threaded-test:
	@python="$$(sh tools/free_threaded_python.sh --build)" && unset PIP_CONSTRAINT && \
	for target in "cpp-test python-test" 'programs PROGRAMS_ARGS="--jobs 1 --most 200"'; do \
	  eval $(MAKE) VENV=.venv-free PYTHON="$$python" WITH_WHEELS=--with-wheels $$target; \
	done

# Tests with threads, with Python and the module under the thread sanitizer. The libraries come from
# the environment of `free-threaded-test`.
TSAN_TESTS ?= tests/python/gate/test_at_once.py
TSAN_SITE := build/tsan-site
free-threaded-tsan: export PIP_ONLY_BINARY = :all:
free-threaded-tsan:
	python="$$(sh tools/free_threaded_python.sh --build)" && unset PIP_CONSTRAINT && \
	  $(MAKE) VENV=.venv-free PYTHON="$$python" WITH_WHEELS=--with-wheels package
	rm -rf $(TSAN_SITE)
	PATH="$(CURDIR)/.venv-free/bin:$$PATH" .venv-free/bin/python -m pip install -q --no-deps --no-build-isolation --target $(TSAN_SITE) \
	  -C build-dir=build/tsan-module -C cmake.build-type=RelWithDebInfo \
	  -C cmake.define.CALLGATE_SANITIZE=thread -C install.strip=false .
	libraries="$$(.venv-free/bin/python -c 'import site; print(*site.getsitepackages())')" && \
	  python="$$(sh tools/free_threaded_python.sh --build --thread-sanitizer)" && \
	  TSAN_OPTIONS="suppressions=$(CURDIR)/tests/thread_sanitizer.txt history_size=4 report_mutex_bugs=0 detect_deadlocks=0 $(TSAN_OPTIONS)" \
	  PYTHONPATH="$(CURDIR)/$(TSAN_SITE):$$libraries" JAX_PLATFORMS=cpu CALLGATE_TEST_XLA=$(TEST_XLA) \
	  "$$python" -m pytest -p no:cacheprovider -p no:xdist -o faulthandler_timeout=3000 $(TSAN_TESTS)

WHEEL_DIR ?= dist
wheel: $(PY)
	$(PIP) wheel --no-deps -w $(WHEEL_DIR) .
	@ls $(WHEEL_DIR)

# tools/portable.py needs an environment with Python 3.12 or newer. A wheel for another processor
# copies the stub of the installed package.
TARGET ?= x86_64-linux
PLATFORM_x86_64-linux = manylinux_2_28_x86_64
PLATFORM_aarch64-linux = manylinux_2_28_aarch64
PLATFORM_aarch64-macos = macosx_12_0_arm64
$(VENV)/.stamp-portable: $(VENV)/.stamp-build build/xla-headers/jaxlib-version
	$(INSTALL) $$($(PY) tools/requirements.py portable)
	touch $@

portable-wheel portable-check: VENV := .venv-portable
portable-wheel portable-check: PYTHON := $(shell sh tools/find_python.sh --newest)
portable-wheel:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-portable \
	  $(if $(filter x86_64-linux,$(TARGET)),,$(VENV)/.stamp-package)
	$(VENV)/bin/python tools/portable.py wheel $(TARGET) --out $(WHEEL_DIR)
	$(VENV)/bin/abi3audit --strict --report $(WHEEL_DIR)/callgate-*-abi3-$(PLATFORM_$(TARGET)).whl

portable-check:
	@$(MAKE) VENV=$(VENV) PYTHON="$(PYTHON)" $(VENV)/.stamp-portable
	$(VENV)/bin/python tools/portable.py objects aarch64-macos

# --- checks ------------------------------------------------------------------------------------

CPP_FILES = $(shell find src include tests/cpp tests/ffi_runner tests/fuzz benchmarks python/callgate \
  $(addprefix virtual_gpu/,driver fake_driver libraries ptx) -name '*.cc' -o -name '*.h' 2>/dev/null)
PY_DIRS = $(wildcard python tests benchmarks examples tools virtual_gpu)

# The compiled module's types, generated by its build, for pyright and the reference.
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

# Fixes the formatting that `make lint` checks.
format: $(VENV)/.stamp-lint+docs
	ruff format $(PY_DIRS)
	ruff check --fix $(PY_DIRS)
	clang-format -i $(CPP_FILES)

# The Python suite with the module under the address and undefined-behavior sanitizers
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

# PyTorch first: a compared library depends on it and would install the CUDA build.
$(VENV)/.stamp-bench: $(VENV)/.stamp-torch-cpu

bench: $(VENV)/.stamp-bench $(VENV)/.stamp-package
	$(PY) -m benchmarks $(BENCH_ARGS)

# Lists rows that got worse by more than 15 % since benchmarks/results, by ratios within the same run.
# Run it on a quiet machine before a release.
bench-check: $(VENV)/.stamp-bench $(VENV)/.stamp-package
	$(PY) -m benchmarks --check $(BENCH_ARGS)

docs: $(VENV)/.stamp-lint+docs environment $(STUB)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	$(PY) -m pytest -q $(SITE)

# The versions that CI installs for every Python. JAX's is left out, because CI tests several.
constraints: $(VENV)/.stamp-constraints
	$(PY) tools/requirements.py run build test demo gallery lint docs | $(PY) -m uv pip compile -q \
	  --universal --python-version 3.11 --no-annotate --upgrade --no-emit-package jax \
	  --no-emit-package jaxlib --custom-compile-command 'make constraints' -o .ci/constraints.txt -

clean:
	rm -rf build dist site wheelhouse .venv .venv-* $(STUB)
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
