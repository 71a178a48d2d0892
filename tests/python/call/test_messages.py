# SPDX-License-Identifier: Apache-2.0
"""Messages for a user who takes a gate for something that it isn't."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

X = jnp.arange(1.0, 4.0)


# -- functions for out= and like= ---
def filled(x: Any, n: int = 3, *, scale: float = 2.0) -> Any:
  return np.full(n, scale, x.dtype)


@pytest.mark.parametrize("engine", ["callgate", "jax"])
def test_out_gets_the_callable_s_defaults(engine: Any) -> None:
  seen: list[Any] = []

  def out(x: Any, n: int, *, scale: float) -> Any:
    seen.append((n, scale))
    return jax.ShapeDtypeStruct((n,), x.dtype)

  gate = cg.gate(filled, out=out)
  with cg.config(engine=engine):
    assert gate(X).tolist() == [2.0] * 3
    assert jax.jit(lambda x: gate(x, n=2))(X).tolist() == [2.0] * 2
    assert jax.vmap(lambda x: gate(x, scale=1.0))(X).tolist() == [[1.0] * 3] * 3
  assert seen == [(3, 2.0), (2, 2.0), (3, 1.0)]


def test_the_callable_s_defaults_go_before_out_s_own() -> None:
  own = lambda x, n=5: jax.ShapeDtypeStruct((n,), x.dtype)
  assert cg.gate(filled, out=own)(X).shape == (3,)
  assert cg.gate(lambda x, **_: x.copy(), out=lambda x, n=3: x)(X).tolist() == X.tolist()
  like = cg.gate(filled, like=lambda x, n, scale: jnp.full(n, scale) + 0 * x[0])
  assert jax.grad(lambda x: like(x).sum())(X).tolist() == [0.0] * 3
  like.check(X)


def test_an_extent_that_is_an_array_is_an_error_that_says_what_to_give() -> None:
  gate = cg.gate(filled, out=lambda x, n=3: jax.ShapeDtypeStruct((n,), x.dtype))
  with pytest.raises(
    cg.GateDefinitionError, match="no value while tracing; pass a Python int by keyword"
  ):
    gate(X, 5)


# -- static arguments ---
@dataclasses.dataclass(frozen=True)
class Settings:
  weight: Any


def test_a_static_argument_that_holds_an_array_is_an_error_that_says_why() -> None:
  gate = cg.gate(lambda x, settings: x, out=lambda x: x)
  with pytest.raises(cg.GateDefinitionError) as caught:
    gate(X, settings=Settings(X))
  assert "keyword argument 'settings': expected an array, a pytree of arrays or" in str(
    caught.value
  )
  assert "got Settings (unhashable type: 'jaxlib" in str(caught.value)
  assert "register_dataclass" in str(caught.value)


# -- NaN ---
@pytest.mark.filterwarnings("ignore")
def test_debug_nans_names_the_gate() -> None:
  gate = cg.gate(lambda x: x * np.float32(np.nan), out=lambda x: x, name="messages.nan")
  kernel = cg.elementwise("T x", "T y", "y = 0 * x / 0", name="messages.kernel")
  named = r"invalid value \(nan\) encountered in the results of "
  with jax.debug_nans(True):
    for call in (gate, jax.jit(gate), jax.jit(lambda x: gate(x) + 1)):
      with pytest.raises(FloatingPointError, match=named + r"gate 'messages\.nan'"):
        call(X)
    with pytest.raises(FloatingPointError, match=named + r"kernel 'messages\.kernel'"):
      kernel(X)
    assert gate.stats()["calls"] >= 3
  assert np.isnan(gate(X)).all()


# -- forward mode ---
def test_forward_mode_of_a_gate_with_a_vjp_says_what_to_define() -> None:
  sine = cg.gate(np.sin, out=lambda x: x, name="messages.sine")
  sine.defvjp(lambda x: (sine(x), x), lambda x, bar: (jnp.cos(x) * bar,))
  summed = lambda x: sine(x).sum()
  twice = lambda x: jax.lax.scan(lambda c, _: (sine(c), None), x, None, length=2)[0]
  started = lambda x: sine.start(x).result()
  for differentiate in (
    lambda: jax.jvp(sine, (X,), (X,)),
    lambda: jax.jit(lambda x: jax.jvp(sine, (x,), (x,)))(X),
    lambda: jax.jacfwd(sine)(X),
    lambda: jax.hessian(summed)(X),
    lambda: jax.jvp(twice, (X,), (X,)),
    lambda: jax.jvp(started, (X,), (X,)),
    lambda: jax.hessian(lambda x: started(x).sum())(X),
  ):
    with pytest.raises(cg.GateDefinitionError) as caught:
      differentiate()
    assert "gate 'messages.sine' has no forward mode: defvjp serves" in str(caught.value)
    assert "Use gate.defjvp(rule)" in str(caught.value)
  np.testing.assert_allclose(jax.grad(summed)(X), jnp.cos(X), rtol=1e-6)
  np.testing.assert_allclose(jax.jacrev(jax.jacrev(summed))(X), jnp.diag(-jnp.sin(X)), rtol=1e-5)


def test_jax_s_own_error_stays_for_others_custom_vjp() -> None:
  double = jax.custom_vjp(lambda x: 2 * x)
  double.defvjp(lambda x: (2 * x, None), lambda _, bar: (2 * bar,))
  for call in (lambda f, x: jax.jvp(f, (x,), (x,)), lambda f, x: jax.jacfwd(f)(x)):
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
      call(double, X)


# -- f-strings ---
def test_an_f_string_of_a_traced_array_is_an_error() -> None:
  def checked(x: Any) -> Any:
    cg.check(x.sum() > 2, f"expected more, got {x}")
    return x

  def printed(x: Any) -> Any:
    cg.print(f"x is {x.sum()}")
    return x

  told = (
    r"expected fields for values, as .* got \w*Tracer\(float32\[\d?\]\), a traced array in an f"
  )
  for function, option in ((checked, "check: message"), (printed, "print: fmt")):
    for transform in (jax.jit, jax.vmap):
      with pytest.raises(cg.GateDefinitionError, match=rf"{option}: .*Tracer"):
        transform(function)(jnp.ones((2, 3)) if transform is jax.vmap else X)
    with pytest.raises(cg.GateDefinitionError, match=told):
      jax.jit(function)(X)
  cg.check(X.sum() > 2, f"expected more, got {X}")  # which is known here


# -- runs ---
def test_numbers_of_runs_are_not_negative() -> None:
  runs: list[int] = []

  @cg.gate(out=lambda x: x, style="context")
  def echo(context: Any, out: Any, x: Any) -> None:
    runs.append(context.run)
    out[...] = x

  sent: list[int] = []
  program = jax.jit(lambda x: cg.tap(echo(x), lambda _, info: sent.append(info.run)))
  for _ in range(3):
    program(X).block_until_ready()
  cg.barrier()
  assert runs == sent
  assert len(set(runs)) == 3
  assert all(0 <= run < 2**32 for run in runs)


# -- derivatives ---
def test_a_derivative_that_is_not_there_says_what_to_do() -> None:
  acts = cg.gate(lambda x: None, effect="io", name="acts")
  gives = cg.gate(lambda x: x, out=lambda x: x, name="gives")
  with pytest.raises(cg.GateDefinitionError, match=r"no results.*stop_gradient.*callgate\.tap"):
    jax.grad(lambda x: (acts(x), x)[1])(1.0)
  with pytest.raises(cg.GateDefinitionError, match=r"defjvp.*stop_gradient"):
    jax.grad(gives)(1.0)


def test_a_gate_is_called_linear_only_where_it_is_declared_so() -> None:
  plain = cg.gate(lambda x: x, out=lambda x: x)
  linear = cg.gate(lambda x: x, out=lambda x: x, linear=True)
  for gate, said in ((plain, "must be linear"), (linear, "is declared linear")):
    with pytest.raises(cg.GateDefinitionError, match=said):
      jax.linear_transpose(gate, X)(X)
