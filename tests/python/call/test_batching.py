# SPDX-License-Identifier: Apache-2.0
"""Batching: the four vmap methods, nested, over every axis, and what the callable gets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

METHODS = ["each", "whole", "broadcast", "rule"]


def reference(x: Any, y: Any) -> Any:
  """Sorts `x` and adds the sum of `y`: not elementwise, so lanes can't be mixed up unnoticed."""
  return {"sorted": jnp.sort(x) + y.sum(), "least": x.min() * y}


def on_host(x: Any, y: Any) -> Any:
  """`reference` in NumPy, over any leading axes that `x` and `y` have or lack."""
  lead = max(x.ndim - 1, y.ndim - 1)
  total = y.sum(-1)[..., None] if lead else y.sum()
  return {"sorted": np.sort(x, -1) + total, "least": x.min(-1)[..., None] * y}


def make_gate(method: str, calls: list[Any] | None = None, **options: Any) -> cg.Gate:
  def function(x: Any, y: Any) -> Any:
    if calls is not None:
      calls.append((x.shape, y.shape))
    return on_host(x, y)

  def rule(size: int, batched: Any, x: Any, y: Any) -> Any:
    pairs = zip((x, y), batched, strict=True)
    x, y = (v if b else jnp.broadcast_to(v, (size, *v.shape)) for v, b in pairs)
    return jax.vmap(reference)(x, y), {"sorted": True, "least": True}

  out = lambda x, y: {"sorted": x, "least": jax.ShapeDtypeStruct(y.shape, x.dtype)}
  if method == "defvmap":
    gate = cg.gate(function, out=out, **options)
    gate.defvmap(rule)
    return gate
  return cg.gate(function, out=out, vmap=rule if method == "rule" else method, **options)


def numbers(*shape: int) -> Any:
  return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def remembered(key: str, compute: Callable[[], Any]) -> Any:
  """The first result of `compute` for this key: one reference serves every method."""
  if key not in _references:
    _references[key] = compute()
  return _references[key]


_references: dict[str, Any] = {}


def assert_same(got: Any, want: Any, what: str = "") -> None:
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=what)
  jax.tree.map(close, got, want)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
  ("x", "y", "in_axes", "out_axes"),
  [
    ((5, 3), (5, 2), 0, 0),
    ((5, 3), (5, 2), (0, 0), 1),
    ((5, 3), (2,), (0, None), 0),
    ((3,), (5, 2), (None, 0), -1),
    ((3, 5), (5, 2), (1, 0), 0),
    ((3, 5), (2, 5), (-1, -1), {"sorted": 0, "least": 1}),
    ((3, 5), (2, 5), -1, {"sorted": -1, "least": 0}),
    ((5, 3), (2, 5), [0, 1], 0),
  ],
  ids=str,
)
def test_every_method_agrees_with_vmap_of_the_reference(
  method: str, x: Any, y: Any, in_axes: Any, out_axes: Any, engine: str
) -> None:
  args = numbers(*x), numbers(*y)
  batched = lambda f: jax.vmap(f, in_axes, out_axes)(*args)
  want = remembered(f"{x} {y} {in_axes} {out_axes}", lambda: batched(reference))
  assert_same(batched(make_gate(method)), want)


@pytest.mark.parametrize("in_axes", [{"a": 0, "b": None}, {"a": 1, "b": 0}, {"a": None, "b": -1}])
@pytest.mark.parametrize("method", METHODS)
def test_in_axes_may_be_pytrees(method: str, in_axes: Any, engine: str) -> None:
  tree = {k: numbers(4, 4) if a is not None else numbers(4) for k, a in in_axes.items()}
  gate = make_gate(method)
  batched = lambda f: jax.vmap(lambda t: f(t["a"], t["b"]), in_axes=(in_axes,))(tree)
  assert_same(batched(gate), batched(reference))


NESTED: dict[str, Callable[[Any], Any]] = {
  "both": lambda f: jax.vmap(jax.vmap(f)),
  "outer x, inner y": lambda f: jax.vmap(jax.vmap(f, (None, 0)), (0, None)),
  "outer y, inner x": lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0)),
  "outer both, inner x": lambda f: jax.vmap(jax.vmap(f, (0, None)), (0, 0)),
  "inner axis 1": lambda f: jax.vmap(jax.vmap(f, (1, None), 1), (0, 0)),
  "three deep": lambda f: jax.vmap(jax.vmap(jax.vmap(f, (0, None)), (None, 0)), (0, 1), 2),
  "jit between": lambda f: jax.vmap(jax.jit(jax.vmap(f, (None, 0))), (0, None)),
  "over map": lambda f: jax.vmap(lambda x, y: jax.lax.map(lambda v: f(v, y), x), (0, None)),
}
NESTED_SHAPES = {
  "both": ((4, 2, 3), (4, 2, 2)),
  "outer x, inner y": ((4, 3), (2, 2)),
  "outer y, inner x": ((2, 3), (4, 2)),
  "outer both, inner x": ((4, 2, 3), (4, 2)),
  "inner axis 1": ((4, 3, 2), (4, 2)),
  "three deep": ((4, 5, 3), (6, 4, 2)),
  "jit between": ((4, 3), (2, 2)),
  "over map": ((4, 5, 3), (2,)),
}


@pytest.mark.parametrize("method", METHODS)
def test_nested_vmaps_compose(method: str, engine: str) -> None:
  args = {name: (numbers(*x), numbers(*y)) for name, (x, y) in NESTED_SHAPES.items()}

  def all_nestings(f: Any) -> Any:
    """As one program, which compiles faster than one each."""
    return jax.jit(lambda args: {name: NESTED[name](f)(*args[name]) for name in NESTED})(args)

  want = remembered("nestings", lambda: all_nestings(reference))
  for name, got in all_nestings(make_gate(method)).items():
    assert_same(got, want[name], name)


@pytest.mark.parametrize(
  ("method", "want"),
  [
    ("each", [((3,), (2,))] * 5),
    ("whole", [((5, 3), (2,))]),
    ("broadcast", [((5, 3), (5, 2))]),
    ("rule", []),
    ("defvmap", []),
  ],
)
def test_methods_decide_what_the_callable_gets(method: str, want: Any) -> None:
  calls: list[Any] = []
  jax.block_until_ready(jax.vmap(make_gate(method, calls), (0, None))(numbers(5, 3), numbers(2)))
  assert calls == want


@pytest.mark.parametrize(
  ("method", "want"),
  [("each", [((3,), (2,))] * 8), ("whole", [((8, 3), (8, 2))]), ("broadcast", [((8, 3), (8, 2))])],
)
def test_nested_vmaps_are_one_folded_axis_to_whole_gates(method: str, want: Any) -> None:
  calls: list[Any] = []
  transform = NESTED["outer x, inner y"]
  jax.block_until_ready(transform(make_gate(method, calls))(numbers(4, 3), numbers(2, 2)))
  assert calls == want


@pytest.mark.parametrize("effect", ["io", "ordered"])
@pytest.mark.parametrize("jit", [True, False])
def test_each_lane_of_an_effectful_gate_runs_once_in_lane_order(effect: Any, jit: bool) -> None:
  seen: list[Any] = []
  gate = cg.gate(lambda x: seen.append(int(x)) or x, out=lambda x: x, effect=effect)
  lanes = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
  program = jax.vmap(jax.vmap(jax.vmap(gate, in_axes=0), in_axes=1), in_axes=0)
  got = (jax.jit(program) if jit else program)(lanes)
  np.testing.assert_array_equal(got, np.swapaxes(lanes, 1, 2))
  assert seen == np.swapaxes(lanes, 1, 2).ravel().tolist()


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
@pytest.mark.parametrize("method", ["each", "rule"])
def test_no_lanes_are_no_calls_and_empty_results(method: str, effect: Any) -> None:
  calls: list[Any] = []
  gate = make_gate(method, calls, effect=effect)
  got = jax.vmap(gate)(np.zeros((0, 3), np.float32), np.zeros((0, 2), np.float32))
  assert (got["sorted"].shape, got["least"].shape) == ((0, 3), (0, 2))
  assert calls == []


def test_an_argument_without_a_batch_axis_is_shared_by_the_lanes() -> None:
  addresses = set()

  def function(x: Any, shared: Any) -> Any:
    addresses.add(shared.ctypes.data)
    return x + shared.sum()

  gate = cg.gate(function, out=lambda x, shared: x)
  jax.block_until_ready(jax.vmap(gate, (0, None))(numbers(6, 2), numbers(1000)))
  assert len(addresses) == 1


def test_calls_without_a_batched_argument_stay_one_call() -> None:
  calls: list[Any] = []
  gate = make_gate("each", calls)
  x, y = numbers(3), numbers(2)
  got = jax.vmap(lambda i: gate(x, y)["least"] + i)(jnp.arange(3.0))
  assert_same(got, reference(x, y)["least"] + np.arange(3)[:, None])
  assert len(calls) == 1


def test_spmd_axis_name_changes_nothing_on_one_device() -> None:
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
  x, y = numbers(4, 3), numbers(4, 2)
  with jax.set_mesh(mesh):
    got = jax.jit(jax.vmap(make_gate("each"), spmd_axis_name="d"))(x, y)
  assert_same(got, jax.vmap(reference)(x, y))


def test_axis_size_and_axis_name_reach_the_lanes() -> None:
  gate = cg.gate(lambda i: i * 2, out=lambda i: i)
  program = jax.vmap(
    lambda: gate(jax.lax.axis_index("i")) + jax.lax.psum(1, "i"), axis_name="i", axis_size=3
  )
  assert program().tolist() == [3, 5, 7]


# -- rules ---------------------------------------------------------------------------------------
def test_rules_get_the_batch_size_which_arguments_have_it_and_static_keywords() -> None:
  seen = []
  gate = cg.gate(lambda t, y, n: y * n, out=lambda t, y, n: y)

  @gate.defvmap
  def _(size: int, batched: Any, t: Any, y: Any, n: int) -> Any:
    seen.append((size, batched, t["a"].shape, y.shape, n))
    return y * n, False

  program = jax.vmap(lambda a, y: gate({"a": a, "b": 1.0}, y, n=3), (1, None))
  assert program(numbers(2, 5), numbers(2)).shape == (5, 2)
  assert seen == [(5, [{"a": True, "b": False}, False], (5, 2), (2,), 3)]


def test_rules_may_return_numbers() -> None:
  gate = cg.gate(np.sum, out=np.float32(0), vmap=lambda size, batched, x: (2.0, False))
  assert jax.vmap(gate)(numbers(5, 3)).tolist() == [2] * 5


def test_rules_may_call_the_gate_itself() -> None:
  gate = cg.gate(lambda x: x.sum(-1), out=lambda x: jax.ShapeDtypeStruct(x.shape[:-1], x.dtype))
  gate.defvmap(lambda size, batched, x: (gate(x), True))
  x = numbers(3, 4, 2)
  assert_same(jax.vmap(jax.vmap(gate))(x), x.sum(-1))


@pytest.mark.parametrize(
  ("result", "words"),
  [
    (lambda x: ((x, x), True), ["structure"]),
    (lambda x: x, ["structure PyTreeDef(*)", "a pair (out, out_batched)"]),
    (lambda x: (x, True, True), ["a pair (out, out_batched)"]),
    (lambda x: (x, (True, True)), ["out_batched of structure PyTreeDef((*, *))", "a bool"]),
    (lambda x: (x, None), ["out_batched of structure PyTreeDef(None)", "a bool"]),
    (lambda x: (0.0, True), ["float32[]", "float32[5, 3]"]),
    (lambda x: (x[:, :1], True), ["float32[5, 1]", "float32[5, 3]"]),
    (lambda x: (x.astype(int), True), ["int32[5, 3]", "float32[5, 3]"]),
    (lambda x: (x, False), ["float32[5, 3]", "float32[3]"]),
  ],
)
def test_rules_that_return_something_else_are_refused(result: Any, words: list[str]) -> None:
  gate = cg.gate(np.sort, out=lambda x: x, vmap=lambda size, batched, x: result(x))
  with pytest.raises(cg.GateDefinitionError) as error:
    jax.vmap(gate)(numbers(5, 3))
  for word in [gate.name, "vmap rule", "expected", *words]:
    assert word in str(error.value)
