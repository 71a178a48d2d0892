# SPDX-License-Identifier: Apache-2.0
"""Functions of tvm_ffi as kernels: from Python, from C++, under every transformation, on a stream.

Functions of Python stand for all; native ones, compiled here, are called by another way (views).
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_programs import is_capturable, load, run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transformation_table import X, assert_chains_agree, groups, reference

import callgate as cg

tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

NATIVE = """
  void twice(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {
    TVM_FFI_ICHECK(x.dtype() == y.dtype() && x.ndim() == y.ndim()) << "x and y differ";
    if (x.dtype() != DLDataType{kDLFloat, 32, 1}) {
      TVM_FFI_THROW(TypeError) << "x: expected float32";
    }
    auto* from = static_cast<const float*>(x.data_ptr());
    auto* to = static_cast<float*>(y.data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = 2 * from[i];
  }
  void axpy(double a, tvm::ffi::TensorView x, tvm::ffi::TensorView y, tvm::ffi::String mode,
            bool negative, int64_t shift, tvm::ffi::TensorView z) {
    double sign = negative ? -1 : 1;
    for (int64_t i = 0; i < x.size(0); ++i) {
      double v = a * static_cast<const float*>(x.data_ptr())[i];
      double w = static_cast<const float*>(y.data_ptr())[i];
      static_cast<float*>(z.data_ptr())[i] =
          float(sign * (mode == "add" ? v + w : v - w) + double(shift));
    }
  }
  void strides(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {
    for (int64_t i = 0; i < x.ndim(); ++i) {
      static_cast<int32_t*>(out.data_ptr())[i] = int32_t(x.size(i));
      static_cast<int32_t*>(out.data_ptr())[x.ndim() + i] = int32_t(x.stride(i));
    }
  }
"""


@functools.cache
def native() -> Any:
  if importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
    pytest.skip("ninja, which tvm_ffi compiles with, is not installed")
  return tvm_ffi.cpp.load_inline(
    "callgate_test", cpp_sources=NATIVE, functions=["twice", "axpy", "strides"]
  )


def convert(function: Any) -> Any:
  """A function of NumPy's arrays as one of tvm_ffi."""
  return tvm_ffi.convert(
    lambda *args: function(*(np.from_dlpack(a) if hasattr(a, "shape") else a for a in args))
  )


def assign(out: Any, value: Any) -> None:
  out[...] = value


def wave(effect: Any = "pure", **options: Any) -> Any:
  def body(x: Any, y: Any) -> None:
    y[...] = np.sin(x) * (1 + np.sum(x, dtype=np.float32))

  return cg.kernel(convert(body), out=lambda x: x, effect=effect, **options)


# -- calls ---------------------------------------------------------------------------------------
def test_operands_come_first_and_results_last() -> None:
  def body(x: Any, y: Any, total: Any, product: Any) -> None:
    total[...], product[...] = x + y, x * y

  kernel = cg.kernel(convert(body), out=lambda x, y: (x, y))
  x = jnp.arange(6.0).reshape(2, 3)
  total, product = jax.jit(kernel)(x, x)
  np.testing.assert_array_equal(total, 2 * x)
  np.testing.assert_array_equal(product, x * x)
  assert kernel.name.startswith("test_tvm_ffi.tvm_ffi") or ".tvm_ffi" in kernel.name


def test_a_native_function_gets_views_of_contiguous_arrays() -> None:
  np.testing.assert_array_equal(jax.jit(cg.kernel(native().twice, like=lambda x: 2 * x))(X), 2 * X)
  strides = cg.kernel(native().strides, out=jax.ShapeDtypeStruct((6,), "int32"))
  assert strides(jnp.ones((2, 3, 4))).tolist() == [2, 3, 4, 12, 4, 1]
  assert cg.kernel(native().twice, out=lambda x: x)(jnp.ones((0, 3))).shape == (0, 3)
  assert cg.kernel(native().twice, out=lambda x: x)(jnp.float32(3)).tolist() == 6


def test_arg_spec_places_numbers_and_strings() -> None:
  spec = ["attrs.a", "args", "attrs.mode", "attrs.negative", "attrs.shift", "rets"]
  kernel = cg.kernel(native().axpy, arg_spec=spec, out=lambda x, y, **_: x)
  x, y = jnp.arange(3.0), jnp.ones(3)

  def call(x: Any, mode: str) -> Any:
    return kernel(x, y, a=np.float32(2), mode=mode, negative=True, shift=10)

  np.testing.assert_array_equal(jax.jit(call, static_argnums=1)(x, "add"), 10 - (2 * x + 1))
  np.testing.assert_array_equal(jax.jit(call, static_argnums=1)(x, "subtract"), 10 - (2 * x - 1))


@pytest.mark.parametrize(
  "dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "float8_e5m2"]
)
def test_tensors_have_the_arrays_dtypes(dtype: str) -> None:
  seen: list[tuple[Any, ...]] = []
  spy = tvm_ffi.convert(lambda x, y: seen.append((str(x.dtype), tuple(x.shape), str(x.device))))
  jax.block_until_ready(cg.kernel(spy, out=lambda x: x)(jnp.zeros((2, 3), dtype)))
  assert seen == [(dtype, (2, 3), "cpu:0")]


def test_a_call_without_results_has_an_effect() -> None:
  seen: list[Any] = []
  kernel = cg.kernel(convert(lambda x: seen.append(x.sum().item())), effect="io", arg_spec=["args"])
  jax.jit(lambda x: kernel(x))(jnp.ones(3))
  jax.effects_barrier()
  assert seen == [3.0]


# -- transformations -----------------------------------------------------------------------------
@pytest.mark.parametrize("chains", groups(7))
def test_kernels_compose_with_all_transformations(chains: Any) -> None:
  assert_chains_agree(chains, make=lambda effect: wave(effect, like=reference))


@pytest.mark.parametrize("vmap", ["each", "whole"])
def test_vmap_loops_over_the_lanes_or_hands_them_over(vmap: Any) -> None:
  shapes: list[Any] = []

  def body(x: Any, y: Any) -> None:
    shapes.append(x.shape)
    y[...] = np.sin(x)

  kernel = cg.kernel(convert(body), out=lambda x: x, vmap=vmap)
  x = jnp.arange(12.0).reshape(3, 4)
  np.testing.assert_allclose(jax.jit(jax.vmap(kernel, 1, 1))(x), np.sin(x), rtol=1e-6)
  assert shapes == ([(3,)] * 4 if vmap == "each" else [(4, 3)])


def test_shards_are_called_on_their_own_devices() -> None:
  shapes: list[Any] = []

  def body(x: Any, y: Any) -> None:
    shapes.append(x.shape)
    y[...] = 2 * x

  mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
  x = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("i")))
  kernel = cg.kernel(convert(body), out=lambda x: x, sharding="shard", thread_safe=True)
  got = jax.jit(kernel)(x)
  np.testing.assert_array_equal(got, 2 * x)
  assert shapes == [(2, 2)] * 4
  assert got.sharding.is_equivalent_to(x.sharding, 2)


# -- errors --------------------------------------------------------------------------------------
def test_exceptions_of_a_function_are_the_calls_error() -> None:
  def body(x: Any, y: Any) -> None:
    raise ValueError("no such luck")

  kernel = cg.kernel(convert(body), out=lambda x: x, name="unlucky")
  with (
    pytest.raises(cg.KernelError, match="kernel 'unlucky': ValueError: no such luck"),
    cg.errors(),
  ):
    jax.block_until_ready(jax.jit(kernel)(X))
  with pytest.raises(cg.KernelError, match="TypeError: x: expected float32"), cg.errors():
    jax.block_until_ready(cg.kernel(native().twice, out=lambda x: x)(jnp.arange(3)))


def test_a_wrong_count_of_arrays_is_tvm_ffis_own_error() -> None:
  kernel = cg.kernel(native().twice, out=lambda x, y: x)
  with pytest.raises(cg.KernelError, match=r"TypeError: .*Expected 2 but got 3"), cg.errors():
    jax.block_until_ready(kernel(X, X))


def test_a_function_that_returns_an_object_is_refused() -> None:
  kernel = cg.kernel(tvm_ffi.convert(lambda x, y: x), out=lambda x: x)
  with pytest.raises(cg.KernelError, match="got one that returns an object"), cg.errors():
    jax.block_until_ready(kernel(X))


def test_a_tensor_that_is_kept_behind_its_call_is_an_error() -> None:
  kept: list[Any] = []
  kernel = cg.kernel(tvm_ffi.convert(lambda x, y: kept.append(x)), out=lambda x: x)
  with pytest.raises(cg.KernelError, match="expected a function that keeps no array"), cg.errors():
    jax.block_until_ready(kernel(X))
  copied = cg.kernel(convert(lambda x, y: kept.append(x.copy())), out=lambda x: x)
  with cg.errors():
    jax.block_until_ready(copied(X))


@pytest.mark.parametrize(
  ("options", "call", "message"),
  [
    ({}, lambda k: k(X, scale=2), "got argument 'scale', which it doesn't have; expected none"),
    (
      {"arg_spec": ["args", "attrs.eps", "rets"]},
      lambda k: k(X),
      "expected argument 'eps', got none",
    ),
    (
      {"arg_spec": ["args", "attrs.eps", "rets"]},
      lambda k: jax.jit(lambda e: k(X, eps=e))(1.0),
      "argument 'eps': expected a bool, an int, a float or a string that is known",
    ),
    ({"arg_spec": ["args"]}, lambda k: k(X), r"expected 0 results \(\), got 1 from out"),
    ({"arg_spec": ["inputs", "rets"]}, None, "arg_spec: expected 'args', 'rets' and names"),
    ({"arg_spec": ["args", "args"]}, None, "each once"),
    ({"dim": 3, "outputs": "y"}, None, "dim: expected nothing for a tvm_ffi.Function, got 3"),
    ({"vmap": "grid"}, None, "vmap: expected 'each', 'whole', 'broadcast' or a rule for a tvm_ffi"),
  ],
)
def test_wrong_arguments_are_named(options: Any, call: Any, message: str) -> None:
  def made_and_called() -> None:
    given = {"out": lambda x, **_: x, "name": "named", **options}
    call(cg.kernel(convert(lambda x, y: None), **given))

  with pytest.raises(cg.GateDefinitionError, match=f"kernel 'named': .*{message}"):
    made_and_called()


def test_packed_elements_are_refused() -> None:
  kernel = cg.kernel(convert(lambda x, y: None), out=lambda x: x)
  with pytest.raises(cg.GateDefinitionError, match="int4 has several elements in a byte"):
    kernel(jnp.zeros(4, "int4"))


def test_an_abi_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
  from callgate._kernel.peers import tvm_ffi as module

  monkeypatch.setattr(module, "_version", lambda library: (1, 2, 3))
  with pytest.raises(cg.GateDefinitionError, match=r"expected .* version 0\.1 .*, got 1\.2\.3"):
    cg.kernel(convert(lambda x, y: None), out=lambda x: x)


@pytest.mark.parametrize(
  ("given", "hint"), [(len, ""), (3, ""), (sys.modules["ctypes"].CDLL(None).abs, "callgate.cfunc")]
)
def test_an_object_that_is_no_kernel_is_refused(given: Any, hint: str) -> None:
  message = f"callgate.kernel: expected a tvm_ffi.Function or a warp.Kernel, got .*{hint}"
  with pytest.raises(cg.GateDefinitionError, match=message):
    cg.kernel(given, out=lambda x: x)


# -- lifetime, programs --------------------------------------------------------------------------
def test_an_exported_program_calls_by_name() -> None:
  from jax import export

  spec = ["attrs.mode", "args", "rets"]
  modes: list[str] = []
  kernel = cg.kernel(
    convert(lambda mode, x, y: (modes.append(mode), assign(y, x + 1))[0]),
    out=lambda x, **_: x, arg_spec=spec, name="tvm.exported",
  )  # fmt: skip
  program = export.export(
    jax.jit(lambda x: kernel(x, mode="add")), disabled_checks=cg.export_checks()
  )(X)
  loaded = export.deserialize(program.serialize())
  np.testing.assert_array_equal(loaded.call(X), X + 1)
  assert modes == ["add"]


# -- CUDA, on the fake driver --------------------------------------------------------------------
def on_device(fake: Any, log: list[Any]) -> Any:
  """y = 2 * x, as a function that enqueues work on tvm_ffi's stream."""
  from fake_cuda import Stream

  def body(x: Any, y: Any) -> None:
    device = x.device
    stream = tvm_ffi.core._env_get_current_stream(device.dlpack_device_type(), device.index)
    log.append((str(device), stream))
    shape, (source, target) = tuple(x.shape), (x.data_ptr(), y.data_ptr())
    Stream(fake, stream).enqueue(
      lambda: assign(fake.view(target, shape, np.float32), 2 * fake.view(source, shape, np.float32))
    )

  return tvm_ffi.convert(body)


def test_a_program_for_cuda_calls_with_its_stream(fake: Any) -> None:
  log: list[Any] = []
  kernel = cg.kernel(on_device(fake, log), like=lambda x: 2 * x)
  program = load(fake, lambda x: kernel(jnp.sin(x)) + 1, X)
  stream = fake.stream()
  stream.hold()
  pending = program.start(X, stream=stream)
  stream.release()
  np.testing.assert_allclose(pending.get(), 2 * np.sin(X) + 1, rtol=1e-6)
  assert log == [("cuda:0", stream.handle)]
  assert tvm_ffi.core._env_get_current_stream(2, 0) == 0  # as it was before
  assert not any(is_capturable(target) for target in program.targets() if "kernel" in target)
  np.testing.assert_allclose(
    run(fake, jax.vmap(jax.grad(lambda x: (kernel(x) ** 2).sum())), jnp.ones((2, 3))),
    8 * np.ones((2, 3)),
  )


def test_errors_of_a_call_on_a_stream_name_the_kernel(fake: Any) -> None:
  def body(x: Any, y: Any) -> None:
    raise RuntimeError("device trouble")

  kernel = cg.kernel(tvm_ffi.convert(body), out=lambda x: x, name="troubled")
  with pytest.raises(Exception, match=r"(?s)kernel 'troubled'.*RuntimeError: device trouble"):
    run(fake, kernel, X)
