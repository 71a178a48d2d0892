# SPDX-License-Identifier: Apache-2.0
"""Branches and loops that hold a collective, a Ref or a bar beside calls, lane by lane."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

Note = Callable[[int, Any], Any]  # of a case's number and a value, which it returns
Collective = Callable[[Any], Any]
LANES = np.arange(4, dtype=np.float32)
lax = jax.lax
_lock = threading.Lock()
_noted: list[tuple[int, float]] = []


def _keep(case: Any, value: Any) -> None:
  with _lock:
    _noted.append((int(case), float(value)))


def _kept(case: Any, value: Any) -> Any:
  _keep(case, value)
  return value


def _tap(**options: Any) -> Note:
  return lambda case, x: cg.tap((np.int32(case), x), lambda pair: _keep(*pair), **options)[1]


def _gate(effect: Any) -> Note:
  gate = cg.gate(_kept, out=lambda case, x: x, effect=effect)
  gate.defjvp(lambda primals, tangents: (gate(*primals), tangents[1]))
  return lambda case, x: gate(np.int32(case), x)


def _check(case: int, x: Any) -> Any:
  """Holds in the lanes that are to take it alone."""
  cg.check(x > 1, "a lane that does not take the branch")
  return _tap()(case, x)


def _plain(case: int, x: Any) -> Any:
  """JAX's own, which computes for all lanes."""
  jax.debug.callback(lambda value: None, x)
  return x


NOTES: dict[str, Note] = {
  "tap": _tap(), "ordered tap": _tap(ordered=True), "dataflow tap": _tap(effect="dataflow"),
  "check": _check, "io": _gate("io"), "ordered": _gate("ordered"),
}  # fmt: skip
COLLECTIVES: dict[str, Collective] = {
  "psum": lambda x: lax.psum(x, "i"),
  "axis_index": lambda x: x * lax.axis_index("i"),
  "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 3), (3, 0)]),
}


def _custom(note: Callable[[Any], Any], collective: Collective) -> Any:
  f = jax.custom_jvp(lambda x: note(x) + collective(x))
  f.defjvp(lambda x, t: (note(x[0]) + collective(x[0]), 3 * collective(t[0])))
  return f


def _custom_vjp(note: Callable[[Any], Any], collective: Collective) -> Any:
  f = jax.custom_vjp(lambda x: note(x) + collective(x))
  f.defvjp(lambda x: (note(x) + collective(x), x), lambda _, t: (3 * collective(t),))
  return f


def _cases(note: Note, collective: Collective) -> list[tuple[Any, list[float]]]:
  """Programs of a lane with its value in 0, 1, 2, 3, and what they note."""

  def numbered(case: int) -> Callable[[Any], Any]:
    return lambda x: note(case, x)

  def branch(case: int) -> Callable[[Any], Any]:
    return lambda x: note(case, x) + collective(x)

  def taken(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.cond(x > 1, f, lambda x: x, x)

  def loop(x: Any) -> Any:
    return lax.scan(lambda s, i: (s + collective(s), note(10, x + 10 * i)), x, np.arange(2.0))[0]

  counted = lambda n: lax.while_loop(
    lambda s: s[0] < n, lambda s: (s[0] + 1, note(5, s[1] + 4) + collective(s[0])), (0.0, n)
  )
  return [
    (taken(branch(0)), [2, 3]),
    (lambda x: lax.cond(x > 1, branch(1), lambda x: note(1, x + 10), x), [2, 3, 10, 11]),
    (
      lambda x: lax.switch(
        jnp.int32(x), [lambda x: x, lambda x: note(2, x + 4), branch(2), lambda x: -x], x
      ),
      [2, 5],
    ),
    (taken(lambda x: lax.cond(x > 2, branch(3), lambda x: note(3, x + 10), x)), [3, 12]),
    (taken(jax.jit(jax.checkpoint(branch(4)))), [2, 3]),
    (counted, []),  # of which JAX says the values
    (taken(_custom(numbered(6), collective)), [2, 3]),
    (taken(_custom_vjp(numbered(7), collective)), [2, 3]),
    (taken(jax.grad(lambda x: note(8, x) + 3 * collective(x))), [2, 3]),
    (jax.grad(taken(_custom(numbered(9), collective))), [2, 3]),
    (taken(loop), [2, 3, 12, 13]),
  ]


@pytest.fixture
def noted() -> Iterator[list[tuple[int, float]]]:
  _noted.clear()
  yield _noted
  cg.barrier()


def _of_case(noted: list[tuple[int, float]], case: int) -> list[float]:
  return sorted(value for number, value in noted if number == case)


@pytest.mark.parametrize(
  ("name", "over"), [*(("tap", over) for over in COLLECTIVES), ("io", "psum")]
)
def test_a_branch_with_a_collective_computes_for_all_lanes_and_calls_for_those_that_take_it(
  name: str, over: str, noted: list[tuple[int, float]]
) -> None:
  def program(note: Note) -> Any:
    lanes = [f for f, _ in _cases(note, COLLECTIVES[over])]
    return jax.jit(jax.vmap(lambda x: [f(x) for f in lanes], axis_name="i"))

  expected = program(_plain)(LANES)
  got = program(NOTES[name])(LANES)
  cg.barrier()
  for case, (_, calls) in enumerate(_cases(_plain, COLLECTIVES[over])):
    np.testing.assert_allclose(got[case], expected[case])
    if calls:
      assert _of_case(noted, case) == calls, case
  if over == "axis_index":
    assert _of_case(noted, 5) == [5, 6, 7, 10, 11, 18]


@pytest.mark.parametrize("name", ["tap", "io", "ordered"])
def test_in_a_while_loop_with_a_collective_a_lane_that_has_ended_calls_no_more(
  name: str, noted: list[tuple[int, float]]
) -> None:
  note = NOTES[name]

  def lane(n: Any) -> Any:
    def going_on(state: Any) -> Any:
      return (note(0, state[0]) < n) & (lax.psum(state[0], "i") < 100)

    return lax.while_loop(going_on, lambda s: (s[0] + 1, note(1, s[1] + 1)), (0.0, 10 * n))

  steps, values = jax.jit(jax.vmap(lane, axis_name="i"))(LANES[:3])
  cg.barrier()
  assert steps.tolist() == [0, 1, 2]
  assert values.tolist() == [0, 11, 22]
  assert _of_case(noted, 0) == [0, 0, 0, 1, 1, 2]
  assert _of_case(noted, 1) == [11, 21, 22]


@pytest.mark.parametrize("waits", ["bar", "psum"])
@pytest.mark.parametrize("inner", ["alone", "in a scan", "in a branch"])
@pytest.mark.parametrize("name", ["tap", "io"])
def test_lanes_of_lanes_end_their_loops_by_themselves(
  name: str, inner: str, waits: str, noted: list[tuple[int, float]]
) -> None:
  def calls(x: Any) -> Any:
    if inner == "in a scan":
      return lax.scan(lambda _, each: (None, NOTES[name](0, each)), None, x)[1]
    within = lambda x: x.at[0].set(NOTES[name](0, x[0]))
    return within(x) if inner == "alone" else lax.cond(x[0] > 0, within, lambda x: x, x)

  def lane(n: Any, x: Any) -> Any:
    def step(state: Any) -> Any:
      i, x = state
      return i + 1, calls(x) + 1 + (0 * lax.psum(x, "i") if waits == "psum" else 0)

    bar = cg.Progress("bar", file=io.StringIO()) if waits == "bar" else None
    return cg.while_loop(lambda state: state[0] < n, step, (0, x), progress=bar)[1]

  counts = np.array([[1, 3], [2, 0]])
  first = np.arange(1.0, 13, dtype=np.float32).reshape(2, 2, 3)
  lanes = jax.jit(jax.vmap(jax.vmap(lane, axis_name="i")))
  np.testing.assert_array_equal(lanes(counts, first), first + counts[..., None])
  cg.barrier()
  seen = first if inner == "in a scan" else first[..., :1]
  right = [x + i for n, xs in zip(counts.flat, seen.reshape(4, -1), strict=True)
           for i in range(n) for x in xs]  # fmt: skip
  assert _of_case(noted, 0) == sorted(right)


@pytest.mark.parametrize("name", ["tap", "io", "ordered", "check"])
def test_a_collective_of_a_loops_predicate_sees_what_ended_lanes_keep(
  name: str, noted: list[tuple[int, float]]
) -> None:
  def results(note: Note) -> list[float]:
    def lane(x: Any) -> Any:
      def going_on(s: Any) -> Any:
        return (lax.psum(s, "i") < 30) & (s < 7)

      return lax.while_loop(going_on, lambda s: note(0, s) + 1, x)

    return jax.jit(jax.vmap(lane, axis_name="i"))(np.arange(2, 8, dtype=np.float32)).tolist()

  expected = results(_plain)
  assert results(NOTES[name]) == expected
  cg.barrier()
  seen = [x for lane, end in enumerate(expected) for x in np.arange(2 + lane, end).tolist()]
  assert sorted(_of_case(noted, 0)) == sorted(seen)


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.limit(60)
def test_devices_meet_in_the_collective_of_a_branch_that_some_lanes_take(
  name: str, kind: str, noted: list[tuple[int, float]]
) -> None:
  mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
  spec = jax.sharding.PartitionSpec("d")

  def lane(x: Any, note: Note) -> Any:
    return lax.cond(x > 1, lambda x: note(0, x) + lax.psum(x, "d"), lambda x: x, x)

  def program(note: Note) -> Any:
    lanes = jax.vmap(lambda x: lane(x, note))
    return jax.jit(jax.shard_map(lanes, mesh=mesh, in_specs=spec, out_specs=spec))

  x = jax.device_put(LANES, jax.NamedSharding(mesh, spec))
  np.testing.assert_array_equal(program(NOTES[name])(x), program(_plain)(x))
  cg.barrier()
  assert _of_case(noted, 0) == [2, 3]


@pytest.mark.parametrize("name", ["tap", "io"])
def test_refs_of_lanes_are_changed_where_the_lane_takes_the_branch_or_goes_on(
  name: str, noted: list[tuple[int, float]]
) -> None:
  note = NOTES[name]

  def in_loop(n: Any) -> Any:
    ref = jax.new_ref(jnp.float32(0))

    def body(i: Any) -> Any:
      ref[...] += note(0, i + 1)
      return i + 1

    lax.while_loop(lambda i: i < n, body, 0.0)
    return ref[...]

  def in_branch(n: Any) -> Any:
    ref = jax.new_ref(n)

    def swap(_: Any) -> None:
      ref[...] = note(1, ref[...] * 2)
      ref.addupdate(1.0)

    lax.cond(n > 1, swap, lambda _: None, n)
    return ref[...]

  sums, values = jax.jit(jax.vmap(lambda n: (in_loop(n), in_branch(n))))(LANES)
  cg.barrier()
  assert sums.tolist() == [0, 1, 3, 6]
  assert values.tolist() == [0, 1, 5, 7]
  assert _of_case(noted, 0) == [1, 1, 1, 2, 2, 3]
  assert _of_case(noted, 1) == [4, 6]


@pytest.mark.parametrize("name", ["tap", "io", "ordered"])
def test_lanes_that_are_split_over_an_explicit_mesh_take_branches_of_their_own(
  name: str, noted: list[tuple[int, float]]
) -> None:
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
  note, along = NOTES[name], jax.P("d")

  def lane(x: Any) -> Any:
    count = lax.while_loop(lambda i: i < x, lambda i: note(1, i + 1), 0.0 * x)
    return count + lax.cond(x > 1, lambda x: note(0, x) * 2, lambda x: x, x)

  with jax.set_mesh(mesh):
    x = jax.device_put(LANES, jax.NamedSharding(mesh, along))
    result = jax.jit(jax.vmap(lane))(x)
  cg.barrier()
  assert result.tolist() == [0, 2, 6, 9]
  assert result.sharding.spec == along
  assert _of_case(noted, 0) == [2, 3]
  assert _of_case(noted, 1) == [1, 1, 1, 2, 2, 3]


def test_a_call_and_a_collective_in_an_equation_that_cannot_be_masked_are_refused() -> None:
  def solve(_: Any, b: Any) -> Any:
    return cg.tap(b, print) / lax.psum(1.0 + b, "i")

  def lane(x: Any) -> Any:
    solved = lambda x: lax.custom_linear_solve(lambda y: 2 * y, x, solve, symmetric=True)
    return lax.cond(x > 1, solved, lambda x: x, x)

  with pytest.raises(cg.GateDefinitionError, match="custom_linear_solve holds both"):
    jax.jit(jax.vmap(lane, axis_name="i"))(LANES)
