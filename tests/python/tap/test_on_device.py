# SPDX-License-Identifier: Apache-2.0
"""Taps with `on_device=True`: copies that stay where the program ran, and what becomes of them.

JAX has no GPU here, so the last step, DLPack into a jax.Array, is replaced by one that reads the
fake device's memory; the capsules that it would get are looked at themselves.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import device_library
import fake_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import FakeCuda

import callgate as cg
from callgate import _callgate
from callgate._tap import delivery

WAITS = ("cuStreamSynchronize", "cuCtxSynchronize")


def numbers(*shape: int) -> np.ndarray[Any, Any]:
  return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def in_use() -> int:
  """Bytes of copies on GPUs, once all that is dropped has gone back."""
  gc.collect()
  _callgate.drain()
  assert _callgate.drain_devices(60)
  return _callgate.device_memory_in_use()[1]


@pytest.fixture
def buffers(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
  """The Buffers that JAX would have been given; nothing is left when the test is over."""
  given: list[Any] = []

  def read(buffer: Any) -> Any:
    given.append(buffer)
    array = np.empty(buffer.shape, buffer.dtype)
    assert fake.driver.fakecuda_read(array.ctypes.data, buffer._data, buffer.nbytes) == 0
    return jnp.asarray(array)

  monkeypatch.setattr(delivery, "import_buffer", read)
  yield given
  del given[:]
  assert in_use() == 0


def test_consumers_get_arrays_that_never_were_on_the_host(
  fake: FakeCuda, buffers: list[Any]
) -> None:
  seen: list[Any] = []
  f = lambda x: cg.tap({"a": x, "b": (x[0] * 2,)}, seen.append, on_device=True)["a"] + 1
  program = fake_programs.load(fake, f, numbers(3))
  np.testing.assert_array_equal(program(numbers(3)), numbers(3) + 1)
  cg.barrier()
  (value,) = seen
  assert isinstance(value["a"], jax.Array)
  np.testing.assert_array_equal(value["a"], numbers(3))
  np.testing.assert_array_equal(value["b"][0], 0)
  assert fake.calls("cuMemcpyDtoHAsync_v2") == 0
  assert fake.calls("cuMemcpyDtoDAsync_v2") == 2
  assert len(buffers) == 2


def test_the_exported_memory_is_the_gpus_and_writable(fake: FakeCuda, buffers: list[Any]) -> None:
  fake_programs.run(fake, lambda x: cg.tap(x, lambda _: None, on_device=True), numbers(2, 3))
  cg.barrier()
  (buffer,) = buffers
  assert buffer.__dlpack_device__() == (2, 0)
  assert repr(buffer).startswith("Buffer(float32[2,3], device=cuda:0")
  waits = fake.calls("cuStreamWaitEvent")
  capsule = buffer.__dlpack__(stream=buffer.stream + 64, max_version=(1, 0))
  assert fake.calls("cuStreamWaitEvent") == waits  # the copy has been made: nothing to wait for
  read = device_library.read_capsule(capsule)
  assert read == device_library.Read(
    "dltensor_versioned", buffer._data, (2, 0), (2, 32, 1), (2, 3), (3, 1), (1, 0), 0
  )
  assert buffer._data % 256 == 0


def test_the_memory_is_kept_for_as_long_as_an_array_and_then_goes_back(
  fake: FakeCuda, buffers: list[Any]
) -> None:
  program = fake_programs.load(
    fake, lambda x: cg.tap(x, lambda _: None, on_device=True), numbers(3)
  )
  for _ in range(3):
    program(numbers(3))
  cg.barrier()
  used = in_use()
  assert used > 0
  capsule = buffers[0].__dlpack__(stream=-1)
  del buffers[1:]
  assert in_use() == used // 3
  del buffers[0]
  assert in_use() == used // 3  # the capsule's
  del capsule
  assert in_use() == 0


def test_the_program_does_not_wait(fake: FakeCuda, buffers: list[Any]) -> None:
  seen: list[Any] = []
  program = fake_programs.load(
    fake, lambda x: cg.tap(x * 2, seen.append, on_device=True) * 0, numbers(50_000)
  )
  stream = fake.stream()
  stream.hold()
  pending = [program.start(numbers(50_000) + i, stream=stream) for i in range(3)]
  assert seen == []
  stream.release()
  for one in pending:
    one.get()
  cg.barrier()
  for i, value in enumerate(seen):
    np.testing.assert_array_equal(value, (numbers(50_000) + i) * 2)
  assert [fake.calls(wait) for wait in WAITS] == [0, 0]


def test_lanes_are_slices_of_one_array(fake: FakeCuda, buffers: list[Any]) -> None:
  seen: list[Any] = []

  def f(x: Any, y: Any) -> Any:
    keep = lambda value, info: seen.append((info.lane, value))
    return cg.tap((x, y), keep, on_device=True, where=x[0] != 2)[0]

  fake_programs.run(fake, jax.vmap(jax.vmap(f, (0, None)), (None, 0)), numbers(3, 2), numbers(2))
  cg.barrier()
  assert [lane for lane, _ in seen] == [(i, j) for i in range(2) for j in (0, 2)]
  for (i, j), (x, y) in seen:
    np.testing.assert_array_equal(x, numbers(3, 2)[j])
    np.testing.assert_array_equal(y, numbers(2)[i])
  assert len(buffers) == 2


def test_where_every_and_logical_shapes_hold(fake: FakeCuda, buffers: list[Any]) -> None:
  seen: list[Any] = []

  def f(x: Any) -> Any:
    def step(i: Any, s: Any) -> Any:
      to = lambda v: seen.append(v.shape)
      cg.tap(x, to, on_device=True, where=i % 2 == 1, logical_shape=(i,), every=2)
      return s

    return jax.lax.fori_loop(0, 8, step, 0)

  fake_programs.run(fake, f, numbers(8))
  cg.barrier()
  assert seen == [(1,), (5,)]
  del buffers


def test_records_of_a_channel_have_them_too(fake: FakeCuda, buffers: list[Any]) -> None:
  with cg.channel("kept") as channel:
    records = channel.records()
    program = fake_programs.load(fake, lambda x: cg.tap(x, "kept", on_device=True), numbers(3))
    for i in range(3):
      program(numbers(3) + i)
  values = [record.value for record in records]
  assert all(isinstance(value, jax.Array) for value in values)
  np.testing.assert_array_equal(np.stack(values), numbers(3) + np.arange(3)[:, None])
  del buffers[:]


@pytest.mark.parametrize("policy", ["drop_new", "drop_old"])
def test_records_that_are_dropped_give_their_memory_back(
  fake: FakeCuda, buffers: list[Any], policy: Any
) -> None:
  begun, go = threading.Event(), threading.Event()

  def slow(value: Any) -> None:
    del value
    begun.set()
    assert go.wait(60)

  with cg.channel(f"kept-{policy}", capacity=16384, on_full=policy, to=slow) as channel:
    program = fake_programs.load(fake, lambda x: cg.tap(x, channel, on_device=True), numbers(256))
    program(numbers(256))
    assert begun.wait(60)
    for _ in range(64):
      program(numbers(256))
    assert _callgate.drain_devices(60)
    held = in_use() // 4096  # blocks are of a page
    assert held <= 16  # what the channel has room for, besides the one in the consumer's hands
    assert channel.stats()["dropped"] > 30
    go.set()
    cg.barrier()
    assert channel.stats()["pending"] == 0
    del buffers[:]
    assert in_use() == 0


def test_records_that_a_consumer_leaves_undelivered_go_back_with_the_channel(
  fake: FakeCuda, buffers: list[Any]
) -> None:
  program = fake_programs.load(fake, lambda x: cg.tap(x, "nobody", on_device=True), numbers(3))
  for _ in range(3):
    program(numbers(3))
  assert in_use() > 0  # they wait for a channel
  with cg.channel("nobody", to=lambda _: None):
    cg.barrier()
  del buffers[:]
  assert in_use() == 0


@pytest.mark.parametrize("how", ["sink", "batch"])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_consumers_that_read_the_host_are_refused_by_name(
  fake: FakeCuda, buffers: list[Any], tmp_path: Any, how: str, platform: str
) -> None:
  got: list[Any] = []
  options: dict[str, Any] = {"to": cg.sinks.JSONL(str(tmp_path / "x.jsonl"))}
  if how == "batch":
    options = {"to": got.append, "batch": True}
  f = lambda x: cg.tap(cg.tap(x, "refusing", name="host"), "refusing", name="kept", on_device=True)
  with cg.channel("refusing", **options) as channel:
    if platform == "cpu":
      jax.jit(f)(numbers(3))
    else:
      fake_programs.run(fake, f, numbers(3))
    with pytest.raises(Exception, match=r"tap 'kept'.*on_device=True"):
      cg.barrier()
    assert channel.stats()["delivered"] == 2
  assert len(got) == (how == "batch")
  del buffers


def test_a_consumer_that_raises_does_not_keep_the_memory(
  fake: FakeCuda, buffers: list[Any]
) -> None:
  def consumer(value: Any) -> None:
    raise KeyError("not this one")

  fake_programs.run(fake, lambda x: cg.tap(x, consumer, on_device=True), numbers(3))
  with pytest.raises(KeyError, match="not this one"):
    cg.barrier()
  del buffers[:]


def test_a_graph_is_not_made_of_it(fake: FakeCuda, buffers: list[Any]) -> None:
  program = fake_programs.load(
    fake, lambda x: cg.tap(x, lambda _: None, on_device=True), numbers(3)
  )
  assert not fake_programs.is_capturable(program.targets()[0])
  with pytest.raises(fake_programs.ProgramError, match="not recorded into a CUDA graph"):
    program.capture(numbers(3))
  del buffers


def test_on_the_cpu_arrays_are_on_the_device_of_the_program() -> None:
  seen: list[Any] = []
  device = jax.devices("cpu")[3]
  f = jax.jit(lambda x: cg.tap(x * 2, seen.append, on_device=True))
  f(jax.device_put(numbers(3), device)).block_until_ready()
  jax.vmap(f)(numbers(2, 2))
  cg.barrier()
  assert all(isinstance(value, jax.Array) for value in seen)
  assert seen[0].devices() == {device}
  np.testing.assert_array_equal(seen[0], numbers(3) * 2)
  np.testing.assert_array_equal(np.stack(seen[1:]), numbers(2, 2) * 2)


def test_without_the_runtime_arrays_are_on_the_default_cpu() -> None:
  seen: list[Any] = []
  with cg.config(engine="jax"):
    jax.jit(lambda x: cg.tap(x, seen.append, on_device=True))(numbers(3)).block_until_ready()
    cg.barrier()
  assert isinstance(seen[0], jax.Array)
  np.testing.assert_array_equal(seen[0], numbers(3))


def test_the_option_is_checked() -> None:
  with pytest.raises(cg.GateDefinitionError, match="on_device: expected a bool, got 'yes'"):
    cg.tap(1.0, lambda _: None, on_device="yes")  # pyright: ignore[reportArgumentType]
