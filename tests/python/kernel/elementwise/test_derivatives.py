# SPDX-License-Identifier: Apache-2.0
"""Derivatives of `cg.elementwise`, against JAX's own of the same expression."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from property_checks import is_soak
from transformation_table import X, groups, run

import callgate as cg

# How g++ optimises the kernels' loops is not what is tested.
elementwise = functools.partial(cg.elementwise, flags=("-O0",))

# Expression, derivative, and the same in JAX.
EXPRESSIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {
  "product": ("z = x * y + 1", "dz = y * dx + x * dy", lambda x, y: x * y + 1),
  "sum": ("z = x - 2 * y", "dz = dx - 2 * dy", lambda x, y: x - 2 * y),
  "power": (
    "z = pow(x, y)",
    "dz = y * pow(x, y - 1) * dx + z * log(x) * dy",
    lambda x, y: x**y,
  ),
  "quotient": ("z = x / y", "dz = (dx - z * dy) / y", lambda x, y: x / y),
  "of the first alone": (
    "z = exp(x) + floor(y)",
    "dz = exp(x) * dx",
    lambda x, y: jnp.exp(x) + jnp.floor(y),
  ),
  "with a condition": (
    "z = x > y ? x * y : sin(y)",
    "auto both = y * dx; both += x * dy; dz = x > y ? both : cos(y) * dy",
    lambda x, y: jnp.where(x > y, x * y, jnp.sin(y)),
  ),
}
EXAMPLES = [((3, 4), (3, 4)), ((3, 1), (4,)), ((), (2, 3)), ((4,), ())]


def values(shape: Any, start: float) -> Any:
  return start + jnp.linspace(0.1, 1.3, int(np.prod(shape, dtype=int))).reshape(shape)


def in_all_modes(f: Callable[..., Any], examples: Any) -> dict[str, Any]:
  """The derivatives for pairs of shapes; one program compiles faster than one each."""
  results: dict[str, Any] = {}
  for x_shape, y_shape in examples:
    x, y = values(x_shape, 0.5), values(y_shape, 0.7)
    tangents = jnp.cos(x), jnp.sin(y)

    def loss(x: Any, y: Any) -> Any:
      z = f(x, y)
      return (z * (1 + jnp.arange(z.size).reshape(z.shape))).sum()

    modes = {
      "gradients": jax.grad(loss, (0, 1))(x, y),
      "gradient of y": jax.grad(loss, 1)(x, y),
      "jvp": jax.jvp(f, (x, y), tangents)[1],
      "linearize": jax.jit(jax.linearize(f, x, y)[1])(*tangents),
    }
    results |= {f"{mode} of {x_shape}, {y_shape}": value for mode, value in modes.items()}
  return results


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_gradients_agree_with_jax_s(name: str) -> None:
  operation, jvp, reference = EXPRESSIONS[name]
  kernel = elementwise("T x, T y", "T z", operation, jvp=jvp)
  # How shapes broadcast is the same for all expressions, which are compiled for each rank.
  all_shapes = name == "product" or is_soak()
  examples = EXAMPLES if all_shapes else EXAMPLES[1:2]
  got, want = (jax.jit(lambda f=f: in_all_modes(f, examples))() for f in (kernel, reference))
  eager = in_all_modes(kernel, EXAMPLES[1:2]) if all_shapes else {}
  for case, value in [*got.items(), *eager.items()]:
    for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(want[case]), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=case)
    assert jax.tree.structure(value) == jax.tree.structure(want[case])


def test_a_derivative_that_is_infinite_doesn_t_spoil_the_other() -> None:
  kernel = elementwise("T x, T y", "T z", "z = sqrt(x) + y", jvp="dz = 0.5 / sqrt(x) * dx + dy")
  assert jax.grad(kernel, 1)(0.0, 1.0) == 1.0
  assert jax.grad(kernel, (0, 1))(0.0, 1.0) == (np.inf, 1.0)


def test_the_kernels_of_arguments_that_are_not_differentiated_do_not_run() -> None:
  kernel = elementwise(
    "T x, T y", "T z", "z = x * y", jvp="dz = y * dx + x * dy", name="test_elementwise.lazy"
  )
  text = jax.jit(jax.grad(lambda x, y: kernel(x, y).sum())).lower(X, X).as_text()
  assert "test_elementwise.lazy.dx[" in text
  assert "test_elementwise.lazy.dy[" not in text


def test_several_results_of_several_dtypes() -> None:
  kernel = elementwise(
    "T x, int32 k, U w", "T a, bool up, float32 b", "a = x * k; up = x > 0; b = x * w",
    jvp="da = k * dx; db = w * dx + x * dw",
  )  # fmt: skip

  def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    def total(x: Any, w: Any) -> Any:
      a, up, b = f(x, jnp.arange(3), w)
      return (a.astype(jnp.float32) * up).sum() + (b**2).sum()

    return total

  x, w = jnp.array([1.0, -2.0, 3.0]), jnp.array([2.0, 0.5, 1.0], jnp.bfloat16)
  got = jax.jit(jax.grad(loss(kernel), (0, 1)))(x, w)
  reference = lambda x, k, w: (x * k, x > 0, x * w.astype(jnp.float32))
  want = jax.jit(jax.grad(loss(reference), (0, 1)))(x, w)
  assert [g.dtype for g in got] == [jnp.float32, jnp.bfloat16]
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2)


def test_the_derivative_of_a_complex_function() -> None:
  kernel = elementwise("T x, T y", "T z", "z = x * y + 1", jvp="dz = y * dx + x * dy")
  x, y = jnp.array([1 + 2j, 3 - 1j]), jnp.array(0.5 - 1j)
  gradient = lambda f: jax.jit(jax.grad(lambda x, y: f(x, y).sum(), (0, 1), holomorphic=True))
  got, want = gradient(kernel)(x, y), gradient(lambda x, y: x * y + 1)(x, y)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  size = elementwise("complex64 x", "float32 z", "z = abs(x)", jvp="dz = 1.0 * dx")
  with pytest.raises(cg.GateDefinitionError, match="complex argument 'x', got a result of float32"):
    jax.grad(size)(1 + 1j)


def test_raw_arguments_and_the_index_serve_in_derivatives() -> None:
  kernel = elementwise(
    "T x, raw T t", "T z", "z = x * x * t[i % 2] * i", jvp="dz = 2 * x * t[i % 2] * i * dx"
  )
  x, t = values((2, 3), 0.0), jnp.array([2.0, 5.0])
  weights = jnp.array([2.0, 5, 2, 5, 2, 5]).reshape(2, 3) * jnp.arange(6).reshape(2, 3)
  np.testing.assert_allclose(jax.grad(lambda x: kernel(x, t).sum())(x), 2 * x * weights, rtol=1e-6)
  lanes = jax.vmap(jax.grad(lambda x: kernel(x, t).sum()))(x)
  np.testing.assert_allclose(lanes, 2 * x * jnp.array([0, 5, 4]), rtol=1e-6)
  with pytest.raises(cg.GateDefinitionError, match="with respect to 't', which is raw"):
    jax.grad(lambda t: kernel(x, t).sum())(t)


def test_a_function_in_the_preamble_serves_both() -> None:
  preamble = """
  template <class V> V softplus(V v) { return max(v, 0) + log1p(exp(-abs(v))); }
  template <class V> V logistic(V v) { return V(1) / (V(1) + exp(-v)); }
  """
  kernel = elementwise(
    "T x", "T z", "z = softplus(x)", jvp="dz = logistic(x) * dx",
    preamble="using callgate::elementwise::max;" + preamble,
  )  # fmt: skip
  x = jnp.linspace(-8, 8, 33)
  np.testing.assert_allclose(kernel(x), jax.nn.softplus(x), rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(jax.vmap(jax.grad(kernel))(x), jax.nn.sigmoid(x), rtol=1e-5)


# -- higher order, references, differences -------------------------------------------------------
SQUARE = elementwise(
  "T x, T y", "T z", "z = x * x * y", jvp="dz = 2 * x * y * dx + x * x * dy",
  like=lambda x, y: x * x * y, name="test_elementwise.square",
)  # fmt: skip


def test_higher_derivatives_come_from_the_reference() -> None:
  x, y = values((2, 1), 0.0), values((3,), 1.0)
  for order in (jax.hessian, lambda f: jax.jacfwd(jax.hessian(f))):
    got = jax.jit(order(lambda x: SQUARE(x, y).sum()))(x)
    want = jax.jit(order(lambda x: (x * x * y).sum()))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5)
  mixed = jax.grad(jax.grad(SQUARE, 0), 1)(3.0, 2.0)
  assert mixed == 6.0


def test_without_a_reference_the_second_derivative_is_an_error_that_names_like() -> None:
  kernel = elementwise("T x", "T z", "z = x * x", jvp="dz = 2 * x * dx")
  assert jax.grad(kernel)(3.0) == 6.0
  with pytest.raises(cg.GateDefinitionError, match=r"first derivative.*pass like="):
    jax.grad(jax.grad(kernel))(3.0)
  linear = elementwise("T x", "T z", "z = 3 * x", jvp="dz = 3 * dx")
  assert jax.grad(jax.grad(linear))(3.0) == 0.0


def test_finite_differences_are_within_their_error_for_each_element() -> None:
  kernel = elementwise("T x, T y", "T z", "z = sin(x) * y", gradient="finite-difference")
  x, y = jnp.linspace(-2, 2, 2001), jnp.array([[1.0], [-2.0]])
  got = jax.jit(jax.grad(lambda x, y: kernel(x, y).sum(), (0, 1)))(x, y)
  want = jax.jit(jax.grad(lambda x, y: (jnp.sin(x) * y).sum(), (0, 1)))(x, y)
  # Truncation h^2/6 |f'''| and rounding eps |f| / h, with h = eps^(1/3) max(1, |x|).
  eps = float(np.finfo(np.float32).eps)
  h = eps ** (1 / 3) * np.maximum(1, np.abs(x))
  bound = 3 * (h**2 / 6 + 2 * eps / h)
  assert (np.abs(got[0] - want[0]) <= bound).all()
  np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1.0)  # a sum over 2001 elements


def test_a_rule_of_the_user_s_goes_first() -> None:
  kernel = elementwise("T x", "T z", "z = x * x", jvp="dz = 2 * x * dx")
  kernel.defjvp(lambda primals, tangents: (kernel(*primals), 100 * tangents[0]))
  assert jax.grad(kernel)(3.0) == 100.0


# -- composition ---------------------------------------------------------------------------------
WAVE = elementwise(
  "T x", "T z", "z = sin(x) * x", jvp="dz = (cos(x) * x + sin(x)) * dx",
  like=lambda x: jnp.sin(x) * x,
)  # fmt: skip


@pytest.mark.parametrize("chains", groups(13))
def test_pairs_of_transformations_agree_with_jax(chains: Any) -> None:
  got, want = run(chains, WAVE), run(chains, lambda x: jnp.sin(x) * x)
  for chain, a, b in zip(chains, got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(chain))


def test_vmap_of_grad_of_scan(engine: str) -> None:
  step = elementwise("T c, T a", "T z", "z = c + 0.1 * a * sin(c)", jvp=(
    "dz = (1 + 0.1 * a * cos(c)) * dc + 0.1 * sin(c) * da"
  ))  # fmt: skip

  def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, x: jax.lax.scan(lambda c, _: (f(c, a), None), x, length=7)[0].sum()

  x, a = values((4, 3), 0.0), values((3,), 0.5)
  gradient = lambda f: jax.jit(jax.vmap(jax.grad(loss(f), (0, 1)), (None, 0)))(a, x)
  want = gradient(lambda c, a: c + 0.1 * a * jnp.sin(c))
  for got, expected in zip(gradient(step), want, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5)


# -- mistakes ------------------------------------------------------------------------------------
def test_expressions_that_are_not_linear_do_not_compile() -> None:
  wrong = ["dz = dx * dx", "dz = 1 / dx", "dz = dx + 1", "dz = exp(dx)", "dz = 2.0"]
  wrong.append("T t = dx; dz = t")
  kernel = elementwise("T x", "T z", "z = x", jvp=";\n".join(["dz = 0", *wrong]))
  with pytest.raises(cg.CompileError) as caught:
    jax.grad(kernel)(1.0)
  said = str(caught.value)
  assert "supports only linear operations" in said
  for line in range(2, 2 + len(wrong)):
    assert re.search(rf", jvp:{line}:\d+: error", said), said


@pytest.mark.parametrize(
  ("inputs", "jvp", "message"),
  [
    (
      "T x",
      "dx = dx",
      "expected a statement for each result, such as 'dz = ...;', got none for 'z'",
    ),
    ("T x, T dx", "dz = dx", "'dx' is the tangent of 'x'; rename"),
    (
      "T x, raw T t",
      "dz = dx + dt",
      "'t' is raw, so jvp= can't use the tangent of a single element",
    ),
  ],
)
def test_a_wrong_expression_is_an_error_when_it_is_made(
  inputs: str, jvp: str, message: str
) -> None:
  with pytest.raises(cg.GateDefinitionError, match=message):
    elementwise(inputs, "T z", "z = x", jvp=jvp)
