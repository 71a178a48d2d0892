# SPDX-License-Identifier: Apache-2.0
"""JAX's own callbacks and buffer callbacks on CUDA, on the fake driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import device_library
import fake_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import FakeCuda
from jax.experimental import io_callback

import callgate as cg
from callgate.compat import buffer_callback as bc
from callgate.compat import callbacks


@pytest.fixture
def installed() -> Iterator[None]:
  cg.install()
  yield
  cg.uninstall()


def numbers(count: int) -> np.ndarray[Any, Any]:
  return np.arange(count, dtype=np.float32)


def add_one(fake: FakeCuda, out: Any, x: Any, stream: int) -> None:
  device_library.kernel(
    fake, lambda a, b: np.add(a, 1, out=b), reads=[x], writes=[out], stream=stream
  )


def test_a_buffer_callback_gets_the_devices_memory_and_stream(fake: FakeCuda) -> None:
  seen: list[Any] = []

  def callback(ctx: Any, out: Any, x: Any) -> None:
    seen.append((ctx.stage, ctx.stream, x.__dlpack_device__(), x.writeable, out.writeable))
    add_one(fake, out, x, ctx.stream)

  call = bc.buffer_callback(callback, jax.ShapeDtypeStruct((3,), jnp.float32))
  stream = fake.stream()
  program = fake_programs.load(fake, lambda x: call(x * 2), numbers(3))
  np.testing.assert_array_equal(program(numbers(3), stream=stream), numbers(3) * 2 + 1)
  assert seen == [(bc.ExecutionStage.EXECUTE, stream.handle, (2, 0), False, True)]


def test_a_recorded_buffer_callback_is_replayed(fake: FakeCuda) -> None:
  calls: list[int] = []

  def callback(ctx: Any, out: Any, x: Any) -> None:
    calls.append(1)
    add_one(fake, out, x, ctx.stream)

  call = bc.buffer_callback(
    callback, jax.ShapeDtypeStruct((3,), jnp.float32), command_buffer_compatible=True
  )
  program = fake_programs.load(fake, call, numbers(3))
  argument = fake.put(numbers(3))
  pending = program.capture(argument)
  assert pending.graph is not None
  for _ in range(2):
    pending.graph.replay(pending.stream)
    pending.stream.finish()
    np.testing.assert_array_equal(pending.results[0].get(), numbers(3) + 1)
  assert calls == [1]


def test_aliases_of_a_buffer_callback_are_one_memory(fake: FakeCuda) -> None:
  def double(ctx: Any, out: Any, x: Any) -> None:
    assert out._data == x._data
    device_library.kernel(fake, lambda b: np.multiply(b, 2, out=b), writes=[out], stream=ctx.stream)

  call = bc.buffer_callback(
    double, jax.ShapeDtypeStruct((3,), jnp.float32), input_output_aliases={0: 0}
  )
  np.testing.assert_array_equal(fake_programs.run(fake, call, numbers(3)), numbers(3) * 2)


def test_results_that_a_buffer_callback_returns_are_refused(fake: FakeCuda) -> None:
  call = bc.buffer_callback(lambda ctx, out, x: 1, jax.ShapeDtypeStruct((3,), jnp.float32))
  with pytest.raises(fake_programs.ProgramError, match="must not return any values"):
    fake_programs.run(fake, call, numbers(3))


@pytest.mark.usefixtures("installed")
def test_installed_callbacks_get_jax_arrays_on_the_cpu(fake: FakeCuda) -> None:
  seen: list[Any] = []

  def callback(x: Any) -> Any:
    seen.append((isinstance(x, jax.Array), {d.platform for d in x.devices()}))
    return np.asarray(x) + 1

  def program(x: Any) -> Any:
    io_callback(lambda y: seen.append(float(y[1])), None, x * 10)
    return jax.pure_callback(callback, x, x * 2) * 3

  got = fake_programs.run(fake, program, numbers(3))
  np.testing.assert_array_equal(got, (numbers(3) * 2 + 1) * 3)
  assert (True, {"cpu"}) in seen
  assert 10.0 in seen


def test_the_functions_themselves_need_no_install(fake: FakeCuda) -> None:
  function = lambda x: callbacks.pure_callback(np.square, x, x)
  np.testing.assert_array_equal(fake_programs.run(fake, function, numbers(3)), numbers(3) ** 2)


@pytest.mark.usefixtures("installed")
def test_a_debug_callback_does_not_hold_the_program(fake: FakeCuda) -> None:
  seen: list[float] = []

  def program(x: Any) -> Any:
    jax.debug.callback(lambda y: seen.append(float(y)), x.sum())
    return x + 1

  np.testing.assert_array_equal(fake_programs.run(fake, program, numbers(3)), numbers(3) + 1)
  cg.barrier()
  assert seen == [3.0]


@pytest.mark.usefixtures("installed")
def test_lanes_of_a_callback_are_called_in_turn(fake: FakeCuda) -> None:
  function = jax.vmap(lambda x: jax.pure_callback(np.square, x, x, vmap_method="sequential"))
  got = fake_programs.run(fake, function, numbers(4).reshape(2, 2))
  np.testing.assert_array_equal(got, numbers(4).reshape(2, 2) ** 2)
