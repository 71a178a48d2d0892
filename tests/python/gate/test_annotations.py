# SPDX-License-Identifier: Apache-2.0
"""Results that jaxtyping's annotations declare, and the check of arguments against theirs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import callgate as cg

jaxtyping = pytest.importorskip("jaxtyping", reason="jaxtyping is not installed")
from jaxtyping import (  # noqa: E402
  Array,
  Bool,
  Complex,
  Float,
  Float32,
  Int,
  Key,
  Num,
  Shaped,
)

F32, I32 = jnp.float32, jnp.int32


def declared(function: Any, *args: Any, **kwargs: Any) -> Any:
  """The shapes and dtypes of a gate's results, from its annotations alone."""
  found = jax.eval_shape(functools.partial(cg.gate(function), **kwargs), *args)
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), found)


def of(*shape: int, dtype: Any = F32) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype)


def test_a_gate_needs_no_out(engine: Any) -> None:
  @cg.gate
  def tripled(x: Float[Array, "n"]) -> Float[Array, "n 3"]:
    return np.stack([x] * 3, axis=1)

  x = jnp.arange(2.0)
  assert tripled(x).tolist() == [[0.0] * 3, [1.0] * 3]
  assert jax.jit(jax.vmap(tripled))(jnp.ones((4, 2))).shape == (4, 2, 3)


def test_the_functions_results_are_checked_against_them() -> None:
  @cg.gate
  def wrong(x: Float[Array, "n"]) -> Float[Array, "n 3"]:
    return x

  with pytest.raises(cg.ResultError, match=r"expected .*\[2,3\].*got .*\[2\]"), cg.errors():
    wrong(jnp.ones(2))


def test_dimensions() -> None:
  def square(x: Num[Array, "*batch n"]) -> Num[Array, "*batch n n"]: ...
  def product(a: Float[Array, "n m"], b: Float[Array, "m k"]) -> Float[Array, "n k"]: ...
  def joined(x: Float[Array, "n"], y: Float[Array, "m"]) -> Float[Array, "n+m-1"]: ...
  def last(x: Float[Array, "... n"]) -> Float[Array, "n"]: ...
  def scalar(x: Float[Array, "_ _"]) -> Float[Array, ""]: ...
  def fixed(x: Float[Array, "2 three=3"]) -> Float[Array, "cols=4 3"]: ...
  def spread(x: Float[Array, "#n"], y: Float[Array, "n"]) -> Float[Array, "n"]: ...
  def rows(x: Float[Array, "n"], *, rows: int) -> Float[Array, "rows n"]: ...
  def braces(x: Float[Array, "n"], *, rows: int) -> Float[Array, "{rows}*2 n"]: ...
  def shifted(x: Float[Array, "n-1"], y: Float[Array, "n"]) -> Float[Array, "n-1"]: ...

  assert declared(square, of(5, 6, 2)) == ((5, 6, 2, 2), "float32")
  assert declared(square, of(2)) == ((2, 2), "float32")
  assert declared(product, of(2, 3), of(3, 4)) == ((2, 4), "float32")
  assert declared(joined, of(2), of(3)) == ((4,), "float32")
  assert declared(last, of(4, 5, 6)) == declared(last, of(6)) == ((6,), "float32")
  assert declared(scalar, of(4, 5)) == ((), "float32")
  assert declared(fixed, of(2, 3)) == ((4, 3), "float32")
  assert declared(spread, of(1), of(7)) == ((7,), "float32")
  assert declared(rows, of(3), rows=2) == ((2, 3), "float32")
  assert declared(braces, of(3), rows=2) == ((4, 3), "float32")
  assert declared(shifted, of(2), of(3)) == ((2,), "float32")


def test_dtypes() -> None:
  def one(x: Float[Array, "n"]) -> Float32[Array, "n"]: ...
  def same(x: Float[Array, "n"]) -> Float[Array, "n"]: ...
  def anything(x: Shaped[Array, "n"]) -> Shaped[Array, "n"]: ...
  def other(x: Float[Array, "n"]) -> Int[Array, "n"]: ...
  def flags(x: Float[Array, "n"]) -> Bool[Array, "n"]: ...
  def wave(x: Float[Array, "n"]) -> Complex[Array, "n"]: ...
  def pair(x: Float[Array, "n"]) -> tuple[Float[Array, "n"], Int[Array, ""]]: ...
  def either(x: Float[Array, "n"]) -> Float[Array, "n"] | Float[np.ndarray, "n"]: ...

  half = of(2, dtype=jnp.bfloat16)
  assert declared(one, half) == ((2,), "float32")
  assert declared(same, half) == ((2,), "bfloat16")
  assert declared(anything, of(2, dtype=jnp.int8)) == ((2,), "int8")
  assert declared(other, of(2)) == ((2,), "int32")
  assert declared(flags, of(2)) == ((2,), "bool")
  assert declared(wave, of(2)) == ((2,), "complex64")
  assert declared(pair, half) == (((2,), "bfloat16"), ((), "int32"))
  assert declared(either, of(2)) == ((2,), "float32")
  with jax.enable_x64(True):
    assert declared(other, of(2)) == ((2,), "int64")
    assert declared(wave, of(2)) == ((2,), "complex128")


def test_arguments_are_checked_by_name() -> None:
  @cg.gate(name="annotated")
  def f(x: Float[Array, "n"], y: Float[Array, "n 2"]) -> Float[Array, "n"]:
    return x

  with pytest.raises(cg.GateDefinitionError) as raised:
    f(jnp.ones(3), jnp.ones((4, 2)))
  assert str(raised.value) == (
    "gate 'annotated': argument 'y': expected Float['n 2'] where n=3, got float32[4,2]"
  )
  with pytest.raises(cg.GateDefinitionError, match=r"'x': expected Float\['n'\], got int32\[3\]"):
    f(jnp.ones(3, int), jnp.ones((3, 2)))
  with pytest.raises(cg.GateDefinitionError, match=r"'x': expected Float\['n'\].*got float32\[\]"):
    f(1.0, jnp.ones((3, 2)))


def test_an_expression_is_checked_when_all_names_are_known() -> None:
  def f(x: Float[Array, "n-1"], y: Float[Array, "n"]) -> Float[Array, "n"]: ...

  with pytest.raises(cg.GateDefinitionError, match=r"'x': expected Float\['n-1'\] where n=3"):
    declared(f, of(3), of(3))


def test_dimensions_that_they_leave_open_are_told() -> None:
  def dims(x: Float[Array, "n"]) -> Float[Array, "m"]: ...
  def dtype(x: Int[Array, "n"], y: Float[Array, "n"]) -> Shaped[Array, "n"]: ...
  def anonymous(x: Float[Array, "..."]) -> Float[Array, "..."]: ...

  with pytest.raises(cg.GateDefinitionError, match=r"result, Float\['m'\]: expected dimensions"):
    declared(dims, of(2))
  with pytest.raises(cg.GateDefinitionError, match=r"got '\.\.\.'; use out="):
    declared(anonymous, of(2))
  assert declared(dtype, of(2, dtype=I32), of(2)) == ((2,), "float32")  # as JAX promotes


def test_other_annotations_say_nothing() -> None:
  def plain(x: Any) -> np.ndarray: ...
  def unknown(x: Any) -> Unknown: ...
  def mixed(x: Any) -> tuple[Float[Array, ""], np.ndarray]: ...
  def maybe(x: Any) -> Float[Array, ""] | None: ...

  for function in (plain, unknown, mixed, maybe):
    with pytest.raises(
      cg.GateDefinitionError, match="results' shapes are not known; expected out="
    ):
      cg.gate(function)


def test_out_and_like_come_first() -> None:
  def f(x: Float[Array, "n"]) -> Float[Array, "n n"]: ...

  gate = cg.gate(f, out=lambda x: x)
  assert jax.eval_shape(gate, of(2)).shape == (2,)
  assert jax.eval_shape(cg.gate(f, like=lambda x: x[:1]), of(2)).shape == (1,)


def test_methods_effects_keys_and_partial_functions() -> None:
  class Model:
    @cg.gate
    def doubled(self, x: Float[Array, "n"]) -> Float[Array, "n"]:
      return 2 * x

  assert Model().doubled(jnp.ones(2)).tolist() == [2.0, 2.0]
  assert Model.doubled(Model(), jnp.ones(2)).tolist() == [2.0, 2.0]

  @cg.gate(effect="io")
  def read(x: Float[Array, "n"]) -> Float[Array, "n"]:
    return x + 1

  assert jax.jit(read)(jnp.ones(2)).tolist() == [2.0, 2.0]

  @cg.gate
  def words(key: Key[Array, ""], x: Float[Array, "n"]) -> Float[Array, "n"]:
    return x + np.float32(key.size)

  assert words(jax.random.key(0), jnp.ones(2)).tolist() == [3.0, 3.0]
  assert words(jax.random.PRNGKey(0), jnp.ones(2)).tolist() == [3.0, 3.0]

  @cg.gate(arrays="jax")
  def pick(keys: Key[Array, "n"], x: Float[Array, "n"]) -> Key[Array, ""]:
    return keys[jnp.argmax(x)]

  keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
  assert jax.jit(pick)(keys, jnp.arange(2.0)) == keys[1]
  with pytest.raises(cg.GateDefinitionError, match="where n=2, got float32\\[3\\]"):
    pick(keys, jnp.ones(3))

  def scaled(x: Float[Array, "n"], *, by: float) -> Float[Array, "n"]:
    return x * np.float32(by)

  assert cg.gate(functools.partial(scaled, by=3))(jnp.ones(2)).tolist() == [3.0, 3.0]


def test_under_transformations_the_annotations_are_of_one_call() -> None:
  @cg.gate(gradient="finite-difference")
  def norm(x: Float[Array, "n"]) -> Float[Array, ""]:
    return np.sqrt((x * x).sum())

  x = jnp.array([[3.0, 4.0], [6.0, 8.0]])
  np.testing.assert_allclose(jax.vmap(jax.grad(norm))(x), [[0.6, 0.8]] * 2, rtol=1e-2)


def test_symbolic_shapes() -> None:
  @cg.gate(name="annotated.symbolic")
  def doubled(x: Float[Array, "n 3"]) -> Float[Array, "2*n"]:
    return np.repeat(x[:, 0], 2)

  shape = jax.ShapeDtypeStruct(export.symbolic_shape("b, 3"), F32)
  exported = export.export(jax.jit(doubled), disabled_checks=cg.export_checks())(shape)
  assert str(exported.out_avals[0].shape[0]) == "2*b"
  assert exported.call(jnp.ones((5, 3))).shape == (10,)
