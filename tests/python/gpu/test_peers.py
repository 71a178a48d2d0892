# SPDX-License-Identifier: Apache-2.0
"""Functions of tvm_ffi and kernels of Warp on a device; run with -m gpu."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

try:
  from warp_kernels import lengths, saxpy, total
except ImportError:
  lengths = saxpy = total = None

needs_warp = pytest.mark.skipif(saxpy is None, reason="warp-lang is not installed")


@needs_warp
def test_warp_computes_what_like_says() -> None:
  kernel = cg.kernel(saxpy, like=lambda a, x, y: a * x + y)
  x, y = jnp.arange(1000.0), jnp.ones(1000)
  np.testing.assert_allclose(jax.jit(lambda x, y: kernel(2.0, x, y))(x, y), 2 * x + y)
  lanes = jax.jit(jax.vmap(lambda x, y: kernel(2.0, x, y)))
  np.testing.assert_allclose(lanes(x.reshape(8, 125), y.reshape(8, 125)).ravel(), 2 * x + y)
  grad = jax.jit(jax.grad(lambda x: (kernel(2.0, x, x) ** 2).sum()))
  np.testing.assert_allclose(grad(x), 18 * x, rtol=1e-6)


@needs_warp
def test_warp_adds_to_results_that_are_zeroed_and_takes_vectors() -> None:
  add = jax.jit(cg.kernel(total, out=jax.ShapeDtypeStruct((1,), "float32"), zeroed=[0]))
  x = jnp.arange(60.0).reshape(6, 10)
  for _ in range(3):
    assert add(x).tolist() == [1770.0]
  measure = cg.kernel(lengths, out=lambda p: jax.ShapeDtypeStruct(p.shape[:1], p.dtype))
  np.testing.assert_allclose(measure(jnp.array([[3.0, 4.0, 0.0], [1.0, 2.0, 2.0]])), [5, 3])


def test_tvm_ffi_gets_the_devices_tensors_and_xlas_stream() -> None:
  tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
  driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
  seen: list[Any] = []

  def copy(x: Any, y: Any) -> None:
    stream = tvm_ffi.core._env_get_current_stream(x.device.dlpack_device_type(), x.device.index)
    size = 4 * int(np.prod(tuple(x.shape)))
    (result,) = driver.cuMemcpyAsync(y.data_ptr(), x.data_ptr(), size, stream)
    seen.append((str(x.device), stream != 0, int(result)))

  kernel = cg.kernel(tvm_ffi.convert(copy), like=lambda x: x)
  x = jnp.arange(1000.0)
  got = jax.jit(lambda x: kernel(jnp.sin(x)) + 1)(x)
  np.testing.assert_allclose(got, np.sin(np.asarray(x)) + 1, rtol=1e-5, atol=1e-6)
  assert seen == [("cuda:0", True, 0)]


def test_errors_of_tvm_ffi_are_the_calls_error() -> None:
  tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

  def fail(x: Any, y: Any) -> None:
    raise ValueError("no such luck")

  kernel = cg.kernel(tvm_ffi.convert(fail), out=lambda x: x, name="unlucky.gpu")
  with pytest.raises(cg.KernelError, match=r"'unlucky.gpu': ValueError: no such luck"), cg.errors():
    jax.block_until_ready(jax.jit(kernel)(jnp.ones(3)))
