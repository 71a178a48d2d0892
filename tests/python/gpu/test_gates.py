# SPDX-License-Identifier: Apache-2.0
"""Gates on a real GPU with the libraries themselves: `pytest -m gpu` where there is one."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate._arrays.gpu import stream_as
from callgate.compat.buffer_callback import buffer_callback

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

KINDS = ["cupy", "torch", "numba"]


def library(kind: str) -> Any:
  module = pytest.importorskip({"numba": "numba.cuda"}.get(kind, kind))
  if kind == "torch" and not module.cuda.is_available():
    pytest.skip("this PyTorch has no CUDA")
  return module


def adder(kind: str) -> Any:
  """out[...] = x + 1, as the library says it."""
  module = library(kind)
  if kind == "cupy":
    return lambda out, x: module.add(x, 1, out=out)
  if kind == "torch":
    return lambda out, x: module.add(x, 1, out=out)

  @module.jit
  def kernel(out: Any, x: Any) -> None:
    index = module.grid(1)
    if index < x.size:
      out[index] = x[index] + 1

  def launch(out: Any, x: Any) -> None:
    flat_out, flat = out.ravel(), x.ravel()
    if flat.size:
      kernel[(flat.size + 127) // 128, 128, x.stream](flat_out, flat)

  return launch


def numbers(*shape: int) -> Any:
  return jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape)


def same(x: Any) -> Any:
  return x


def inplace(kind: Any, **options: Any) -> Any:
  return cg.gate(adder(kind), out=same, arrays=kind, style="inplace", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (64, 1024)])
def test_a_library_writes_in_place_between_xlas_own_work(kind: str, shape: tuple[int, ...]) -> None:
  if kind == "numba" and not shape:
    shape = (1,)
  gate = inplace(kind)
  got = jax.jit(lambda x: gate(x * 2) * 3)(numbers(*shape))
  np.testing.assert_array_equal(got, (np.asarray(numbers(*shape)) * 2 + 1) * 3)


def test_a_kernel_of_numbas_without_a_stream_is_ordered_too() -> None:
  cuda = library("numba")

  @cuda.jit
  def kernel(out: Any, x: Any) -> None:
    index = cuda.grid(1)
    if index < x.size:
      out[index] = x[index] + 1

  gate = cg.gate(
    lambda out, x: kernel[8192, 128](out, x), out=same, arrays="numba", style="inplace"
  )
  x = numbers(1 << 20)
  for _ in range(20):
    got = jax.jit(lambda x: gate(x * 2) * 3)(x)
    np.testing.assert_array_equal(got, (np.asarray(x) * 2 + 1) * 3)


@pytest.mark.parametrize("kind", ["cupy", "torch", "jax", "numpy", "buffer"])
def test_returned_arrays_are_results(kind: Any) -> None:
  if kind in ("cupy", "torch"):
    library(kind)
  add = {"buffer": lambda x: np.full(x.shape, 5, np.float32)}.get(kind, lambda x: x + 1)
  gate = cg.gate(add, out=same, arrays=kind)
  x = numbers(300, 300)
  want = np.full(x.shape, 5) if kind == "buffer" else np.asarray(x) + 1
  for _ in range(10):
    np.testing.assert_array_equal(jax.jit(lambda x: gate(x) * 2)(x), want * 2)


def test_results_that_are_not_dense_are_made_so_by_cupy_and_torch() -> None:
  for kind in ("cupy", "torch"):
    library(kind)
    turned = lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype)
    gate = cg.gate(lambda x: x.T, out=turned, arrays=kind)
    np.testing.assert_array_equal(jax.jit(gate)(numbers(3, 5)), np.asarray(numbers(3, 5)).T)


def test_an_identity_of_a_donated_argument_is_no_copy() -> None:
  gate = cg.gate(lambda out, x: None, out=same, arrays="buffer", style="inplace", aliases={0: 0})
  x = numbers(1024)
  pointer = x.unsafe_buffer_pointer()
  got = jax.jit(gate, donate_argnums=0)(x)
  assert got.unsafe_buffer_pointer() == pointer
  np.testing.assert_array_equal(got, np.arange(1024))


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_and_derivatives(kind: str) -> None:
  gate = inplace(kind, like=lambda x: x + 1)
  x = numbers(4, 8)
  np.testing.assert_array_equal(jax.jit(jax.vmap(gate))(x), np.asarray(x) + 1)
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: gate(x).sum()))(x[0]), np.ones(8))


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_work_of_a_stream_of_the_users_own_is_joined(kind: str) -> None:
  module = library(kind)

  def callback(out: Any, x: Any) -> None:
    side = module.cuda.Stream()
    if kind == "cupy":
      here = module.cuda.get_current_stream()
      side.wait_event(here.record())
      with side:
        module.add(x, 1, out=out)
      here.wait_event(side.record())
      side.synchronize()
    else:
      side.wait_stream(module.cuda.current_stream())
      with module.cuda.stream(side):
        module.add(x, 1, out=out)
      module.cuda.current_stream().wait_stream(side)

  gate = cg.gate(callback, out=same, arrays=kind, style="inplace")  # pyright: ignore[reportArgumentType]
  got = jax.jit(lambda x: gate(x * 2) * 3)(numbers(1 << 16))
  np.testing.assert_array_equal(got, (np.arange(1 << 16, dtype=np.float32) * 2 + 1) * 3)


@pytest.mark.parametrize("consumer", ["cupy", "torch", "jax"])
def test_dlpack_of_a_buffer_is_read_by_every_library(consumer: str) -> None:
  module = library(consumer) if consumer != "jax" else jax.dlpack
  seen: list[Any] = []

  def callback(out: Any, x: Any) -> None:
    assert x.__dlpack_device__()[0] == 2
    if consumer == "jax":
      seen.append(x.shape)  # JAX would wait for the program that waits for it
      return
    array = module.from_dlpack(x)
    seen.append(tuple(array.shape))
    module.from_dlpack(out)[...] = array * 2

  gate = cg.gate(callback, out=same, arrays="buffer", style="inplace")
  got = jax.jit(lambda x: gate(x + 1) - 1)(numbers(100))
  assert seen == [(100,)]
  if consumer != "jax":
    np.testing.assert_array_equal(got, (np.arange(100) + 1) * 2 - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_gate_gives_the_same_as_a_called_one(kind: str) -> None:
  calls: list[int] = []
  add = adder(kind)

  def callback(out: Any, x: Any) -> None:
    calls.append(1)
    add(out, x)

  gate = cg.gate(  # pyright: ignore[reportCallIssue]
    callback,
    out=same,
    arrays=kind,  # pyright: ignore[reportArgumentType]
    style="inplace",
    command_buffer=True,
  )

  @jax.jit
  def program(x: Any) -> Any:
    for _ in range(8):  # enough for XLA to want a graph
      x = gate(x) * 0.5
    return x

  want = np.arange(64, dtype=np.float32)
  for _ in range(8):
    want = (want + 1) * np.float32(0.5)
  for _ in range(10):
    np.testing.assert_allclose(program(numbers(64)), want)
  assert len(calls) >= 8


def test_a_call_that_cannot_be_recorded_is_an_error() -> None:
  cupy = library("cupy")

  def callback(out: Any, x: Any) -> None:
    cupy.add(x, 1, out=out)
    cupy.cuda.get_current_stream().synchronize()

  gate = cg.gate(
    callback, out=same, arrays="cupy", style="inplace", command_buffer=True, name="waits"
  )

  def program(x: Any) -> Any:
    for _ in range(8):
      x = gate(x)
    return x

  def run_often() -> None:
    for _ in range(3):
      jax.jit(program)(numbers(8)).block_until_ready()

  with pytest.raises(Exception, match=r"(?i)captur(e|ing)|recorded into"):
    run_often()


@pytest.mark.parametrize("thread", ["xla", "own"])
def test_copies_on_the_host_are_staged_both_ways(thread: Any) -> None:
  gate = cg.gate(lambda x: x + 1, out=same, thread=thread)
  for size in (0, 1, 1000, 1 << 22):
    x = numbers(size)
    got = jax.jit(lambda x: gate(x * 2) * 3)(x)
    np.testing.assert_array_equal(got, (np.asarray(x) * 2 + 1) * 3)


def test_exceptions_and_what_comes_after_them() -> None:
  def fail(out: Any, x: Any) -> None:
    raise KeyError("on the GPU")

  gate = cg.gate(fail, out=same, arrays="buffer", style="inplace")
  with pytest.raises(KeyError, match="on the GPU"), cg.errors():
    jax.jit(gate)(numbers(3)).block_until_ready()
  working = cg.gate(lambda x: x + 1, out=same)
  np.testing.assert_array_equal(jax.jit(working)(numbers(3)), [1, 2, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_that_is_kept_is_an_escape(kind: str) -> None:
  kept: list[Any] = []
  add = adder(kind)

  def leak(out: Any, x: Any) -> None:
    add(out, x)
    kept.append(x)

  gate = cg.gate(leak, out=same, arrays=kind, style="inplace")  # pyright: ignore[reportArgumentType]
  with pytest.raises(cg.EscapedViewError), cg.errors():
    jax.jit(gate)(numbers(8)).block_until_ready()
  if kind == "torch":
    np.testing.assert_array_equal(kept[0].cpu().numpy(), np.arange(8))
  kept.clear()
  gc.collect()


def test_a_write_to_an_input_is_found_when_asked_for() -> None:
  library("cupy")

  def write(out: Any, x: Any) -> None:
    x += 1
    out[...] = x

  gate = cg.gate(write, out=same, arrays="cupy", style="inplace")
  with cg.config(check_writes=True), pytest.raises(cg.InputWriteError), cg.errors():
    jax.jit(lambda x: gate(x * 2))(numbers(8)).block_until_ready()


def test_streams_of_libraries_are_xlas() -> None:
  cupy = library("cupy")

  def callback(ctx: Any, out: Any, x: Any) -> None:
    assert ctx.stream_as("cupy").ptr == ctx.stream == x.stream
    with stream_as("cupy", ctx.stream, 0):
      cupy.from_dlpack(out)[...] = cupy.from_dlpack(x) + 1

  gate = cg.gate(callback, out=same, arrays="buffer", style="context")
  np.testing.assert_array_equal(jax.jit(gate)(numbers(5)), [1, 2, 3, 4, 5])


def test_ordered_gates_run_in_order() -> None:
  seen: list[int] = []
  gate = cg.gate(lambda x: seen.append(int(x)), out=(), effect="ordered")

  @jax.jit
  def program(x: Any) -> Any:
    for i in range(5):
      gate(x + i)
    return x

  program(jnp.int32(10)).block_until_ready()
  jax.effects_barrier()
  assert seen == [10, 11, 12, 13, 14]


def test_ordered_programs_run_after_one_that_failed() -> None:
  seen: list[int] = []

  @cg.gate(out=(), effect="ordered")
  def positive(x: np.ndarray) -> None:
    if x < 0:
      raise ValueError("not positive")
    seen.append(int(x))

  program = jax.jit(lambda x: (positive(x), x + 1)[1])
  with pytest.raises(jax.errors.JaxRuntimeError, match="not positive"):
    program(jnp.int32(-1)).block_until_ready()
  for i in range(3):
    assert program(jnp.int32(i)) == i + 1
  assert seen == [0, 1, 2]
  with pytest.raises(ValueError, match="not positive"):  # nobody took it in `cg.errors()`
    cg.barrier()
  cg.barrier()


def test_a_feed_that_has_ended_leaves_other_feeds_alone() -> None:
  with cg.feed([np.int32(1)]) as short, cg.feed(np.int32(i) for i in range(5)) as long:
    assert short.next() == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="EndOfFeed"):
      short.next().block_until_ready()
    assert [int(long.next()) for _ in range(5)] == list(range(5))
  with pytest.raises(cg.EndOfFeed):
    cg.barrier()


def test_buffer_callbacks_and_installed_callbacks() -> None:
  cupy = library("cupy")

  def callback(ctx: Any, out: Any, x: Any) -> None:
    with stream_as("cupy", ctx.stream, 0):
      cupy.add(cupy.asarray(x), 1, out=cupy.asarray(out))

  for recorded in (False, True):
    call = buffer_callback(
      callback, jax.ShapeDtypeStruct((8,), jnp.float32), command_buffer_compatible=recorded
    )
    np.testing.assert_array_equal(jax.jit(call)(numbers(8)), np.arange(8) + 1)
  cg.install()
  try:
    got = jax.jit(lambda x: jax.pure_callback(np.square, x, x))(numbers(4))
    np.testing.assert_array_equal(got, [0, 1, 4, 9])
  finally:
    cg.uninstall()


def test_each_gpu_gets_its_own_arrays_and_stream() -> None:
  devices = jax.devices("cuda")
  if len(devices) < 2:
    pytest.skip(f"needs 2 GPUs, has {len(devices)}")
  library("cupy")
  gate = inplace("cupy", sharding="i -> i")
  mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
  sharding = jax.NamedSharding(mesh, jax.P("x"))
  x = jax.device_put(np.arange(16, dtype=np.float32), sharding)
  np.testing.assert_array_equal(jax.jit(lambda x: gate(x) * 2)(x), (np.arange(16) + 1) * 2)
  for device in devices[:2]:
    y = jax.device_put(np.ones(4, np.float32), device)
    np.testing.assert_array_equal(jax.jit(gate)(y), np.full(4, 2))


def test_an_own_thread_s_error_in_a_program_whose_result_nobody_keeps_is_waited_for() -> None:
  goes_on = threading.Event()

  def fail(x: np.ndarray) -> np.ndarray:
    goes_on.wait(60)
    raise KeyError("kept by nobody")

  program = jax.jit(cg.gate(fail, out=lambda x: x, thread="own"))
  program(numbers(4))
  timer = threading.Timer(0.2, goes_on.set)
  timer.start()
  with pytest.raises(KeyError, match="kept by nobody"):
    cg.barrier()
  timer.join()
