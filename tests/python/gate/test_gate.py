# SPDX-License-Identifier: Apache-2.0
"""How gates are made and called: call forms, shapes, pytrees, keywords, styles, names."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

Point = collections.namedtuple("Point", ["x", "y"])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["kind"])
@dataclasses.dataclass
class Layer:
  w: Any
  b: Any
  kind: str = "dense"


X = np.array([3.0, 1.0, 2.0], np.float32)
F32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)


def same(value: Any) -> Any:
  return value


def assert_trees_equal(got: Any, want: Any) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.asarray(a).dtype == np.asarray(b).dtype


# -- call forms ----------------------------------------------------------------------------------
def by_decorator(x: Any) -> Any:
  @cg.gate(out=same)
  def sort(x: Any) -> Any:
    return np.sort(x)

  return sort(x)


CALL_FORMS = {
  "decorator": by_decorator,
  "call": lambda x: cg.gate(np.sort, out=same)(x),
  "like": lambda x: cg.gate(np.sort, like=jnp.sort)(x),
  "call once": lambda x: cg.call(np.sort, x, x),
  "method": lambda x: cg.gate(np.random.default_rng(0).permutation, out=same)(x * 0),
  "partial": lambda x: cg.gate(functools.partial(np.sort, axis=0), out=same)(x),
}


@pytest.mark.parametrize("form", CALL_FORMS)
@pytest.mark.parametrize("transform", [same, jax.jit], ids=["eager", "jit"])
def test_every_call_form_gives_numpys_result(form: str, transform: Any, engine: str) -> None:
  want = np.sort(X) if form != "method" else X * 0
  got = transform(CALL_FORMS[form])(jnp.asarray(X))
  assert isinstance(got, jax.Array)
  np.testing.assert_array_equal(got, want)


SHAPES = {
  "a struct": F32((3,)),
  "a jax array": jnp.zeros(3),
  "a numpy array": np.zeros(3, np.float32),
  "a function of structs": lambda x: F32(x.shape),
  "a function with the static keyword": lambda x, n: F32((n,)),
}


@pytest.mark.parametrize("out", SHAPES)
def test_shapes_come_from_values_and_functions(out: str, engine: str) -> None:
  gate = cg.gate(lambda x, n: np.resize(x, n), out=SHAPES[out])
  np.testing.assert_array_equal(gate(X, n=3), X)


def test_shape_rules_get_structs_and_never_values() -> None:
  seen = []

  def rule(tree: Any) -> Any:
    seen.append(tree)
    return tree["a"]

  cg.gate(lambda tree: tree["a"], out=rule)({"a": X, "b": 1})
  assert seen == [{"a": F32((3,)), "b": jax.ShapeDtypeStruct((), np.int32)}]


@pytest.mark.parametrize(
  "value",
  [1, 1.5, True, 2j, np.float32(3), np.arange(4), X.reshape(1, 3), np.zeros((0, 2), np.float32)],
  ids=repr,
)
@pytest.mark.parametrize("transform", [same, jax.jit], ids=["eager", "jit"])
def test_arguments_become_the_arrays_that_jax_makes_of_them(
  value: Any, transform: Any, engine: str
) -> None:
  got = transform(lambda v: cg.call(np.array, jnp.asarray(v), v))(value)
  assert_trees_equal(got, jnp.asarray(value))


def test_jits_cache_serves_calls_of_one_shape() -> None:
  traces = []

  def rule(x: Any) -> Any:
    traces.append(x.shape)
    return x

  program = jax.jit(cg.gate(np.sort, out=rule))
  for shape in [(3,), (3,), (4,), (3,)]:
    program(np.ones(shape, np.float32))
  assert traces == [(3,), (4,)]


# -- pytrees -------------------------------------------------------------------------------------
TREES = {
  "tuple": (X, 2 * X),
  "list": [X, [X]],
  "dict": {"b": X, "a": {"c": np.int32(1)}},
  "named tuple": Point(X, (X, X)),
  "dataclass": Layer(X, {"z": X}, kind="conv"),
  "with None": {"a": None, "b": (X, None)},
  "with empties": {"a": (), "b": [X], "c": {}},
  "ordered dict": collections.OrderedDict(z=X, a=X),
  "integer keys": {1: X, 0: X},
  "no leaf": {"a": None, "b": ()},
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("transform", [same, jax.jit], ids=["eager", "jit"])
def test_pytrees_go_in_and_come_out_as_they_are(tree: str, transform: Any, engine: str) -> None:
  value, seen = TREES[tree], []

  def identity(tree: Any, y: Any) -> Any:
    seen.append((type(tree), jax.tree.structure(tree)))  # no view: it dies with the call
    return tree, y

  gate = cg.gate(identity, out=lambda t, y: (t, y), effect="io")
  got = transform(lambda v: gate(v, X))(value)
  jax.block_until_ready(got)
  assert_trees_equal(got, (value, X))
  assert seen == [(type(value), jax.tree.structure(value))]


@pytest.mark.parametrize("out", [(), None, {}], ids=repr)
def test_gates_may_have_no_results(out: Any, engine: str) -> None:
  seen = []
  got = jax.jit(cg.gate(lambda x: seen.append(x.copy()) or out, out=lambda x: out, effect="io"))(X)
  jax.effects_barrier()
  assert got == out
  np.testing.assert_array_equal(seen, [X])


def test_gates_may_have_no_arguments(engine: str) -> None:
  np.testing.assert_array_equal(jax.jit(cg.gate(lambda: X, out=F32((3,))))(), X)


def test_results_of_another_structure_are_an_error_that_shows_both(engine: str) -> None:
  gate = cg.gate(lambda x: {"b": x}, out=lambda x: {"a": x})
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"'a'(.|\n)*'b'"):
    jax.block_until_ready(gate(X))


# -- keywords ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
  "value", [3, "text", (1, "a"), None, np.dtype("int8"), Point(1, 2), 2.5, b"b", frozenset("a")]
)
def test_static_keywords_reach_the_callable_as_they_are(value: Any, engine: str) -> None:
  seen = []
  gate = cg.gate(lambda x, option: seen.append(option) or x, out=lambda x: x, effect="io")
  jax.block_until_ready(jax.jit(functools.partial(gate, option=value))(X))
  assert seen == [value]
  assert type(seen[0]) is type(value)


def test_each_static_value_has_a_call_of_its_own(engine: str) -> None:
  gate = cg.gate(lambda x, power: x**power, like=lambda x, power: x**power)
  got = jax.jit(lambda x: [gate(x, power=n) for n in (1, 2, 3)])(X)
  np.testing.assert_allclose(got, [X, X**2, X**3], rtol=1e-6)


def test_unhashable_keywords_are_refused_by_name() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"'option'.*hashable.*list"):
    cg.gate(lambda x, option: x, out=same)(X, option=[1])


@pytest.mark.parametrize(
  "rules", [{}, {"like": lambda x, *, scale=1: x * scale["s"]}], ids=["plain", "like"]
)
def test_array_keywords_are_arguments(rules: Any, engine: str) -> None:
  def scaled(x: Any, scale: Any) -> Any:
    return x * scale["s"]

  gate = cg.gate(scaled, **({"out": lambda x, scale: x} | rules))
  got = jax.jit(lambda x, s: gate(x, scale={"s": s}))(X, X)
  np.testing.assert_array_equal(got, X * X)


# -- styles --------------------------------------------------------------------------------------
def returned(x: Any, y: Any) -> Any:
  return {"sum": x + y, "product": x * y}


def in_place(out: Any, x: Any, y: Any) -> None:
  np.add(x, y, out=out["sum"])
  np.multiply(x, y, out=out["product"])


def with_context(context: Any, out: Any, x: Any, y: Any) -> None:
  assert context.device == jax.devices()[0].id
  assert context.stream == 0
  in_place(out, x, y)


@pytest.mark.parametrize(
  ("style", "function"),
  [("return", returned), ("inplace", in_place), ("context", with_context)],
  ids=["return", "inplace", "context"],
)
@pytest.mark.parametrize("transform", [same, jax.jit, jax.vmap])
def test_styles_give_the_same_results(
  style: Any, function: Any, transform: Any, engine: str
) -> None:
  gate = cg.gate(function, style=style, out=lambda x, y: {"sum": x, "product": x})
  x = np.stack([X, 2 * X])
  assert_trees_equal(transform(gate)(x, x + 1), returned(x, x + 1))


@pytest.mark.parametrize("style", ["return", "inplace", "context"])
def test_single_results_are_bare_arrays_in_every_style(style: Any, engine: str) -> None:
  def function(*args: Any) -> Any:
    if style == "return":
      return args[0] + 1
    np.add(args[-1], 1, out=args[-2])
    return None

  np.testing.assert_array_equal(cg.gate(function, style=style, out=lambda *a: a[-1])(X), X + 1)


# -- names and definitions -----------------------------------------------------------------------
def test_names_are_where_the_callable_lives_and_a_count() -> None:
  def f(x: Any) -> Any:
    return x

  base = f"{__name__}.test_names_are_where_the_callable_lives_and_a_count.<locals>.f"
  gates = [cg.gate(f, out=same) for _ in range(3)]
  assert [gate.name for gate in gates] == [base, f"{base}#1", f"{base}#2"]
  assert repr(gates[0]) == f"<gate '{base}'>"


def test_gates_look_like_the_function_they_wrap() -> None:
  gate = cg.gate(by_decorator, out=same)
  assert gate.__name__ == "by_decorator"
  assert gate.__wrapped__ is by_decorator


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({}, ["out=", "like="]),
    ({"out": same, "effect": "never"}, ["effect", "'pure'", "'io'", "'ordered'", "'never'"]),
    ({"out": same, "style": "fast"}, ["style", "'inplace'", "'fast'"]),
    ({"out": same, "arrays": "lists"}, ["arrays", "'numpy'", "'lists'"]),
    ({"out": same, "vmap": "some"}, ["vmap", "'each'", "'some'"]),
    ({"out": same, "thread": "main"}, ["thread", "'own'", "'main'"]),
    ({"out": same, "timeout": -1}, ["timeout", "positive", "-1"]),
    ({"out": same, "gradient": "exact"}, ["gradient", "'finite-difference'", "'exact'"]),
    ({"out": same, "gradient": "finite-difference", "effect": "io"}, ["gradient", "'pure'"]),
  ],
)
def test_wrong_options_are_refused_by_name(options: Any, words: list[str]) -> None:
  with pytest.raises(cg.GateDefinitionError) as error:
    cg.gate(np.sort, name="basics.wrong", **options)
  for word in ["basics.wrong", *words]:
    assert word in str(error.value)


def test_arguments_that_are_no_arrays_are_refused_with_advice() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"argument .*str.*by keyword"):
    cg.gate(np.sort, out=same)("text")


def test_check_compares_a_gate_with_its_reference() -> None:
  cg.gate(np.sin, like=jnp.sin).check(X)
  with pytest.raises(AssertionError, match="Mismatched elements"):
    cg.gate(np.cos, like=jnp.sin).check(X)
  with pytest.raises(cg.GateDefinitionError, match="like="):
    cg.gate(np.sin, out=same).check(X)


@pytest.mark.parametrize(
  ("style", "function"),
  [
    ("return", lambda x, y: x),
    ("inplace", lambda out, x, y: None),
    ("context", lambda context, out, x, y: None),
  ],
)
def test_a_gates_signature_is_that_of_its_calls(style: Any, function: Any) -> None:
  gate = cg.gate(function, out=lambda x, y: x, style=style)
  assert list(inspect.signature(gate).parameters) == ["x", "y"]
