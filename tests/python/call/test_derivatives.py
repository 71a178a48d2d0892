# SPDX-License-Identifier: Apache-2.0
"""Derivatives of gates: rules, references, finite differences, linear gates, and none at all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples, is_soak

import callgate as cg
from callgate._core.public import core

X = jnp.array([0.3, -1.2, 2.0])
V = jnp.array([1.0, 0.5, -2.0])


def wave(x: Any, y: Any) -> Any:
  """The function under test: R^n x R^n -> {R^n, R}, different in both arguments."""
  return {"v": jnp.sin(x) * y**2, "s": jnp.sum(x * y)}


def wave_on_host(x: Any, y: Any) -> Any:
  return {"v": np.sin(x) * y**2, "s": np.sum(x * y)}


def shapes(x: Any, y: Any) -> Any:
  return {"v": x, "s": jax.ShapeDtypeStruct((), x.dtype)}


def with_like() -> cg.Gate:
  return cg.gate(wave_on_host, like=wave)


def with_jvp() -> cg.Gate:
  gate = cg.gate(wave_on_host, out=shapes)

  @gate.defjvp
  def _(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    out = gate(x, y)
    return out, {"v": jnp.cos(x) * y**2 * dx + 2 * jnp.sin(x) * y * dy, "s": dx @ y + x @ dy}

  return gate


def with_vjp() -> cg.Gate:
  gate = cg.gate(wave_on_host, out=shapes)

  def backward(saved: Any, ct: Any) -> Any:
    x, y = saved
    return (
      ct["v"] * jnp.cos(x) * y**2 + ct["s"] * y,
      ct["v"] * 2 * jnp.sin(x) * y + ct["s"] * x,
    )

  gate.defvjp(lambda x, y: (gate(x, y), (x, y)), backward)
  return gate


def with_differences() -> cg.Gate:
  return cg.gate(wave_on_host, out=shapes, gradient="finite-difference")


GATES = {
  "like": with_like,
  "defjvp": with_jvp,
  "defvjp": with_vjp,
  "finite-difference": with_differences,
}
BOTH_MODES = ["like", "defjvp", "finite-difference"]


def tolerance(kind: str) -> dict[str, float]:
  # Central differences in float32 are good to about eps^(2/3) of the values: 2.4e-5 x a few.
  if kind == "finite-difference":
    return {"rtol": 1e-3, "atol": 1e-3}
  return {"rtol": 1e-5, "atol": 1e-6}


def assert_close(got: Any, want: Any, kind: str = "like") -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  compare = functools.partial(np.testing.assert_allclose, **tolerance(kind))
  jax.tree.map(lambda a, b: compare(np.asarray(a), np.asarray(b)), got, want)


def scalar(f: Callable[..., Any]) -> Callable[..., Any]:
  def total(x: Any, y: Any) -> Any:
    out = f(x, y)
    return jnp.sum(out["v"] ** 2) + jnp.tanh(out["s"])

  return total


REVERSE: dict[str, Callable[[Any], Any]] = {
  "grad": lambda f: jax.grad(scalar(f))(X, V),
  "grad of the second argument": lambda f: jax.grad(scalar(f), argnums=1)(X, V),
  "value_and_grad of both": lambda f: jax.value_and_grad(scalar(f), (0, 1))(X, V),
  "vjp": lambda f: jax.vjp(f, X, V)[1]({"v": V, "s": jnp.float32(2)}),
  "jacrev": lambda f: jax.jacrev(f)(X, V),
  "jit of grad": lambda f: jax.jit(jax.grad(scalar(f)))(X, V),
  "grad of jit": lambda f: jax.grad(jax.jit(scalar(f)))(X, V),
  "vmap of grad": lambda f: jax.vmap(jax.grad(scalar(f)), (0, None))(jnp.stack([X, V]), V),
  "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(scalar(f), (0, None))(x, V).sum())(
    jnp.stack([X, V])
  ),
  "grad of scan": lambda f: jax.grad(
    lambda x: jax.lax.scan(lambda c, v: (f(c, v)["v"], f(c, v)["s"]), x, jnp.stack([V, X]))[1].sum()
  )(X),
  "grad of checkpoint": lambda f: jax.grad(
    lambda x: scalar(jax.checkpoint(f))(jax.checkpoint(f)(x, V)["v"], V)
  )(X),
  "grad of cond": lambda f: jax.grad(
    lambda x: jax.lax.cond(x[0] > 0, scalar(f), lambda x, y: jnp.sum(x), x, V)
  )(X),
  "grad of a custom_vjp around": lambda f: jax.grad(in_custom_vjp(f))(X),
}
FORWARD: dict[str, Callable[[Any], Any]] = {
  "jvp": lambda f: jax.jvp(f, (X, V), (V, X)),
  "jvp with one zero tangent": lambda f: jax.jvp(lambda x: f(x, V), (X,), (V,)),
  "linearize": lambda f: jax.linearize(f, X, V)[1](V, X),
  "jacfwd": lambda f: jax.jacfwd(f, argnums=(0, 1))(X, V),
  "jvp of while": lambda f: jax.jvp(
    lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], V)["v"]), (0, x))[
      1
    ],
    (X,),
    (V,),
  ),
  "jvp of a custom_jvp around": lambda f: jax.jvp(in_custom_jvp(f), (X,), (V,)),
}
SECOND: dict[str, Callable[[Any], Any]] = {
  "hessian": lambda f: jax.hessian(scalar(f))(X, V),
  "grad of grad": lambda f: jax.grad(lambda x: jax.grad(scalar(f))(x, V).sum())(X),
  "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f))(X, V),
}


def in_custom_vjp(f: Any) -> Any:
  around = jax.custom_vjp(lambda x: f(x, V)["s"])
  around.defvjp(lambda x: (f(x, V)["s"], x), lambda x, ct: (ct * f(x, V)["v"],))
  return around


def in_custom_jvp(f: Any) -> Any:
  around = jax.custom_jvp(lambda x: f(x, V)["s"])
  around.defjvp(lambda p, t: (f(*p, V)["s"], f(*p, V)["v"] @ t[0]))
  return around


TABLES: dict[str, dict[str, Callable[[Any], Any]]] = {
  "reverse": REVERSE,
  "forward": FORWARD,
  "second": SECOND,
}


@functools.cache
def compiled(table: str, kind: str) -> dict[str, Any]:
  """All of a table as one program, which compiles faster than one each; "": of the reference."""
  make = GATES.get(kind, lambda: wave)
  program = lambda: {name: compute(make()) for name, compute in TABLES[table].items()}
  return jax.jit(program)()


def in_turn(transforms: dict[str, Any], transform: str, kinds: Sequence[str], kind: str) -> bool:
  """True if a check runs the transform with the kind without `jit`, too; a soak does with each."""
  turn = list(transforms).index(transform) - list(kinds).index(kind)
  return is_soak() or turn % len(kinds) == 0


def assert_derivative_agrees(table: str, kinds: Sequence[str], kind: str, transform: str) -> None:
  want = compiled(table, "")[transform]
  assert_close(compiled(table, kind)[transform], want, kind)
  if in_turn(TABLES[table], transform, kinds, kind):  # each operation on its own
    assert_close(TABLES[table][transform](GATES[kind]()), want, kind)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("transform", REVERSE)
def test_reverse_mode_agrees_with_jaxs_own(kind: str, transform: str) -> None:
  assert_derivative_agrees("reverse", list(GATES), kind, transform)


@pytest.mark.parametrize("kind", BOTH_MODES)
@pytest.mark.parametrize("transform", FORWARD)
def test_forward_mode_agrees_with_jaxs_own(kind: str, transform: str) -> None:
  assert_derivative_agrees("forward", BOTH_MODES, kind, transform)


@pytest.mark.parametrize("kind", ["like", "defjvp"])
@pytest.mark.parametrize("transform", SECOND)
def test_second_derivatives_agree_with_jaxs_own(kind: str, transform: str) -> None:
  assert_derivative_agrees("second", ["like", "defjvp"], kind, transform)


@pytest.mark.parametrize("kind", GATES)
def test_derivatives_are_the_same_on_jaxs_engine(kind: str, engine: str) -> None:
  compute = REVERSE["vmap of grad"]
  got = jax.jit(lambda: compute(GATES[kind]()))()
  assert_close(got, compiled("reverse", "")["vmap of grad"], kind)


@examples(7)
@given(st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=3))
def test_finite_differences_have_a_bounded_error(values: list[float]) -> None:
  x = np.array(values, np.float32)
  got = jax.jacfwd(cg.gate(np.sin, out=lambda x: x, gradient="finite-difference"))(x)
  # Truncation h^2/6 and rounding eps/h at h = eps^(1/3) max(1, |x|), in every column.
  step = np.finfo(np.float32).eps ** (1 / 3) * np.maximum(1, np.abs(x))
  bound = step**2 / 6 + 2 * np.finfo(np.float32).eps / step
  assert (np.abs(got - np.diag(np.cos(x))) <= bound + 1e-7).all()


def test_finite_differences_see_only_floating_arguments() -> None:
  function = lambda t: t["x"] * t["n"].astype(np.float32)
  gate = cg.gate(function, out=lambda t: t["x"], gradient="finite-difference")
  got = jax.grad(lambda x: gate({"x": x, "n": jnp.int32(3)}).sum())(X)
  assert_close(got, jnp.full(3, 3.0), "finite-difference")


def test_finite_differences_have_no_steps_in_empty_arguments() -> None:
  gate = cg.gate(lambda x, y: x + y.sum(), out=lambda x, y: x, gradient="finite-difference")
  got = jax.grad(lambda x, y: gate(x, y).sum(), (0, 1))(X, jnp.zeros((2, 0)))
  assert_close(got, (jnp.ones(3), jnp.zeros((2, 0))), "finite-difference")


def test_integer_results_have_no_tangent() -> None:
  gate = cg.gate(
    lambda x: (np.argsort(x).astype(np.int32), np.sort(x)),
    like=lambda x: (jnp.argsort(x), jnp.sort(x)),
  )
  value = lambda f: jax.grad(lambda x: (f(x)[1] * V).sum() + f(x)[0].sum())(X)
  assert_close(value(gate), value(lambda x: (jnp.argsort(x), jnp.sort(x))))


def test_rules_get_static_keywords_that_they_name() -> None:
  gate = cg.gate(lambda x, power: x**power, out=lambda x, power: x)

  @gate.defjvp
  def _(primals: Any, tangents: Any, power: int) -> Any:
    (x,), (dx,) = primals, tangents
    return gate(x, power=power), power * x ** (power - 1) * dx

  for power in (2, 3):
    got = jax.grad(lambda x: gate(x, power=power).sum())(X)
    assert_close(got, power * X ** (power - 1))


# -- linear gates --------------------------------------------------------------------------------
A = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def matvec(method: str = "each", calls: list[str] | None = None) -> cg.Gate:
  """x, scale -> scale A x: linear in x alone, over any leading axes."""

  def function(x: Any, scale: Any) -> Any:
    return np.asarray(scale)[..., None] * (x @ A.T) if np.ndim(scale) else scale * (x @ A.T)

  out = lambda x, scale: jax.ShapeDtypeStruct((4,), x.dtype)
  gate = cg.gate(function, out=out, linear=0, vmap=method)

  @gate.deftranspose
  def _(ct: Any, x: Any, scale: Any) -> Any:
    assert x.shape == (3,)
    return scale * (A.T @ ct)

  return gate


LINEAR: dict[str, Callable[[Any], Any]] = {
  "jvp": lambda f: jax.jvp(lambda x: f(x, 2.0), (X,), (V,)),
  "grad": lambda f: jax.grad(lambda x: (f(x, 2.0) ** 2).sum())(X),
  "jacfwd": lambda f: jax.jacfwd(f)(X, 2.0),
  "jacrev": lambda f: jax.jacrev(f)(X, 2.0),
  "transpose": lambda f: jax.linear_transpose(lambda x: f(x, 2.0), X)(jnp.arange(4.0)),
  "hessian": lambda f: jax.hessian(lambda x: (f(x, 2.0) ** 2).sum())(X),
  "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, s: (f(x, s) ** 2).sum()))(
    jnp.stack([X, V]), jnp.array([1.0, 2.0])
  ),
  "grad with lanes sharing x": lambda f: jax.grad(
    lambda x: (jax.vmap(f, (None, 0))(x, jnp.array([1.0, 2.0])) ** 2).sum()
  )(X),
  "grad with lanes sharing the scale": lambda f: jax.grad(
    lambda x: (jax.vmap(f, (0, None))(x, jnp.float32(3)) ** 2).sum()
  )(jnp.stack([X, V])),
  "grad of nested vmaps": lambda f: jax.grad(
    lambda x: (jax.vmap(jax.vmap(f, (0, None)), (None, 0))(x, jnp.array([1.0, 2.0])) ** 2).sum()
  )(jnp.stack([X, V, X])),
}


@functools.cache
def all_linear(method: str) -> dict[str, Any]:
  make = lambda: (lambda x, scale: scale * (A @ x)) if method == "matrix" else matvec(method)
  program = lambda: {name: compute(make()) for name, compute in LINEAR.items()}
  return jax.jit(program)()


METHODS = ["each", "whole", "broadcast"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transform", LINEAR)
def test_linear_gates_agree_with_the_matrix(method: str, transform: str) -> None:
  want = all_linear("matrix")[transform]
  assert_close(all_linear(method)[transform], want)
  if in_turn(LINEAR, transform, METHODS, method):  # each operation on its own
    assert_close(LINEAR[transform](matvec(method)), want)


def test_a_linear_gate_of_several_arguments_has_one_cotangent_each() -> None:
  gate = cg.gate(lambda t, y: 2 * t["a"] + 3 * y, out=lambda t, y: y, linear=True)
  gate.deftranspose(lambda ct, t, y: ({"a": 2 * ct}, 3 * ct))
  got = jax.grad(lambda a, y: gate({"a": a}, y).sum(), (0, 1))(X, V)
  assert_close(got, (jnp.full(3, 2.0), jnp.full(3, 3.0)))


# -- no derivative -------------------------------------------------------------------------------
@pytest.mark.parametrize(
  "differentiate",
  [
    lambda f: jax.grad(lambda x: f(x).sum())(X),
    lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    lambda f: jax.jvp(f, (X,), (V,)),
    lambda f: jax.linearize(jax.vmap(f), X),
    lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0].sum())(X),
  ],
  ids=["grad", "jit", "jvp", "linearize", "scan"],
)
def test_no_derivative_is_an_error_with_the_four_ways_to_define_one(differentiate: Any) -> None:
  gate = cg.gate(np.sin, out=lambda x: x)
  with pytest.raises(cg.GateDefinitionError) as error:
    differentiate(gate)
  for word in [gate.name, "defjvp", "defvjp", "like=", "gradient='finite-difference'"]:
    assert word in str(error.value)


def sine_with_like() -> cg.Gate:
  return cg.gate(np.sin, like=jnp.sin)


def sine_with_jvp() -> cg.Gate:
  gate = cg.gate(np.sin, out=lambda x: x)
  gate.defjvp(lambda primals, tangents: (gate(*primals), jnp.cos(primals[0]) * tangents[0]))
  return gate


def sine_with_vjp() -> cg.Gate:
  gate = cg.gate(np.sin, out=lambda x: x)
  gate.defvjp(lambda x: (gate(x), x), lambda x, ct: (ct * jnp.cos(x),))
  return gate


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
  "fori_loop": lambda f, w: jax.lax.fori_loop(0, 3, lambda i, c: f(c), w),
  "scan": lambda f, w: jax.lax.scan(lambda c, _: (f(c) * w, f(c)), w, None, length=3)[1],
  "map": jax.lax.map,
  "checkpoint": lambda f, w: jax.lax.scan(jax.checkpoint(lambda c, _: (f(c), c)), w, None, 3)[1],
  "vmap of scan": lambda f, w: jax.vmap(lambda v: jax.lax.fori_loop(0, 2, lambda i, c: f(c), v))(w),
  "scan of vmap": lambda f, w: jax.lax.fori_loop(0, 2, lambda i, c: jax.vmap(f)(c), w),
}
SECOND: dict[str, Callable[[Any], Any]] = {
  "hessian": jax.hessian,
  "grad of grad": lambda f: jax.grad(lambda w: jax.grad(f)(w).sum()),
  "jvp of grad": lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (V,))[1],
  "grad of grad of grad": lambda f: jax.grad(
    lambda w: jax.grad(lambda v: jax.grad(f)(v).sum())(w).sum()
  ),
}


CASES: dict[Callable[[], cg.Gate], list[tuple[str, str]]] = {
  sine_with_like: [
    *((loop, "hessian") for loop in LOOPS),
    ("fori_loop", "grad of grad"),
    ("scan", "grad of grad of grad"),
  ],
  sine_with_jvp: [("fori_loop", "jvp of grad"), ("vmap of scan", "hessian")],
  sine_with_vjp: [("scan", "grad of grad"), ("map", "grad of grad of grad")],
}


@pytest.mark.parametrize("make", CASES)
def test_second_derivatives_of_loops_agree_with_jax(make: Callable[[], cg.Gate]) -> None:
  """JAX drops custom derivatives from the body of a loop that it linearizes."""

  def all_of(f: Any) -> Any:
    return [
      jax.jit(SECOND[order](lambda w, loop=loop: LOOPS[loop](f, w).sum()))(X)
      for loop, order in CASES[make]
    ]

  for found, expected in zip(all_of(make()), all_of(jnp.sin), strict=True):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_a_loop_whose_carry_alone_is_differentiated_knows_which_arguments_move() -> None:
  gate = cg.gate(lambda x, k: np.sin(x) * np.float32(k), like=lambda x, k: jnp.sin(x) * k)
  plain = lambda x, k: jnp.sin(x) * k

  def twice(f: Any) -> Any:
    steps = jnp.arange(1, 4)  # integers, which have no tangents
    loop = lambda w: jax.lax.scan(lambda c, k: (f(c, k), c), w, steps)[0].sum()
    return jax.hessian(loop)(X)

  np.testing.assert_allclose(twice(gate), twice(plain), rtol=1e-4, atol=1e-4)


def test_gates_outside_the_differentiated_path_need_no_derivative() -> None:
  gate = cg.gate(np.sin, out=lambda x: x)
  got = jax.grad(lambda x: (x * gate(jax.lax.stop_gradient(x))).sum())(X)
  assert_close(got, np.sin(X))


@pytest.mark.parametrize(
  "use", [lambda gate: gate.check(X), lambda gate: jax.jvp(gate, (X,), (V,))]
)
@pytest.mark.parametrize(
  ("like", "words"),
  [
    (lambda x: jnp.float32(1), ["result 0: expected float32[3]", "got float32[]"]),
    (lambda x: jnp.ones(3, jnp.int32), ["result 0: expected float32[3]", "got int32[3]"]),
    (lambda x: (x,), ["expected results of the structure PyTreeDef(*), got PyTreeDef((*,))"]),
  ],
  ids=["shape", "dtype", "structure"],
)
def test_a_reference_of_another_type_is_refused(like: Any, words: list[str], use: Any) -> None:
  gate = cg.gate(np.ones_like, out=lambda x: x, like=like)
  with pytest.raises(cg.GateDefinitionError) as error:
    use(gate)
  for word in [f"{core(gate).label}: like: ", *words]:
    assert word in str(error.value)


@pytest.mark.parametrize(
  ("rule", "words"),
  [
    (lambda y, t: y, ["PyTreeDef({'a': *, 'b': *})", "expected a pair (out, tangent_out)"]),
    (lambda y, t: (y, t, t), ["expected a pair (out, tangent_out)"]),
    (lambda y, t: (y, None), ["tangents of structure PyTreeDef(None)", "expected PyTreeDef({"]),
    (lambda y, t: (y, {"a": t}), ["tangents of structure PyTreeDef({'a': *})"]),
    (lambda y, t: (y, {"a": t, "b": t[:2]}), ["float32[2] for result 1", "expected float32[3]"]),
    (lambda y, t: (y, {"a": 0.0, "b": t}), ["float32[] for result 0", "expected float32[3]"]),
    (lambda y, t: (y, {"a": t.astype(int), "b": t}), ["int32[3] for result 0", "float32[3]"]),
  ],
  ids=["no pair", "three", "None", "count", "shape", "number", "dtype"],
)
def test_a_jvp_rule_that_returns_something_else_is_refused(rule: Any, words: list[str]) -> None:
  gate = cg.gate(lambda x: {"a": x, "b": x}, out=lambda x: {"a": x, "b": x})
  gate.defjvp(lambda primals, tangents: rule(gate(*primals), tangents[0]))
  moved = lambda x: jax.jvp(gate, (x,), (x,))
  for use in (moved, jax.jit(moved), jax.grad(lambda x: gate(x)["a"].sum())):
    with pytest.raises(cg.GateDefinitionError) as error:
      use(X)
    for word in [f"{core(gate).label}: the jvp rule returned", *words]:
      assert word in str(error.value)


@pytest.mark.parametrize("make", [sine_with_like, sine_with_jvp, sine_with_vjp])
@pytest.mark.parametrize(
  "argument", [np.ma.array([1.0, 2.0], mask=[0, 1]), "abc", np.array([None]), object()]
)
def test_gates_with_derivatives_refuse_other_values_than_arrays(make: Any, argument: Any) -> None:
  with pytest.raises(
    cg.GateDefinitionError, match="argument 'x': expected an array or a pytree of"
  ):
    make()(argument)


@pytest.mark.parametrize("rule", ["defjvp", "deftranspose", "defvmap"])
def test_a_rule_that_is_no_function_is_refused(rule: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=f"{rule}: rule: expected a callable, got 3"):
    getattr(cg.gate(np.sin, out=lambda x: x), rule)(3)


@pytest.mark.parametrize(
  ("define", "words"),
  [
    (lambda: jax.grad(lambda s: matvec()(X, s).sum())(2.0), ["'scale'", "not declared linear"]),
    (
      lambda: jax.grad(lambda x: cg.gate(np.sum, out=X[0], linear=True)(x))(X),
      ["deftranspose", "no transpose"],
    ),
    (lambda: with_jvp().defvjp(wave, wave), ["expected one of defjvp and defvjp, got both"]),
    (lambda: with_vjp().defjvp(wave), ["expected one of defjvp and defvjp, got both"]),
  ],
  ids=["not linear", "no transpose", "defvjp too", "defjvp too"],
)
def test_wrong_definitions_are_refused(define: Any, words: list[str]) -> None:
  with contextlib.ExitStack() as stack:
    error = stack.enter_context(pytest.raises(cg.GateDefinitionError))
    define()
  for word in words:
    assert word in str(error.value)
