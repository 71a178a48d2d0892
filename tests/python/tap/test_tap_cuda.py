# SPDX-License-Identifier: Apache-2.0
"""Taps, checks, prints, progress bars and sinks in programs for CUDA, on the fake driver.

A program on a GPU must send the records that it sends on the CPU: `both` compares them.
The fake driver fails a test whose copies are not ordered as CUDA needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import fake_programs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fake_cuda import FakeCuda, open_fake
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples
from recorded_bars import counts, recorded

import callgate as cg

WAITS = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
LARGE = 20_000  # float32: more than goes by the program's own stream


def numbers(*shape: int) -> np.ndarray[Any, Any]:
  return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def both(
  fake: FakeCuda,
  make: Callable[[Callable[..., Any]], Callable[..., Any]],
  *arguments: Any,
  in_order: bool = True,
) -> list[Any]:
  """The records of a program's taps on CUDA, after comparing them with the CPU's.

  Args:
    fake: the driver.
    make: the program, of the consumer that its taps call.
    *arguments: the program's.
    in_order: whether the program promises an order; without, records come back by name.

  Returns:
    (value, name, seq, lane, role, transforms, repeated) of each record, in order.
  """

  def collect(run: Callable[[Callable[..., Any]], Any]) -> tuple[list[Any], Any]:
    seen: list[Any] = []

    def consumer(value: Any, info: Any) -> None:
      about = (info.name, info.lane, info.role, info.transforms, info.repeated)
      seen.append((value, *about))

    result = run(consumer)
    cg.barrier()
    return seen if in_order else sorted(seen, key=lambda record: record[1]), result

  on_gpu, got = collect(lambda c: fake_programs.run(fake, make(c), *arguments))
  on_cpu, expected = collect(lambda c: jax.block_until_ready(jax.jit(make(c))(*arguments)))
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  assert [record[1:] for record in on_gpu] == [record[1:] for record in on_cpu]
  for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
    jax.tree.map(np.testing.assert_array_equal, gpu[0], cpu[0])
    jax.tree.map(lambda a, b: (a.dtype, a.shape) == (b.dtype, b.shape) or 1 / 0, gpu[0], cpu[0])
  return on_gpu


# -- contents ------------------------------------------------------------------------------------
def test_a_tap_delivers_the_value_and_the_program_goes_on_with_it(fake: FakeCuda) -> None:
  seen = both(fake, lambda to: lambda x: cg.tap(x * 2, to, name="twice") + 1, numbers(2, 3))
  assert [record[1] for record in seen] == ["twice"]
  np.testing.assert_array_equal(seen[0][0], numbers(2, 3) * 2)


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"effect": "dataflow"}])
@pytest.mark.parametrize("size", [3, LARGE])
def test_all_effects_and_sizes_are_delivered_in_the_order_that_they_promise(
  fake: FakeCuda, options: dict[str, Any], size: int
) -> None:
  def make(to: Any) -> Any:
    def f(x: Any) -> Any:
      for step in range(4):
        x = cg.tap(x + 1, to, name=f"step{step}", **options)
      return x

    return f

  seen = both(fake, make, numbers(size), in_order=bool(options))
  assert [record[1] for record in seen] == [f"step{i}" for i in range(4)]


def test_small_and_large_records_keep_their_order(fake: FakeCuda) -> None:
  def make(to: Any) -> Any:
    def f(x: Any) -> Any:
      for step in range(6):
        cg.tap(x + step if step % 2 else x[0] + step, to, name=str(step), ordered=True)
      return x

    return f

  assert [record[1] for record in both(fake, make, numbers(LARGE))] == list("012345")


def test_where_and_every_choose_the_same_records(fake: FakeCuda) -> None:
  def make(to: Any) -> Any:
    def f(x: Any) -> Any:
      def step(i: Any, s: Any) -> Any:
        cg.tap(s, to, name="where", where=i % 3 == 1, ordered=True)
        cg.tap(s, to, name="every", every=4, ordered=True)
        cg.tap(s, to, name="both", where=i % 2 == 1, every=2, ordered=True)
        return s + 1

      return jax.lax.fori_loop(0, 10, step, x)

    return f

  names = [record[1] for record in both(fake, make, np.float32(0))]
  assert [names.count(n) for n in ("where", "every", "both")] == [3, 3, 3]


def test_a_record_that_is_not_due_is_not_copied(fake: FakeCuda) -> None:
  seen: list[Any] = []
  program = fake_programs.load(fake, lambda x: cg.tap(x, seen.append, every=3), numbers(3))
  for _ in range(6):
    program(numbers(3))
  cg.barrier()
  assert len(seen) == 2
  assert fake.calls("cuMemcpyDtoHAsync_v2") == 2


def test_lanes_of_a_vmap_come_one_by_one(fake: FakeCuda) -> None:
  def make(to: Any) -> Any:
    def f(x: Any, y: Any) -> Any:
      return cg.tap({"x": x, "y": y}, to, where=x[0] != 2)["x"] * 2

    return jax.vmap(jax.vmap(f, (0, None)), (None, 0))

  seen = both(fake, make, numbers(3, 2), numbers(2))
  assert len({record[2] for record in seen}) == len(seen) == 4


@pytest.mark.parametrize("size", [2, LARGE])
def test_roles_are_sent_under_differentiation(fake: FakeCuda, size: int) -> None:
  def make(to: Any) -> Any:
    def f(x: Any) -> Any:
      return jnp.sum(cg.tap(x * x, to, roles=("primal", "cotangent")) ** 2)

    return jax.grad(f)

  assert {record[3] for record in both(fake, make, numbers(size))} == {"primal", "cotangent"}


def test_the_second_pass_of_a_checkpoint_is_marked(fake: FakeCuda) -> None:
  def make(to: Any) -> Any:
    return jax.grad(jax.checkpoint(lambda x: jnp.sin(cg.tap(jnp.sin(x), to))))

  assert [record[5] for record in both(fake, make, np.float32(1))] == [False, True]


def test_padding_is_taken_off_by_the_logical_shape(fake: FakeCuda) -> None:
  def make(to: Any) -> Any:
    return lambda x, n: cg.tap(x, to, logical_shape=(n, 2))

  ((value, *_),) = both(fake, make, numbers(4, 3), np.int32(3))
  assert value.shape == (3, 2)


DTYPES = [
  "bool",
  "int8",
  "uint16",
  "int32",
  "float16",
  "bfloat16",
  "float32",
  "complex64",
  "float8_e4m3fn",
]


@examples(7)
@given(
  dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
  shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
def test_every_dtype_and_shape_arrives(dtypes: list[str], shape: tuple[int, ...]) -> None:
  fake = open_fake()
  size = int(np.prod(shape, dtype=int))
  values = [
    (np.arange(size).reshape(shape) % 2).astype(np.dtype(getattr(ml_dtypes, d, d))) for d in dtypes
  ]
  seen: list[Any] = []
  fake_programs.run(fake, lambda *xs: [cg.tap(xs, seen.append), 0][1], *values)
  cg.barrier()
  (got,) = seen
  for value, expected in zip(got, values, strict=True):
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(np.asarray(value, complex), np.asarray(expected, complex))
  assert fake.violations() == []


def test_a_consumer_may_keep_and_write_what_it_gets(fake: FakeCuda) -> None:
  kept: list[Any] = []
  program = fake_programs.load(fake, lambda x: cg.tap(x, kept.append), numbers(3))
  for i in range(3):
    program(numbers(3) + i)
  cg.barrier()
  for i, array in enumerate(kept):
    array += 1
    np.testing.assert_array_equal(array, numbers(3) + i + 1)


# -- time ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [3, LARGE])
def test_the_program_waits_for_nothing_and_a_barrier_for_all(fake: FakeCuda, size: int) -> None:
  seen: list[Any] = []

  def f(x: Any) -> Any:
    for i in range(3):
      cg.tap(x + i, seen.append, ordered=True)
    return x

  program = fake_programs.load(fake, f, numbers(size))
  stream = fake.stream()
  stream.hold()
  pending = program.start(numbers(size), stream=stream)  # comes back although nothing can run
  assert seen == []
  released = threading.Timer(0.05, stream.release)
  released.start()
  cg.barrier()
  released.join()
  assert len(seen) == 3
  for i, value in enumerate(seen):
    np.testing.assert_array_equal(value, numbers(size) + i)
  pending.get()
  assert fake.calls("cuStreamSynchronize") == fake.calls("cuCtxSynchronize") == 0


def test_a_barrier_that_has_no_time_says_so(fake: FakeCuda) -> None:
  seen: list[Any] = []
  program = fake_programs.load(fake, lambda x: cg.tap(x, seen.append), numbers(3))
  stream = fake.stream()
  stream.hold()
  pending = program.start(numbers(3), stream=stream)
  try:
    with pytest.raises(TimeoutError):
      cg.barrier(timeout=0.05)
    assert seen == []
  finally:
    stream.release()
  pending.get()
  cg.barrier()
  assert len(seen) == 1


def test_large_records_do_not_hold_up_the_stream(fake: FakeCuda) -> None:
  seen: list[Any] = []
  fake.delay_copies(0.02)
  program = fake_programs.load(fake, lambda x: cg.tap(x, seen.append) * 2, numbers(LARGE))
  np.testing.assert_array_equal(program(numbers(LARGE)), numbers(LARGE) * 2)
  cg.barrier()
  np.testing.assert_array_equal(seen[0], numbers(LARGE))
  assert fake.calls("cuMemcpyDtoDAsync_v2") == 1


def test_order_is_kept_on_each_device(fake: FakeCuda) -> None:
  seen: list[Any] = []

  def f(x: Any) -> Any:
    return jax.lax.fori_loop(
      0, 20, lambda i, s: cg.tap(s + 1, lambda v, info: seen.append((info.device, int(v)))), x
    )

  programs = [fake_programs.load(fake, f, np.int32(0)) for _ in range(2)]
  streams = [fake.stream(0), fake.stream(1)]
  threads = [
    threading.Thread(target=lambda p=p, s=s: p(np.int32(100 * s.device), stream=s))
    for p, s in zip(programs, streams, strict=True)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  cg.barrier()
  for stream in streams:
    first = 100 * stream.device
    assert [v for d, v in seen if d == stream.device] == list(range(first + 1, first + 21))
  assert len(seen) == 40


def test_nothing_is_left_allocated(fake: FakeCuda) -> None:
  from callgate import _callgate

  seen: list[Any] = []
  program = fake_programs.load(fake, lambda x: cg.tap(x, seen.append), numbers(LARGE))
  for _ in range(3):
    program(numbers(LARGE))
  cg.barrier()
  del seen[:]
  assert _callgate.device_memory_in_use() == (0, 0)


# -- graphs --------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [3, 16_384])  # at most 64 KiB
def test_a_recorded_tap_sends_once_a_replay(fake: FakeCuda, size: int) -> None:
  seen: list[Any] = []
  program = fake_programs.load(fake, lambda x: cg.tap(x * 2, seen.append) + 1, numbers(size))
  assert fake_programs.is_capturable(program.targets()[0])
  argument = fake.put(numbers(size))
  pending = program.capture(argument)
  cg.barrier()
  assert seen == []
  assert pending.graph is not None
  for i in range(4):
    argument.set(numbers(size) + i)
    pending.graph.replay(pending.stream)
    pending.stream.finish()
  cg.barrier()
  assert len(seen) == 4
  for i, value in enumerate(seen):
    np.testing.assert_array_equal(value, (numbers(size) + i) * 2)


def test_a_recorded_tap_with_a_predicate_asks_it_at_each_replay(fake: FakeCuda) -> None:
  seen: list[int] = []
  program = fake_programs.load(
    fake, lambda x: cg.tap(x, lambda v: seen.append(int(v)), where=x % 2 == 1), np.int32(0)
  )
  argument = fake.put(np.int32(0))
  pending = program.capture(argument)
  assert pending.graph is not None
  for i in range(6):
    argument.set(np.int32(i))
    pending.graph.replay(pending.stream)
    pending.stream.finish()
  cg.barrier()
  assert seen == [1, 3, 5]


def test_a_print_without_arrays_is_one(fake: FakeCuda, capsys: Any) -> None:
  def f(x: Any) -> Any:
    cg.print("a step")
    return x + 1

  program = fake_programs.load(fake, f, numbers(3))
  for _ in range(2):
    program(numbers(3))
  cg.barrier()
  assert capsys.readouterr().out == "a step\n" * 2


@pytest.mark.parametrize("before", range(3))
def test_a_recorded_tap_counts_its_replays(fake: FakeCuda, before: int) -> None:
  seen: list[int] = []
  program = fake_programs.load(
    fake, lambda x: cg.tap(x, lambda v: seen.append(int(v)), every=3), np.int32(0)
  )
  for i in range(before):  # runs that are no graph count, too
    program(np.int32(i))
  argument = fake.put(np.int32(0))
  pending = program.capture(argument)
  assert pending.graph is not None
  for i in range(before, 9):
    argument.set(np.int32(i))
    pending.graph.replay(pending.stream)
    pending.stream.finish()
  cg.barrier()
  assert sorted(seen) == [0, 3, 6]  # the runs of two streams come in any order


@pytest.mark.parametrize("size", [1, LARGE])
def test_taps_of_runs_and_of_replays_come_in_the_order_of_their_stream(
  fake: FakeCuda, size: int
) -> None:
  seen: list[tuple[str, float]] = []

  def f(x: Any) -> Any:
    x = cg.tap(x, lambda v: seen.append(("first", float(v[0]))), ordered=True)
    return cg.tap(x, lambda v: seen.append(("second", float(v[0]))), ordered=True) * 0

  program = fake_programs.load(fake, f, numbers(size))
  arguments = [fake.put(numbers(size) + i) for i in range(6)]
  stream = fake.stream()
  runs = [program.start(arguments[0], stream=stream)]  # its records may wait when the graph runs
  pending = program.capture(arguments[1], stream=stream)
  assert pending.graph is not None
  stream.hold()
  pending.graph.replay(stream)
  for argument in arguments[2:]:
    runs.append(program.start(argument, stream=stream))
    pending.graph.replay(stream)
  stream.release()
  stream.finish()
  cg.barrier()
  order = [0, 1, 2, 1, 3, 1, 4, 1, 5, 1]
  first = float(numbers(size)[0])
  assert seen == [(name, first + i) for i in order for name in ("first", "second")]
  assert len(runs) == 5


# -- checks, prints, bars ------------------------------------------------------------------------
def test_a_check_that_passes_is_silent_and_one_that_fails_says_what_and_where(
  fake: FakeCuda,
) -> None:
  def f(x: Any) -> Any:
    cg.check(x >= 0, "expected x >= 0, got {x}", x=x)
    return x * 2

  program = fake_programs.load(fake, f, np.float32(0))
  assert program(np.float32(2)) == 4
  with pytest.raises(cg.CheckError, match=r"expected x >= 0, got -1\.0") as caught, cg.errors():
    program(np.float32(-1))
  assert caught.value.values["x"] == -1
  assert any(
    "tap/test_tap_cuda.py" in note for note in [*caught.value.__notes__, str(caught.value)]
  )
  assert program(np.float32(3)) == 6


def test_lanes_of_a_check_fail_by_themselves(fake: FakeCuda) -> None:
  def f(x: Any) -> Any:
    cg.check(x < 2, "too large: {x}", x=x)
    return x

  with pytest.raises(cg.CheckError, match="too large: 2"), cg.errors():
    fake_programs.run(fake, jax.vmap(f), np.arange(4, dtype=np.int32))


def test_prints_come_in_order_with_the_values_of_the_time(
  fake: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
  def f(x: Any) -> Any:
    def step(i: Any, s: Any) -> Any:
      cg.print("step {} of {s:.1f}", i, s=s, ordered=True)
      return s * 2

    return jax.lax.fori_loop(0, 3, step, x)

  fake_programs.run(fake, f, np.float32(1))
  cg.barrier()
  assert capsys.readouterr().out == "step 0 of 1.0\nstep 1 of 2.0\nstep 2 of 4.0\n"


def loop_of(kind: str) -> Callable[..., Any]:
  """A loop of twenty steps with a bar."""
  progress = cg.Progress("steps", every=1)
  if kind == "scan":
    add = lambda s, x: (s + x, s)
    return lambda x: cg.scan(add, x, jnp.arange(20, dtype=jnp.float32), progress=progress)
  if kind == "fori":
    return lambda x: cg.fori_loop(0, 20, lambda i, s: s + i, x, progress=progress)
  limit = lambda s: s < 20
  return lambda x: cg.while_loop(limit, lambda s: s + 1, x, progress=progress)


@pytest.mark.parametrize("kind", ["scan", "fori", "while"])
def test_progress_counts_the_steps_of_a_loop(fake: FakeCuda, kind: str) -> None:
  with recorded() as on_gpu:
    got = fake_programs.run(fake, loop_of(kind), np.float32(0))
  with recorded() as on_cpu:
    expected = jax.block_until_ready(jax.jit(loop_of(kind))(np.float32(0)))
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  assert counts(on_gpu) == counts(on_cpu)
  assert [count for _, count, _ in counts(on_gpu)] == [20]


def test_a_bar_of_a_loop_with_taps_and_lanes(fake: FakeCuda) -> None:
  def make(to: Any) -> Any:
    def f(x: Any) -> Any:
      step = lambda i, s: cg.tap(s * 2, to) + i
      return cg.fori_loop(0, 3, step, x, progress="lanes")

    return jax.vmap(f)

  with recorded() as bars:
    assert len(both(fake, make, numbers(2))) == 6
  assert [count for _, count, _ in counts(bars)] == [3, 3]  # the GPU's, then the CPU's
