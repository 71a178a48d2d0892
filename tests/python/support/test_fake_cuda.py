# SPDX-License-Identifier: Apache-2.0
"""The fake CUDA driver and what runs programs on it: they must find faults, and be right."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import DeviceArray, FakeCuda, Stream, open_fake
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from property_checks import examples

import callgate as cg

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def copy(stream: Stream, source: DeviceArray, target: DeviceArray) -> None:
  def work() -> None:
    target.view()[...] = source.view()

  stream.enqueue(work, reads=[source], writes=[target])


# -- the driver ----------------------------------------------------------------------------------
DTYPES = [np.bool_, np.int8, np.uint16, np.int64, np.float16, jnp.bfloat16, np.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_device_memory_gives_back_what_was_put(fake: FakeCuda, dtype: Any) -> None:
  array = np.arange(6).reshape(2, 3).astype(dtype)
  np.testing.assert_array_equal(fake.put(array).get(), array)
  assert fake.put(array, device=1).device == 1
  assert fake.put(np.zeros((0, 3), dtype)).get().shape == (0, 3)


def test_a_host_that_reads_a_device_pointer_crashes(fake: FakeCuda) -> None:
  code = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
driver = ctypes.CDLL(sys.argv[1])
driver.fakecuda_new_memory.restype = ctypes.c_uint64
driver.fakecuda_new_memory.argtypes = [ctypes.c_int, ctypes.c_size_t]
pointer = driver.fakecuda_new_memory(0, 64)
print("made", flush=True)
ctypes.string_at(pointer, 1)
"""
  done = subprocess.run(
    [sys.executable, "-c", code, str(fake.path)], capture_output=True, text=True, timeout=120
  )
  assert done.stdout == "made\n"
  assert done.returncode == -signal.SIGSEGV


def test_nothing_of_a_held_stream_runs(fake: FakeCuda) -> None:
  a, b = fake.put(X), fake.put(X * 0)
  stream = fake.stream()
  stream.hold()
  copy(stream, a, b)
  assert stream.queued() == 1
  np.testing.assert_array_equal(b.get(), X * 0)
  stream.release()
  assert stream.finish() == 0
  np.testing.assert_array_equal(b.get(), X)


def test_work_of_two_streams_without_an_event_between_is_found(fake: FakeCuda) -> None:
  a, b, c = fake.put(X), fake.put(X), fake.put(X)
  first, second = fake.stream(), fake.stream()
  copy(first, a, b)
  copy(second, b, c)
  (text,) = fake.violations()
  assert "reads" in text
  assert "not ordered after a test's work, which writes it" in text
  fake.clear()


def test_work_that_the_host_waited_for_is_in_order(fake: FakeCuda) -> None:
  a, b, c = fake.put(X), fake.put(X), fake.put(X)
  first, second = fake.stream(), fake.stream()
  copy(first, a, b)
  first.finish()
  copy(second, b, c)
  second.finish()


def test_overwriting_what_another_stream_still_reads_is_found(fake: FakeCuda) -> None:
  a, b, c = fake.put(X), fake.put(X), fake.put(X)
  first, second = fake.stream(), fake.stream()
  copy(first, a, b)
  copy(second, c, a)
  (text,) = fake.violations()
  assert "writes" in text
  assert "which reads it" in text
  fake.clear()


def test_two_streams_may_read_the_same(fake: FakeCuda) -> None:
  a, b, c = fake.put(X), fake.put(X), fake.put(X)
  copy(fake.stream(), a, b)
  copy(fake.stream(), a, c)


def test_more_streams_than_a_few_hundred_are_all_known(fake: FakeCuda) -> None:
  made = [fake.stream() for _ in range(300)]
  known = {stream.handle for stream in fake.streams()}
  assert {stream.handle for stream in made} <= known


def test_dropped_memory_lives_until_its_work_has_ended(fake: FakeCuda) -> None:
  a, b = fake.put(X), fake.empty(X.shape, X.dtype)
  stream = fake.stream()
  stream.hold()
  pointer = a.pointer
  stream.enqueue(lambda: b.view().__setitem__(..., fake.view(pointer, X.shape, X.dtype)), reads=[a])
  del a
  stream.release()
  assert stream.finish() == 0
  np.testing.assert_array_equal(b.get(), X)


def test_a_stream_that_failed_gives_the_error_ever_after(fake: FakeCuda) -> None:
  stream, ran = fake.stream(), []
  stream.fail(700)
  for number in range(2):
    stream.enqueue(lambda number=number: ran.append(number))
  assert (stream.finish(), ran) == (700, [])
  fake.clear()
  assert stream.finish() == 0


def test_a_graph_runs_again(fake: FakeCuda) -> None:
  a, b = fake.put(X), fake.put(X * 0)
  stream, other = fake.stream(), fake.stream()
  stream.begin_capture()
  copy(stream, a, b)
  graph = stream.end_capture()
  assert graph is not None
  assert len(graph) == 1
  np.testing.assert_array_equal(b.get(), X * 0)
  for factor in (2, 3):
    a.set(X * factor)
    graph.replay(other)
    assert other.finish() == 0
    np.testing.assert_array_equal(b.get(), X * factor)


# -- programs ------------------------------------------------------------------------------------
def elementwise(x: Any) -> Any:
  return {"a": jnp.sin(x) * 2, "b": (x > 2, x.astype(jnp.bfloat16) + 1)}


def shapes(x: Any) -> Any:
  y = jnp.sort(x.T, axis=0)[1:, :]
  return y, jnp.concatenate([y, y]).sum(0), jnp.argmax(x), jnp.zeros((0, 2)) + 1


def control(x: Any) -> Any:
  total, parts = jax.lax.scan(lambda c, row: (c + row, c * 2), jnp.zeros(3), x)
  return jax.lax.cond(total[0] > 2, lambda: parts + 1, lambda: parts), total


def loop(x: Any) -> Any:
  step = jax.jit(lambda x: x * 2)
  return jax.lax.while_loop(lambda x: x.sum() < 100, step, x + 1)


def switch(x: Any) -> Any:
  return [jax.lax.switch(i, [lambda: x, lambda: -x, lambda: x * 0]) for i in range(-1, 4)]


def complex_numbers(x: Any) -> Any:
  return (x * 1j + 1).conj(), jnp.abs(x + 1j)


PROGRAMS = [elementwise, shapes, control, loop, switch]
if jax.__version_info__ < (0, 12):  # its StableHLO interpreter aborts the process
  PROGRAMS.append(complex_numbers)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_give_what_they_give_on_the_cpu(fake: FakeCuda, program: Any) -> None:
  got, want = fake_programs.run(fake, program, X), jax.jit(program)(X)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a.astype(complex), np.asarray(b).astype(complex), rtol=1e-5)


@examples(7)
@given(
  hnp.arrays(
    st.sampled_from([np.dtype(np.float32), np.dtype(np.int32), np.dtype(bool)]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements=st.integers(0, 1),
  )
)
def test_arrays_of_any_shape_come_through(array: Any) -> None:
  got = fake_programs.run(open_fake(), lambda x: (x, x.T, jnp.where(x, 2, 3)), array)
  for value, want in zip(got, (array, array.T, np.where(array, 2, 3)), strict=True):
    np.testing.assert_array_equal(value, want)


def test_a_program_does_not_wait_for_its_stream(fake: FakeCuda) -> None:
  program = fake_programs.load(fake, elementwise, X)
  stream = fake.stream()
  stream.hold()
  pending = program.start(X, stream=stream)
  assert stream.queued() > 3
  stream.release()
  np.testing.assert_allclose(pending.get()["a"], np.sin(X) * 2, rtol=1e-6)


def test_a_captured_program_computes_anew_at_each_replay(fake: FakeCuda) -> None:
  x = fake.put(X)
  pending = fake_programs.load(fake, lambda x: jnp.sin(x * 2) + 1, x_struct()).capture(x)
  stream = fake.stream()
  assert pending.graph is not None
  for factor in (1, 2):
    x.set(X * factor)
    pending.graph.replay(stream)
    assert stream.finish() == 0
    np.testing.assert_allclose(pending.results[0].get(), np.sin(X * factor * 2) + 1, rtol=1e-6)


def x_struct() -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(X.shape, X.dtype)


def test_a_loop_that_the_host_decides_can_not_be_captured(fake: FakeCuda) -> None:
  with pytest.raises(NotImplementedError, match=r"stablehlo\.while in a capture"):
    fake_programs.load(fake, loop, X).capture(X)


def test_a_target_without_a_handler_is_named(fake: FakeCuda) -> None:
  def program(x: Any) -> Any:
    return jax.ffi.ffi_call("nobody.knows", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

  with pytest.raises(NotImplementedError, match=r"nobody\.knows"):
    fake_programs.run(fake, program, X)


def test_an_argument_of_another_shape_is_refused(fake: FakeCuda) -> None:
  program = fake_programs.load(fake, elementwise, X)
  with pytest.raises(AssertionError, match=r"expected an array of \(2, 3\)"):
    program(X[0])


# -- callgate's handlers -------------------------------------------------------------------------
def test_a_gate_runs_in_a_program_for_cuda(fake: FakeCuda) -> None:
  calls: list[Any] = []

  def callback(x: Any) -> Any:
    calls.append(np.array(x))
    return x + 1

  gate = cg.gate(callback, like=lambda x: x)
  program = fake_programs.load(fake, lambda x: gate(x * 2) * 3, X)
  assert [target.startswith("callgate.") for target in program.targets()] == [True]
  for factor in (1, 2):
    np.testing.assert_array_equal(program(X * factor), (X * factor * 2 + 1) * 3)
  np.testing.assert_array_equal(calls, [X * 2, X * 4])
  program.close()
  assert fake.runner.runner_live_errors() == 0
  assert fake.runner.runner_leaked_states() == 0


def test_an_error_of_a_gate_ends_the_program(fake: FakeCuda) -> None:
  def callback(_: Any) -> Any:
    raise ValueError("not today")

  gate = cg.gate(callback, like=lambda x: x)
  with pytest.raises(fake_programs.ProgramError, match="not today"):
    fake_programs.run(fake, gate, X)


def test_a_gate_in_a_loop_is_one_call_site(fake: FakeCuda) -> None:
  gate = cg.gate(lambda x: x + 1, like=lambda x: x)
  program = fake_programs.load(fake, lambda x: jax.lax.fori_loop(0, 5, lambda _, x: gate(x), x), X)
  np.testing.assert_array_equal(program(X), X + 5)
  assert len(program.sites) == 1


def test_a_tap_reports_and_the_program_goes_on(fake: FakeCuda) -> None:
  seen: list[Any] = []

  def program(x: Any) -> Any:
    cg.tap(x * 2, lambda value: seen.append(np.array(value)))
    return x + 1

  np.testing.assert_array_equal(fake_programs.run(fake, program, X), X + 1)
  cg.barrier()
  np.testing.assert_array_equal(seen, [X * 2])


def test_attributes_of_every_kind_reach_a_handler(fake: FakeCuda, tmp_path: Path) -> None:
  source = tmp_path / "handler.cc"
  source.write_text(HANDLER)
  library = tmp_path / "handler.so"
  include = f"-I{jax.ffi.include_dir()}"
  command = ["c++", "-std=c++20", "-shared", "-fPIC", include, str(source), "-o", str(library)]
  subprocess.run(command, check=True, timeout=300)
  handler = ctypes.CDLL(str(library)).test_attributes
  jax.ffi.register_ffi_target(
    "test.attributes", jax.ffi.pycapsule(handler), platform="CUDA", api_version=1
  )

  def program(x: Any) -> Any:
    call = jax.ffi.ffi_call("test.attributes", jax.ShapeDtypeStruct((), np.int32))
    return call(x, a=np.int32(3), b="text", c=np.arange(4), d=True, e=np.float32(2.5))

  with pytest.raises(fake_programs.ProgramError) as caught:
    fake_programs.run(fake, program, X)
  assert str(caught.value) == "3 text 4:3 1 2.5 6 device 0"
  assert caught.value.code == 3


HANDLER = r"""
#include <string>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error run(int32_t device, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer>, int32_t a,
                      std::string_view b, ffi::Span<const int64_t> c, bool d, float e) {
  std::string text = std::to_string(a) + " " + std::string(b) + " " + std::to_string(c.size()) +
                     ":" + std::to_string(c[3]) + " " + std::to_string(int(d)) + " " +
                     std::to_string(e).substr(0, 3) + " " + std::to_string(x.element_count()) +
                     " device " + std::to_string(device);
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, text);
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(test_attributes, run, ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>()
    .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<int32_t>("a").Attr<std::string_view>("b")
    .Attr<ffi::Span<const int64_t>>("c").Attr<bool>("d").Attr<float>("e"));
"""
