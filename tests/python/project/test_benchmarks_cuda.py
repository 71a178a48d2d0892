# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that need a GPU, where there is none: they say so, and write nothing."""

import importlib
import os
import pathlib
import shutil
import subprocess
import sys

import interpreters
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def benchmarks(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT))
  return importlib.import_module("benchmarks.__main__")


def run(*arguments):
  environment = {**interpreters.same_path(ROOT), "JAX_PLATFORMS": "cpu"}
  return interpreters.run(
    interpreters.Module("benchmarks"), *arguments, cwd=ROOT, environment=environment, timeout=100
  )


def test_every_subject_for_gpus_imports_and_names_its_targets_rows(benchmarks):
  for subject in benchmarks.CUDA_SUBJECTS:
    module = importlib.import_module(f"benchmarks.bench_{subject}")
    assert module.TARGETS
    text = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    for target in module.TARGETS:
      words = target.row.split(", ")[0]
      assert words in text, f"{subject}: {target.row}"


def test_the_subjects_for_gpus_say_that_there_is_none_and_write_nothing():
  results = ROOT / "benchmarks" / "results"
  before = sorted(results.iterdir())
  done = run("cuda", "--quick")
  assert done.returncode == 3
  lines = done.stdout.splitlines()
  assert [line.partition(":")[0] for line in lines] == [
    "cuda_identity", "cuda_gates", "cuda_kernels", "cuda_taps", "cuda_elementwise",
  ]  # fmt: skip
  for line in lines:
    assert "nothing measured and nothing written: needs a CUDA device" in line
  assert sorted(results.iterdir()) == before


def test_a_report_holds_the_device_that_it_ran_on(benchmarks):
  harness = importlib.import_module("benchmarks.harness")
  report = harness.Report("cuda_gates", "", "us", [], device={"name": "a GPU"})
  assert report.to_json()["environment"]["device"] == {"name": "a GPU"}
  report.device = None
  assert "device" not in report.to_json()["environment"]


def test_the_handlers_of_the_floor_compile_without_cuda(benchmarks, tmp_path, monkeypatch):
  if shutil.which("c++") is None and shutil.which("g++") is None:
    pytest.skip("a C++ compiler is needed")
  import ctypes

  import jax

  raw = importlib.import_module("benchmarks.peers.raw")
  raw_cuda = importlib.import_module("benchmarks.peers.raw_cuda")
  monkeypatch.setattr(raw, "BUILD", tmp_path)
  library = ctypes.CDLL(str(raw.compiled(raw_cuda.SOURCE, jax.ffi.include_dir())))
  for name in (*raw_cuda.HANDLERS, "bench_cuda_load", "bench_cuda_launches", "bench_cuda_copies"):
    assert getattr(library, name)


ADAPTERS = ("gate_empty", "gate_aliased", "gate_cupy", "gate_numpy", "gate_numpy_aliased",
  "cuda_empty", "triton_empty", "numba_empty")  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of the peers' own
@pytest.mark.parametrize("name", ADAPTERS)
def test_callgates_benchmarks_lower_for_cuda(benchmarks, name):
  import jax
  import jax.numpy as jnp

  import callgate as cg

  harness = importlib.import_module("benchmarks.harness")
  cuda = importlib.import_module("benchmarks.peers.cuda")
  x = jnp.ones(1024)
  try:
    function = getattr(cuda, name)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, carry: function(carry), x))
    lowered = program.trace(x).lower(lowering_platforms=("cuda",))
  except harness.NotInstalled as error:
    pytest.skip(str(error))
  except (cg.CompileError, cg.GateDefinitionError) as error:
    if "pip install" not in str(error):
      raise
    pytest.skip(str(error).splitlines()[0])
  assert "@callgate." in lowered.as_text()


def gpu_tool(folder, *arguments):
  command = [sys.executable, str(ROOT / "tools" / "gpu.py"), *arguments, "--out", str(folder)]
  environment = {**os.environ, **interpreters.same_path(), "JAX_PLATFORMS": "cpu"}
  return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("what", ["test", "bench"])
def test_the_command_for_machines_with_a_gpu_says_that_there_is_none(what, tmp_path):
  done = gpu_tool(tmp_path / "out", what)
  assert done.returncode == 3, done.stderr
  log = (tmp_path / "out" / f"{what}.log").read_text()
  assert "no CUDA device that JAX can use" in log
  assert log in done.stdout


def test_the_command_for_machines_with_a_gpu_ends_when_its_time_is_up(tmp_path):
  done = gpu_tool(tmp_path, "test", "--seconds", "0")
  assert "ended after its time" in (tmp_path / "test.log").read_text()
  assert done.returncode != 0


@pytest.mark.gpu
@pytest.mark.parametrize(
  "subject", ["cuda_identity", "cuda_gates", "cuda_kernels", "cuda_taps", "cuda_elementwise"]
)
def test_a_quick_run_on_a_gpu_measures_callgate_s_own_rows(subject):
  environment = {**os.environ, **interpreters.same_path(ROOT)}
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks", subject, "--quick", "--no-json"],
    cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  for line in done.stdout.splitlines():
    if line.startswith("callgate"):
      assert "failed" not in line, line
