# SPDX-License-Identifier: Apache-2.0
"""The examples for GPUs: what they say without one, and what they find on one."""

import importlib
import pathlib
import re
import sys
import warnings

import interpreters
import jax
import jax.numpy as jnp
import pytest

import callgate as cg
from callgate._build import nvrtc

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
NAMES = ("gpu_fft_filter.py", "gpu_triton_softmax.py", "gpu_cuda_scan.py")


def run(name, folder, **variables):
  environment = {**interpreters.same_path(), **variables}
  return interpreters.succeed(EXAMPLES / name, cwd=folder, environment=environment, timeout=300)


def numbers(text, words):
  """The numbers of the line with these words."""
  line = next(line for line in text.splitlines() if words in line)
  return [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", line)]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_for_gpus_says_why_it_does_nothing_where_there_is_none(name, tmp_path):
  text = run(name, tmp_path, JAX_PLATFORMS="cpu")
  assert text.startswith("skipped: ")
  assert text.count("\n") == 1


@pytest.fixture
def example(monkeypatch):
  """Imports an example; its kernels' names are free again afterwards."""
  monkeypatch.syspath_prepend(str(EXAMPLES))
  yield importlib.import_module
  for name in NAMES:
    sys.modules.pop(name.removesuffix(".py"), None)


def calls(function, *args):
  """The targets of callgate's that a function calls in a program for CUDA."""
  lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
  return re.findall(r"@(callgate\.[\w.]+)", lowered.as_text())


def test_the_fft_filter_stays_a_gate_in_the_loop_of_its_descent(example):
  filtering = example("gpu_fft_filter")
  picture = jnp.ones((filtering.SIZE, filtering.SIZE))
  found = calls(lambda b: filtering.sharpened(b, filtering.blur), picture)
  assert found == ["callgate.gate"] * 2  # the blur, and its transpose


def test_the_triton_softmax_lowers_with_its_derivative(example):
  pytest.importorskip("triton")
  softmax = jax.vmap(example("gpu_triton_softmax").make_softmax())
  x = jnp.ones((2, 3, 7))
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Triton's own
    assert calls(softmax, x) == ["callgate.kernel"]
    assert calls(jax.grad(lambda x: softmax(x).sum()), x) == ["callgate.kernel"] * 2


def test_the_cuda_scan_lowers_to_one_call_for_all_lanes(example):
  try:
    nvrtc.compiler()
  except cg.CompileError as error:
    pytest.skip(str(error).splitlines()[0])
  scan = example("gpu_cuda_scan").make_scan()
  assert calls(scan, jnp.arange(5)) == ["callgate.kernel"]
  assert calls(jax.vmap(scan), jnp.ones((4, 5))) == ["callgate.kernel"]
  assert calls(jax.grad(lambda x: jax.vmap(scan)(x).sum()), jnp.ones((4, 5))) == ["callgate.kernel"]


@pytest.mark.gpu
def test_the_fft_filter_sharpens_the_picture_as_jnp_s_transforms_do(tmp_path):
  pytest.importorskip("cupy")
  text = run("gpu_fft_filter.py", tmp_path)
  blurred, ours = numbers(text, "blurred picture")
  theirs, difference = numbers(text, "with jnp.fft")
  assert ours < 0.8 * blurred
  assert ours == pytest.approx(theirs, abs=2e-3)
  assert difference < 0.05  # two hundred steps carry roundings on


@pytest.mark.gpu
def test_the_triton_softmax_and_its_gradient_are_jax_s(tmp_path):
  pytest.importorskip("triton")
  text = run("gpu_triton_softmax.py", tmp_path)
  assert numbers(text, "values")[0] < 1e-6
  assert numbers(text, "gradient")[0] < 1e-5


@pytest.mark.gpu
def test_the_cuda_scan_sums_as_cumsum_does(tmp_path):
  text = run("gpu_cuda_scan.py", tmp_path)
  assert "1,000,003 integers: equal to jnp.cumsum" in text
  _, error, off = numbers(text, "cg.cuda: ")
  _, theirs, _ = numbers(text, "jnp.cumsum: ")
  assert error < max(3 * theirs, 1e-3)
  assert off < 0.05
