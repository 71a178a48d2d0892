# SPDX-License-Identifier: Apache-2.0
"""Knobs: programs read what the host has set, all devices alike, without a new compilation."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of
from meanwhile import Meanwhile
from process_groups import run_group
from programs import drop_programs_until
from transformation_table import EFFECT_PAIRS, assert_chains_agree, diagonal, groups, reference

import callgate as cg
from callgate import _callgate
from callgate._core.public import core
from callgate._steer import knob


def test_a_program_reads_what_was_set_last(engine: str) -> None:
  rate = cg.knob("test rate", 0.5)
  traced = 0

  @jax.jit
  def program(x: Any) -> Any:
    nonlocal traced
    traced += 1
    return x * rate.read()

  assert program(2.0) == 1
  rate.set(3)
  assert program(2.0) == 6
  assert rate.value == 3.0
  assert rate.read() == 3
  assert traced == 1


def test_a_running_program_sees_the_change(engine: str) -> None:
  target = cg.knob("test target", 0)
  got = list[int]()

  def step(state: Any) -> Any:
    count, _ = state
    cg.tap(count, lambda count: target.set(7) if count == 3 else None)
    return count + 1, target.read()

  program = jax.jit(
    lambda: jax.lax.while_loop(lambda s: (s[0] < 100_000_000) & (s[1] != 7), step, (0, 0))
  )
  count, last = program()
  got += [int(count), int(last)]
  assert got[0] > 3
  assert got[1] == 7


@pytest.mark.parametrize(
  ("value", "dtype"),
  [
    (1, "int32"),
    (0.5, "float32"),
    (True, "bool"),
    (np.float16(2), "float16"),
    (np.int8(-3), "int8"),
  ],
)
def test_kinds_of_numbers(value: Any, dtype: str, engine: str) -> None:
  knob = cg.knob(f"test kind {dtype}", value)
  assert knob.dtype == dtype
  got = jax.jit(knob.read)()
  assert got.dtype == dtype
  assert got == value
  assert type(knob.value) is type(np.asarray(value).item())


def test_numbers_of_64_bits() -> None:
  with jax.enable_x64(True):
    knob = cg.knob("test wide", 2**40 + 1)
    assert jax.jit(knob.read)() == 2**40 + 1
    knob.set(-5)
    assert jax.jit(knob.read)() == -5
    fine = cg.knob("test fine", 0.1)
    assert float(jax.jit(fine.read)()) == 0.1


def test_all_reads_of_an_execution_get_one_number(engine: str) -> None:
  knob = cg.knob("test once", 1)

  turn = cg.gate(lambda i: (knob.set(int(i) + 2), i)[1], out=lambda i: i, effect="io")

  def step(carry: Any, i: Any) -> Any:
    return carry + turn(i), (knob.read(per="execution"), knob.read())

  program = jax.jit(lambda: jax.lax.scan(step, 0, jnp.arange(300))[1])
  once, each = program()
  assert (once == 1).all()
  assert each[0] < each[-1]
  jax.effects_barrier()
  once, _ = program()
  assert (once == 301).all()


def test_an_execution_keeps_its_number_while_thousands_of_others_read() -> None:
  knob = cg.knob("test long", 1)
  there, go_on = threading.Event(), threading.Event()

  def wait(i: Any) -> Any:
    if not there.is_set():
      there.set()
      assert go_on.wait(60)
    return i

  gate = cg.gate(wait, out=lambda i: i, effect="io", thread="own")

  def step(carry: Any, i: Any) -> Any:  # reads, waits, reads
    number = knob.read(per="execution")
    return carry + gate(i + 0 * number), number

  long = jax.jit(lambda: jax.lax.scan(step, 0, np.arange(2))[1]).lower().compile()
  short = jax.jit(lambda: knob.read(per="execution"))
  numbers = list[Any]()
  thread = threading.Thread(target=lambda: numbers.extend(long().tolist()))
  thread.start()
  try:
    assert there.wait(60)
    for number in range(2, 3000):
      knob.set(number)
      assert short() == number
  finally:
    go_on.set()
    thread.join()
  assert numbers == [1, 1]


def test_devices_get_the_same_number_at_the_same_read() -> None:
  knob = cg.knob("test alike", -1)
  mesh = jax.make_mesh((8,), ("d",))
  turn = cg.gate(lambda i: (knob.set(int(i)), i)[1], out=lambda i: i, effect="io")

  def on_part(x: Any) -> Any:
    def step(x: Any, i: Any) -> Any:
      return x + turn(i), knob.read()

    last, numbers = jax.lax.scan(step, x[0], jnp.arange(300))
    return numbers[None] + 0 * last

  program = jax.jit(jax.shard_map(on_part, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
  x = jax.device_put(jnp.zeros(8, int), jax.NamedSharding(mesh, jax.P("d")))
  got = np.asarray(program(x))
  assert got.shape == (8, 300)
  assert got[0, 0] < got[0, -1]
  assert (got == got[0]).all()


def test_devices_get_the_same_number_through_jaxs_callbacks() -> None:
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
  for value in (0, 0.0):
    knob, reads = cg.knob(f"test alike {value}", value), iter(range(100))
    core(knob).as_array = lambda knob=knob, reads=reads: np.asarray(next(reads), knob.dtype)
    with cg.config(engine="jax"):
      read = lambda x, knob=knob: x + knob.read()
      program = jax.jit(jax.shard_map(read, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
      got = np.asarray(program(jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, jax.P("d")))))
    assert next(reads) == 4
    assert (got == got[0]).all()


def test_partitioned_programs_read_without_collectives() -> None:
  knob = cg.knob("test parts", 2.0)
  mesh = jax.make_mesh((8,), ("d",))
  x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))
  program = jax.jit(lambda x: x * knob.read())
  np.testing.assert_array_equal(program(x), 2 * np.arange(8.0))
  assert "all-reduce" not in program.lower(x).compile().as_text()


PROCESS = """
import sys
index, count, port = map(int, sys.argv[1:])
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
import numpy as np
import callgate as cg
from process_groups import report

knob = cg.knob("shared", 10.0 * (index + 1))
devices = jax.device_count()
mesh = jax.make_mesh((devices,), ("d",))
spec = jax.NamedSharding(mesh, jax.P("d"))
x = jax.make_array_from_callback((devices,), spec, lambda i: np.ones(1, np.float32))
shown = lambda x: sorted({float(shard.data[0]) for shard in x.addressable_shards})
report(partitioned=shown(jax.jit(lambda x: x * knob.read(), out_shardings=spec)(x)))
part = lambda x: x * knob.read(consistent=True)
program = jax.shard_map(part, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
report(consistent=shown(jax.jit(program)(x)))
"""


def test_processes_get_process_0s_number(tmp_path: Path) -> None:
  script = tmp_path / "process.py"
  script.write_text(PROCESS)
  for ended in run_group(script, 2, folder=tmp_path):
    assert ended.status == 0, ended.errors
    assert ended.reports == {"partitioned": [10.0], "consistent": [10.0]}


def test_consistent_reads_in_a_shard_map() -> None:
  knob = cg.knob("test consistent", 3)
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
  part = lambda x: x + knob.read(consistent=True)
  program = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
  x = jax.device_put(jnp.arange(4), jax.NamedSharding(mesh, jax.P("d")))
  np.testing.assert_array_equal(program(x), np.arange(4) + 3)
  assert jax.jit(lambda: knob.read(consistent=True))() == 3


@pytest.mark.parametrize("chains", groups(14, pairs=EFFECT_PAIRS))
def test_pairs_of_transformations(chains: Any) -> None:
  one = cg.knob(f"test one {chains[0]}", 1.0)

  def make(effect: Any) -> Any:
    del effect
    return lambda x: one.read() * reference(x)

  assert_chains_agree(chains, make=make)


def test_other_reads_in_transformations() -> None:
  one = cg.knob("test one for all", 1.0)

  def make(effect: Any) -> Any:
    del effect
    return lambda x: one.read(per="execution") * one.read(consistent=True) * reference(x)

  assert_chains_agree(diagonal(3), make=make)


@pytest.mark.parametrize("kind", ["partitioned", "shard_map"])
def test_reads_over_several_devices(engine: str, kind: str) -> None:
  one, all_ = cg.knob("test devices", 2.0), cg.knob("test devices' all", 3.0)
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
  f = lambda x: x * one.read() + all_.read(per="execution") + one.read(consistent=True)
  if kind == "shard_map":
    f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
  x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))
  program = jax.jit(f)
  np.testing.assert_array_equal(program(x), 2 * np.arange(8.0) + 5)
  one.set(4)
  np.testing.assert_array_equal(program(x), 4 * np.arange(8.0) + 7)


# -- records ---------------------------------------------------------------------------------------
def test_changes_are_records_of_channels_with_a_stream(tmp_path: Path) -> None:
  rate = cg.knob("test recorded", 1.0)
  path = tmp_path / "run.cgs"
  seen = list[Any]()
  with (
    cg.channel("test steered", to=[cg.sinks.Stream(path), seen.append]),
    cg.channel("test unsteered", to=seen.append),
  ):
    program = jax.jit(lambda x: cg.tap(x * rate.read(), "test steered"))
    program(2.0)
    rate.set(3.0)
    cg.barrier()
    program(2.0)
  assert seen == [2.0, 3.0, 6.0]
  assert [(r.name, r.leaves[""].item()) for r in cg.open_stream(path)] == [
    ("test steered", 2.0),
    ("knob:test recorded", 3.0),
    ("test steered", 6.0),
  ]


def test_a_consumer_of_a_full_channel_may_turn_a_knob(tmp_path: Path) -> None:
  count = cg.knob("test counted", 0)
  path = tmp_path / "run.cgs"

  def turn(x: Any) -> None:
    if x.size > 1:
      count.set(int(x[0]))

  with cg.channel("test small", to=[cg.sinks.Stream(path), turn], capacity=4096):
    loop = lambda i: cg.tap(jnp.full(200, i), "test small")
    jax.jit(lambda: jax.lax.map(loop, jnp.arange(30)))()
    cg.barrier()
    for thread in threading.enumerate():
      if thread.name == "callgate knob":
        thread.join()
  numbers = [r.leaves[""] for r in cg.open_stream(path) if r.name == "knob:test counted"]
  assert sorted(numbers) == list(range(30))


# -- definitions -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
  ("arguments", "options", "said"),
  [
    (("",), {}, "knob: name: expected"),
    ((3,), {}, "knob: name: expected"),
    (("test", "fast"), {}, "value: expected a number or a bool, got 'fast'"),
    (("test", [1, 2]), {}, "value: expected a number or a bool, got \\[1, 2\\]"),
    (("test", 1j), {}, "value: expected a number or a bool"),
    (
      ("test", 1.0),
      {"range": 3},
      r"range: expected a pair \(least, greatest\), got 3",
    ),
    (("test", 1.0), {"range": (2, 1)}, "range: expected two numbers, the first less"),
    (("test", 1.0), {"range": (2, 3)}, "value: expected 2.0 to 3.0, got 1.0"),
    (("test", 1.0), {"range": (0, 3), "scale": "log"}, "range: expected numbers above 0"),
    (("test", 1.0), {"scale": "log"}, "scale: 'log' needs range="),
    (("test", 1.0), {"scale": "cubic"}, "scale: expected .*, got 'cubic'"),
    (("test", True), {"range": (0, 1)}, "range"),
  ],
)
def test_wrong_definitions_are_refused(arguments: Any, options: Any, said: str) -> None:
  arguments = (*arguments, *(1.0,) * (2 - len(arguments)))
  with pytest.raises(cg.GateDefinitionError, match=said):
    cg.knob(*arguments, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_number_that_was_read_at_the_ranges_end_is_in_the_range(dtype: Any) -> None:
  made = cg.knob(f"test ends {np.dtype(dtype)}", dtype(0.1), range=(0.1, 0.7))
  for end in (0.1, 0.7):
    made.set(end)
    read = float(made.read())
    made.set(read)
    assert float(made.read()) == read
    assert 0.1 <= made.value <= 0.7
  with pytest.raises(cg.GateDefinitionError, match=r"expected 0\.1 to 0\.7, got 0\.72"):
    made.set(0.72)


def test_wrong_values_are_refused_and_change_nothing() -> None:
  whole = cg.knob("test whole", 3, range=(0, 10))
  for value, said in (
    (11, "knob 'test whole': value: expected 0 to 10, got 11"),
    (2.5, "expected an integer for int32, got 2.5"),
    (2**40, "expected an integer for int32, -2147483648 to 2147483647, got 1099511627776"),
    (True, "expected an integer"),
    (np.arange(2), "expected an integer"),
    ("1", "expected an integer"),
  ):
    with pytest.raises(cg.GateDefinitionError, match=said.replace("(", "\\(")):
      whole.set(value)
  assert whole.value == 3
  real = cg.knob("test real", 1.0)
  with pytest.raises(cg.GateDefinitionError, match="can hold, got 1e\\+300"):
    real.set(1e300)
  real.set(float("nan"))
  assert np.isnan(jax.jit(real.read)())
  with pytest.raises(cg.GateDefinitionError, match="per: expected"):
    real.read(per="step")  # pyright: ignore[reportArgumentType]


def test_two_live_knobs_do_not_share_a_name() -> None:
  first = cg.knob("test twice", 1.0)
  with pytest.raises(ValueError, match=r"'test twice' is taken by a live knob .*test_knobs\.py"):
    cg.knob("test twice", 2.0)
  assert first.value == 1.0


def test_a_dropped_knob_leaves_nothing_when_its_programs_are_gone() -> None:
  names = lambda: [n for n in _callgate.registered_names() if "test dropped" in n]

  def used() -> weakref.ref[Any]:
    knob = cg.knob("test dropped", 1.0)
    program = jax.jit(lambda x: x * knob.read() + knob.read(per="execution"))
    assert program(2.0) == 3
    assert len(names()) >= 3
    return weakref.ref(knob)

  dropped = used()
  drop_programs_until(lambda: dropped() is None and not names())


def test_a_definition_that_runs_again_keeps_the_knob() -> None:
  code = """
    import jax, callgate as cg

    cell = "rate = cg.knob('rate', {}, range=(0, {}))"
    exec(compile(cell.format(0.5, 1), "<cell 1>", "exec"), globals())
    first, program = rate, jax.jit(lambda x: x * rate.read())
    print(program(2.0))
    exec(compile(cell.format(3.0, 5), "<cell 2>", "exec"), globals())
    print(program(2.0), rate is first, rate.range)
    for wrong in ((9.0, 5), (2.0, -1), (9, 5)):
      try:
        exec(compile(cell.format(*wrong), "<cell 3>", "exec"), globals())
      except cg.GateDefinitionError:
        print(program(2.0), rate is first, rate.range)
    exec(compile(cell.format(4, 5), "<cell 4>", "exec"), globals())
    print(program(2.0), rate is first, rate.range)
    exec("import numpy; " + cell.format("numpy.int32(1)", 5), globals())
    print(program(2.0), rate is first, rate.range)
  """
  kept = "6.0 True (0.0, 5.0)"
  whole = "8.0 True (0.0, 5.0)"  # a whole number stands for a real one
  assert output_of(code).split("\n")[:7] == ["1.0", *[kept] * 4, whole, "8.0 False (0, 5)"]


def test_an_exported_program_holds_the_name() -> None:
  rate = cg.knob("test exported", 2.0)
  program = jax.jit(lambda x: x * rate.read())
  exported = jax.export.export(program, disabled_checks=cg.export_checks())(1.0).serialize()
  rate.set(5.0)
  assert jax.export.deserialize(exported).call(1.0) == 5


def test_knobs_are_listed_while_another_thread_defines_one(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  first = cg.knob("test first", 1)
  others = list[cg.Knob]()
  meanwhile = Meanwhile(lambda: others.append(cg.knob("test meanwhile", 2)))

  class Slow(weakref.WeakValueDictionary[str, cg.Knob]):
    def items(self) -> Any:
      for pair in super().items():
        meanwhile()
        yield pair

  monkeypatch.setattr(knob, "_knobs", Slow(knob._knobs))
  assert knob.live()["test first"] is first
  meanwhile.end()
  assert knob.live()["test meanwhile"] is others[0]
