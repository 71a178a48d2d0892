# SPDX-License-Identifier: Apache-2.0
"""Calls in functions that XLA applies to two elements are refused: they would end the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

Pairwise = Callable[[Any, Any], Any]
add = cg.gate(lambda a, b: a + b, out=lambda a, b: a, name="reducers.add")
increment = cg.gate(lambda a: a + 1, out=lambda a: a, name="reducers.increment")
doubled = cg.elementwise("float32 x", "float32 y", "y = x + x", name="reducers.doubled")
X = jnp.arange(8, dtype=np.float32)
USERS: dict[str, Callable[[Pairwise, Any], Any]] = {
  "jax.lax.reduce": lambda f, x: jax.lax.reduce(x, np.float32(0), f, (0,)),
  "jax.lax.reduce_window": lambda f, x: jax.lax.reduce_window(
    x, np.float32(0), f, (2,), (1,), "VALID"
  ),
  "x.at[...].apply": lambda f, x: x.at[jnp.array([1, 2])].apply(lambda one: f(one, one)),
}
CALLS: dict[str, Pairwise] = {
  "gate 'reducers.add'": add,
  "gate 'reducers.increment'": lambda a, b: increment(a) + b,
  "kernel 'reducers.doubled'": lambda a, b: doubled(a) + b,
  "tap '": lambda a, b: cg.tap(a + b, lambda value: None, effect="dataflow"),
  "jax.pure_callback": lambda a, b: jax.pure_callback(lambda a, b: a + b, a, a, b),
}


@pytest.mark.parametrize("how", ["jit", "without jit", "inner jit", "vmap"])
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_between_two_elements_is_refused(call: str, user: str, how: str) -> None:
  of = jax.jit(CALLS[call]) if how == "inner jit" else CALLS[call]
  run = lambda x: USERS[user](of, x)
  if how == "vmap":
    run = jax.vmap(run)
  x = X.reshape(2, 4) if how == "vmap" else X
  with pytest.raises(cg.GateDefinitionError) as raised:
    (run if how == "without jit" else jax.jit(run))(x)
  assert str(raised.value).startswith(f"{user}: expected a function of JAX's own operations")
  assert f"calls {call}" in str(raised.value)


def test_functions_of_jax_alone_and_calls_of_whole_arrays_work() -> None:
  for user in USERS.values():
    np.testing.assert_array_equal(
      jax.jit(lambda x, user=user: user(jnp.add, x))(X), user(jnp.add, X)
    )
  np.testing.assert_array_equal(jax.lax.associative_scan(add, X), np.cumsum(X))
