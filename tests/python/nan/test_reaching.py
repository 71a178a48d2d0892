# SPDX-License-Identifier: Apache-2.0
"""`find_nan(f, reaching=True)` reports what gets into a result, and `all` lists every place."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformation_table import PAIRS, TRANSFORMATIONS, X, build

import callgate as cg

SPLIT = jax.P("d")
FIND: Any = cg.find_nan
reaching: Any = functools.partial(cg.find_nan, reaching=True)


def safe_log(x: Any) -> Any:
  return jnp.where(x > 0, jnp.log(x), 0.0)


def places(report: cg.NanReport | None) -> list[Any]:
  """The operations of a report's list, each with its step, and the names of inputs."""
  assert report is not None
  assert report.all[0] == report
  return [
    one.source if one.primitive == "input" else (one.primitive, one.step) for one in report.all
  ]


def test_a_masked_logarithm_reaches_no_result() -> None:
  x = jnp.array([-1.0, 0.0, 2.0])
  assert reaching(safe_log)(x) is None
  found: Any = cg.find_nan(safe_log)(x)
  assert found is not None
  assert (found.primitive, found.kind) == ("log", "nan")
  report = reaching(lambda x: (safe_log(x).sum() + jnp.sqrt(x), 3))(x)
  assert places(report) == [("sqrt", None)]
  assert report.index == (0,)
  assert report.operands == ("float32[3], -1 to 2",)
  report = reaching(jax.grad(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum()))(x[1:])
  assert (report.primitive, report.kind) == ("div", "inf")  # 0 * inf, which where does not save


def test_infinities_that_end_as_numbers_reach_no_result() -> None:
  sigmoid = lambda x: 1 / (1 + jnp.exp(-x))
  assert FIND(sigmoid)(-100.0).primitive == "exp"
  assert reaching(sigmoid)(-100.0) is None
  assert reaching(lambda x: jnp.exp(x) - jnp.exp(x))(100.0).primitive == "exp"
  assert reaching(lambda x: jnp.log(x) > 0)(-1.0) is None
  assert reaching(lambda: 3)() is None


def test_only_a_path_of_nans_counts() -> None:
  def f(x: Any) -> Any:
    masked = jnp.log(x)
    shown = jnp.where(x > 0, masked, jnp.sqrt(x))  # NaNs of the square root alone
    return jnp.nan_to_num(masked), shown

  assert places(reaching(f)(-1.0)) == [("sqrt", None)]
  assert places(cg.find_nan(f)(-1.0)) == [("log", None), ("sqrt", None)]
  assert places(reaching(lambda x: jnp.log(x) + jnp.sqrt(x))(-1.0)) == [
    ("log", None),
    ("sqrt", None),
  ]


def test_the_step_is_one_that_reaches_a_result() -> None:
  def scanned(x: Any) -> Any:
    step = lambda c, t: (c - 1.0, jnp.where(t == 3, jnp.log(c), 0.0))
    return jax.lax.scan(step, x, jnp.arange(6))

  assert places(reaching(scanned)(-1.0)) == [("log", 3)]
  assert places(cg.find_nan(scanned)(-1.0)) == [("log", 0)]
  assert reaching(lambda x: scanned(x)[0])(-1.0) is None

  def carried(x: Any) -> Any:
    step = lambda i, c: jnp.where(i > 3, jnp.sqrt(c), c - 1.0)
    return jax.lax.fori_loop(0, 6, step, x)

  def asked(x: Any) -> Any:
    body = lambda c: (c[0] + 1, jnp.where(c[0] > 3, jnp.sqrt(c[1]), c[1] - 1.0))
    return jax.lax.while_loop(lambda c: jnp.log(5.0 - c[0]) > -1e9, body, (0, x))[1]

  for f in (carried, asked, lambda x: jax.lax.map(carried, x[None])):
    assert reaching(f)(1.5).step in (4, (0, 4))

  def nested(x: Any) -> Any:
    inner = lambda c, t: (c, jnp.where((x < c) & (t == 1), jnp.log(c), safe_log(c)))
    outer = lambda c, _: (c - 1.0, jax.lax.scan(inner, c, jnp.arange(3))[1])
    return jax.lax.scan(outer, x + 2, length=5)[1], jnp.sqrt(x)

  report = reaching(nested)(-3.0)
  assert places(report) == [("log", (0, 1)), ("sqrt", None)]


def test_a_branch_hands_on_what_it_takes() -> None:
  chosen = lambda x: jax.lax.cond(x > 0, lambda y: 0 * x, lambda y: y, jnp.log(-jnp.abs(x)))
  assert reaching(chosen)(1.0) is None
  assert reaching(chosen)(-1.0).primitive == "log"
  both = jax.vmap(chosen)
  assert reaching(both)(jnp.array([1.0, 2.0])) is None
  assert reaching(both)(jnp.array([1.0, -2.0])).primitive == "log"
  unsafe = lambda x: jax.lax.cond(x > 0, lambda x: x, jnp.log, x)
  assert reaching(lambda x: jnp.nan_to_num(unsafe(x)))(-1.0) is None
  assert reaching(jax.jit(unsafe))(-1.0).primitive == "log"


def test_lanes() -> None:
  def rounds(n: Any, x: Any) -> Any:
    body = lambda s: (s[0] + 1, jnp.where(s[0] == 2, jnp.log(x), safe_log(x)))
    return jax.lax.while_loop(lambda s: s[0] < n, body, (0, x))[1]

  n, x = jnp.array([2, 4, 3]), jnp.array([-1.0, 5.0, -1.0])
  report = reaching(jax.vmap(rounds))(n, x)
  assert (report.primitive, report.step) == ("log", 2)
  assert reaching(jax.vmap(rounds))(jnp.array([2, 4, 2]), x) is None
  report = reaching(jax.vmap(lambda x: safe_log(x - 1) + jnp.sqrt(x)))(jnp.array([1.0, 0.5, -1.0]))
  assert (report.primitive, report.lane, report.index) == ("sqrt", 2, (2,))


def test_inputs_have_their_names() -> None:
  f = lambda params, x, *, scale=1.0: (params["w"] * x).sum() * scale
  w = {"w": np.array([1.0, np.nan], np.float32)}
  for find in (FIND, reaching):
    report = find(f)(w, 2.0)
    assert (report.primitive, report.source) == ("input", "params['w']")
    assert (report.argument, report.index) == ("params['w']", (1,))
    assert places(find(f)(w, np.nan, scale=np.nan)) == ["params['w']", "x", "scale"]
    assert find(lambda *xs: sum(xs))(1.0, np.nan).source == "argument 1"
  masked = lambda params, x: jnp.where(jnp.isnan(params["w"]), 0.0, params["w"]) * x
  assert FIND(masked)(w, 2.0).source == "params['w']"
  assert reaching(masked)(w, 2.0) is None
  assert places(reaching(masked)(w, np.nan)) == ["x"]
  made = reaching(lambda x, y: x * jnp.log(y))(np.nan, -1.0)
  assert places(made) == [("log", None), "x"]


def test_all_has_the_first_hundred_in_the_programs_order() -> None:
  def f(x: Any) -> Any:
    ys = jax.lax.scan(lambda c, t: (c, (jnp.log(c), jnp.sqrt(c))), x, jnp.arange(3))[1]
    return ys, [jnp.log(x) for _ in range(101)]

  report = reaching(jax.jit(f))(-200.0)
  assert len(report.all) == 100
  assert places(report) == [("log", 0), ("sqrt", 0)] + [("log", None)] * 98
  assert {type(one) for one in report.all} == {cg.NanReport}
  assert report.all[3].source == report.all[4].source != ""
  assert report.all[2].operands == ("float32[], -200",)
  assert [one.all for one in report.all] == [[]] * 100
  assert dataclasses.asdict(report)["all"][0]["primitive"] == "log"


@pytest.mark.parametrize("loop", [False, True])
def test_refs_hand_on_what_they_hold(loop: bool) -> None:
  def f(x: Any) -> Any:
    ref = jax.new_ref(x)

    def step(i: Any, total: Any) -> Any:
      ref[...] = jnp.sqrt(ref[...]) - 1.0
      return total + 1.0

    total = jax.lax.fori_loop(0, 3, step, 0.0) if loop else step(0, 0.0)
    return total, ref[...]

  assert reaching(f)(-1.0).primitive == "sqrt"
  assert reaching(lambda x: jnp.nan_to_num(f(x)[1]))(-1.0) is None


@pytest.mark.parametrize("check", [True, False])
def test_shards(check: bool) -> None:
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])

  def over_devices(f: Callable[[Any], Any], out: Any = SPLIT) -> Any:
    mapped = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=out, check_vma=check)
    return lambda x: reaching(mapped)(jax.device_put(x, jax.NamedSharding(mesh, jax.P("d"))))

  x = jnp.array([1.0, -1.0, 2.0, -2.0])
  assert over_devices(safe_log)(x) is None
  report = over_devices(lambda x: safe_log(x) + jnp.sqrt(x + 1.5))(x)
  assert (report.primitive, report.shard) == ("sqrt", 3)

  # A collective hands a NaN on to all devices, each of which may mask it.
  def summed(x: Any, shown: int) -> Any:
    total = jax.lax.psum(jnp.log(x), "d")
    return jnp.where(jax.lax.axis_index("d") == shown, total, 0.0) + 0 * x

  for shown in (0, 1):
    report = over_devices(functools.partial(summed, shown=shown))(x)
    assert (places(report), report.shard) == ([("log", None)], 1)
  assert over_devices(functools.partial(summed, shown=9))(x) is None
  whole = over_devices(lambda x: jax.lax.psum(safe_log(x) + jnp.sqrt(x), "d"), jax.P())
  assert places(whole(x)) == [("sqrt", None)]

  def looped(x: Any) -> Any:
    step = lambda c, t: (c + 1.0, jnp.where(t == 2, jnp.log(c), 0.0))
    return jax.lax.scan(step, x, jnp.arange(4))[1].sum(0)

  report = over_devices(looped)(jnp.array([1.0, -1.0, 2.0, -3.0]))
  assert (report.primitive, report.step, report.shard) == ("log", 2, 3)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_partitioned_programs(kind: str) -> None:
  types = (jax.sharding.AxisType[kind],)
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=types)
  x = jax.device_put(jnp.arange(8.0) - 5, jax.NamedSharding(mesh, jax.P("d")))
  step = lambda c, t: (c + 1.0, safe_log(c) + jnp.where(t == 1, jnp.sqrt(c), 0.0))
  scanned = lambda x: jax.lax.scan(step, x, jnp.arange(3))[1]
  with jax.set_mesh(mesh):
    for find, first in ((FIND, ("log", 0)), (reaching, ("sqrt", 1))):
      report = find(scanned)(x)
      assert ((report.primitive, report.step), report.index) == (first, (0,))
    assert reaching(safe_log)(x) is None


def hidden_root(x: Any) -> Any:
  return jnp.sqrt(-1 - x * x)


def shown_root(x: Any) -> Any:
  return jnp.sqrt(-1 - x * x)


@pytest.mark.parametrize("outer", TRANSFORMATIONS)
def test_pairs_of_transformations(outer: str) -> None:
  """One program has both roots: the first one's NaNs reach no result, the second one's do."""
  chains = [pair for pair in PAIRS if pair[0] == outer]
  masked = lambda x: jnp.where(x * x > -1, jnp.sin(x), jax.lax.stop_gradient(hidden_root(x)))
  for chain in random.Random(outer).sample(chains, 1):
    report = reaching(build(chain, lambda x: masked(x) + shown_root(x)))(X)
    assert report is not None, chain
    assert (report.kind, report.primitive) == ("nan", "sqrt"), chain
    assert all(place.source.endswith("(shown_root)") for place in report.all), chain


def test_gates_run_once() -> None:
  calls: list[float] = []

  def host(x: Any) -> Any:
    calls.append(float(x))
    return x * np.float32(np.nan)

  gate = cg.gate(host, out=lambda x: x, effect="io")
  assert reaching(lambda x: jnp.nan_to_num(gate(x)))(1.5) is None
  assert reaching(gate)(2.5).callee == f"gate '{gate.name}'"
  assert calls == [1.5, 2.5]


def test_reaching_is_a_flag() -> None:
  with pytest.raises(cg.GateDefinitionError, match="find_nan: reaching: expected"):
    cg.find_nan(safe_log, reaching="yes")  # pyright: ignore[reportArgumentType]


WEIGHTS = jnp.array([1.0, jnp.nan])


@pytest.mark.parametrize(
  ("f", "primitive"),
  [
    (lambda x: x * WEIGHTS, "mul"),
    (jax.jit(lambda x: x * WEIGHTS), "mul"),
    (lambda x: x + np.float32(np.nan), "add"),
    (jax.grad(lambda x: (x * WEIGHTS).sum()), "mul"),
    (lambda x: (jnp.log(x + 2.0), x + WEIGHTS), "add"),
  ],
)
def test_a_constant_nan_is_made_by_the_operation_that_takes_it(f: Any, primitive: str) -> None:
  report = reaching(f)(-1.0)
  assert (report.primitive, report.kind) == (primitive, "nan")
  assert "test_reaching.py" in report.source
  assert report.operands[-1].endswith(", nan")


LINE = r"test_reaching\.py:\d+ "


def in_a_ref(x: Any) -> Any:
  ref = jax.new_ref(WEIGHTS)
  return ref[...] + x


def over_steps(f: Any) -> Any:
  return lambda x: jax.lax.scan(lambda c, t: (f(c, t), None), x, jnp.arange(5))[0]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
  ("f", "primitive", "step", "index"),
  [
    (lambda x: (x, WEIGHTS), "constant", None, (1,)),
    (lambda x: (x, jnp.bfloat16(jnp.nan)), "constant", None, ()),
    (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * x, WEIGHTS), "constant", None, (1,)),
    (lambda x: jax.lax.while_loop(lambda c: c[0] < x, lambda c: c, (3.0, WEIGHTS)), "constant",
     None, (1,)),
    (lambda x: jax.lax.map(lambda w: w * x, WEIGHTS), "constant", None, (1,)),
    (lambda x: jax.lax.cond(x > 0, lambda: 0 * WEIGHTS, lambda: WEIGHTS), "constant", None, (1,)),
    (over_steps(lambda c, t: jnp.where(t == 3, WEIGHTS, c)), "select_n", 3, (1,)),
    (over_steps(lambda c, t: jax.lax.cond(t == 3, lambda: jnp.nan, lambda: c)), "constant", 3, ()),
    (lambda x: jax.lax.fori_loop(0, 4 + x.astype(int), lambda i, c: c + WEIGHTS[i % 2], 1.0),
     "dynamic_slice", 1, (0,)),
    (in_a_ref, "constant", None, (1,)),
    (jax.checkpoint(lambda x: WEIGHTS), "constant", None, (1,)),
  ],
)  # fmt: skip
def test_a_constant_that_no_operation_takes_has_the_nan(
  f: Any, primitive: str, step: int | None, index: tuple[int, ...], jitted: bool
) -> None:
  x = jnp.float32(-1.0) if primitive != "select_n" else jnp.ones(2)
  report = reaching(jax.jit(f) if jitted else f)(x)
  assert (report.kind, report.primitive, report.step) == ("nan", primitive, step)
  assert report.index == index
  assert re.search(LINE, report.source)
  assert report.argument is None
  if primitive == "constant":
    assert str(report).startswith("a constant has a NaN")


def test_each_constant_counts_alone() -> None:
  start = (WEIGHTS, jnp.array([jnp.nan, 1.0]), jnp.array([-jnp.inf, 1.0]))
  looped = lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jax.tree.map(lambda c: c * x, c), start)
  assert [one.index for one in reaching(looped)(2.0).all] == [(1,), (0,)]
  for one, index in ((0, (1,)), (1, (0,))):
    assert [it.index for it in reaching(lambda x, one=one: looped(x)[one])(2.0).all] == [index]
  assert reaching(lambda x: looped(x)[2])(2.0) is None
  assert (
    reaching(lambda x: jnp.nan_to_num(jax.lax.scan(lambda c, _: (c, c), WEIGHTS, length=2)[1]))(2.0)
    is None
  )


def test_constants_in_lanes_and_shards() -> None:
  taken = lambda x: jax.lax.cond(x > 0, lambda: jnp.nan, lambda: x)
  report = reaching(jax.vmap(taken))(jnp.array([-1.0, 2.0]))
  assert (report.primitive, report.lane) == ("constant", 1)
  rounds = lambda n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, WEIGHTS * 1.0),
                                        (0, jnp.zeros(2)))  # fmt: skip
  report = reaching(jax.vmap(rounds))(jnp.array([0, 2]))
  assert (report.primitive, report.lane, report.index) == ("mul", 1, (1, 1))
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("d",), axis_types=auto, devices=jax.devices()[:4])
  w = jnp.array([1.0, 2.0, jnp.nan, 4.0])
  mapped = jax.shard_map(lambda x, w: x * w, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
  assert reaching(lambda x: mapped(x, w))(jnp.ones(4)).index == (2,)
  assert reaching(lambda x: jnp.nan_to_num(mapped(x, w)))(jnp.ones(4)) is None


def test_an_array_of_the_closure_counts_as_an_input() -> None:
  report = FIND(lambda x: x * WEIGHTS)(2.0)
  assert (report.primitive, report.index, report.argument) == ("constant", (1,), None)
  assert re.search(LINE, report.source)
  assert places(FIND(lambda x, y: (jnp.log(x) * y + WEIGHTS, WEIGHTS))(-1.0, np.nan)) == [
    ("log", None),
    "y",
    ("constant", None),
  ]
  assert FIND(lambda x: (x, WEIGHTS))(2.0).primitive == "constant"
  assert FIND(lambda x: jnp.where(x > 0, x, jnp.nan))(2.0) is None  # a scalar, as in masks
  assert FIND(lambda x: jax.lax.fori_loop(0, x, lambda i, c: c + 1.0, 1.0))(4) is None


def test_a_constant_that_reaches_no_result_is_no_finding() -> None:
  x = jnp.array([1.0, 2.0])
  assert reaching(lambda x: jnp.where(x > 0, x, jnp.nan))(x) is None
  assert reaching(lambda x: jnp.nansum(x * WEIGHTS))(x) is None
  assert reaching(lambda x: jnp.where(x > 1, x, -jnp.inf))(x) is None  # a mask
  assert reaching(lambda x: jnp.where(x > 1, x, jnp.nan))(x).kind == "nan"


def test_a_bool_may_be_a_static_argument() -> None:
  jitted = jax.jit(lambda x, train: jnp.log(x) if train else x, static_argnames="train")
  assert reaching(jitted)(-1.0, train=True).primitive == "log"
  assert reaching(jitted)(-1.0, False) is None


def test_numbers_as_arguments_without_jit() -> None:
  with jax.disable_jit():
    assert reaching(lambda n, x: n * jnp.log(x))(3, 2.0) is None
    report = reaching(lambda n, x: n * jnp.log(x))(3, -1.0)
    assert (report.primitive, report.result) == ("log", "float32[]")
    assert places(reaching(lambda x: x + 1)(float("nan"))) == ["x"]
