# SPDX-License-Identifier: Apache-2.0
"""`cg.torch`: PyTorch functions in JAX programs, against JAX's own implementation of the maths."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from interpreters import printed_by
from property_checks import examples
from transformation_table import TRIPLES, expected, groups, reference, run

import callgate as cg
from callgate._core.public import core

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

X = jnp.array([0.4, -0.7, 1.1])
TWO = jnp.stack([X, 2 * X])


def in_torch(x: Any) -> Any:
  return torch.sin(x) * (1 + x.sum())


def close(got: Any, want: Any, rtol: float = 1e-4, case: object = "") -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5, err_msg=str(case))


# -- transformations -----------------------------------------------------------------------------
def assert_chains_agree(chains: Any, **options: Any) -> None:
  got, want = run(chains, cg.torch(in_torch, **options)), expected(tuple(chains))
  for chain, a, b in zip(chains, got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=str(chain))


@pytest.mark.parametrize("chains", groups(0))
def test_pairs_of_transformations_agree_with_jax(chains: Any) -> None:
  assert_chains_agree(chains)


@pytest.mark.parametrize("chains", groups(13))
def test_pairs_agree_lane_by_lane(chains: Any) -> None:
  assert_chains_agree(chains, vmap="each")


@pytest.mark.parametrize("chains", groups(2))
def test_pairs_agree_through_jax_s_callbacks(chains: Any) -> None:
  with cg.config(engine="jax"):
    assert_chains_agree(chains)


def test_sampled_triples_agree_with_jax() -> None:
  assert_chains_agree(random.Random(7).sample(TRIPLES, 12))


def f_in_torch(x: Any, y: dict[str, Any], *, power: int = 2) -> Any:
  return {"a": (x @ y["w"]).tanh() ** power, "b": (x.sum() * y["v"], x.exp())}


def f_in_jax(x: Any, y: dict[str, Any], *, power: int = 2) -> Any:
  return {"a": jnp.tanh(x @ y["w"]) ** power, "b": (x.sum() * y["v"], jnp.exp(x))}


ARGS = (jnp.array([[0.1, 0.5], [-0.3, 0.2]]), {"w": jnp.array([0.7, -1.0]), "v": jnp.float32(2)})


def scalar(f: Any) -> Any:
  return lambda *args: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(f(*args)))


def hvp(f: Any) -> Any:
  return lambda *args: jax.jvp(jax.grad(scalar(f), (0, 1)), args, args)[1]


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
  "value": lambda f: f,
  "gradient of all": lambda f: jax.grad(scalar(f), (0, 1)),
  "gradient of one": lambda f: jax.grad(scalar(f), 1),
  "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
  "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*args),
  "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
  "jacrev": lambda f: jax.jacrev(f, (0, 1)),
  "hessian": lambda f: jax.hessian(f, (0, 1)),
  "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
  "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f)),
  "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f)),
  "third": lambda f: jax.jacfwd(jax.hessian(scalar(f))),
  "hessian times vector": hvp,
  "gradient of jvp": lambda f: jax.grad(
    scalar(lambda x, y: jax.jvp(lambda x: f(x, y), (x,), (x * 2,))[1])
  ),
  "differentiated linearize": lambda f: jax.jacfwd(
    lambda x, y: jax.linearize(lambda x: f(x, y), x)[1](x)
  ),
  "hessian of checkpoint": lambda f: jax.hessian(jax.checkpoint(f)),
  "hessian of jit": lambda f: jax.hessian(jax.jit(f)),
}


# Each operation outside of `jit` is a program of its own: these have all kinds of calls.
OUTSIDE_OF_JIT = ["value", "gradient of all", "jvp", "linearize", "hessian"]


@functools.cache
def wanted_derivatives() -> dict[str, Any]:
  """All the derivatives in JAX, as one program, which compiles faster than one each."""
  program = lambda *args: {name: of(f_in_jax)(*args) for name, of in DERIVATIVES.items()}
  return jax.jit(program)(*ARGS)


@pytest.mark.parametrize("name", OUTSIDE_OF_JIT)
def test_derivatives_of_pytrees_agree_with_jax_outside_of_jit(name: str) -> None:
  close(DERIVATIVES[name](cg.torch(f_in_torch))(*ARGS), wanted_derivatives()[name], case=name)


def test_all_derivatives_in_one_program_that_runs_them_at_once(engine: str) -> None:
  program = jax.jit(
    lambda *args: {n: of(cg.torch(f_in_torch))(*args) for n, of in DERIVATIVES.items()}
  )
  for _ in range(10 if engine == "callgate" else 1):
    got, wanted = program(*ARGS), wanted_derivatives()
    for name, want in wanted.items():
      close(got[name], want, case=name)


MAPPED: dict[str, Any] = {
  "x": (0, None),
  "w": (None, {"w": 0, "v": None}),
  "x's columns, w and v": (1, {"w": 0, "v": 0}),
}
MAPPED_DERIVATIVES = ["value", "gradient of all", "jvp", "hessian times vector"]


def mapped(f: Any, axes: str, derivative: str) -> Any:
  in_axes = MAPPED[axes]

  def program(x: Any, y: Any) -> Any:
    x = x if in_axes[0] is None else jnp.stack([x, 2 * x, x - 1], in_axes[0])
    v = y["v"]
    y = jax.tree.map(lambda v: jnp.stack([v, v + 1, -v]), y) if in_axes[1] is not None else y
    y = {**y, "v": v} if in_axes[1] is not None and in_axes[1]["v"] is None else y
    return jax.vmap(DERIVATIVES[derivative](f), in_axes)(x, y)

  return program


MAPPED_CASES = list(itertools.product(MAPPED, MAPPED_DERIVATIVES))


def mapped_derivatives(f: Any) -> Any:
  """All cases, as one program, which compiles faster than one each."""
  return jax.jit(lambda *args: [mapped(f, *case)(*args) for case in MAPPED_CASES])(*ARGS)


@functools.cache
def wanted_mapped_derivatives() -> list[Any]:
  return mapped_derivatives(f_in_jax)


@pytest.mark.parametrize("method", ["auto", "each", "whole"])
def test_mapped_derivatives_agree_with_jax(method: Any) -> None:
  found = mapped_derivatives(cg.torch(f_in_torch, vmap=method))
  for case, got, want in zip(MAPPED_CASES, found, wanted_mapped_derivatives(), strict=True):
    close(got, want, rtol=1e-3, case=case)


def test_static_and_array_keywords_reach_the_function_and_its_derivatives() -> None:
  f = cg.torch(f_in_torch)
  want = jax.grad(lambda x: scalar(lambda x: f_in_jax(x, ARGS[1], power=3))(x))(ARGS[0])
  close(jax.grad(lambda x: scalar(lambda x: f(x, ARGS[1], power=3))(x))(ARGS[0]), want)
  close(jax.grad(lambda x: scalar(lambda x: f(x, y=ARGS[1], power=3))(x))(ARGS[0]), want)


# -- what has a derivative and what has none ------------------------------------------------------
def test_integers_have_no_gradient_unused_arguments_have_zeros() -> None:
  f = cg.torch(lambda x, i, unused: (x[i.long()], i + 1, (x > 0).sum(dtype=torch.int32)))
  i = jnp.array([2, 0], jnp.int32)
  grads = jax.grad(lambda x, u: f(x, i, u)[0] @ jnp.array([3.0, 5.0]), (0, 1))(X, X)
  close(grads, (jnp.array([5.0, 0.0, 3.0]), jnp.zeros(3)))
  (y, j, n), (dy, dj, dn) = jax.jvp(f, (X, i, X), (X, np.zeros(2, jax.dtypes.float0), X))
  close((y, j, n, dy), (X[i], i + 1, jnp.int32(2), X[i]))
  assert dj.dtype == dn.dtype == jax.dtypes.float0


def test_a_result_that_torch_detaches_is_a_constant() -> None:
  f = cg.torch(lambda x: (x.detach() * 2, torch.ones(3)))
  close(jax.grad(lambda x: f(x)[0].sum() + f(x)[1].sum())(X), jnp.zeros(3))
  close(jax.jvp(f, (X,), (X,))[1], (jnp.zeros(3), jnp.zeros(3)))
  assert jax.hessian(lambda x: f(x)[0].sum())(X).tolist() == [[0.0] * 3] * 3


def test_an_argument_that_is_returned_has_its_derivative() -> None:
  close(jax.jacrev(cg.torch(lambda x: x))(X), jnp.eye(3))
  close(jax.jacfwd(cg.torch(lambda x: (x, x)))(X), (jnp.eye(3), jnp.eye(3)))


COMPLEX: dict[str, tuple[Any, Any]] = {
  "holomorphic": (lambda z: torch.exp(z) * z, lambda z: jnp.exp(z) * z),
  "conjugate": (lambda z: z.conj() * z**2, lambda z: z.conj() * z**2),
  "real result": (lambda z: (z.abs() ** 2 * z.real).sum(), lambda z: (abs(z) ** 2 * z.real).sum()),
  "fft": (lambda z: torch.fft.fft(z), lambda z: jnp.fft.fft(z)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_derivatives_follow_jax_s_convention(name: str) -> None:
  ours, want = cg.torch(COMPLEX[name][0]), COMPLEX[name][1]
  z = jnp.array([1 + 2j, -0.5 + 0.3j], jnp.complex64)
  y = jax.jit(want)(z)
  ct = (y * 0 + 1) if y.dtype == jnp.float32 else y + 1j

  def derivatives(f: Any) -> Any:
    second = jax.vjp(lambda z: jax.vjp(f, z)[1](ct)[0], z)[1](z)
    return (
      jax.vjp(f, z)[1](ct),
      jax.jvp(f, (z,), (z + 1j,)),
      jax.vmap(f)(jnp.stack([z, -z])),
      second,
    )

  close(jax.jit(lambda: derivatives(ours))(), jax.jit(lambda: derivatives(want))())


class OldSquare(torch.autograd.Function):
  """Without setup_context, so `torch.func` refuses it."""

  @staticmethod
  def forward(ctx: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
    ctx.save_for_backward(x)
    return x * x

  @staticmethod
  def backward(ctx: Any, g: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
    (x,) = ctx.saved_tensors
    return 2 * x * g


class NewSquare(torch.autograd.Function):
  """Without jvp, so it has no forward mode; and without a batching rule."""

  @staticmethod
  def forward(x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
    return x * x

  @staticmethod
  def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)

  @staticmethod
  def backward(ctx: Any, g: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
    (x,) = ctx.saved_tensors
    return 2 * x * g


def pairwise(x: Any) -> Any:
  points = x.reshape(-1, 1) * torch.arange(1.0, 3.0)
  return torch.cdist(points, points + 1)


def pairwise_in_jax(x: Any) -> Any:
  points = x.reshape(-1, 1) * jnp.arange(1.0, 3.0)
  return jnp.linalg.norm(points[:, None] - points[None] - 1, axis=-1)


def forces(x: Any) -> Any:
  x = x.requires_grad_()
  return torch.autograd.grad((x**4).sum(), x, create_graph=True)[0]


SCALARS: dict[str, Callable[[Any], Any]] = {
  "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
  "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
  "vmap of jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,))[1]),
  "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f)),
  "jacfwd of grad": lambda f: jax.jacfwd(jax.grad(f)),
  "grad of jacfwd": lambda f: jax.grad(jax.jacfwd(f)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_number_times_a_scalar_keeps_its_type_in_forward_mode(name: str) -> None:
  f = cg.torch(lambda x: torch.sin(x) * 0.5 + 0.25)
  x = X[:3] if "vmap" in name else X[0]
  found = jax.jit(SCALARS[name](f))(x)
  expected = SCALARS[name](lambda x: jnp.sin(x) * 0.5 + 0.25)(x)
  assert found.dtype == expected.dtype
  np.testing.assert_allclose(found, expected, rtol=1e-5)


HARD: dict[str, tuple[Any, Any, dict[str, Any]]] = {
  "an old autograd.Function": (lambda x: OldSquare.apply(x), lambda x: x * x, {}),
  "no forward mode": (lambda x: NewSquare.apply(x), lambda x: x * x, {}),
  "autograd inside": (forces, lambda x: 4 * x**3, {"enable_grad": True}),
}


@pytest.mark.parametrize("derivative", ["value", "jacrev", "jacfwd", "hessian", "jacfwd of jacfwd"])
@pytest.mark.parametrize("name", HARD)
def test_functions_that_torch_func_refuses_have_all_derivatives(name: str, derivative: str) -> None:
  ours, want, options = HARD[name]
  transform = {"jacrev": jax.jacrev, "jacfwd": jax.jacfwd, "hessian": jax.hessian}.get(
    derivative
  ) or DERIVATIVES[derivative]
  expected = jax.jit(transform(want))(X)
  close(transform(cg.torch(ours, **options))(X), expected, rtol=2e-3)


def test_a_function_that_torch_differentiates_once_in_reverse_mode_has_that_gradient() -> None:
  f = cg.torch(pairwise)  # under torch.func.vmap torch gives zeros for its gradient
  close(jax.jacrev(f)(X), jax.jit(jax.jacrev(pairwise_in_jax))(X), rtol=1e-3)
  grads = lambda f: jax.jit(jax.vmap(jax.grad(lambda x: f(x)[0, 1])))(TWO)
  close(grads(f), grads(pairwise_in_jax), rtol=1e-3)
  with pytest.raises(NotImplementedError, match="_cdist_backward"), cg.errors():
    jax.block_until_ready(jax.jvp(f, (X,), (X,)))


def test_user_rules_and_references_come_before_torch_s() -> None:
  f = cg.torch(torch.sin)
  f.defjvp(lambda primals, tangents: (f(*primals), 100 * tangents[0]))
  assert jax.grad(lambda x: f(x).sum())(X).tolist() == [100.0] * 3
  g = cg.torch(torch.sin, like=jnp.sin)
  g.check(X)
  close(jax.jacfwd(g)(X), jax.jacfwd(jnp.sin)(X))
  h = cg.torch(lambda x: torch.from_numpy(np.sin(x.numpy())), out=X, gradient="finite-difference")
  np.testing.assert_allclose(jax.grad(lambda x: h(x).sum())(X), jnp.cos(X), rtol=1e-2)


# -- batches -------------------------------------------------------------------------------------
def counted(f: Any) -> tuple[Any, list[int]]:
  """The function, and the numbers of dimensions that it was called with, once it has values."""
  from torch._subclasses.fake_tensor import is_fake

  calls: list[int] = []

  def counting(x: Any) -> Any:
    if not is_fake(x):
      calls.append(x.ndim)
    return f(x)

  return counting, calls


DATA_DEPENDENT: dict[str, Any] = {
  "a branch on a value": lambda x: x + 1 if x.sum() > 0 else x - 1,
  "item": lambda x: x * x.max().item(),
  "NumPy": lambda x: torch.from_numpy(np.sort(x.numpy())),
}


def test_a_function_that_torch_maps_is_called_once_for_all_lanes() -> None:
  f, calls = counted(in_torch)
  close(jax.vmap(cg.torch(f))(TWO), jax.vmap(reference)(TWO))
  close(jax.vmap(jax.vmap(cg.torch(f)))(TWO[None]), jax.vmap(jax.vmap(reference))(TWO[None]))
  assert len(calls) == 2


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_function_that_torch_can_t_map_runs_lane_by_lane(name: str) -> None:
  function = DATA_DEPENDENT[name]
  f, calls = counted(function)
  got = jax.vmap(cg.torch(f, out=X))(jnp.stack([X, -2 * X]))
  want = [function(torch.tensor(np.array(x))).numpy() for x in (X, -2 * X)]
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert len(calls) == 2


def test_an_operation_that_torch_would_loop_over_runs_lane_by_lane() -> None:
  def loss(x: Any) -> Any:
    targets, lengths = torch.tensor([[1, 1]]), (torch.tensor([4]), torch.tensor([2]))
    return torch.nn.functional.ctc_loss(x.log_softmax(-1)[:, None], targets, *lengths)

  f, calls = counted(loss)
  x = jnp.sin(jnp.arange(24.0)).reshape(2, 4, 3)
  one = cg.torch(loss, out=jnp.float32(0))
  close(jax.vmap(cg.torch(f, out=jnp.float32(0)))(x), jnp.stack([one(row) for row in x]))
  assert len(calls) == 2


def test_a_forced_method_is_kept() -> None:
  f, calls = counted(in_torch)
  jax.vmap(cg.torch(f, vmap="each"))(TWO)
  assert len(calls) == 2
  with pytest.raises(RuntimeError, match="vmap"), cg.errors():
    jax.vmap(cg.torch(lambda x: x * x.max().item(), out=X, vmap="whole"))(TWO)
  rule = lambda size, batched, x: (x + size, True)
  assert jax.vmap(cg.torch(torch.sin, vmap=rule))(jnp.zeros((4, 1))).tolist() == [[4.0]] * 4
  own = cg.torch(torch.sin, vmap=lambda size, batched, x: (jnp.sin(x), True))
  close(jax.grad(lambda x: jax.vmap(own)(x).sum())(X), jnp.cos(X))
  close(jax.vmap(jax.grad(own))(X), jnp.cos(X))
  with pytest.raises(cg.GateDefinitionError, match="'auto', 'whole', 'each', got 'broadcast'"):
    cg.torch(torch.sin, vmap="broadcast")  # pyright: ignore[reportArgumentType]


def test_effects_run_once_a_lane_and_in_order() -> None:
  seen: list[float] = []
  from torch._subclasses.fake_tensor import is_fake

  def note(x: Any) -> Any:
    if not is_fake(x):
      seen.append(x.item())
    return x * 2

  for effect in ("io", "ordered"):
    seen.clear()
    f = cg.torch(note, out=jnp.float32(0), effect=effect)
    close(jax.jit(jax.vmap(f))(X), 2 * X)
    jax.effects_barrier()
    assert seen == X.tolist()
  close(jax.grad(cg.torch(lambda x: x**2, effect="io"))(3.0), jnp.float32(6))


# -- values --------------------------------------------------------------------------------------
DTYPES = ["bool", "int8", "uint8", "uint16", "int32", "uint32", "float16", "bfloat16", "float32"]
WIDER = [*DTYPES, "complex64", "float8_e4m3fn", "float8_e5m2"]


@examples(20)
@given(
  hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
  st.sampled_from(WIDER),
  st.sampled_from(["callgate", "jax"]),
)
def test_any_shape_and_dtype_makes_the_round_trip(shape: Any, dtype: str, engine: Any) -> None:
  x = (jnp.arange(np.prod(shape, dtype=int)) % 5).reshape(shape).astype(dtype)
  with cg.config(engine=engine):
    same, moved = jax.jit(cg.torch(lambda x: (x, x.movedim(0, -1) if x.ndim else x)))(x)
  for got, want in ((same, x), (moved, jnp.moveaxis(x, 0, -1) if x.ndim else x)):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got.astype("complex64"), want.astype("complex64"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_other_dtypes_have_gradients_of_their_own(dtype: str) -> None:
  x = X.astype(dtype)
  got = jax.jit(jax.grad(lambda x: cg.torch(lambda x: (x * x).sum())(x).real))(x)
  assert got.dtype == x.dtype
  np.testing.assert_allclose(got.astype("complex64"), 2 * X, rtol=1e-2)


def test_doubles_work_where_jax_has_them() -> None:
  with jax.enable_x64(True):
    x = jnp.array([1.0, 2.0], jnp.float64)
    f = cg.torch(lambda x: (torch.lgamma(x), x.argmax()))
    y, i = f(x)
    assert (y.dtype, i.dtype, int(i)) == (jnp.float64, jnp.int64, 1)
    want = jax.hessian(lambda x: jax.lax.lgamma(x).sum())(x)
    close(jax.hessian(lambda x: f(x)[0].sum())(x), want, rtol=1e-9)


def test_inputs_are_views_of_xla_s_memory_and_out_is_its_result() -> None:
  seen: list[int] = []

  def double(out: Any, x: Any) -> None:
    seen.extend([x.data_ptr(), out.data_ptr()])
    torch.add(x, x, out=out)

  x = jax.block_until_ready(X + 0)
  y = cg.torch(double, out=x, style="inplace")(x)
  assert seen == [x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer()]
  close(y, 2 * x)
  f = cg.torch(double, out=x, style="inplace")
  close(jax.vmap(f)(TWO), 2 * TWO)
  with pytest.raises(cg.GateDefinitionError, match="no derivative: style='inplace'"):
    jax.grad(lambda x: f(x).sum())(x)
  with pytest.raises(cg.GateDefinitionError, match="needs out="):
    cg.torch(double, style="inplace")


def test_aliases_work_in_place() -> None:
  def bump(out: Any, table: Any, row: Any) -> None:
    out[row.item()] += 1

  f = cg.torch(bump, out=lambda table, row: table, style="inplace", aliases={0: 0})
  assert jax.jit(f, donate_argnums=0)(jnp.zeros(3), 1).tolist() == [0.0, 1.0, 0.0]


def test_results_may_be_torch_s_named_tuples_numbers_and_lazy_views() -> None:
  values, indices = cg.torch(lambda x: torch.sort(x))(X)
  assert (values.tolist(), indices.tolist()) == (sorted(X.tolist()), [1, 0, 2])
  assert indices.dtype == jnp.int32
  assert cg.torch(lambda x: (1.5, x.ndim, None), cast=True)(X) == (1.5, 1, None)
  z = jnp.array([1 + 2j, 3j], jnp.complex64)
  close(cg.torch(lambda z: (z.conj(), z.conj().imag, z[::2]))(z), (z.conj(), -z.imag, z[::2]))


def test_torch_tensors_are_taken_as_arguments() -> None:
  close(cg.torch(torch.add)(torch.ones(3), other=torch.ones(3)), jnp.full(3, 2.0))


def test_a_gate_on_a_thread_of_its_own_may_run_jax() -> None:
  def through_jax(x: Any) -> Any:
    return torch.from_numpy(np.array(jnp.sin(jnp.array(x.numpy()))))

  close(jax.jit(cg.torch(through_jax, out=X, thread="own"))(X), jnp.sin(X))


def test_a_kept_tensor_holds_a_copy_and_is_an_error() -> None:
  kept: list[Any] = []

  def leak(x: Any) -> Any:
    kept.append(x)
    return x * 2

  with pytest.raises(cg.EscapedViewError, match="argument 'x'"), cg.errors():
    jax.block_until_ready(jax.jit(cg.torch(leak, out=X))(X))
  assert kept[-1].tolist() == X.tolist()


# -- random numbers ------------------------------------------------------------------------------
def dropped(x: Any) -> Any:
  return torch.nn.functional.dropout(x, 0.5) * x


def test_a_key_decides_the_draw_of_the_value_and_of_its_derivatives() -> None:
  f = cg.torch(dropped, random=True)
  x, key = jnp.linspace(1.0, 2.0, 32), jax.random.key(3)
  mask = f(x, rng=key) / x**2
  assert set(np.round(mask).tolist()) == {0.0, 2.0}
  close(f(x, rng=key), mask * x**2)
  close(jax.grad(lambda x: f(x, rng=key).sum())(x), 2 * mask * x)
  close(jax.jvp(lambda x: f(x, rng=key), (x,), (x,))[1], 2 * mask * x * x)
  assert not jnp.array_equal(f(x, rng=jax.random.key(4)), f(x, rng=key))


def test_lanes_share_a_key_or_have_one_each() -> None:
  f = cg.torch(dropped, random=True)
  x, keys = jnp.ones((3, 32)), jax.random.split(jax.random.key(0), 3)
  one = jax.jit(lambda x, k: f(x, rng=k))
  each = jnp.stack([one(x[0], k) for k in keys])
  close(jax.vmap(lambda x: f(x, rng=keys[1]))(x), jnp.stack([each[1]] * 3))
  close(jax.vmap(lambda x, k: f(x, rng=k))(x, keys), each)
  close(jax.jit(jax.vmap(jax.grad(lambda x, k: f(x, rng=k).sum())))(x, keys), 2 * each)


def test_draws_leave_torch_s_own_generator_alone() -> None:
  torch.manual_seed(0)
  want = torch.rand(3)
  torch.manual_seed(0)
  cg.torch(dropped, random=True)(X, rng=jax.random.PRNGKey(1)).block_until_ready()
  assert torch.equal(torch.rand(3), want)


def test_a_derivative_of_another_draw_is_refused() -> None:
  f = cg.torch(dropped)
  assert f(X).shape == (3,)
  with pytest.raises(cg.GateDefinitionError, match=r"random numbers .*bernoulli.* random=True"):
    jax.grad(lambda x: f(x).sum())(X)
  with pytest.raises(cg.GateDefinitionError, match="random=True; pass rng="):
    cg.torch(dropped, random=True)(X)
  rows = jax.vmap(f)(jnp.ones((64, 3)))
  assert len({tuple(row) for row in rows.tolist()}) > 1  # lane by lane: each draws anew


# -- errors --------------------------------------------------------------------------------------
class MyError(Exception):
  pass


def test_an_exception_of_the_derivative_reaches_the_caller_as_it_is() -> None:
  def fails(x: Any) -> Any:
    if x.requires_grad:
      raise MyError("from torch")
    return x

  with pytest.raises(MyError, match="from torch"), cg.errors():
    jax.block_until_ready(jax.grad(lambda x: cg.torch(fails, out=X)(x).sum())(-X))


def test_results_that_depend_on_values_need_out() -> None:
  f = cg.torch(lambda x: x[: int(x.sum())], name="torch.cut")
  with pytest.raises(cg.GateDefinitionError, match=r"'torch.cut': .* declare them with out="):
    jax.jit(f)(X)
  with pytest.raises(cg.GateDefinitionError, match=r"RuntimeError: .*out="):
    cg.torch(lambda x: x + torch.ones(2))(X)
  with pytest.raises(cg.GateDefinitionError, match="pass enable_grad=True"):
    cg.torch(lambda x: torch.autograd.grad((x**2).sum(), x)[0])(X)


def test_a_wrong_result_is_an_error_that_names_it() -> None:
  wrong = pytest.raises(cg.ResultError, match=r"expected float32\[3\], got float64\[3\]")
  with wrong, cg.errors():
    jax.block_until_ready(cg.torch(lambda x: x.double(), out=X)(X))
  with pytest.raises(cg.GateDefinitionError, match=r"result 1 is float64.*\.to\(torch.float32\)"):
    cg.torch(lambda x: (x, x.double()))(X)
  with pytest.raises(cg.GateDefinitionError, match=r"expected tensors .* got str"):
    cg.torch(lambda x: "no")(X)
  with pytest.raises(
    cg.GateDefinitionError, match="argument 'x': PyTorch doesn't support float8_e3m4"
  ):
    cg.torch(lambda x: -x, out=X)(X.astype(jnp.float8_e3m4))


def test_wrong_options_are_errors() -> None:
  with pytest.raises(cg.GateDefinitionError, match="expected a callable or a module, got 3"):
    cg.torch(3)  # pyright: ignore[reportCallIssue, reportArgumentType]
  with pytest.raises(cg.GateDefinitionError, match="mutable=True needs a module"):
    cg.torch(torch.sin, mutable=True)
  with pytest.raises(cg.GateDefinitionError, match="style: expected one of 'return', 'inplace'"):
    cg.torch(torch.sin, style="context")  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_without_pytorch_the_error_says_what_to_install() -> None:
  printed = printed_by("""
import sys
sys.modules["torch"] = None
import callgate as cg
try:
  cg.torch(print)
except cg.GateDefinitionError as error:
  print(error)
""")
  assert "pip install 'callgate[torch]'" in printed


# -- names and lives -----------------------------------------------------------------------------
EXPORTED = """
import callgate as cg, jax, jax.numpy as jnp, torch
f = cg.torch(lambda x, *, k: torch.sin(k * x) * x.sum(), name="export.torch")
model = cg.torch(torch.nn.Linear(3, 2), name="export.linear")
"""
PROGRAMS: dict[str, Any] = {
  "value": lambda f: lambda x: f(x, k=2.0),
  "gradient": lambda f: jax.grad(lambda x: f(x, k=2.0).sum()),
  "hessian": lambda f: jax.hessian(lambda x: f(x, k=2.0).sum()),
  "map of gradient": lambda f: lambda x: jax.vmap(jax.grad(lambda x: f(x, k=2.0)[0]))(x[None]),
}


def test_exported_programs_find_the_derivatives_in_a_fresh_process(tmp_path: Any) -> None:
  here: dict[str, Any] = {}
  exec(EXPORTED, here)
  want: list[Any] = []
  for name, program in PROGRAMS.items():
    function = jax.jit(program(here["f"]))
    exported = jax.export.export(function, disabled_checks=cg.export_checks())(X)
    (tmp_path / name).write_bytes(exported.serialize())
    want.append(np.asarray(function(X)).ravel())
  params = here["model"].params
  step = jax.jit(jax.grad(lambda p, x: here["model"](p, x).sum()))
  exported = jax.export.export(step, disabled_checks=cg.export_checks())(params, X)
  (tmp_path / "module").write_bytes(exported.serialize())
  printed = printed_by(
    EXPORTED
    + f"""
import pathlib, sys
from jax import export
load = lambda n: export.deserialize(bytearray(pathlib.Path(sys.argv[1], n).read_bytes()))
x = jnp.array({X.tolist()})
for name in {list(PROGRAMS)}:
  print(*jnp.ravel(load(name).call(x)))
grads = load("module").call(model.params, x)
print(*jnp.ravel(grads["weight"]), *grads["bias"])
""",
    str(tmp_path),
  )
  *rows, last = [[float(v) for v in line.split()] for line in printed.splitlines()]
  for row, values in zip(rows, want, strict=True):
    np.testing.assert_allclose(row, values, rtol=1e-5)
  np.testing.assert_allclose(last, [*X.tolist(), *X.tolist(), 1, 1], rtol=1e-6)


def test_programs_hold_names_and_no_address() -> None:
  f = cg.torch(in_torch, name="torch.named")
  text = jax.jit(jax.hessian(lambda x: f(x).sum())).lower(X).as_text()
  assert "torch.named[vjp:0/jvp:0" in text
  assert "0x" not in text
  assert not core(f).define_variant("nonsense")


def test_many_calls_leave_nothing_behind() -> None:
  step = jax.jit(jax.value_and_grad(lambda x: cg.torch(in_torch)(x).sum()))
  for _ in range(3):
    step(X)[1].block_until_ready()
  gc.collect()
  tensors = lambda: sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
  before = tensors()
  for _ in range(20):
    step(X)[1].block_until_ready()
  assert tensors() <= before


def test_names_are_unique_and_the_decorator_takes_options() -> None:
  @cg.torch(name="torch.one")
  def one(x: Any) -> Any:
    """Says what it does."""
    return x.argmax()

  assert isinstance(one, cg.TorchFunction)
  assert (one.__doc__, [*inspect.signature(one).parameters], one(X)) == (
    "Says what it does.",
    ["x"],
    2,
  )
  with pytest.raises(ValueError, match=r"torch\.one"):
    cg.torch(torch.sin, name="torch.one")
