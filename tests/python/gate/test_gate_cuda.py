# SPDX-License-Identifier: Apache-2.0
"""Gates on CUDA's own arrays: contents, protocols, streams, results, escapes, graphs.

Programs run on the fake driver, which fails a test whose work is not ordered as CUDA needs it.
"""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import weakref
from typing import Any

import device_library
import fake_programs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from device_library import LEGACY, Array, DlpackArray, kernel
from fake_cuda import FakeCuda, open_fake
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples

import callgate as cg


def add_one(fake: FakeCuda, out: Any, x: Any) -> None:
  """out[...] = x + 1, on XLA's stream."""
  kernel(fake, lambda a, b: np.add(a, 1, out=b), reads=[x], writes=[out], stream=x.stream)


def numbers(*shape: int) -> np.ndarray[Any, Any]:
  return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def run(fake: FakeCuda, function: Any, *arguments: Any) -> Any:
  return fake_programs.run(fake, function, *arguments)


def same(x: Any) -> Any:
  return x


# -- contents and styles -------------------------------------------------------------------------
def test_an_inplace_gate_works_on_the_memory_of_the_program(fake: FakeCuda) -> None:
  gate = cg.gate(lambda out, x: add_one(fake, out, x), out=same, arrays="buffer", style="inplace")
  got = run(fake, lambda x: gate(x * 2) * 3, numbers(2, 3))
  np.testing.assert_array_equal(got, (numbers(2, 3) * 2 + 1) * 3)


def test_a_context_tells_stream_device_and_ordinal(fake: FakeCuda) -> None:
  seen: list[Any] = []

  def callback(ctx: Any, out: Any, x: Any) -> None:
    seen.append((ctx.stream, ctx.stream == x.stream, ctx.ordinal, ctx.stage))
    add_one(fake, out, x)

  gate = cg.gate(callback, out=same, arrays="buffer", style="context")
  stream = fake.stream(1)
  program = fake_programs.load(fake, gate, numbers(3))
  np.testing.assert_array_equal(program(numbers(3), stream=stream), numbers(3) + 1)
  assert seen == [(stream.handle, True, 1, cg.ExecutionStage.EXECUTE)]


def test_a_gate_on_the_device_waits_for_nothing(fake: FakeCuda) -> None:
  gate = cg.gate(lambda out, x: add_one(fake, out, x), out=same, arrays="buffer", style="inplace")
  program = fake_programs.load(fake, lambda x: gate(gate(x)), numbers(4))
  stream = fake.stream()
  stream.hold()
  pending = program.start(numbers(4), stream=stream)  # comes back although nothing can run
  assert stream.queued() > 0
  for wait in ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"):
    assert fake.calls(wait) == 0, wait
  stream.release()
  np.testing.assert_array_equal(pending.get(), numbers(4) + 2)


class _View:
  """A library's array over a Buffer: it holds the Buffer as long as it lives."""

  def __init__(self, of: Any) -> None:
    self.__dlpack_device__, self.__dlpack__ = of.__dlpack_device__, of.__dlpack__


@pytest.mark.parametrize("returned", [same, _View])
def test_an_operand_that_is_returned_is_no_escape_while_the_stream_is_busy(
  fake: FakeCuda, returned: Any
) -> None:
  gate = cg.gate(returned, out=same, arrays="buffer")
  program = fake_programs.load(fake, lambda x: gate(x * 2) + 1, numbers(4))
  stream = fake.stream()
  stream.hold()
  pending = program.start(numbers(4), stream=stream)
  stream.release()
  np.testing.assert_array_equal(pending.get(), numbers(4) * 2 + 1)
  assert fake.violations() == []


def test_lanes_of_a_vmap_are_parts_of_the_same_memory(fake: FakeCuda) -> None:
  shapes: list[Any] = []

  def callback(out: Any, x: Any, y: Any) -> None:
    shapes.append((x.shape, y.shape))
    kernel(fake, lambda a, b, c: np.add(a, b, out=c), reads=[x, y], writes=[out], stream=x.stream)

  gate = cg.gate(callback, out=lambda x, y: x, arrays="buffer", style="inplace")
  got = run(fake, jax.vmap(gate, (0, None)), numbers(3, 2), numbers(2))
  np.testing.assert_array_equal(got, numbers(3, 2) + numbers(2))
  assert shapes == [((2,), (2,))] * 3


def test_an_alias_is_one_memory_for_argument_and_result(fake: FakeCuda) -> None:
  same_memory: list[bool] = []

  def double(out: Any, x: Any) -> None:
    same_memory.append(out._data == x._data)
    kernel(fake, lambda b: np.multiply(b, 2, out=b), writes=[out], stream=out.stream)

  gate = cg.gate(double, out=same, arrays="buffer", style="inplace", aliases={0: 0})
  np.testing.assert_array_equal(run(fake, gate, numbers(4)), numbers(4) * 2)
  assert same_memory == [True]


def test_derivatives_compose_on_the_device(fake: FakeCuda) -> None:
  def scale(out: Any, x: Any) -> None:
    kernel(fake, lambda a, b: np.multiply(a, 3, out=b), reads=[x], writes=[out], stream=x.stream)

  gate = cg.gate(scale, out=same, arrays="buffer", style="inplace", linear=True)
  gate.deftranspose(lambda ct, x: (gate(ct),))
  got = run(fake, jax.grad(lambda x: (gate(x) ** 2).sum()), numbers(3))
  np.testing.assert_array_equal(got, 18 * numbers(3))


def test_arrays_of_no_elements_and_of_rank_0_come_as_they_are(fake: FakeCuda) -> None:
  seen: list[Any] = []

  def callback(out: Any, x: Any, y: Any) -> None:
    seen.append((x.shape, x.__cuda_array_interface__["data"], y.shape, y.nbytes))
    kernel(fake, lambda b, c: np.copyto(c, b), reads=[y], writes=[out], stream=y.stream)

  gate = cg.gate(callback, out=lambda x, y: y, arrays="buffer", style="inplace")
  got = run(fake, gate, np.zeros((0, 3), np.float32), np.float32(5))
  assert got == 5
  assert seen == [((0, 3), (0, True), (), 4)]


# -- what a Buffer says --------------------------------------------------------------------------
def look(fake: FakeCuda, ask: Any, *arguments: Any) -> Any:
  """The result of `ask(out, x)` inside a gate on the device."""
  found: list[Any] = []

  def callback(out: Any, x: Any) -> None:
    found.append(ask(out, x))
    device_library.copy(fake, x, out, x.stream)

  gate = cg.gate(callback, out=same, arrays="buffer", style="inplace")
  run(fake, gate, *arguments)
  return found[0]


def test_the_array_interface_has_exactly_the_entries_of_version_3(fake: FakeCuda) -> None:
  def ask(out: Any, x: Any) -> Any:
    return x.__cuda_array_interface__, out.__cuda_array_interface__, x._data, out._data, x.stream

  given, result, data, out_data, stream = look(fake, ask, numbers(2, 3))
  shared = {"shape": (2, 3), "typestr": "<f4", "strides": None, "version": 3, "stream": stream}
  assert given == {**shared, "data": (data, True)}
  assert result == {**shared, "data": (out_data, False)}


@pytest.mark.parametrize(
  "dtype", ["bool", "int8", "uint16", "int32", "float16", "float32", "complex64"]
)
def test_the_array_interface_names_numpys_types(fake: FakeCuda, dtype: str) -> None:
  named = look(fake, lambda _, x: x.__cuda_array_interface__["typestr"], np.ones(2, dtype))
  assert named == np.dtype(dtype).str


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_without_a_name_have_no_array_interface(fake: FakeCuda, dtype: str) -> None:
  def ask(_: Any, x: Any) -> Any:
    assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match=f"{dtype}.*__dlpack__"):
      _ = x.__cuda_array_interface__
    return device_library.read_capsule(x.__dlpack__(max_version=(1, 0))).dtype

  code = {"bfloat16": (4, 16, 1), "float8_e4m3fn": (10, 8, 1), "float8_e5m2": (12, 8, 1)}
  assert look(fake, ask, np.ones(2, getattr(ml_dtypes, dtype))) == code[dtype]


def test_a_capsule_says_device_type_shape_and_that_an_input_is_read_only(fake: FakeCuda) -> None:
  def ask(out: Any, x: Any) -> Any:
    assert x.__dlpack_device__() == out.__dlpack_device__() == (2, 0)
    capsules = [b.__dlpack__(stream=-1, max_version=(1, 2)) for b in (x, out)]
    return [device_library.read_capsule(c) for c in capsules], x._data, out._data

  (x, out), data, out_data = look(fake, ask, numbers(2, 3))
  for one, pointer, flags in ((x, data, 1), (out, out_data, 0)):
    assert one == device_library.Read(
      "dltensor_versioned", pointer, (2, 0), (2, 32, 1), (2, 3), (3, 1), (1, 0), flags
    )


def test_a_consumer_of_dlpack_0_gets_the_memory_itself(fake: FakeCuda) -> None:
  def ask(_: Any, x: Any) -> Any:
    return device_library.read_capsule(x.__dlpack__(stream=-1)), x._data

  capsule, data = look(fake, ask, numbers(3))
  assert (capsule.name, capsule.data, capsule.version) == ("dltensor", data, None)


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"stream": 0}, ValueError, "stream: expected None, -1"),
    ({"stream": -2}, ValueError, "got -2"),
    ({"stream": "1"}, TypeError, "expected None or an int, got str"),
    ({"dl_device": (1, 0)}, BufferError, r"dl_device: expected None or \(2, 0\).*arrays=\"numpy\""),
    ({"dl_device": (2, 1)}, BufferError, r"got \(2, 1\)"),
    ({"copy": True}, BufferError, "consumers copy"),
  ],
)
def test_a_capsule_of_another_kind_is_refused(
  fake: FakeCuda, options: dict[str, Any], error: type[Exception], message: str
) -> None:
  def ask(_: Any, x: Any) -> None:
    with pytest.raises(error, match=message):
      x.__dlpack__(**options)

  look(fake, ask, numbers(2))


def test_the_host_is_told_that_it_cannot_read_a_buffer(fake: FakeCuda) -> None:
  def ask(out: Any, x: Any) -> str:
    for access in (np.asarray, np.array, lambda b: b.unpack()):
      with pytest.raises(TypeError, match=r"float32\[2\] is on cuda:0.*arrays=\"numpy\""):
        access(x)
    with pytest.raises(BufferError, match="cuda:0"):
      memoryview(x)
    with pytest.raises(TypeError, match="cuda:0"):
      out.pack(numbers(2))
    return repr(x)

  assert look(fake, ask, numbers(2)) == "Buffer(float32[2], device=cuda:0, read-only)"


def test_a_buffer_on_the_cpu_has_no_array_interface_and_no_stream() -> None:
  def ask(x: Any) -> Any:
    assert not hasattr(x, "__cuda_array_interface__")
    assert x.stream == 0
    assert x.device.startswith("cpu:")
    return np.asarray(x)

  gate = cg.gate(ask, out=same, arrays="buffer")
  np.testing.assert_array_equal(gate(jnp.arange(3.0)), numbers(3))


# -- streams -------------------------------------------------------------------------------------
def exchange(fake: FakeCuda, name: int | None, use: int) -> Any:
  """A gate that hands its arrays to a consumer that names one stream and uses another."""

  def callback(out: Any, x: Any) -> None:
    for buffer in (x, out):
      buffer.__dlpack__(stream=name)
    kernel(fake, lambda a, b: np.add(a, 1, out=b), reads=[x], writes=[out], stream=use)

  return cg.gate(callback, out=same, arrays="buffer", style="inplace")


@pytest.mark.parametrize("name", [None, 1, 2])
def test_default_streams_wait_for_xla_and_xla_for_them(fake: FakeCuda, name: int | None) -> None:
  gate = exchange(fake, name, name or LEGACY)
  got = run(fake, lambda x: gate(x * 2) * 3, numbers(3))
  np.testing.assert_array_equal(got, (numbers(3) * 2 + 1) * 3)


def test_a_held_stream_holds_back_the_consumer(fake: FakeCuda) -> None:
  gate = exchange(fake, None, LEGACY)
  program = fake_programs.load(fake, gate, numbers(3))
  stream = fake.stream()
  stream.hold()
  pending = program.start(numbers(3), stream=stream)
  stream.release()
  np.testing.assert_array_equal(pending.get(), numbers(3) + 1)


def test_another_stream_waits_for_xla(fake: FakeCuda) -> None:
  other = fake.stream()

  def callback(out: Any, x: Any) -> None:
    x.__dlpack__(stream=other.handle)
    scratch = fake.empty(x.shape, x.dtype)
    device_library.copy(fake, x, scratch, other.handle)
    kept.append(scratch)
    fake_wait(fake, x.stream, other.handle)  # XLA's does so for the default streams alone
    device_library.copy(fake, x, out, x.stream)

  kept: list[Any] = []
  gate = cg.gate(callback, out=same, arrays="buffer", style="inplace")
  program = fake_programs.load(fake, lambda x: gate(x + 1), numbers(3))
  pending = program.start(numbers(3))
  pending.get()
  other.finish()
  np.testing.assert_array_equal(kept[0].get(), numbers(3) + 1)


def test_nobody_waits_where_the_streams_are_the_same_or_no_waiting_is_asked(
  fake: FakeCuda,
) -> None:
  def ask(_: Any, x: Any) -> int:
    before = fake.calls("cuStreamWaitEvent")
    x.__dlpack__(stream=x.stream)
    x.__dlpack__(stream=-1)
    return fake.calls("cuStreamWaitEvent") - before

  assert look(fake, ask, numbers(2)) == 0


def test_xla_waits_for_the_default_stream_of_a_user_of_the_array_interface(fake: FakeCuda) -> None:
  def callback(out: Any, x: Any) -> None:
    stream = x.__cuda_array_interface__["stream"]
    fake_wait(fake, LEGACY, stream)
    kernel(fake, lambda a, b: np.add(a, 1, out=b), reads=[x], writes=[out], stream=LEGACY)

  gate = cg.gate(callback, out=same, arrays="buffer", style="inplace")
  np.testing.assert_array_equal(run(fake, lambda x: gate(x) * 2, numbers(3)), numbers(3) * 2 + 2)


def fake_wait(fake: FakeCuda, stream: int, other: int) -> None:
  """Makes a stream wait for another, as a library does."""
  import ctypes

  driver, event = fake.driver, ctypes.c_void_p()
  assert driver.cuEventCreate(ctypes.byref(event), 2) == 0
  assert driver.cuEventRecord(event, ctypes.c_void_p(other)) == 0
  assert driver.cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0) == 0
  driver.cuEventDestroy_v2(event)


# -- returned values -----------------------------------------------------------------------------
def returning(function: Any, **options: Any) -> Any:
  return cg.gate(function, out=same, arrays="buffer", **options)


def test_arrays_of_the_host_go_through_pinned_memory(fake: FakeCuda) -> None:
  gate = returning(lambda x: numbers(3) + 5)
  np.testing.assert_array_equal(run(fake, lambda x: gate(x) * 2, numbers(3)), (numbers(3) + 5) * 2)


def test_a_python_number_is_a_result_of_rank_0(fake: FakeCuda) -> None:
  assert run(fake, returning(lambda x: np.float32(2.5)), np.float32(0)) == 2.5


def test_an_argument_may_be_returned(fake: FakeCuda) -> None:
  np.testing.assert_array_equal(run(fake, returning(lambda x: x), numbers(3)), numbers(3))


@pytest.mark.parametrize("kind", [Array, DlpackArray])
def test_arrays_of_the_device_are_copied_there_and_kept_until_then(
  fake: FakeCuda, kind: type
) -> None:
  dead: list[Any] = []

  def callback(x: Any) -> Any:
    made = fake.empty(x.shape, x.dtype)
    kernel(fake, lambda a, b: np.add(a, 1, out=b), reads=[x], writes=[made], stream=x.stream)
    weakref.finalize(made, dead.append, True)
    return Array(made, x.stream) if kind is Array else DlpackArray(made)

  program = fake_programs.load(fake, lambda x: returning(callback)(x) * 2, numbers(3))
  stream = fake.stream()
  stream.hold()
  pending = program.start(numbers(3), stream=stream)
  gc.collect()
  assert dead == []
  stream.release()
  np.testing.assert_array_equal(pending.get(), numbers(3) * 2 + 2)
  cg.barrier()  # the device's completions have run
  _callgate_drain()
  assert dead == [True]


def _callgate_drain() -> None:
  from callgate import _callgate

  _callgate.drain()


def test_xla_waits_for_the_stream_that_a_result_was_made_in(fake: FakeCuda) -> None:
  other = fake.stream()

  def callback(x: Any) -> Any:
    made = fake.empty(x.shape, x.dtype)
    kernel(fake, lambda b: b.fill(7), writes=[made], stream=other.handle)
    return Array(made, other.handle)

  other.hold()
  program = fake_programs.load(fake, returning(callback), numbers(3))
  pending = program.start(numbers(3))
  other.release()
  np.testing.assert_array_equal(pending.get(), [7, 7, 7])


def test_a_producer_of_dlpack_is_told_xlas_stream(fake: FakeCuda) -> None:
  told: list[Any] = []

  def callback(x: Any) -> Any:
    array = DlpackArray(fake.put(numbers(3)))
    told.append((array.streams, x.stream))
    return array

  np.testing.assert_array_equal(run(fake, returning(callback), numbers(3)), numbers(3))
  ((streams, stream),) = told
  assert streams == [stream]


@pytest.mark.parametrize(
  ("made", "message"),
  [
    (
      lambda fake: Array(fake.put(np.zeros(4, np.float32)), None),
      r"float32\[3\], got float32\[4\]",
    ),
    (lambda fake: Array(fake.put(np.zeros(3, np.int32)), None), r"float32\[3\], got int32\[3\]"),
    (lambda fake: DlpackArray(fake.put(np.zeros(3), 0)), r"got float64\[3\]"),
    (lambda fake: DlpackArray(fake.put(numbers(3), 1)), "on cuda:1 .*cuda:0"),
    (lambda fake: Array(fake.put(numbers(3), 1), None), "on cuda:1 .*cuda:0"),
    (lambda fake: DlpackArray(fake.put(numbers(3)), strides=(2,)), "dense and row-major"),
    (lambda fake: Array(fake.put(numbers(3)), None, strides=(8,)), "dense and row-major"),
    (lambda fake: Array(fake.put(numbers(3)), None, mask=1), "without a mask"),
    (lambda fake: Array(fake.put(numbers(3)), 0), "got 0"),
    (lambda _: np.zeros(3), r"got float64\[3\]"),
    (lambda _: None, "got None"),
  ],
)
def test_an_array_that_does_not_fit_is_an_error_that_says_so(
  fake: FakeCuda, made: Any, message: str
) -> None:
  with pytest.raises(fake_programs.ProgramError, match=message):
    run(fake, returning(lambda x: made(fake)), numbers(3))
  error = cg.last_error()
  assert isinstance(error, (TypeError, ValueError))


def test_cast_is_for_arrays_of_the_host(fake: FakeCuda) -> None:
  gate = returning(lambda x: np.arange(3.0), cast=True)
  np.testing.assert_array_equal(run(fake, gate, numbers(3)), numbers(3))


DTYPES = [
  *("bool", "int8", "int16", "int32", "uint8", "uint32"),
  *("float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2"),
]


@examples(9)
@given(
  dtype=st.sampled_from(DTYPES),
  shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
  style=st.sampled_from(["return", "inplace"]),
)
def test_every_dtype_and_shape_comes_through(
  dtype: str, shape: tuple[int, ...], style: str
) -> None:
  fake = open_fake()
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)

  def inplace(out: Any, x: Any) -> None:
    device_library.copy(fake, x, out, x.stream)

  function = inplace if style == "inplace" else same
  gate = cg.gate(function, out=same, arrays="buffer", style=style)  # pyright: ignore[reportArgumentType]
  got = run(fake, gate, x)
  assert got.dtype == kind
  np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8)) if x.ndim else None
  assert got.tobytes() == x.tobytes()
  assert fake.violations() == []


# -- errors and escapes --------------------------------------------------------------------------
def test_an_exception_is_the_programs_error_and_is_kept(fake: FakeCuda) -> None:
  def fail(out: Any, x: Any) -> None:
    raise KeyError("no such thing")

  gate = cg.gate(fail, out=same, arrays="buffer", style="inplace")
  with pytest.raises(fake_programs.ProgramError, match="no such thing"):
    run(fake, gate, numbers(2))
  assert isinstance(cg.last_error(), KeyError)
  working = cg.gate(
    lambda out, x: add_one(fake, out, x), out=same, arrays="buffer", style="inplace"
  )
  np.testing.assert_array_equal(run(fake, working, numbers(2)), numbers(2) + 1)


def test_a_buffer_that_outlives_its_call_is_an_error_and_cannot_be_used(fake: FakeCuda) -> None:
  kept: list[Any] = []

  def leak(out: Any, x: Any) -> None:
    kept.append(x)
    add_one(fake, out, x)

  gate = cg.gate(leak, out=same, arrays="buffer", style="inplace")
  with pytest.raises(fake_programs.ProgramError, match=r"EscapedViewError|kept after the call"):
    run(fake, gate, numbers(2))
  assert isinstance(cg.last_error(), cg.EscapedViewError)
  for use in (
    lambda b: b.__cuda_array_interface__,
    lambda b: b.__dlpack__(),
    lambda b: b._dlpack_unchecked(),
  ):
    with pytest.raises(BufferError, match="its call has ended"):
      use(kept[0])
  assert kept[0].shape == (2,)


def test_a_capsule_that_outlives_the_call_is_an_escape(fake: FakeCuda) -> None:
  kept: list[Any] = []

  def leak(out: Any, x: Any) -> None:
    kept.append(x.__dlpack__(stream=-1))
    add_one(fake, out, x)

  gate = cg.gate(leak, out=same, arrays="buffer", style="inplace")
  with pytest.raises(fake_programs.ProgramError, match="argument 'x'"):
    run(fake, gate, numbers(2))
  assert isinstance(cg.last_error(), cg.EscapedViewError)


def test_a_write_to_an_input_is_found_when_asked_for(fake: FakeCuda) -> None:
  def write(out: Any, x: Any) -> None:
    kernel(fake, lambda a: a.fill(9), writes=[x], stream=x.stream)
    device_library.copy(fake, x, out, x.stream)

  gate = cg.gate(write, out=same, arrays="buffer", style="inplace")
  with cg.config(check_writes=True), pytest.raises(fake_programs.ProgramError, match="written to"):
    run(fake, gate, numbers(2))
  assert isinstance(cg.last_error(), cg.InputWriteError)


def test_a_failing_driver_is_an_error_of_the_program(fake: FakeCuda) -> None:
  gate = returning(lambda x: numbers(3))
  program = fake_programs.load(fake, gate, numbers(3))
  fake.fail("cuMemcpyHtoDAsync_v2", 719)
  with pytest.raises(fake_programs.ProgramError, match="cuMemcpyHtoDAsync_v2"):
    program(numbers(3))
  np.testing.assert_array_equal(program(numbers(3)), numbers(3))


# -- graphs --------------------------------------------------------------------------------------
def graph_gate(callback: Any) -> Any:
  return cg.gate(callback, out=same, arrays="buffer", style="inplace", command_buffer=True)


def test_a_recorded_gate_is_called_once_and_its_work_is_replayed(fake: FakeCuda) -> None:
  calls: list[int] = []

  def callback(out: Any, x: Any) -> None:
    calls.append(1)
    add_one(fake, out, x)

  gate = graph_gate(callback)
  program = fake_programs.load(fake, gate, numbers(3))
  assert program.targets() == ["callgate.gate.graph"]
  assert fake_programs.is_capturable("callgate.gate.graph")
  assert not fake_programs.is_capturable("callgate.gate")
  argument = fake.put(numbers(3))
  pending = program.capture(argument)
  for value in (1, 5):
    argument.set(np.full(3, value))
    assert pending.graph is not None
    pending.graph.replay(pending.stream)
    pending.stream.finish()
    np.testing.assert_array_equal(pending.results[0].get(), np.full(3, value + 1))
  assert calls == [1]
  np.testing.assert_array_equal(program(numbers(3)), numbers(3) + 1)  # not recorded: called
  assert calls == [1, 1]


def test_a_call_that_cannot_be_recorded_is_an_error_that_says_so(fake: FakeCuda) -> None:
  def wait(out: Any, x: Any) -> None:
    import ctypes

    fake.driver.cuStreamSynchronize(ctypes.c_void_p(x.stream))

  program = fake_programs.load(fake, graph_gate(wait), numbers(3))
  with pytest.raises(
    fake_programs.ProgramError, match=r"command_buffer=True.*can't record the call"
  ):
    program.capture(numbers(3))
  assert isinstance(cg.last_error(), cg.CaptureError)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"arrays": "numpy", "style": "inplace"}, "arrays that stay on the GPU"),
    ({"arrays": "jax", "style": "inplace"}, "got arrays='jax'"),
    ({"arrays": "buffer"}, "got style='return'"),
    ({"arrays": "buffer", "style": "inplace", "effect": "io"}, "got effect='io'"),
    ({"arrays": "buffer", "style": "context", "effect": "ordered"}, "got effect='ordered'"),
  ],
)
def test_a_gate_that_a_graph_cannot_hold_is_refused_at_once(
  options: dict[str, Any], message: str
) -> None:
  with pytest.raises(cg.GateDefinitionError, match=message):
    cg.gate(same, out=same, command_buffer=True, **options)


# -- copies on the host --------------------------------------------------------------------------
@pytest.mark.parametrize("arrays", ["numpy", "jax"])
def test_copies_on_the_host_serve_numpy_and_jax(fake: FakeCuda, arrays: Any) -> None:
  kinds: list[Any] = []

  def callback(x: Any) -> Any:
    kinds.append(type(x).__module__.partition(".")[0])
    return np.asarray(x) + 1

  gate = cg.gate(callback, out=same, arrays=arrays)
  got = run(fake, lambda x: gate(x * 2) * 3, numbers(3))
  np.testing.assert_array_equal(got, (numbers(3) * 2 + 1) * 3)
  assert kinds == [{"numpy": "numpy", "jax": "jaxlib"}[arrays]]
  assert fake.calls("cuStreamSynchronize") == fake.calls("cuCtxSynchronize") == 0


def test_a_context_on_the_host_still_knows_the_stream(fake: FakeCuda) -> None:
  seen: list[Any] = []

  def callback(ctx: Any, out: Any, x: Any) -> None:
    seen.append((ctx.stream != 0, ctx.ordinal))
    out[...] = x + 1

  gate = cg.gate(callback, out=same, style="context")
  np.testing.assert_array_equal(run(fake, gate, numbers(3)), numbers(3) + 1)
  assert seen == [(True, 0)]


def test_jax_in_a_callable_on_its_own_thread_stays_off_the_device_that_waits(
  fake: FakeCuda,
) -> None:
  seen: list[Any] = []

  @cg.gate(out=same, thread="own")
  def gate(x: Any) -> Any:
    seen.append(jax.config.jax_default_device)
    return np.asarray(jnp.asarray(x) + 1)

  np.testing.assert_array_equal(run(fake, gate, numbers(3)), numbers(3) + 1)
  assert [device.platform for device in seen] == ["cpu"]
  # The thread may serve a program of the CPU next, which has nothing to stay off.
  seen.clear()
  np.testing.assert_array_equal(jax.jit(gate)(numbers(3)), numbers(3) + 1)
  assert seen == [None]


@pytest.mark.parametrize("thread", ["xla", "own"])
def test_a_thread_gets_the_errors_of_its_own_programs(fake: FakeCuda, thread: Any) -> None:
  class Failure(Exception):
    pass

  @cg.gate(out=same, effect="io", thread=thread)
  def gate(x: Any) -> Any:
    if int(x) % 2:
      raise Failure(int(x))
    return x

  programs = [fake_programs.load(fake, gate, np.float32(0)) for _ in range(6)]
  together = threading.Barrier(len(programs))

  def call(number: int) -> int | None:
    together.wait()
    try:
      with cg.errors():
        programs[number](np.float32(number))
    except (Failure, fake_programs.ProgramError) as error:
      failure = error if isinstance(error, Failure) else cg.last_error()
      assert failure is not None
      return failure.args[0]
    return None

  with concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
    for _ in range(3):
      assert list(pool.map(call, range(6))) == [None, 1, None, 3, None, 5]
  cg.barrier()


def test_a_barrier_raises_what_failed_in_a_program_of_another_thread(fake: FakeCuda) -> None:
  @cg.gate(out=same, thread="own")
  def gate(x: Any) -> Any:
    raise ValueError(float(x))

  alive, ended = threading.Event(), threading.Event()

  def call() -> None:
    run(fake, gate, np.float32(3))
    alive.set()
    ended.wait(60)

  thread = threading.Thread(target=call)
  thread.start()
  alive.wait(60)
  with cg.errors():  # not this thread's
    pass
  with pytest.raises(ValueError, match="3"):
    cg.barrier()
  cg.barrier()  # once
  ended.set()
  thread.join()
