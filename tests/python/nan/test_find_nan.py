# SPDX-License-Identifier: Apache-2.0
"""The first equation that makes a NaN or an infinity: which, where, in which step and lane."""

from __future__ import annotations

import inspect
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformation_table import PAIRS, TRANSFORMATIONS, X, build

import callgate as cg


def line_of(text: str) -> int:
  """The line of this file that has the text in a comment."""
  lines, first = inspect.getsourcelines(inspect.getmodule(line_of))  # pyright: ignore[reportArgumentType]
  return max(first, 1) + next(i for i, line in enumerate(lines) if line.endswith(f"# {text}\n"))


def test_a_program_without_any_is_none() -> None:
  assert cg.find_nan(lambda x: jnp.sin(x) / 2)(1.0) is None
  assert cg.find_nan(lambda: 3)() is None
  assert cg.find_nan(lambda x: x)(jnp.array([1.0, jnp.inf])) is None  # nothing makes it
  mask = lambda x: jnp.max(jnp.where(x > 0, x, -jnp.inf))
  assert cg.find_nan(mask)(jnp.array([-1.0, 2.0])) is None


def test_the_first_is_told_with_its_operands() -> None:
  def f(x: Any) -> Any:
    y = x - 2.0
    z = jnp.log(y)  # here
    return jnp.sqrt(z) + z / 0

  report = cg.find_nan(f)(jnp.array([3.0, 1.5, 0.5]))
  assert isinstance(report, cg.NanReport)
  assert (report.kind, report.primitive) == ("nan", "log")
  assert (report.step, report.lane, report.index) == (None, None, (1,))
  assert report.operands == ("float32[3], -1.5 to 1",)
  assert report.result == "float32[3]"
  assert report.source.endswith(
    f"test_find_nan.py:{line_of('here')} (test_the_first_is_told_with_its_operands.<locals>.f)"
  )
  assert str(report).startswith("'log' made a NaN, at [1] of float32[3]\n  at ")
  assert "\n  operand 0: float32[3], -1.5 to 1" in str(report)


def test_infinities_of_finite_operands() -> None:
  report = cg.find_nan(lambda x: jnp.exp(x) - jnp.exp(x))(100.0)
  assert (report.kind, report.primitive) == ("inf", "exp")
  report = cg.find_nan(lambda x: x - jnp.inf * x)(jnp.inf)
  assert (report.kind, report.primitive) == ("nan", "sub")


def test_steps_of_loops_within_each_other() -> None:
  def inner(total: Any, t: Any) -> Any:
    return total - 1.0, jnp.log(total) * t

  def outer(x: Any, _: Any) -> Any:
    return jax.lax.scan(inner, x, jnp.arange(3.0))[0], None

  report = cg.find_nan(lambda x: jax.lax.scan(outer, x, length=4)[0])(7.5)
  assert report.step == (2, 2)
  reverse = lambda x: jax.lax.scan(inner, x, jnp.arange(5.0), reverse=True)
  assert cg.find_nan(reverse)(1.5).step == 2
  counted = lambda x: jax.lax.while_loop(
    lambda c: c[0] < 9, lambda c: (c[0] + 1, jnp.exp(c[1])), (0, x)
  )
  assert cg.find_nan(counted)(1.0).step == 3
  asked = lambda x: jax.lax.while_loop(lambda c: jnp.log(c) > -1, lambda c: c - 1.0, x)
  assert cg.find_nan(asked)(2.5).step == 3
  assert cg.find_nan(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: x / (3 - i), x))(1.0).step == 3


def test_lanes() -> None:
  x = jnp.array([[1.0, 4.0], [9.0, -1.0], [-2.0, 1.0]])
  assert cg.find_nan(jax.vmap(lambda row: jnp.sqrt(row)))(x).lane == 1
  report = cg.find_nan(jax.vmap(jax.vmap(jnp.sqrt)))(x)
  assert (report.lane, report.index) == ((1, 1), (1, 1))
  step = lambda c, t: (c - 1.0, jnp.log(c) * t)
  report = cg.find_nan(jax.vmap(lambda x: jax.lax.scan(step, x, jnp.arange(4.0))))(
    jnp.array([9.0, 2.5])
  )
  assert (report.step, report.lane) == (3, 1)


def test_lanes_are_where_vmap_puts_them() -> None:
  x = jnp.array([[1.0, 4.0], [9.0, -1.0], [2.0, 1.0]])
  report = cg.find_nan(jax.vmap(jnp.sqrt, in_axes=1))(x)
  assert (report.lane, report.index) == (1, (1, 1))
  report = cg.find_nan(jax.vmap(jax.vmap(jnp.sqrt), in_axes=1))(x)
  assert report.lane == (1, 1)
  report = cg.find_nan(jax.vmap(jax.vmap(lambda a: jnp.sqrt(a), 1, 1), 2))(x[None].T[..., None])
  assert report.lane is not None

  def step(c: Any, t: Any) -> Any:
    return c - 1.0, jnp.log(c) @ jnp.ones(3) * t

  loop = lambda c: jax.lax.scan(step, c, jnp.arange(4.0))[1]
  rows = jnp.array([[9.0, 9.0], [9.0, 9.0], [2.5, 9.0]])
  report = cg.find_nan(jax.vmap(jax.jit(loop), in_axes=1))(rows)
  assert (report.primitive, report.step, report.lane) == ("log", 3, 0)
  report = cg.find_nan(jax.vmap(jax.grad(lambda c: jnp.sqrt(c).sum()), in_axes=1))(rows - 2.5)
  assert (report.kind, report.lane) == ("inf", 0)
  shared = lambda x, c: x + jnp.log(c)  # c is no lane's own
  report = cg.find_nan(jax.vmap(shared, (0, None)))(jnp.ones(3), jnp.array([1.0, -1.0]))
  assert (report.primitive, report.lane, report.index) == ("log", None, (1,))
  assert jax.jit(jax.vmap(jax.jit(loop), in_axes=1))(rows).shape == (2, 4)  # has no marks


def test_lanes_count_in_their_own_branches_and_rounds() -> None:
  lax = jax.lax
  # A lane that has ended would take the logarithm of a negative number.
  rounds = lambda n, x: lax.while_loop(
    lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.log(n + x - s[0])), (0.0, x)
  )
  nested = lambda n: lax.while_loop(
    lambda s: s[0] < n, lambda s: (s[0] + 1, rounds(s[0] + 1, 0.5 + 0 * n)[1]), (0.0, n)
  )
  branch = lambda x: lax.cond(x > 0, jnp.log, lambda x: x, x)
  which = lambda i, x: lax.switch(i, [jnp.log, jnp.sqrt, lambda x: x], x)
  n, signs = jnp.array([1.0, 4.0]), jnp.array([1.0, -1.0])
  assert cg.find_nan(jax.vmap(rounds))(n, jnp.full(2, 0.5)) is None
  assert cg.find_nan(jax.vmap(nested))(n) is None
  assert cg.find_nan(jax.vmap(branch))(signs) is None
  assert cg.find_nan(jax.vmap(jax.grad(branch)))(signs) is None
  assert cg.find_nan(jax.vmap(which))(jnp.array([1, 2]), signs) is None
  report = cg.find_nan(jax.vmap(rounds))(jnp.array([3.0, 4.0]), jnp.array([0.5, -2.5]))
  assert (report.primitive, report.step, report.lane, report.index) == ("log", 2, 1, (1,))
  assert report.result == "float32[2]"
  # The earliest step counts, not the first lane.
  report = cg.find_nan(jax.vmap(rounds))(jnp.array([4.0, 3.0]), jnp.array([-2.5, -2.5]))
  assert (report.step, report.lane) == (1, 1)
  report = cg.find_nan(jax.vmap(jax.vmap(which)))(
    jnp.array([[2, 2, 2], [2, 2, 0]]), jnp.full((2, 3), -1.0)
  )
  assert (report.lane, report.index, report.result) == ((1, 2), (1, 2), "float32[2,3]")


def test_inside_jaxs_own_functions_the_line_is_that_of_their_call() -> None:
  def inverse(x: Any) -> Any:
    return jnp.linalg.inv(x)  # inverse

  def norm(x: Any) -> Any:
    return jnp.linalg.norm(x)  # norm

  for f, line in ((inverse, "inverse"), (jax.grad(norm), "norm")):
    report = cg.find_nan(f)(np.zeros((2, 2), np.float32))
    assert report is not None
    assert f"test_find_nan.py:{line_of(line)} (" in report.source


def test_a_nan_that_is_given_is_the_inputs() -> None:
  f = lambda batch, scale, *rest: batch["x"].sum() * scale + sum(rest)
  report = cg.find_nan(f)({"x": np.array([1.0, np.nan], np.float32)}, 1.0)
  assert (report.kind, report.primitive, report.argument) == ("nan", "input", "batch['x']")
  assert (report.index, report.result) == ((1,), "float32[2]")
  assert str(report) == "the input 'batch['x']' has a NaN, at [1] of float32[2]"
  assert cg.find_nan(f)({"x": np.ones(2)}, 1.0, 2.0, np.nan).argument == "argument 3"
  assert cg.find_nan(f)({"x": np.ones(2)}, scale=np.nan).argument == "scale"
  made = cg.find_nan(lambda x, y: (x, jnp.log(y)))(np.nan, -1.0)  # which says more
  assert made.primitive == "log"


def test_branches_jits_and_rules_of_users() -> None:
  safe = lambda x: jax.lax.cond(x > 0, jnp.log, lambda x: x, x)
  assert cg.find_nan(safe)(-1.0) is None
  unsafe = lambda x: jax.lax.cond(x > 0, lambda x: x, jnp.log, x)
  assert cg.find_nan(unsafe)(-1.0).primitive == "log"

  @jax.custom_jvp
  def slope(x: Any) -> Any:
    return jnp.sqrt(x)

  @slope.defjvp
  def _(primals: Any, tangents: Any) -> Any:
    return slope(*primals), tangents[0] / primals[0]

  assert cg.find_nan(slope)(-1.0).primitive == "sqrt"
  report = cg.find_nan(jax.grad(slope))(0.0)
  assert (report.kind, report.primitive) == ("inf", "div")
  for wrap in (jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f))):
    assert cg.find_nan(wrap(jnp.log))(-1.0).primitive == "log"


def test_the_functions_of_custom_vmap_and_of_linear_solves() -> None:
  logarithm = lambda x: jnp.log(x)
  mapped = jax.custom_batching.custom_vmap(logarithm)
  mapped.def_vmap(lambda size, batched, x: (jnp.log(x), True))
  solve = lambda _, b: jnp.log(b)
  solved = lambda b: jax.lax.custom_linear_solve(lambda x: 2 * x, b, solve, symmetric=True)
  for f in (mapped, solved, jax.jit(mapped), jax.vmap(mapped), jax.vmap(solved)):
    report = cg.find_nan(f)(jnp.array([1.0, -1.0]))
    assert (report.primitive, report.index) == ("log", (1,))
  report = cg.find_nan(lambda x: jax.lax.scan(lambda c, x: (c, mapped(x)), 0, x))(-X)
  assert (report.primitive, report.step) == ("log", 0)


def test_a_gradient_that_where_does_not_save() -> None:
  f = lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()
  assert cg.find_nan(f)(jnp.zeros(3)) is None
  report = cg.find_nan(jax.grad(f))(jnp.array([1.0, 0.0]))
  assert (report.primitive, report.kind, report.index) == ("div", "inf", (1,))


@pytest.mark.parametrize("outer", TRANSFORMATIONS)
def test_pairs_of_transformations(outer: str) -> None:
  chains = [pair for pair in PAIRS if pair[0] == outer]
  for chain in random.Random(outer).sample(chains, 1):
    # Few equations: all that they become under the chain is looked at.
    assert cg.find_nan(build(chain, jnp.sin))(X) is None, chain
    report = cg.find_nan(build(chain, lambda x: jnp.sqrt(-1 - x * x)))(X)
    assert report is not None, chain
    assert (report.kind, report.primitive) == ("nan", "sqrt"), chain


@pytest.mark.parametrize("kind", ["partitioned", "shard_map"])
def test_over_several_devices(kind: str) -> None:
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
  x = jax.device_put(jnp.arange(8.0) - 5, jax.NamedSharding(mesh, jax.P("d")))

  def f(x: Any) -> Any:
    step = lambda c, t: (c + 1.0, jnp.log(c) * t)
    return jax.lax.scan(step, x + 4, jnp.arange(3.0))[1].sum(0)

  if kind == "shard_map":
    f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
  report = cg.find_nan(f)(x)
  assert report is not None
  assert (report.kind, report.primitive, report.step) == ("nan", "log", 0)
  assert report.shard == (0 if kind == "shard_map" else None)
  report = cg.find_nan(f)(jnp.where(jnp.arange(8) == 5, -7.0, x + 8))
  assert report is not None
  assert (report.step, report.index) == (0, (1,) if kind == "shard_map" else (5,))
  assert report.shard == (2 if kind == "shard_map" else None)
  assert cg.find_nan(f)(x + 8) is None


def test_the_first_of_several_devices_in_the_programs_order_is_found() -> None:
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])

  def found(f: Any, *values: float) -> tuple[Any, ...]:
    mapped = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    x = jax.device_put(jnp.array(values), jax.NamedSharding(mesh, jax.P("d")))
    report = cg.find_nan(mapped)(x)
    assert report is not None
    return report.primitive, report.shard, report.step

  # A collective hands a NaN on to all devices.
  summed = lambda x: jax.lax.psum(jnp.log(x), "d") + x
  assert found(summed, 1.0, 1.0, -1.0, 1.0) == ("log", 2, None)

  # A later step of a loop comes before what stands behind the loop.
  def looped(x: Any) -> Any:
    first = jax.lax.axis_index("d") == 0
    x = jax.lax.fori_loop(0, 5, lambda i, x: x + jnp.log(jnp.where(i == 4, x, 1.0)), x)
    return x + jnp.sqrt(jnp.where(first, -1.0, 1.0))

  assert found(looped, 1.0, 1.0, -1.0, 1.0) == ("log", 2, 4)
  # A reversed loop begins with the last of what it scans.
  step = lambda c, t: (c, jnp.log(jnp.abs(c - t) - 0.5))
  for reverse, expected in ((False, ("log", 0, 0)), (True, ("log", 1, 0))):
    scanned = lambda x, r=reverse: jax.lax.scan(step, x, jnp.arange(3.0), reverse=r)[1][0]
    assert found(scanned, 0.0, 2.0, 9.0, 9.0) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "complex64"])
def test_dtypes(dtype: str) -> None:
  report = cg.find_nan(lambda x: x / (x - x))(jnp.ones(2, dtype))
  assert report is not None
  assert report.primitive in ("div", "convert_element_type")


def test_gates_and_kernels_are_looked_at_and_run_once() -> None:
  calls = list[float]()

  def root(x: Any) -> Any:
    calls.append(float(x))
    with np.errstate(invalid="ignore"):
      return np.sqrt(x)

  gate = cg.gate(root, out=lambda x: x, effect="io")
  report = cg.find_nan(lambda x: jax.lax.scan(lambda c, _: (c - 1, gate(c)), x, length=3))(1.5)
  assert (report.primitive, report.step) == ("gate", 2)
  assert report.callee == f"gate '{gate.name}'"
  assert str(report).startswith(f"gate '{gate.name}' made a NaN in step 2")
  assert calls == [1.5, 0.5, -0.5]


@pytest.mark.parametrize("loop", ["scan", "while", "vmap of while"])
def test_a_refs_value_is_made_by_the_equation_that_made_it(loop: str) -> None:
  def program(x: Any) -> Any:
    ref = jax.new_ref(x)

    def step(total: Any) -> Any:
      ref[...] = ref[...] - 1
      return total + jnp.sqrt(ref[...])

    if loop == "scan":
      return jax.lax.scan(lambda total, _: (step(total), None), 0.0, length=3)[0]
    return jax.lax.while_loop(lambda total: total < 3, step, 0.0)

  lanes = loop.startswith("vmap")
  found = cg.find_nan(jax.vmap(program) if lanes else program)(jnp.full(2, 0.5) if lanes else 1.1)
  assert found is not None
  assert found.primitive == "sqrt"


def test_arguments_that_are_no_arrays() -> None:
  def f(x: Any, *, name: str, power: int) -> Any:
    return {name: jnp.log(x["a"]) ** power}

  assert cg.find_nan(f)({"a": np.float32(-1)}, name="b", power=2).primitive == "log"
  with pytest.raises(cg.GateDefinitionError, match="find_nan: f: expected"):
    cg.find_nan(3)  # pyright: ignore[reportArgumentType]


class Same:
  """Equal to all others of its kind."""

  def __init__(self, scale: float) -> None:
    self.scale = scale

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Same)

  def __hash__(self) -> int:
    return 0


@pytest.mark.parametrize("reaching", [False, True])
def test_later_calls_reuse_the_program(reaching: bool) -> None:
  traced: list[Any] = []
  compiled: list[str] = []

  def count(event: str, _: float, **__: Any) -> None:
    if "backend_compile" in event:
      compiled.append(event)

  def f(x: Any, way: Any, flag: bool = True) -> Any:
    traced.append(way)
    return jnp.log(x["a"] * way.scale) if flag else x["a"]

  find, one, other = cg.find_nan(f, reaching=reaching), Same(1.0), Same(-1.0)
  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    for value, way, flag, found in (
      (1.0, one, True, False), (-1.0, one, True, True), (1.0, one, True, False),
      (1.0, other, True, True), (-1.0, other, True, False), (-1.0, one, True, True),
      (-1.0, one, False, False),
    ):  # fmt: skip
      report = find({"a": np.float32(value)}, way, flag)
      assert (report is not None) == found, (value, way.scale)
      assert report is None or (report.primitive, report.step) == ("log", None)
  finally:
    jax.monitoring.unregister_event_duration_listener(count)
  assert [way.scale for way in traced] == [1.0, -1.0, 1.0]
  assert len(compiled) == 3, compiled
  assert find({"a": np.ones(3, np.float32)}, one) is None  # another shape
  assert find({"a": np.float32(np.nan)}, one, False).argument == "x['a']"
  assert len(traced) == 4
  with jax.disable_jit():
    assert find({"a": np.float32(-1)}, one).primitive == "log"


@pytest.mark.parametrize(
  "inside",
  [
    lambda find: jax.jit(find(jnp.log))(1.0),
    lambda find: jax.vmap(find(jnp.log))(jnp.ones(2)),
    lambda find: jax.vmap(lambda x: find(lambda: jnp.log(x))())(jnp.ones(2)),
    lambda find: jax.jit(lambda x: find(jnp.log)(1.0))(1.0),
    lambda find: jax.lax.map(find(jnp.log), jnp.ones(2)),
    lambda find: jax.grad(find(jnp.log))(-1.0),
  ],
)
def test_a_call_inside_a_transformation_says_where_it_belongs(inside: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"outside of jax.jit.*find_nan\(jax.vmap\(f"):
    inside(cg.find_nan)
