# SPDX-License-Identifier: Apache-2.0
"""Lanes that run one after the other have the numbers that they would have side by side."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

Flow = Callable[[Callable[[Any], Any], Any], Any]
lax = jax.lax
_keep = lambda x: x

# Control flow in which lanes of values above 2 alone call the function.
FLOWS: dict[str, Flow] = {
  "cond": lambda f, x: lax.cond(x > 2, f, _keep, x),
  "switch": lambda f, x: lax.switch((x > 2).astype(int), [_keep, f], x),
  "while": lambda f, x: lax.while_loop(
    lambda c: (c[0] < 1) & (c[1] > 2), lambda c: (c[0] + 1, f(c[1])), (0, x)
  )[1],
  "scan in cond": lambda f, x: lax.cond(
    x > 2, lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0], _keep, x
  ),
  "while in cond": lambda f, x: lax.cond(
    x > 2,
    lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    _keep, x,
  ),
  "cond in cond": lambda f, x: lax.cond(
    x > 1, lambda x: lax.cond(x > 2, f, _keep, x), _keep, x
  ),
  "cond in scan": lambda f, x: lax.scan(
    lambda c, _: (lax.cond(c > 2, f, _keep, c), None), x, length=1
  )[0],
  "jit in cond": lambda f, x: lax.cond(x > 2, jax.jit(f), _keep, x),
  "checkpoint in cond": lambda f, x: lax.cond(x > 2, jax.checkpoint(f), _keep, x),
  "custom_jvp in cond": lambda f, x: lax.cond(x > 2, _with_jvp(f), _keep, x),
  "custom_vjp in cond": lambda f, x: lax.cond(x > 2, _with_vjp(f), _keep, x),
}  # fmt: skip
# A vmap, the lanes' values and, of each lane that calls, its index.
VMAPS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
  "one": (jax.vmap, np.arange(5, dtype=np.float32)),
  "two": (lambda f: jax.vmap(jax.vmap(f)), np.arange(6, dtype=np.float32).reshape(2, 3)),
  "inner axis last": (
    lambda f: jax.vmap(jax.vmap(f), in_axes=1, out_axes=1),
    np.arange(6, dtype=np.float32).reshape(3, 2).T,
  ),
}


def _with_jvp(f: Any) -> Any:
  ruled = jax.custom_jvp(f)
  ruled.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
  return ruled


def _with_vjp(f: Any) -> Any:
  ruled = jax.custom_vjp(f)
  ruled.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
  return ruled


def _indices(of: str, values: np.ndarray) -> dict[float, tuple[int, ...]]:
  """The index of each lane, outermost level first, by its value."""
  lanes = values.T if of == "inner axis last" else values
  return {float(lanes[index]): index for index in np.ndindex(lanes.shape)}


def _named(index: tuple[int, ...]) -> str:
  return f"in lane {index[0] if len(index) == 1 else index}"


def _notes(error: BaseException) -> str:
  return "\n".join(getattr(error, "__notes__", ()))


def _fails_at(value: float, **options: Any) -> Any:
  def fail(x: Any) -> Any:
    if x == value:
      raise ValueError("this lane")
    return x

  return cg.gate(fail, like=_keep, effect="io", **options)


def _error_of(function: Any, *args: Any) -> Exception:
  with pytest.raises(Exception) as caught, cg.errors():
    jax.block_until_ready(function(*args))
  return caught.value


# Each control flow under two vmaps, and one of them under each.
PAIRS = [*((flow, "two") for flow in FLOWS), ("cond", "one"), ("cond", "inner axis last")]


@pytest.mark.parametrize(("flow", "vmap"), PAIRS)
def test_an_error_names_the_lane(flow: str, vmap: str) -> None:
  mapped, values = VMAPS[vmap]
  for value, index in _indices(vmap, values).items():
    if value != 4:
      continue
    gate = _fails_at(value)
    program = jax.jit(mapped(lambda x, gate=gate: FLOWS[flow](gate, x)))
    for _ in range(2):  # the second call is JAX's C++ dispatch
      assert _named(index) in _notes(_error_of(program, values))


@pytest.mark.parametrize(("flow", "vmap"), PAIRS)
def test_a_check_names_the_lane(flow: str, vmap: str) -> None:
  mapped, values = VMAPS[vmap]

  def checked(x: Any) -> Any:
    cg.check(x != 4, "not {x}", x=x)
    return x

  error = _error_of(jax.jit(mapped(lambda x: FLOWS[flow](checked, x))), values)
  assert isinstance(error, cg.CheckError)
  assert _named(_indices(vmap, values)[4]) in _notes(error)


@pytest.mark.parametrize("vmap", VMAPS)
def test_a_tap_knows_its_lane(vmap: str, engine: str) -> None:
  _check_taps([flow for flow, of in PAIRS if of == vmap], vmap, "io")


@pytest.mark.parametrize("effect", ["ordered", "dataflow"])
def test_a_tap_of_another_effect_knows_its_lane(effect: str) -> None:
  _check_taps(["cond", "while", "scan in cond"], "two", effect)


def _check_taps(flows: list[str], vmap: str, effect: str) -> None:
  """In one program, which compiles faster than one for each flow."""
  mapped, values = VMAPS[vmap]
  came: dict[str, dict[float, tuple[int, ...]]] = {flow: {} for flow in flows}
  options: dict[str, Any] = {"ordered": True} if effect == "ordered" else {"effect": effect}

  def tapped(flow: str) -> Any:
    keep = lambda value, info: came[flow].update({float(value): info.lane})
    return mapped(lambda x: FLOWS[flow](lambda x: cg.tap(x, keep, **options), x))

  jax.block_until_ready(jax.jit(lambda x: [tapped(flow)(x) for flow in flows])(values))
  cg.barrier()
  wanted = {v: index for v, index in _indices(vmap, values).items() if v > 2}
  assert came == dict.fromkeys(flows, wanted)


def _sides(x: Any) -> Any:
  """Calls of a whole vmap's in a branch, and of a branch in a vmap's."""
  return jnp.stack([x, x + 10])


@pytest.mark.parametrize("outer", [False, True])
def test_levels_of_both_kinds(outer: bool, engine: str) -> None:
  came: dict[float, tuple[int, ...]] = {}
  tap = lambda x: cg.tap(x, lambda value, info: came.update({float(value): info.lane}))
  gate = _fails_at(13.0)
  if outer:  # the branch depends on the inner lane alone, so that the outer ones call at once
    one = lambda f, p, x: lax.cond(p > 1, f, _keep, x)
    mapped = lambda f: jax.vmap(jax.vmap(functools.partial(one, f)), in_axes=(None, 0))
    args = np.arange(4.0, dtype=np.float32), np.stack([np.arange(4.0), np.arange(4.0) + 10])
    want = {2.0: (0, 2), 3.0: (0, 3), 12.0: (1, 2), 13.0: (1, 3)}
  else:
    one = lambda f, x: lax.cond(x > 1, lambda x: jax.vmap(f)(_sides(x)).sum(), _keep, x)
    mapped = lambda f: jax.vmap(functools.partial(one, f))
    args = (np.arange(4.0, dtype=np.float32),)
    want = {2.0: (2, 0), 12.0: (2, 1), 3.0: (3, 0), 13.0: (3, 1)}
  jax.block_until_ready(jax.jit(mapped(tap))(*args))
  cg.barrier()
  assert came == want
  if engine == "callgate":  # JAX's own callbacks with effects are in no branch under vmap
    assert _named(want[13.0]) in _notes(_error_of(jax.jit(mapped(gate)), *args))


def test_masked_calls_know_their_lanes() -> None:
  came: dict[float, tuple[int, ...]] = {}
  gate = _fails_at(3.0)

  def call(x: Any) -> Any:
    x = cg.tap(x, lambda value, info: came.update({float(value): info.lane}))
    return gate(x) + lax.psum(x, "i")

  one = lambda x: lax.cond(x > 1, lambda x: jax.vmap(call)(_sides(x)).sum(), _keep, x)
  error = _error_of(jax.jit(jax.vmap(one, axis_name="i")), np.arange(4.0, dtype=np.float32))
  cg.barrier()
  assert _named((3, 0)) in _notes(error)
  assert came == {2.0: (2, 0), 12.0: (2, 1), 3.0: (3, 0), 13.0: (3, 1)}


@pytest.mark.parametrize("where", [False, True])
def test_streams_and_lines_have_the_lanes(tmp_path: pathlib.Path, where: bool) -> None:
  stream, lines = str(tmp_path / "run.cgs"), tmp_path / "run.jsonl"
  options: dict[str, Any] = {"where": True} if where else {}
  with cg.channel("numbers") as channel:
    channel.add(cg.sinks.Stream(stream))
    channel.add(cg.sinks.JSONL(lines))

    def one(p: Any, x: Any) -> Any:
      send = lambda x: cg.tap({"x": x}, channel, name="n", **options)["x"]
      return lax.cond(p > 1, lambda x: jax.vmap(send)(_sides(x)).sum(), _keep, x)

    program = jax.vmap(jax.vmap(one, in_axes=(0, 0)), in_axes=(None, 0))
    xs = np.stack([np.arange(4.0), np.arange(4.0) + 100]).astype(np.float32)
    jax.block_until_ready(jax.jit(program)(np.arange(4.0), xs))
  want = {float(xs[i, j] + 10 * k): (i, j, k) for i in range(2) for j in (2, 3) for k in range(2)}
  written = [json.loads(line) for line in lines.read_text().splitlines()]
  assert {line["value"]["x"]: tuple(line["lane"]) for line in written} == want
  with cg.open_stream(stream) as records:
    read = {float(one.leaves["['x']"]): one.lane for one in records}
  assert read == {v: int(np.ravel_multi_index(i, (2, 4, 2))) for v, i in want.items()}


def test_each_sharded_lane_knows_its_number() -> None:
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  xs = jax.device_put(
    np.arange(8, dtype=np.float32),
    jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")),
  )
  came: dict[float, tuple[int, ...]] = {}
  gate = _fails_at(6.0)
  call = lambda x: gate(cg.tap(x, lambda value, info: came.update({float(value): info.lane})))
  error = _error_of(jax.jit(jax.vmap(lambda x: lax.cond(x > 2, call, _keep, x))), xs)
  cg.barrier()
  assert _named((6,)) in _notes(error)
  assert came == {float(n): (n,) for n in range(3, 8)}


class Counter:
  """Counts the calls of its own, and says on which thread and for which lane it was made."""

  def __init__(self) -> None:
    self.calls = 0

  def __call__(self, x: np.ndarray) -> np.ndarray:
    self.calls += 1
    return np.float32(self.calls) + 0 * x


@pytest.fixture(scope="module")
def two() -> Iterator[cg.Workers]:
  with cg.workers(2) as workers:
    yield workers


@pytest.mark.parametrize("flow", ["cond", "while", "jit in cond", "inner vmap", "outer vmap"])
def test_lanes_have_objects_of_their_own(two: cg.Workers, flow: str, engine: str) -> None:
  gate = cg.gate(Counter, out={"__call__": lambda x: x}, effect="io", run_on=two, affinity="lane")
  values = np.arange(6, dtype=np.float32)
  if flow == "inner vmap":
    one = lambda x: lax.cond(x > 2, lambda x: jax.vmap(gate)(_sides(x)).sum() / 2, _keep, x)
    program = jax.vmap(one)
  elif flow == "outer vmap":
    one = lambda p, x: lax.cond(p > 2, gate, _keep, x)
    each = jax.vmap(jax.vmap(one), in_axes=(None, 0))
    program = lambda x: each(x, jnp.stack([x, x])).mean(axis=0)
  else:
    program = jax.vmap(lambda x: FLOWS[flow](gate, x))
  program = jax.jit(program)
  for turn in range(1, 4):
    np.testing.assert_array_equal(program(values), np.where(values > 2, turn, values))


def test_workers_and_executors_name_the_lane(two: cg.Workers) -> None:
  with concurrent.futures.ThreadPoolExecutor(2) as executor:
    for place in (two, executor):
      gate = _fails_at(4.0, run_on=place)
      one = lambda x, gate=gate: lax.cond(
        x > 2, lambda x: jax.vmap(gate)(_sides(x)).sum(), _keep, x
      )
      error = _error_of(jax.jit(jax.vmap(one)), np.arange(6, dtype=np.float32))
      assert _named((4, 0)) in _notes(error)


def test_recordings_have_the_lanes(tmp_path: pathlib.Path) -> None:
  lock, ran = threading.Lock(), [0]

  @cg.gate(like=_keep, effect="io")
  def draw(x: Any) -> Any:
    with lock:
      ran[0] += 1
      return np.float32(ran[0])

  values = np.arange(6, dtype=np.float32)
  program = jax.jit(jax.vmap(lambda x: lax.cond(x > 2, draw, _keep, x)))
  with cg.record(tmp_path / "run"):
    first = program(values)
  with cg.open_stream(str(tmp_path / "run")) as recorded:
    lanes = [int(call.leaves["at"][0]) for call in recorded if "at" in call.leaves]
  assert sorted(lanes) == [3, 4, 5]
  with cg.replay(tmp_path / "run"):
    np.testing.assert_array_equal(program(values), first)
  assert ran == [3]


def test_lanes_that_end_within_a_byte_have_numbers() -> None:
  def fail(x: Any) -> Any:
    if int(x.unpack()) == 2:
      raise ValueError("this lane")
    return np.zeros((), np.int8)

  gate = cg.gate(fail, out=jax.ShapeDtypeStruct((), "int8"), arrays="buffer", effect="io")
  values = jnp.arange(4).astype(jnp.int4)
  assert _named((2,)) in _notes(_error_of(jax.jit(jax.vmap(gate)), values))


@pytest.mark.parametrize("flow", FLOWS)
def test_derivatives_are_those_of_the_reference(flow: str) -> None:
  gate = cg.gate(lambda x: np.square(x), like=lambda x: x * x, effect="io")
  value = lambda f: lambda x: jax.vmap(lambda x: FLOWS[flow](f, x))(x).sum()
  xs = np.arange(1, 6, dtype=np.float32)
  ours, reference = value(gate), value(lambda x: x * x)
  forward = lambda f: lambda x: jax.jvp(f, (x,), (x + 1,))[1]
  reverse = jax.grad, lambda f: jax.vmap(jax.grad(lambda x: f(x[None])))
  # JAX has no reverse mode of while_loop, and no forward mode of custom_vjp.
  ways = (*(() if "vjp" in flow else (forward,)), *(() if "while" in flow else reverse))
  found, want = jax.jit(lambda x: [[of(f)(x) for of in ways] for f in (ours, reference)])(xs)
  for a, b in zip(found, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_lines_of_two_calls_of_a_gate_with_rules() -> None:
  gate = _fails_at(1.0)

  def first(x: Any) -> Any:
    return gate(x)

  def second(x: Any) -> Any:
    return gate(x) + 1

  for function in (first, second):
    for program in (jax.jit(function), jax.jit(jax.grad(function))):
      notes = _notes(_error_of(program, 1.0))
      assert f"line {function.__code__.co_firstlineno + 1}, in " in notes
      assert function.__name__ in notes
