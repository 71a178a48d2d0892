# SPDX-License-Identifier: Apache-2.0
"""Arguments that are modules: pytrees with functions, strings and other objects beside arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate._core.public import core

BOTH = pytest.mark.parametrize("engine", ["callgate", "jax"])


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["weight", "activation", "mode"],
  meta_fields=["size"],
)
@dataclasses.dataclass
class Layer:
  """As of equinox: a function and a string are leaves like the array."""

  weight: Any
  activation: Callable[[Any], Any] | None
  mode: Any = "plain"
  size: int = 2


class Unhashable:
  __hash__ = None  # type: ignore[assignment]


def model(scale: float = 1.0, activation: Any = np.tanh, mode: Any = "plain") -> Any:
  weight = jnp.full((2, 2), scale)
  return {"layers": [Layer(weight, activation, mode), Layer(weight + 1, None, mode)]}


def reference(m: Any, x: Any, np: Any = jnp) -> Any:
  for layer in m["layers"]:
    x = np.dot(layer.weight, x)
    x = x if layer.activation is None else np.tanh(x)
  return x


def applied(**options: Any) -> Any:
  def apply(m: Any, x: Any) -> Any:
    for layer in m["layers"]:
      assert type(layer) is Layer
      assert isinstance(layer.weight, np.ndarray)
      assert layer.mode == "plain"
      x = np.dot(layer.weight, x)
      x = x if layer.activation is None else layer.activation(x)
    return x

  return cg.gate(apply, **{"out": lambda m, x: x, **options})


X = jnp.array([0.1, -0.2])


# -- calls ---
@BOTH
def test_the_callable_gets_the_structure_back(engine: Any) -> None:
  gate = applied()
  with cg.config(engine=engine), cg.errors():
    want = reference(model(), X)
    np.testing.assert_allclose(gate(model(), X), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: gate(model(), x))(X), want, rtol=1e-6)
    np.testing.assert_allclose(gate(x=X, m=model()), want, rtol=1e-6)
    rows = jnp.stack([X, 2 * X, 3 * X])
    got = jax.vmap(lambda x: gate(model(), x))(rows)
    np.testing.assert_allclose(got, jax.vmap(lambda x: reference(model(), x))(rows), rtol=1e-6)
    got = jax.lax.scan(lambda c, x: (c, gate(model(), x)), 0, rows)[1]
    np.testing.assert_allclose(got, jax.vmap(lambda x: reference(model(), x))(rows), rtol=1e-6)


def test_every_function_about_the_gate_gets_it_back() -> None:
  seen: list[Any] = []

  def out(m: Any, x: Any) -> Any:
    seen.append(("out", m["layers"][0].activation))
    return x

  gate = applied(out=out)

  @gate.defvmap
  def _(size: int, batched: Any, m: Any, x: Any) -> Any:
    flags = batched[0]["layers"][0]
    seen.append(("vmap", m["layers"][0].activation, flags.weight, flags.activation, flags.mode))
    return jnp.broadcast_to(x, (size, 2)), True

  assert jax.vmap(lambda x: gate(model(), x))(jnp.ones((3, 2))).shape == (3, 2)
  assert seen == [("out", np.tanh), ("vmap", np.tanh, False, False, False)]


def test_static_parts_are_equal_by_value_and_else_by_identity() -> None:
  traced: list[Any] = []

  def out(m: Any, x: Any) -> Any:
    traced.append(m["layers"][0].mode)
    return x

  gate = cg.gate(lambda m, x: x.copy(), out=out, like=lambda m, x: x)
  one = Unhashable()
  for mode in ("a", "".join(["a"]), "b", b"b", one, one, Unhashable()):
    before = core(gate).differentiable.cache_info().currsize
    gate(model(mode=mode), X)
    traced.append(core(gate).differentiable.cache_info().currsize - before)
  assert [made for made in traced if isinstance(made, int)] == [1, 0, 1, 1, 1, 0, 1]


def test_a_loaded_program_has_its_static_parts() -> None:
  gate = cg.gate(lambda m, x: m[0](x) + len(m[1]), out=lambda m, x: x, name="split.loaded")
  from jax import export

  program = export.export(
    jax.jit(lambda x: gate((np.cos, "three"), x)), disabled_checks=cg.export_checks()
  )(X)
  np.testing.assert_allclose(program.call(X), np.cos(X) + 5, rtol=1e-6)


# -- derivatives ---
@BOTH
@pytest.mark.parametrize("way", ["jvp", "vjp", "vjp of None", "like", "differences"])
def test_derivatives_are_of_the_arrays(engine: Any, way: str) -> None:
  def loss(call: Any, weights: Any, x: Any) -> Any:
    m = model()
    for layer, weight in zip(m["layers"], weights, strict=True):
      layer.weight = weight
    return call(m, x).sum()

  arrays = lambda m: tuple(layer.weight for layer in m["layers"])

  def of_weights(m: Any, x: Any) -> Any:
    def run(weights: Any, x: Any) -> Any:
      layers = [dataclasses.replace(a, weight=w) for a, w in zip(m["layers"], weights, strict=True)]
      assert layers[0].activation is np.tanh
      return reference({"layers": layers}, x)

    return run

  options = {"like": {"like": reference}, "differences": {"gradient": "finite-difference"}}
  gate = applied(**options.get(way, {}))
  if way == "jvp":

    @gate.defjvp
    def _(primals: Any, tangents: Any) -> Any:
      run = of_weights(*primals)
      moved = (arrays(tangents[0]), tangents[1])
      return gate(*primals), jax.jvp(run, (arrays(primals[0]), primals[1]), moved)[1]

  if way.startswith("vjp"):

    def backward(residuals: Any, cotangent: Any) -> Any:
      m, x = residuals
      weights, x_bar = jax.vjp(of_weights(m, x), arrays(m), x)[1](cotangent)
      kept = [None, "plain"] if way == "vjp of None" else [np.tanh, "plain"]
      layers = [Layer(w, *(kept if i == 0 else [None, None])) for i, w in enumerate(weights)]
      if way == "vjp of None":
        layers[0].mode = None
      layers[1].mode = "plain"
      return {"layers": layers}, x_bar

    gate.defvjp(lambda m, x: (gate(m, x), (m, x)), backward)
  weights = arrays(model())
  want = jax.grad(lambda w, x: loss(reference, w, x), (0, 1))(weights, X)
  with cg.config(engine=engine), cg.errors():
    got = jax.jit(jax.grad(lambda w, x: loss(gate, w, x), (0, 1)))(weights, X)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), got, want)


def test_cotangents_of_another_structure_are_an_error() -> None:
  gate = applied()
  gate.defvjp(lambda m, x: (gate(m, x), x), lambda x, bar: ({"layers": [bar]}, bar))
  with pytest.raises(cg.GateDefinitionError, match=r"bwd: expected cotangents of the structure"):
    jax.grad(lambda x: gate(model(), x).sum())(X)


def test_a_linear_gate_is_transposed() -> None:
  gate = cg.gate(lambda m, x: m["w"] * x, out=lambda m, x: x, linear=1)

  @gate.deftranspose
  def _(cotangent: Any, m: Any, x: Any) -> Any:
    assert m["name"] == "scale"
    return gate(m, cotangent)

  scale = {"w": jnp.array([2.0, 3.0]), "name": "scale"}
  assert jax.grad(lambda x: gate(scale, x).sum())(X).tolist() == [2.0, 3.0]


# -- messages ---
@pytest.mark.parametrize("options", [{}, {"like": reference}])
def test_messages_name_a_leaf_by_its_parameter_and_path(options: Any) -> None:
  gate = applied(**options)
  with pytest.raises(cg.GateDefinitionError) as caught:
    gate(model(mode=np.array(["text"])), X)
  assert ": argument 'm'['layers'][0].mode: expected an array" in str(caught.value)

  kept: list[Any] = []
  keep = cg.gate(lambda m, x: kept.append(m["layers"][1].weight), effect="io")
  with (
    pytest.raises(cg.EscapedViewError, match=r"argument 'm'\['layers'\]\[1\]\.weight:"),
    cg.errors(),
  ):
    keep(model(), X)


def test_an_argument_that_is_no_array_itself_is_refused() -> None:
  for value in ("text", np.tanh, object()):
    with pytest.raises(cg.GateDefinitionError, match=r"argument 'm': expected an array .*static"):
      applied()(value, X)
