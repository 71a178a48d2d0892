# SPDX-License-Identifier: Apache-2.0
"""Knobs, stops, breakpoints, checkpoints, recordings and profiles of programs on a GPU."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

MANY = 1_000_000  # steps, which take longer than a test may


def mesh_of_all() -> Any:
  """All GPUs, two or more, as one axis."""
  if len(jax.devices()) < 2:
    pytest.skip(f"needs 2 GPUs, has {len(jax.devices())}")
  return jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])


def on_parts(mesh: Any, f: Any) -> Any:
  return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))


def split(mesh: Any, x: Any) -> Any:
  return jax.device_put(jnp.asarray(x), jax.NamedSharding(mesh, jax.P("d")))


# -- knobs -----------------------------------------------------------------------------------------
def test_a_program_reads_what_was_set_last() -> None:
  knobs = [cg.knob("gpu float", 0.5), cg.knob("gpu int", 3), cg.knob("gpu bool", True)]
  traced = 0

  @jax.jit
  def program(x: Any) -> Any:
    nonlocal traced
    traced += 1
    return x * knobs[0].read(), knobs[1].read(), knobs[2].read(per="execution")

  assert [float(value) for value in program(2.0)] == [1, 3, 1]
  for knob, value in zip(knobs, (4, -7, False), strict=True):
    knob.set(value)
  assert [float(value) for value in program(2.0)] == [8, -7, 0]
  assert traced == 1


def test_a_running_program_sees_the_change_and_lanes_share_a_read() -> None:
  target = cg.knob("gpu target", 0)

  def step(state: Any) -> Any:
    count, _ = state
    cg.tap(count, lambda count: target.set(7) if count == 3 else None)
    return count + 1, target.read()

  looking = lambda state: (state[0] < MANY) & (state[1] != 7)
  count, last = jax.jit(lambda: jax.lax.while_loop(looking, step, (0, 0)))()
  assert 3 < int(count) < MANY
  assert last == 7
  lanes = jax.jit(jax.vmap(lambda x: x + target.read()))(jnp.arange(3))
  assert lanes.tolist() == [7, 8, 9]


def test_a_program_that_is_replayed_as_a_graph_reads_each_time() -> None:
  knob = cg.knob("gpu graph", 0.0)

  @jax.jit
  def program(x: Any) -> Any:
    for _ in range(8):  # enough launches for XLA to make a graph of
      x = jnp.sin(x @ x)
    return x[0, 0] * 0 + knob.read()

  for turn in range(10):
    knob.set(turn)
    assert program(jnp.ones((16, 16))) == turn


def test_devices_read_the_same_number() -> None:
  mesh = mesh_of_all()
  knob = cg.knob("gpu alike", -1)
  turn = cg.gate(lambda i: (knob.set(int(i)), i)[1], out=lambda i: i, effect="io")

  def on_part(x: Any) -> Any:
    last, numbers = jax.lax.scan(lambda x, i: (x + turn(i), knob.read()), x[0], jnp.arange(20))
    return numbers[None] + 0 * last

  got = np.asarray(on_parts(mesh, on_part)(split(mesh, np.zeros(2, int))))
  assert (got == got[0]).all()
  x = split(mesh, np.arange(8.0))
  np.testing.assert_array_equal(jax.jit(lambda x: x * knob.read())(x), 19 * np.arange(8.0))


# -- stops -----------------------------------------------------------------------------------------
def test_loops_end_where_they_are_asked_to() -> None:
  def step(count: Any) -> Any:
    cg.tap(count, lambda count: cg.stop("enough") if count == 5 else None)
    return count + 1

  looking = lambda count: (count < MANY) & ~cg.stop_requested()
  program = jax.jit(lambda n: jax.lax.while_loop(looking, step, n))
  assert 5 < int(program(0)) < MANY
  assert cg.stop_reason() == "enough"
  assert program(MANY) == MANY

  body = lambda carry, x: (step(carry), carry)
  scanned = jax.jit(lambda n: cg.scan(body, n, length=10_000, stoppable=True))
  last, counts, steps = scanned(0)
  assert 5 < int(steps) < 10_000
  assert last == steps
  np.testing.assert_array_equal(counts, np.where(np.arange(10_000) < steps, np.arange(10_000), 0))


def test_devices_stop_at_the_same_step() -> None:
  mesh = mesh_of_all()
  begun = threading.Event()

  def on_part(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
      cg.tap(carry[0], lambda _: begun.set())
      return carry + 1 + 0 * jax.lax.psum(carry, "d"), None

    return cg.scan(step, x, length=3000, stoppable=True)[0]

  thread = threading.Thread(target=lambda: (begun.wait(), cg.stop()))
  thread.start()
  reached = np.asarray(on_parts(mesh, on_part)(split(mesh, np.zeros(4))))
  thread.join()
  assert 0 < reached[0] < 3000
  assert (reached == reached[0]).all()


# -- breakpoints -----------------------------------------------------------------------------------
@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
  """The names at each stop, where x is negated."""
  seen: list[dict[str, Any]] = []

  def hook() -> None:
    names = sys._getframe(1).f_locals
    seen.append({key: names[key] for key in ("x", "lane", "shard")})
    names["x"] = -names["x"]

  monkeypatch.setattr(sys, "breakpointhook", hook)
  return seen


def test_a_stop_gives_back_what_was_changed(stops: list[dict[str, Any]]) -> None:
  program = jax.jit(lambda x: cg.breakpoint(x[0] >= 1, out="x", x=x * 2) + 1)
  assert program(jnp.array([0.25, 1.0])).tolist() == [1.5, 3]
  assert not stops
  assert program(jnp.array([1.0, 2.0])).tolist() == [-1, -3]
  (names,) = stops
  assert isinstance(names["x"], np.ndarray)
  assert names["x"].tolist() == [2, 4]
  with cg.config(breakpoints=False):
    assert program(jnp.array([1.0, 2.0])).tolist() == [3, 5]

  lanes = jax.jit(jax.vmap(lambda x: cg.breakpoint(x > 1, out="x", x=x)))
  assert lanes(jnp.arange(4.0)).tolist() == [0, 1, -2, -3]
  assert [names["lane"] for names in stops[1:]] == [2, 3]

  def step(carry: Any, i: Any) -> Any:
    return cg.breakpoint(i == 3, out="x", x=carry) + 1, None

  assert jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(5))[0])(0.0) == -1
  slope = jax.jit(jax.grad(lambda x: jnp.sin(cg.breakpoint(x > 1, out="x", x=x))))
  np.testing.assert_allclose(slope(0.5), np.cos(0.5), rtol=1e-6)


def test_a_device_stops_by_itself(stops: list[dict[str, Any]]) -> None:
  mesh = mesh_of_all()
  f = on_parts(mesh, lambda x: cg.breakpoint(x[0] == 2, out="x", x=x))
  assert f(split(mesh, np.arange(4.0))).tolist() == [0, 1, -2, -3]
  assert [names["x"].tolist() for names in stops] == [[2, 3]]


def test_leaving_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
  def leave() -> None:
    raise KeyboardInterrupt

  monkeypatch.setattr(sys, "breakpointhook", leave)
  program = jax.jit(lambda x: cg.breakpoint(x > 1, out="x", x=x) * 2)
  with pytest.raises(KeyboardInterrupt), cg.errors():
    jax.block_until_ready(program(2.0))
  assert program(1.0) == 2


# -- checkpoints -----------------------------------------------------------------------------------
def advance(carry: Any, x: Any) -> Any:
  carry = {"n": carry["n"] + 1, "w": carry["w"] * 0.5 + x, "b": carry["b"] + 1}
  return carry, carry["w"].sum()


def begun() -> Any:
  return {"n": jnp.int32(0), "w": jnp.zeros(3000), "b": jnp.ones(2, jnp.bfloat16)}


XS = np.arange(1.0, 11.0, dtype=np.float32)


def test_a_loop_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
  def run(saves: Any, xs: Any) -> Any:
    result = jax.jit(lambda c, xs: cg.scan(advance, c, xs, save=saves))(begun(), xs)
    cg.barrier()
    return result

  carry, ys = jax.jit(lambda c: jax.lax.scan(advance, c, XS))(begun())
  first = cg.Checkpoints(tmp_path, every=3, keep=5)
  run(first, XS[:7])
  assert first.steps() == (3, 6, 7)
  half = first.load(begun(), step=6)
  assert half["n"] == 6
  assert half["w"].shape == (3000,)
  got, rest = run(cg.Checkpoints(tmp_path, every=3, resume=True), XS)
  jax.tree.map(np.testing.assert_array_equal, got, carry)
  np.testing.assert_array_equal(rest, np.where(np.arange(10) < 7, 0, ys))


def test_parts_of_devices_and_another_number_of_them(tmp_path: Path) -> None:
  mesh = mesh_of_all()
  body = lambda c, _: (c + 1, c.sum())
  program = lambda saves, c, n: jax.jit(lambda c: cg.scan(body, c, length=n, save=saves))(c)
  x = np.arange(8, dtype=np.float32)
  program(cg.Checkpoints(tmp_path, every=2), split(mesh, x), 4)
  cg.barrier()
  assert len(list(tmp_path.glob("step_0000000004/part_*.npz"))) == 2
  for carry in (jnp.asarray(x), split(mesh, x)):
    carry, ys = program(cg.Checkpoints(tmp_path, every=10, resume=True), carry, 6)
    np.testing.assert_array_equal(carry, x + 6)
    np.testing.assert_array_equal(np.asarray(ys) != 0, np.arange(6) >= 4)
    cg.barrier()
    shutil.rmtree(tmp_path / "step_0000000006")


# -- recordings ------------------------------------------------------------------------------------
def test_recorded_calls_are_replayed(tmp_path: Path) -> None:
  calls: list[int] = []

  def count(x: Any) -> Any:
    calls.append(1)
    return x + len(calls)

  gate = cg.gate(count, out=lambda x: x, effect="io", name="gpu recorded")

  @jax.jit
  def program(x: Any) -> Any:
    lanes = jax.vmap(gate)(jnp.stack([x, x]))
    return jax.lax.scan(lambda c, _: (gate(c) * 0.5, c.sum()), lanes[0] + lanes[1], length=3)

  x = jnp.arange(3.0)
  with cg.record(tmp_path / "a.cgr") as recording:
    first = jax.device_get(program(x))
  assert recording.count == len(calls) == 5
  with cg.replay(tmp_path / "a.cgr") as replay:
    second = jax.device_get(program(x))
  assert len(calls) == 5
  assert (replay.answered, replay.left) == (5, 0)
  jax.tree.map(np.testing.assert_array_equal, first, second)
  differs = pytest.raises(cg.ReplayError, match="differs from call")
  with differs, cg.replay(tmp_path / "a.cgr"), cg.errors():
    jax.block_until_ready(program(x + 1))


def test_arrays_that_stay_on_the_device_are_recorded_as_the_hosts_are(tmp_path: Path) -> None:
  numba = pytest.importorskip("numba.cuda")
  calls: list[int] = []

  @numba.jit
  def kernel(out: Any, x: Any, number: Any) -> None:
    index = numba.grid(1)
    if index < x.size:
      out[index] = x[index] + number

  @cg.gate(out=lambda x: x, arrays="numba", style="inplace", effect="io", name="gpu stays")
  def gate(out: Any, x: Any) -> None:
    calls.append(1)
    kernel[1, 64, x.stream](out, x, np.float32(100 * len(calls)))

  program = jax.jit(lambda x: jax.lax.scan(lambda c, _: (gate(c * 2) + 1, c), x, length=3))
  x = jnp.arange(4.0)
  with cg.record(tmp_path / "b.cgr") as recording:
    first = jax.device_get(program(x))
  assert recording.count == len(calls) == 3
  np.testing.assert_array_equal(first[1][1], np.arange(4.0) * 2 + 101)
  with cg.replay(tmp_path / "b.cgr") as replay:
    second = jax.device_get(program(x))
  assert (len(calls), replay.answered, replay.left) == (3, 3, 0)
  jax.tree.map(np.testing.assert_array_equal, first, second)
  missing = pytest.raises(cg.ReplayError, match=r"gate 'gpu stays'.*differs")
  with missing, cg.replay(tmp_path / "b.cgr"), cg.errors():
    jax.block_until_ready(program(x + 1))


def test_recordings_of_calls_in_graphs_are_refused_by_name(tmp_path: Path) -> None:
  @cg.gate(
    out=lambda x: x, arrays="buffer", style="inplace", command_buffer=True, name="gpu in graphs"
  )
  def gate(out: Any, x: Any) -> None:
    del out, x

  refused = pytest.raises(NotImplementedError, match=r"gate 'gpu in graphs'.*=False")
  with refused, cg.record(tmp_path / "d.cgr"), cg.errors():
    jax.block_until_ready(jax.jit(gate)(jnp.ones(4)))


def test_feeds_are_replayed(tmp_path: Path) -> None:
  def read(items: Any, block: Any) -> Any:
    with cg.feed(items, shape=jax.ShapeDtypeStruct((4,), jnp.float32), name="gpu items") as feed:
      take = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=3)[1])
      with block:
        return np.asarray(take())

  def gone() -> Any:
    raise ConnectionError("no data")
    yield

  first = read((np.full(4, i, np.float32) for i in range(3)), cg.record(tmp_path / "c.cgr"))
  np.testing.assert_array_equal(first, read(gone(), cg.replay(tmp_path / "c.cgr")))


# -- names and costs -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def named() -> Any:
  """A program with a gate, a kernel, a tap and a check."""
  sort = cg.gate(np.sort, out=lambda x: x, effect="io", name="gpu sort")
  square = cg.elementwise("T x", "T y", "y = x * x", name="gpu_square")

  def f(x: Any) -> Any:
    y = square(sort(x))
    cg.tap(y, lambda y: None, name="gpu tap")
    cg.check(y[0] >= 0, "gpu check")
    return y

  return jax.jit(f)


def test_calls_have_their_names_in_programs_and_in_traces(tmp_path: Path, named: Any) -> None:
  program, x = named, jnp.arange(4.0)
  text = program.lower(x).compile().as_text()
  for name in ("gpu sort", "gpu_square", "gpu tap"):
    assert f"callgate/{name}" in text
  with cg.trace(tmp_path / "trace.json"):
    jax.block_until_ready(program(x))
    cg.barrier()
  events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
  found = {(event["cat"], event["name"].partition("[")[0]) for event in events}
  assert ("gate", "gpu sort") in found
  assert ("kernel", "gpu_square") in found
  assert ("deliver", "gpu tap") in found
  with jax.profiler.trace(str(tmp_path)):
    jax.block_until_ready(program(x))
    cg.barrier()
  (path,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
  planes = jax.profiler.ProfileData.from_file(str(path)).planes
  names = {event.name for plane in planes for line in plane.lines for event in line.events}
  assert "callgate/gpu sort" in names
  assert "callgate/deliver gpu tap" in names


def test_the_cost_of_calls_is_told_for_the_device(named: Any) -> None:
  stays = cg.gate(
    lambda out, x: None, out=lambda x: x, arrays="buffer", style="inplace", name="gpu inplace"
  )
  report = cg.explain(lambda x: stays(named(x)), jax.ShapeDtypeStruct((1000,), np.float32))
  assert report.platform in ("cuda", "gpu")
  by_name = {call.name: call for call in report.calls}
  sort, tap = by_name["gpu sort"], by_name["gpu tap"]
  assert sort.waits
  assert sort.copies == 12_000  # to the host, and there and back for its result
  assert by_name["gpu_square"].copies == 0
  assert tap.copies == 4000
  assert by_name["gpu inplace"].copies == 0
  assert by_name["gpu inplace"].gil
