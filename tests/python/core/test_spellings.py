# SPDX-License-Identifier: Apache-2.0
"""Options as JAX and others call them: the error says what callgate calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

X = jnp.ones(3)
JAX = [
  (
    {"vmap_method": "sequential"},
    "vmap_method='sequential' is JAX's option; in callgate: vmap='each'",
  ),
  ({"vmap_method": "expand_dims"}, "vmap='whole'"),
  ({"vmap_method": "broadcast_all"}, "vmap='broadcast'"),
  ({"vmap_method": "legacy_vectorized"}, "vmap='whole'"),
  ({"vmap_method": None}, "in callgate: vmap='each' or vmap='whole' or vmap='broadcast'"),
  ({"ordered": True}, "ordered=True is JAX's option; in callgate: effect='ordered'"),
  ({"ordered": False}, "effect='io'"),
  ({"has_side_effect": True}, "effect='io'"),
  (
    {"pure": False},
    "pure=False is another library's option; in callgate: effect='io' or 'ordered'",
  ),
  ({"input_output_aliases": {0: 0}}, "aliases="),
  ({"static_argnames": "n"}, "keyword arguments without arrays"),
  ({"jit": True}, "not needed, since calls work inside and outside jax.jit"),
]
MAKERS: dict[str, Callable[..., Any]] = {
  "gate": lambda **options: cg.gate(np.sort, out=X, **options),
  "call": lambda **options: cg.call(np.sort, X, X, **options),
  "cpp": lambda **options: cg.cpp("", out=X, **options),
  "cfunc": lambda **options: cg.cfunc(0, "int f(int x)", **options),
  "elementwise": lambda **options: cg.elementwise("T x", "T y", "y = x", **options),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("options", "text"), JAX)
def test_other_names_of_options_are_answered(
  maker: str, options: dict[str, Any], text: str
) -> None:
  with pytest.raises(cg.GateDefinitionError) as caught:
    MAKERS[maker](**options)
  assert str(caught.value).startswith(f"{maker}: {next(iter(options))}=")
  assert text in str(caught.value)


def test_so_are_result_types_and_those_of_taps() -> None:
  with pytest.raises(cg.GateDefinitionError, match="in callgate: out=, a pytree of"):
    cg.gate(np.sort, result_shape_dtypes=X)
  with pytest.raises(cg.GateDefinitionError, match="tap: vmap_method='sequential' is JAX's"):
    cg.tap(X, print, vmap_method="sequential")  # pyright: ignore
  with pytest.raises(cg.GateDefinitionError, match=r"tap: partitioned=True .* sharding='shard'"):
    cg.tap(X, print, partitioned=True)  # pyright: ignore
  assert cg.tap(X, lambda _: None, ordered=True) is not None  # which is its own


def test_so_is_jax_s_value_of_vmap() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"vmap: 'sequential' is JAX's .* vmap='each'"):
    cg.gate(np.sort, out=X, vmap="sequential")  # pyright: ignore


def test_a_callable_s_own_keyword_of_such_a_name_reaches_it() -> None:
  def scaled(x: Any, *, pure: bool) -> Any:
    return x * np.float32(2 if pure else 3)

  assert cg.call(scaled, X, X, pure=True).tolist() == [2.0] * 3
