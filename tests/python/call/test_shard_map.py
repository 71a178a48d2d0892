# SPDX-License-Identifier: Apache-2.0
"""Everything inside `jax.shard_map` under its defaults, against plain JAX code in the same place.

By default JAX types each value by the mesh axes that it varies over, and adds gradients up over the
axes that a value does not vary over. A result typed wrongly is a gradient that is wrong by the
number of devices, without an error.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config as jax_config
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from property_checks import is_soak
from quick_xla import QUICKLY_COMPILED
from transformation_table import (
  EFFECT_PAIRS,
  TRANSFORMATIONS,
  TRIPLES,
  build,
  gate,
  groups,
  reference,
)

import callgate as cg

DEVICES = 4
MESH = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
GRID = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2), ("a", "b"))
X = jnp.linspace(-0.8, 1.1, 3 * DEVICES, dtype=jnp.float32)  # three numbers a device
W = jnp.array([0.4, -0.7, 1.1])  # all devices have it

F = Callable[..., Any]


BY_DEVICE = P("d")


def mapped(
  function: F, in_specs: Any = BY_DEVICE, out_specs: Any = BY_DEVICE, mesh: Any = MESH
) -> F:
  return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def close(got: Any, want: Any, tolerance: float = 1e-4, what: Any = "") -> None:
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=str(what))


# -- the table of transformations ------------------------------------------------------------------
def run(chains: Any, f: F) -> list[Any]:
  program = mapped(lambda x: [build(chain, f)(x) for chain in chains])
  return jax.jit(program, compiler_options=QUICKLY_COMPILED)(X)


@functools.cache
def expected(chains: Any) -> list[Any]:
  return run(chains, reference)


@pytest.mark.parametrize("numbers", [[0, 3, 6], [8, 11, 13]])
def test_pairs_of_transformations_agree_with_jax(numbers: list[int]) -> None:
  """The pairs are those of test_transformations.py: all of them in a soak."""
  chains = tuple(pair for group in groups(*numbers) for pair in group)
  for chain, got, want in zip(chains, run(chains, gate("pure")), expected(chains), strict=True):
    close(got, want, what=chain)


@pytest.mark.parametrize("chains", groups(5))
def test_pairs_of_transformations_agree_through_jaxs_callbacks(chains: Any) -> None:
  with cg.config(engine="jax"):
    found = run(chains, gate("pure"))
  for chain, got, want in zip(chains, found, expected(tuple(chains)), strict=True):
    close(got, want, what=chain)


@pytest.mark.parametrize("effect", ["io", "ordered"])
@pytest.mark.parametrize("chains", groups(9, pairs=EFFECT_PAIRS))
def test_pairs_of_transformations_take_effects(effect: Any, chains: Any) -> None:
  chains = tuple(chains)
  for chain, got, want in zip(chains, run(chains, gate(effect)), expected(chains), strict=True):
    close(got, want, what=chain)


def test_triples_of_transformations_agree_with_jax() -> None:
  chains = tuple(TRIPLES[:: len(TRIPLES) // 12])
  for chain, got, want in zip(chains, run(chains, gate("pure")), expected(chains), strict=True):
    close(got, want, what=chain)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_agree_with_jax_operation_by_operation(name: str) -> None:
  want = expected(tuple((each,) for each in TRANSFORMATIONS))
  close(mapped(TRANSFORMATIONS[name](gate("pure")))(X), want[list(TRANSFORMATIONS).index(name)])


# -- derivatives in what devices share ----------------------------------------------------------
def product(x: Any, w: Any) -> Any:
  """Linear in w."""
  return jnp.sin(x) * w


def on_host(x: Any, w: Any) -> Any:
  return np.sin(x) * w


def with_jvp() -> F:
  f: Any = cg.gate(on_host, out=lambda x, w: x)
  f.defjvp(lambda p, t: (f(*p), jnp.cos(p[0]) * p[1] * t[0] + jnp.sin(p[0]) * t[1]))
  return f


def with_vjp() -> F:
  f: Any = cg.gate(on_host, out=lambda x, w: x)
  f.defvjp(
    lambda x, w: (f(x, w), (x, w)),
    lambda kept, ct: (jnp.cos(kept[0]) * kept[1] * ct, jnp.sin(kept[0]) * ct),
  )
  return f


def linear(make: F = cg.gate, function: Any = on_host) -> F:
  f: Any = make(function, out=lambda x, w: x, linear=1)
  f.deftranspose(lambda ct, x, w: jnp.sin(x) * ct)
  return f


KERNEL = """
  void product(cg::In<float, 1> x, cg::In<float, 1> w, cg::Out<float, 1> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[i] = std::sin(x[i]) * w[i];
  }
"""
compiled = functools.partial(cg.cpp, flags=("-O0",))


def in_numba() -> F:
  def scaled(out: Any, x: Any, w: Any) -> None:
    out[:] = np.sin(x) * w

  return cg.numba(scaled, like=product)  # pyright: ignore[reportAttributeAccessIssue]


SUBJECTS: dict[str, Callable[[], F]] = {
  "gate, like": lambda: cg.gate(on_host, like=product),
  "gate, like, io": lambda: cg.gate(on_host, like=product, effect="io"),
  "gate, defjvp": with_jvp,
  "gate, defvjp": with_vjp,
  "gate, differences": lambda: cg.gate(on_host, out=lambda x, w: x, gradient="finite-difference"),
  "gate, linear": linear,
  "gate, like, whole": lambda: cg.gate(on_host, like=product, vmap="whole"),
  "kernel, like": lambda: compiled(KERNEL, like=product),
  "kernel, linear": lambda: linear(compiled, KERNEL),
  "elementwise, jvp": lambda: cg.elementwise(
    "T x, T w", "T y", "y = sin(x) * w", jvp="dy = cos(x) * w * dx + sin(x) * dw"
  ),
  "elementwise, like": lambda: cg.elementwise("T x, T w", "T y", "y = sin(x) * w", like=product),
  "tap": lambda: lambda x, w: cg.tap(jnp.sin(x), print_nothing) * cg.tap(w, print_nothing),
  "tap, all roles": lambda: (
    lambda x, w: cg.tap(
      product(x, w), print_nothing, roles=("primal", "tangent", "cotangent"), effect="dataflow"
    )
  ),
}
if importlib.util.find_spec("numba"):
  SUBJECTS["numba"] = in_numba
if importlib.util.find_spec("torch"):
  SUBJECTS["torch"] = lambda: cg.torch(lambda x, w: x.sin() * w)


def print_nothing(value: Any) -> None:
  del value


def gradient_of_total(f: F) -> F:
  """A value that the devices share has one gradient: that of the sum over all of them."""
  return lambda x, w: jax.grad(lambda w: jax.lax.psum(f(x, w).sum(), "d"))(w)


def gradient_of_own(f: F) -> F:
  return lambda x, w: jax.grad(lambda w: f(x, w).sum())(w)


def both(f: F) -> F:
  return lambda x, w: jax.grad(lambda x, w: (f(x, w) * x).sum(), (0, 1))(x, w)


def lanes(f: F) -> F:
  row = lambda x, w: jax.grad(lambda w: f(x, w).sum())(w)
  return lambda x, w: jax.vmap(row, (0, None))(jnp.stack([x, 2 * x]), w).sum(0)


def steps(f: F) -> F:
  """A carry that varies, from a start that does."""

  def loss(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, i: (f(c, w) + i, c.sum()), x, jnp.arange(3.0))[1].sum()

  return lambda x, w: jax.grad(loss, 1)(x, w)


def pushed(f: F) -> F:
  return lambda x, w: jax.jvp(lambda w: f(x, w), (w,), (jnp.cos(w),))[1]


X_AND_W = (P("d"), P())
PROGRAMS: dict[str, tuple[Callable[[F], F], Any, bool]] = {
  # name: (the program, its out_specs, whether it differentiates in x, too)
  "values": (lambda f: f, P("d"), False),
  "gradient of the total": (gradient_of_total, P(), False),
  "gradient of each device's own": (gradient_of_own, P(), False),
  "gradients in both": (both, (P("d"), P()), True),
  "gradient in lanes": (lanes, P(), False),
  "gradient through steps": (steps, P(), True),
  "tangents": (pushed, P("d"), False),
  "remat": (lambda f: gradient_of_own(jax.checkpoint(f)), P(), False),
  "cond": (
    lambda f: gradient_of_own(lambda x, w: jax.lax.cond(x[0] > 0, f, lambda x, w: -f(x, w), x, w)),
    P(),
    False,
  ),
}


def run_programs(f: F, names: tuple[str, ...]) -> dict[str, Any]:
  """Each in a shard_map of its own, all compiled at once."""
  programs = {name: mapped(PROGRAMS[name][0](f), X_AND_W, PROGRAMS[name][1]) for name in names}
  return jax.jit(lambda x, w: {name: each(x, w) for name, each in programs.items()})(X, W)


@functools.cache
def what_jax_gives() -> dict[str, Any]:
  return run_programs(product, tuple(PROGRAMS))


# Kernels that are compiled for the CPU; on a GPU PyTorch has to be built for it.
ONLY_ON_THE_CPU = ("kernel, like", "kernel, linear", "numba", "torch")


# Subjects that a check runs by JAX's callbacks, too.
BY_JAX = SUBJECTS if is_soak() else ["gate, like, io", "gate, defvjp", "kernel, like", "tap"]


@pytest.mark.parametrize(
  ("subject", "engine"),
  [*((one, "callgate") for one in SUBJECTS), *((one, "jax") for one in BY_JAX)],
  indirect=["engine"],
)
def test_derivatives_in_what_devices_share_agree_with_jax(subject: str, engine: str) -> None:
  if subject in ONLY_ON_THE_CPU and jax.default_backend() != "cpu":
    pytest.skip("runs on the CPU")

  def has(name: str, in_x: bool) -> bool:
    if (in_x and "linear" in subject) or (name == "tangents" and "defvjp" in subject):
      return False  # it has no such derivative
    # JAX's callbacks have none of these.
    return engine != "jax" or not ("linear" in subject or (name == "remat" and "io" in subject))

  names = tuple(name for name, (_, _, in_x) in PROGRAMS.items() if has(name, in_x))
  # The step of a difference in float32 leaves three digits.
  tolerance = 2e-2 if "differences" in subject else 1e-4
  for name, got in run_programs(SUBJECTS[subject](), names).items():
    close(got, what_jax_gives()[name], tolerance, name)


def test_a_tangent_that_a_rule_gives_as_a_number_varies_as_its_result() -> None:
  f = cg.gate(np.sign, out=lambda x: x)
  f.defjvp(lambda p, t: (f(*p), 0.0))
  each = jax.shard_map(lambda x: f(x[0])[None], mesh=MESH, in_specs=BY_DEVICE, out_specs=BY_DEVICE)
  x = jnp.ones(DEVICES)
  for differentiate in (lambda x: jax.jvp(each, (x,), (x,))[1], jax.grad(lambda x: each(x).sum())):
    assert differentiate(x).tolist() == jax.jit(differentiate)(x).tolist() == [0] * DEVICES


def test_explicit_axes_outside_agree_with_jax() -> None:
  explicit = jax.make_mesh(
    (DEVICES,), ("d",), (AxisType.Explicit,), devices=jax.devices()[:DEVICES]
  )
  f, program = SUBJECTS["gate, like"](), gradient_of_total
  with jax.set_mesh(explicit):
    x, w = jax.device_put(X, P("d")), jax.device_put(W, P())
    got, want = (
      jax.jit(jax.shard_map(program(g), in_specs=X_AND_W, out_specs=P()))(x, w)
      for g in (f, product)
    )
  close(got, want)


def test_gradients_outside_of_the_map_agree_with_jax() -> None:
  def loss(f: F) -> F:
    inner = mapped(lambda x, w: f(x, w) * x, X_AND_W)
    return lambda x, w: inner(x, w).sum()

  f = with_vjp()
  got, want = (jax.jit(jax.grad(loss(g), (0, 1)))(X, W) for g in (f, product))
  close(got, want)
  got, want = (
    jax.jit(jax.vmap(jax.grad(loss(g), 1), (None, 0)))(X, jnp.stack([W, -W])) for g in (f, product)
  )
  close(got, want)


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_on_two_axes_each_value_varies_over_its_own(axes: tuple[str, ...]) -> None:
  """x varies over one axis or both, w over b alone: the result over all of these."""
  rows = P(axes[0] if len(axes) == 1 else axes)
  x = X[: 3 * 4].reshape(-1)
  w = jnp.concatenate([W, 2 * W])

  def program(f: F) -> F:
    def inside(x: Any, w: Any) -> Any:
      x = x[:3]
      assert jax.typeof(f(x, w)).manual_axis_type.varying == frozenset(axes) | {"b"}
      grads = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(x, w)
      return jax.lax.psum(grads[0], axes), jax.lax.psum(grads[1], "b")

    return mapped(inside, (rows, P("b")), P(), GRID)

  f = with_vjp()
  close(jax.jit(program(f))(x, w), jax.jit(program(product))(x, w))


# -- types ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_a_result_that_varies_is_refused_as_one_that_does_not(effect: Any, engine: str) -> None:
  f = cg.gate(np.sin, out=lambda x: x, effect=effect)
  with pytest.raises(ValueError, match="out_specs"):
    jax.jit(mapped(f, P("d"), P()))(X)
  close(jax.jit(mapped(f, P(), P()))(X), np.sin(X))


def test_casts_that_the_user_switched_off_are_asked_for() -> None:
  f = SUBJECTS["gate, like"]()
  with jax_config.auto_pcast(False), pytest.raises(ValueError, match="varying manual axes"):
    jax.jit(mapped(f, X_AND_W))(X, W)


def test_a_rule_s_constants_count_as_varying() -> None:
  f: Any = cg.gate(on_host, out=lambda x, w: x)
  f.defvjp(
    lambda x, w: (f(x, w), None), lambda _, ct: (jnp.zeros(3), jnp.full((3,), 2.0) * ct.sum() * 0)
  )
  total = lambda x, w: jax.grad(lambda w: f(x, w).sum())(w)
  close(jax.jit(mapped(total, X_AND_W, P()))(X, W), jnp.zeros(3))


# -- taps, prints, checks, feeds, JAX's own callbacks ----------------------------------------------
def test_taps_prints_checks_and_bars_take_values_of_any_type(capsys: Any) -> None:
  seen: list[tuple[int, float]] = []

  def note(value: Any, info: cg.TapInfo) -> None:
    seen.append((info.device, float(value["total"])))

  def program(x: Any, w: Any) -> Any:
    total = jax.lax.psum(x.sum(), "d")
    both = cg.tap({"x": x, "w": w, "total": total}, note, where=x[0] < 9, effect="dataflow")
    assert [jax.typeof(both[k]).manual_axis_type.varying for k in ("x", "w", "total")] == [
      {"d"},
      set(),
      set(),
    ]
    cg.check(x[0] < 9, "expected less, got {x} beside {w}", x=x, w=w)
    cg.print("total {t}", t=both["total"])
    ran = jax.lax.fori_loop(0, 3, lambda i, c: c + cg.tap(w, note_nothing) * i, both["w"])
    return both["x"] * 2, ran

  y, ran = jax.jit(mapped(program, X_AND_W, (P("d"), P())))(X, W)
  cg.barrier()
  close(y, X * 2)
  close(ran, 4 * W)
  devices = [d.id for d in MESH.devices]
  assert sorted(seen) == [(d, pytest.approx(float(X.sum()), abs=1e-5)) for d in devices]
  assert capsys.readouterr().out.count("total ") == DEVICES


def note_nothing(value: Any) -> None:
  del value


def test_each_device_takes_items_of_a_feed_for_itself(engine: str) -> None:
  def steps(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c + feed.next(), None), x, length=3)[0]

  with cg.feed(np.arange(1, 100, dtype=np.float32)) as feed:
    y = jax.jit(mapped(steps))(jnp.zeros(DEVICES))
    assert float(y.sum()) == sum(range(1, 3 * DEVICES + 1))
    with pytest.raises(ValueError, match="out_specs"):
      jax.jit(mapped(lambda x: x + feed.next(), P(), P()))(jnp.zeros(1))


def test_installed_callbacks_give_what_jax_s_give() -> None:
  like = jax.ShapeDtypeStruct((3,), np.float32)

  def program(x: Any, w: Any) -> Any:
    jax.debug.callback(lambda v: None, w)
    y = jax.pure_callback(np.sin, like, x)
    z = io_callback(lambda v: np.asarray(v) * 2, like, w)
    return jax.lax.pcast(y, "d", to="varying") * x, z

  run = lambda: jax.jit(mapped(program, X_AND_W, (P("d"), P())))(X, W)
  want = run()
  cg.install()
  try:
    close(run(), want)
  finally:
    cg.uninstall()
