# SPDX-License-Identifier: Apache-2.0
"""Derivatives on a mesh of explicit axes, where types say how arrays are sharded.

A gate's results lie as `sharding=` says, its arguments as they come: what a rule computes from the
arguments is resharded to the types that JAX asks for. The oracle is pure JAX.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from property_checks import is_soak
from split_arrays import mesh, put

import callgate as cg

F = Callable[..., Any]
MESH = mesh("4x2", AxisType.Explicit)
X, SCALE = np.linspace(0.1, 1, 64, dtype=np.float32).reshape(16, 4), np.float32(1.5)
SHARDINGS = {"whole": None, "gather": "gather", "rows whole": "[i] j, -> [i] j", "shard": "shard"}


def on_host(x: np.ndarray, s: np.ndarray) -> np.ndarray:
  return s * np.sin(x)


def wave(x: Any, s: Any) -> Any:
  return s * jnp.sin(x)


def slope(x: Any, s: Any, dx: Any, ds: Any) -> Any:
  return s * jnp.cos(x) * dx + jnp.sin(x) * ds


def by_jvp(**options: Any) -> F:
  gate = cg.gate(on_host, out=lambda x, s: x, **options)
  gate.defjvp(lambda primals, tangents: (gate(*primals), slope(*primals, *tangents)))
  return gate


def by_jvp_alone(**options: Any) -> F:
  gate = cg.gate(on_host, out=lambda x, s: x, **options)
  gate.defjvp(lambda primals, tangents: (wave(*primals), slope(*primals, *tangents)))
  return gate


def by_vjp(**options: Any) -> F:
  gate = cg.gate(on_host, out=lambda x, s: x, **options)
  gate.defvjp(
    lambda x, s: (gate(x, s), (x, s)),
    lambda kept, ct: (kept[1] * jnp.cos(kept[0]) * ct, (jnp.sin(kept[0]) * ct).sum()),
  )
  return gate


def by_transpose(sharding: str | None = None) -> F:
  rule = sharding and sharding.replace(", ->", " ->")  # of the one argument
  gate = cg.gate(lambda y: 3 * y, out=lambda y: y, linear=True, sharding=rule)
  gate.deftranspose(lambda ct, y: 3 * ct)
  return lambda x, s: gate(wave(x, s) / 3)


WAYS: dict[str, F] = {
  "like": lambda **options: cg.gate(on_host, like=wave, **options),
  "defjvp": by_jvp,
  "defjvp without the gate": by_jvp_alone,
  "defvjp": by_vjp,
  "linear": by_transpose,
  "differences": lambda **options: cg.gate(
    on_host, out=lambda x, s: x, gradient="finite-difference", **options
  ),
}
PROGRAMS: dict[str, Callable[[F], F]] = {
  "grad": lambda f: jax.grad(lambda x, s: (f(x, s) ** 2).sum(), (0, 1)),
  "vjp": lambda f: lambda x, s: jax.vjp(f, x, s)[1](jnp.ones_like(f(x, s))),
  "jvp": lambda f: lambda x, s: jax.jvp(f, (x, s), (2 * x, s)),
  "a loop": lambda f: jax.grad(
    lambda x, s: jax.lax.scan(lambda c, _: (c + f(x, s).sum(), None), 0.0, length=2)[0], (0, 1)
  ),
}


def placed(*spec: Any) -> tuple[jax.Array, jax.Array]:
  return put(X, MESH, *spec), put(SCALE, MESH)


def all_programs(f: F, *left_out: str) -> F:
  used = {name: program(f) for name, program in PROGRAMS.items() if name not in left_out}
  return jax.jit(lambda *args: {name: program(*args) for name, program in used.items()})


@functools.cache
def what_jax_gives(*spec: Any) -> dict[str, Any]:
  return all_programs(wave)(*placed(*spec))


def close(got: Any, want: Any, way: str = "") -> None:
  tolerance = 2e-2 if way == "differences" else 1e-5  # a step in float32 leaves three digits
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), got, want)


SPECS = [("a",), (None, "b")]  # rows, columns
CASES = list(itertools.product(WAYS, SHARDINGS))


@pytest.mark.parametrize(
  ("way", "sharding", "spec"),
  [(*case, spec) for case in CASES for spec in SPECS]
  if is_soak()
  else [(*case, SPECS[(i + i // 4) % 2]) for i, case in enumerate(CASES)],
)
def test_derivatives_agree_with_jax(way: str, sharding: str, spec: tuple[Any, ...]) -> None:
  programs = all_programs(WAYS[way](sharding=SHARDINGS[sharding]), *["jvp"][: way == "defvjp"])
  got = programs(*placed(*spec))
  close(got, {name: what_jax_gives(*spec)[name] for name in got}, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_lies_as_its_argument(way: str) -> None:
  args = placed("a", "b")
  for got, arg in zip(jax.jit(PROGRAMS["grad"](WAYS[way]()))(*args), args, strict=True):
    assert jax.typeof(got).sharding.spec == jax.typeof(arg).sharding.spec


@pytest.mark.parametrize("way", WAYS)
def test_under_vmap_they_agree_with_jax(way: str) -> None:
  args = placed(None, "b")
  got, want = (
    jax.jit(jax.vmap(PROGRAMS["grad"](f), (0, None)))(*args) for f in (WAYS[way](), wave)
  )
  close(got, want, way)


@pytest.mark.parametrize("way", WAYS)
def test_with_the_mesh_set_they_agree_with_jax(way: str) -> None:
  with jax.set_mesh(MESH):
    got = jax.jit(PROGRAMS["grad"](WAYS[way]()))(*placed("a"))
  close(got, what_jax_gives("a")["grad"], way)


@pytest.mark.parametrize("way", ["like", "defjvp without the gate"])
def test_second_derivatives_and_calls_outside_of_jit_agree_with_jax(way: str) -> None:
  f, args = WAYS[way](), placed("a")

  def second(f: F) -> F:
    return jax.grad(lambda x, s: (jax.grad(lambda x: f(x, s).sum())(x) * x).sum())

  close(jax.jit(second(f))(*args), jax.jit(second(wave))(*args))
  with jax.set_mesh(MESH):
    got, want = (PROGRAMS["grad"](g)(*args) for g in (f, wave))
  close(got, want)


def test_integers_and_arrays_of_no_mesh_beside_them() -> None:
  def power(x: Any, n: Any, y: Any) -> Any:
    return x**n * y

  f, x = cg.gate(power, like=power), placed("a")[0]
  args = x, jnp.int32(3), jnp.float32(2)
  got, want = (jax.jit(jax.grad(lambda *a, g=g: g(*a).sum()))(*args) for g in (f, power))
  np.testing.assert_allclose(got, want, 1e-5)


def test_kernels_agree_with_jax() -> None:
  double = cg.elementwise("float32 x", "float32 y", "y = 2 * x * x", jvp="dy = 4 * x * dx")
  x = placed("a")[0]
  got = jax.jit(jax.grad(lambda x: double(x).sum()))(x)
  np.testing.assert_allclose(got, 4 * X, 1e-6)


def test_in_a_shard_map_they_agree_with_jax() -> None:
  spec = jax.P("a", "b")
  f, args = WAYS["like"](), placed("a", "b")
  got, want = (
    jax.jit(
      jax.shard_map(
        PROGRAMS["grad"](g), in_specs=(spec, jax.P()), out_specs=(spec, jax.P()), mesh=MESH
      )
    )(*args)
    for g in (f, wave)
  )
  close(got, want)


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_a_default_gate_may_make_a_carry_or_a_branchs_result(effect: Any) -> None:
  gate = cg.gate(lambda x: np.cumsum(x).astype(x.dtype), out=lambda x: x, effect=effect)
  whole = lambda x: jax.pure_callback(lambda x: np.cumsum(x).astype(x.dtype), x, x)

  def program(f: Any) -> Any:
    def loops(x: Any) -> Any:
      x = jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0]
      x = jax.lax.cond(x.sum() > 5, f, lambda x: x, x)
      return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1]

    return jax.jit(loops)

  values = np.arange(8, dtype=np.float32)
  with jax.set_mesh(MESH):
    x = jax.device_put(values, jax.NamedSharding(MESH, jax.P(MESH.axis_names[0])))
    got = program(gate)(x)
  assert got.sharding.spec == x.sharding.spec
  np.testing.assert_array_equal(got, program(whole)(values))
