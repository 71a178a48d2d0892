# SPDX-License-Identifier: Apache-2.0
"""A replay answers all recorded calls, under every transformation, and calls nothing."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from transformation_table import EFFECT_PAIRS, build, groups, on_host, reference

import callgate as cg
from callgate._core import registry, tape

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Source:
  """A function that answers otherwise each time, and counts."""

  def __init__(self) -> None:
    self.count = 0
    self.lock = threading.Lock()

  def __call__(self, x: Any) -> Any:
    with self.lock:
      self.count += 1
      return (np.asarray(x) + 100 * self.count).astype(np.float32)


def gate_of(source: Any, **options: Any) -> Any:
  make: Any = cg.gate
  return make(source, **{"out": lambda x: x, "effect": "io", **options})


def recorded_and_replayed(
  path: Path, program: Any, *args: Any, source: Source, **options: Any
) -> tuple[Any, Any]:
  """The program's results in a recording and in its replay, which calls nothing and is whole."""
  before = source.count
  with cg.record(path) as recording:
    first = jax.device_get(program(*args))
  called = source.count - before
  assert recording.count == called > 0
  with cg.replay(path, **options) as replay:
    second = jax.device_get(program(*args))
  assert source.count == before + called
  assert (replay.answered, replay.called, replay.left) == (called, 0, 0)
  return first, second


def programs(gate: Any) -> dict[str, Any]:
  """Programs of one vector, in which the gate is called."""
  step = lambda c, x: (gate(c) * 0.5, c + x)
  return {
    "jit": jax.jit(gate),
    "eager": gate,
    "scan": jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(3.0))),
    "cond": jax.jit(lambda x: jax.lax.cond(x[0] > 0, gate, lambda y: -y, x)),
    "vmap": jax.jit(lambda x: jax.vmap(gate)(jnp.stack([x, x, 2 * x]))),
    "vmap of scan": jax.jit(
      lambda x: jax.vmap(lambda x: jax.lax.scan(step, x, jnp.arange(2.0)))(jnp.stack([x, x]))
    ),
    "while": jax.jit(
      lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, gate(c[1])), (0, x))
    ),
    "two lines": jax.jit(lambda x: gate(x) - 2 * gate(x)),
  }


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_programs_are_answered_as_they_were(tmp_path: Path, engine: str, effect: str) -> None:
  source = Source()
  gate = gate_of(source, effect=effect)
  for number, (name, program) in enumerate(programs(gate).items()):
    if engine == "jax" and effect == "ordered" and "vmap" in name:
      continue  # JAX refuses that
    x = jnp.array([1.0, 2.0]) + number  # new operands: a pure call is not the last program's
    first, second = recorded_and_replayed(tmp_path / f"{name}.cgr", program, x, source=source)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("effect", ["io", "pure"])
@pytest.mark.parametrize("chains", groups(6, 14, pairs=EFFECT_PAIRS))
def test_transformations_in_composition(
  tmp_path: Path, engine: str, chains: Any, effect: Any
) -> None:
  """Pairs of the table: a replay gives what the recording gave, and calls nothing."""
  calls: list[int] = []

  def counted(x: Any) -> Any:
    calls.append(1)
    return on_host(x)

  gate = cg.gate(counted, like=reference, effect=effect)
  refused = ("vmap", "vmap of axis 1", "while with lanes apart", "checkpoint")
  if engine == "jax" and effect == "io":  # JAX refuses its io_callback in some of these
    chains = [pair for pair in chains if not set(pair) & set(refused)]
  x = jnp.array([0.4, -0.7, 1.1])
  program = jax.jit(lambda x: [build(chain, gate)(x) for chain in chains])
  with cg.record(tmp_path / "pairs.cgr") as recording:
    first = jax.device_get(program(x))
  count = len(calls)
  with cg.replay(tmp_path / "pairs.cgr") as replay:
    second = jax.device_get(program(x))
  assert len(calls) == count == recording.count == replay.answered > len(chains) // 2
  for chain, one, other in zip(chains, first, second, strict=True):
    np.testing.assert_array_equal(one, other, err_msg=str(chain))


def test_rules_of_derivatives_whose_functions_are_gates(tmp_path: Path) -> None:
  source = Source()
  slope = gate_of(source, effect="pure")
  gate = gate_of(source, effect="pure")
  gate.defjvp(lambda primals, tangents: (gate(*primals), slope(primals[0]) * tangents[0]))
  program = jax.jit(jax.value_and_grad(lambda x: gate(x).sum()))
  first, second = recorded_and_replayed(tmp_path / "g.cgr", program, jnp.ones(3), source=source)
  jax.tree.map(np.testing.assert_array_equal, first, second)


def test_styles_batching_and_dtypes(tmp_path: Path) -> None:
  """In place, aliased, whole batches, pytrees, empty and packed arrays, static keywords."""
  source = Source()

  def inplace(out: Any, x: Any) -> None:
    out[...] = source(x)

  def add(out: Any, x: Any) -> None:
    out += source(np.zeros_like(x))

  def tree(x: Any, *, scale: float) -> Any:
    return {"a": source(x["a"]) * scale, "b": (x["b"].astype(np.int32), np.zeros((0, 2), bool))}

  def packed(x: Any) -> Any:
    source(0)
    return x.copy()

  out = lambda x, scale: {
    "a": x["a"],
    "b": (jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((0, 2), jnp.bool_)),
  }
  half = jnp.arange(3, dtype=jnp.bfloat16)
  aliased = gate_of(add, style="inplace", aliases={0: 0})
  gates = [
    (gate_of(inplace, style="inplace"), (jnp.ones(2),), {}),
    (aliased, (jnp.ones(2),), {}),
    (jax.vmap(gate_of(source, vmap="whole")), (jnp.ones((3, 2)),), {}),
    (jax.vmap(aliased), (jnp.ones((3, 2)),), {}),
    (cg.gate(tree, out=out), ({"a": jnp.ones(()), "b": half[:2]},), {"scale": 2.0}),
    (cg.gate(packed, out=lambda x: x), (half,), {}),
    (gate_of(lambda x: source(x.real) + 0j, out=lambda x: x), (jnp.ones(2, jnp.complex64),), {}),
  ]
  for number, (gate, args, static) in enumerate(gates):
    path = tmp_path / f"{number}.cgr"
    run = jax.jit(lambda *args, gate=gate, static=static: gate(*args, **static))
    first, second = recorded_and_replayed(path, run, *args, source=source)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_each_device_has_its_own_answers(tmp_path: Path, engine: str) -> None:
  """Programs are partitioned automatically and by shard_map; devices run in any order."""
  devices = len(jax.devices())
  mesh = jax.make_mesh((devices,), ("d",))
  rows = NamedSharding(mesh, PartitionSpec("d"))
  source = Source()
  x = jnp.zeros((devices, 2))  # the same operands everywhere
  if engine == "jax":  # whose callbacks don't know the device
    x += jnp.arange(devices)[:, None]
  x = jax.device_put(x, rows)
  gate = gate_of(source, sharding="shard")
  mapped = jax.shard_map(gate, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
  for name, program in {"auto": jax.jit(gate), "map": jax.jit(mapped)}.items():
    first, second = recorded_and_replayed(tmp_path / f"{name}.cgr", program, x, source=source)
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first[:, 0])) == devices


def test_threads_share_a_recording(tmp_path: Path) -> None:
  source = Source()
  program = jax.jit(gate_of(source))
  xs = [jnp.full(2, float(i)) for i in range(16)]

  def run(_: Any) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      return list(pool.map(lambda x: np.asarray(program(x)), xs))

  first, second = recorded_and_replayed(tmp_path / "t.cgr", run, None, source=source)
  np.testing.assert_array_equal(first, second)


def test_feeds_give_their_items_and_their_end(tmp_path: Path, engine: str) -> None:
  path = tmp_path / "feed.cgr"

  def read(items: Any, block: Any) -> list[Any]:
    with cg.feed(items, shape=SCALAR, name=f"replay.items.{engine}") as feed:
      taken = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=3)[1])
      with block:
        found = [*map(float, taken()), float(next(feed))]
        with pytest.raises(cg.EndOfFeed, match="ended after 4"), cg.errors():
          jax.block_until_ready(taken())
        assert list(feed) == []
    registry.rename(registry.get(feed.name), registry.free_name("replay.old"))  # errors keep it
    return found

  def gone() -> Any:
    raise ConnectionError("no data")
    yield

  recording = cg.record(path)
  assert read((np.float32(i) for i in range(4)), recording) == [0, 1, 2, 3]
  assert recording.count == 6
  replay = cg.replay(path)
  assert read(gone(), replay) == [0, 1, 2, 3]
  assert (replay.answered, replay.left) == (6, 0)


def test_objects_of_the_host_are_not_made_and_their_users_are_answered(
  tmp_path: Path, engine: str
) -> None:
  made: list[Any] = []

  def make(x: Any) -> Any:
    made.append(float(x))
    return {"scale": float(x)}

  hold = cg.hold(make, name=f"replay.hold.{engine}")

  @jax.jit
  def program(x: Any) -> Any:
    def step(c: Any, x: Any) -> Any:
      handle = hold(x)
      return c, cg.use(lambda h, x: np.float32(h["scale"] + x), handle, c, out=SCALAR)

    kept = hold(x)
    ys = jax.lax.scan(step, x, jnp.arange(3.0))[1]
    return ys.sum() + cg.use(lambda h: np.float32(h["scale"]), kept, out=SCALAR)

  path = tmp_path / "hold.cgr"
  with cg.record(path) as recording:
    first = program(5.0)
  count = len(made)
  assert (count, recording.count) == (4, 8)
  assert not tape.objects
  with cg.replay(path) as replay:
    assert program(5.0) == first
  assert (len(made), replay.left) == (count, 0)
  use = lambda x: cg.use(lambda h: np.float32(h["scale"] * 2), hold(x), out=SCALAR)
  missing = pytest.raises(cg.ReplayError, match="doesn't create")
  with cg.replay(path, partial=True), missing, cg.errors():
    jax.block_until_ready(jax.jit(use)(0.0))


def test_started_calls_are_not_started(tmp_path: Path) -> None:
  source = Source()
  gate = gate_of(source, name="replay.started")

  async def later(x: Any) -> Any:
    return source(x)

  slow = gate_of(later, name="replay.async")

  def program(xs: Any) -> Any:
    tickets = [gate.start(xs[0]), gate.start(xs[1]), slow.start(xs[2])]
    return [ticket.result() for ticket in reversed(tickets)]

  path = tmp_path / "s.cgr"
  run = jax.jit(program)
  with cg.record(path):
    first = jax.device_get(run(jnp.zeros((3, 2))))
  with cg.replay(path) as replay:
    second = jax.device_get(run(jnp.zeros((3, 2))))
  assert source.count == 3
  assert replay.left == 0
  jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_local_function_is_answered_when_its_model_is_traced_again(tmp_path: Path) -> None:
  asked: list[float] = []

  def model(x: Any, by: float = 2) -> Any:
    def ask(x: Any) -> Any:
      asked.append(float(x))
      return x * by

    return cg.call(ask, x, x, effect="io")

  with cg.record(tmp_path / "model.cgr"):
    assert jax.jit(lambda x: model(x))(3.0) == 6
  with cg.replay(tmp_path / "model.cgr"):
    assert jax.jit(lambda x: model(x, 5))(3.0) == 6  # the recording's
    with pytest.raises(cg.ReplayError, match="only the 1 recorded calls"), cg.errors():
      jax.jit(lambda x: model(x, 7))(3.0)
  assert asked == [3]


def test_executors_and_workers_are_not_needed(tmp_path: Path) -> None:
  pytest.importorskip("cloudpickle")
  with concurrent.futures.ThreadPoolExecutor(2) as pool, cg.workers(1) as workers:
    places: dict[str, Any] = {"executor": pool, "workers": workers}
    for name, place in places.items():
      make = lambda place, name=name: cg.gate(
        _far, out=lambda x: x, run_on=place, effect="io", name=f"replay.{name}"
      )
      path, x = tmp_path / f"{name}.cgr", jnp.arange(6.0).reshape(3, 2)
      with cg.record(path) as recording:
        first = jax.device_get(jax.jit(jax.vmap(make(place)))(x))
      assert recording.count == 3
      gone: Any = cg.workers(1) if name == "workers" else concurrent.futures.ThreadPoolExecutor(1)
      if name == "executor":
        gone.shutdown()
      program = jax.jit(jax.vmap(make(gone)))
      with cg.replay(path) as replay:
        np.testing.assert_array_equal(program(x), first)
      assert replay.left == 0
      if name == "workers":
        assert gone.pids == []
        assert (program(x) != first).any()  # outside of the block the worker starts
        # Two lanes of the recording, one of another call: it alone is made.
        with cg.replay(path, partial=True) as replay:
          np.testing.assert_array_equal(program(x.at[1].add(1))[0], first[0])
        assert (replay.answered, replay.called) == (2, 1)
        gone.close()


def _far(x: Any) -> Any:
  return np.random.default_rng().random(x.shape).astype(np.float32) + x
