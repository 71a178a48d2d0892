# SPDX-License-Identifier: Apache-2.0
"""Kernels of Warp: compiled for the CPU and called there, compiled for CUDA without a device."""

from __future__ import annotations

import struct as binary
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_images import check_plan
from fake_programs import run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transformation_table import X, assert_chains_agree, groups, reference

import callgate as cg
from callgate._core.public import core
from callgate._kernel.launch import CudaCall

wp = pytest.importorskip("warp", reason="warp-lang is not installed")
from warp_kernels import lengths, saxpy  # noqa: E402  (it needs Warp)


@wp.kernel
def wave(x: wp.array(dtype=float), y: wp.array(dtype=float)):
  i = wp.tid()
  total = float(1.0)  # noqa: UP018  (a variable of Warp's, no constant)
  for k in range(x.shape[0]):
    total += x[k]
  y[i] = wp.sin(x[i]) * total


@wp.kernel
def transpose(x: wp.array2d(dtype=wp.int32), y: wp.array2d(dtype=wp.int32)):
  i, j = wp.tid()
  y[j, i] = x[i, j]


@wp.kernel
def total(x: wp.array2d(dtype=float), out: wp.array(dtype=float)):
  i, j = wp.tid()
  wp.atomic_add(out, 0, x[i, j])


@wp.kernel
def advance(dt: wp.float64, x: wp.array(dtype=wp.float64), v: wp.array(dtype=wp.float64)):
  i = wp.tid()
  x[i] = x[i] + dt * v[i]


@wp.kernel
def mixed(
  flag: bool, n: wp.int8, h: wp.float16, x: wp.array(dtype=wp.uint8), m: wp.array(dtype=wp.mat22),
  out: wp.array(dtype=float), count: wp.array(dtype=wp.int32),
):  # fmt: skip
  i = wp.tid()
  out[i] = float(x[i]) + float(n) + float(h) + wp.trace(m[i])
  if flag:
    count[i] = i


@wp.kernel
def generic(x: wp.array(dtype=Any), y: wp.array(dtype=Any)):
  i = wp.tid()
  y[i] = x[i]


@wp.struct
class Body:
  mass: float


@wp.kernel
def heavy(body: Body, out: wp.array(dtype=float)):
  out[0] = body.mass


def made_saxpy(**options: Any) -> Any:
  return cg.kernel(saxpy, like=lambda a, x, y: a * x + y, **options)


def shapes(*arrays: Any) -> tuple[Any, ...]:
  return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)


# -- on the CPU ----------------------------------------------------------------------------------
def test_a_call_computes_what_the_kernel_says() -> None:
  x, y = jnp.arange(5.0), jnp.ones(5)
  kernel = made_saxpy()
  assert kernel.name.endswith(".saxpy")
  np.testing.assert_array_equal(jax.jit(lambda x, y: kernel(2.0, x, y))(x, y), 2 * x + y)
  np.testing.assert_array_equal(kernel(a=3, x=x, y=y), 3 * x + y)
  kernel.check(2.0, x, y)


def test_elements_that_are_vectors_are_last_extents() -> None:
  kernel = cg.kernel(lengths, out=lambda p: jax.ShapeDtypeStruct(p.shape[:1], p.dtype))
  points = jnp.array([[3.0, 4.0, 0.0], [1.0, 2.0, 2.0]])
  np.testing.assert_allclose(jax.jit(kernel)(points), [5, 3])
  with pytest.raises(
    cg.GateDefinitionError, match=r"argument 'points': expected \(3,\) as its last"
  ):
    kernel(jnp.ones((4, 2)))


def test_dim_is_the_first_arrays_shape_or_what_the_call_says() -> None:
  x = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
  flipped = lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype)
  np.testing.assert_array_equal(cg.kernel(transpose, out=flipped)(x), x.T)
  one = cg.kernel(transpose, out=flipped, dim=lambda x: (x.shape[0], 1), aliases=None)
  assert np.asarray(one(x))[0].tolist() == [0, 3]


def test_results_are_zeroed_where_the_kernel_adds_to_them() -> None:
  kernel = cg.kernel(total, out=jax.ShapeDtypeStruct((1,), "float32"), zeroed=[0])
  x = jnp.arange(6.0).reshape(2, 3)
  for _ in range(3):
    assert jax.jit(kernel)(x).tolist() == [15.0]


def test_inouts_are_updated_in_place() -> None:
  with jax.enable_x64(True):
    kernel = cg.kernel(advance, inouts="x", out=lambda dt, x, v: x)
    x, v = jnp.arange(3.0), jnp.ones(3)
    np.testing.assert_allclose(jax.jit(lambda x: kernel(0.5, x, v))(x), np.arange(3.0) + 0.5)
    np.testing.assert_allclose(x, np.arange(3.0))  # its own memory


def test_numbers_and_arrays_of_all_kinds() -> None:
  out = lambda flag, n, h, x, m: (jax.ShapeDtypeStruct(x.shape, "float32"),
                                  jax.ShapeDtypeStruct(x.shape, "int32"))  # fmt: skip
  kernel = cg.kernel(mixed, outputs=["out", "count"], out=out)
  x, m = jnp.arange(4, dtype=jnp.uint8), jnp.tile(jnp.eye(2), (4, 1, 1))
  value, count = jax.jit(lambda x, m: kernel(True, -3, 0.5, x, m))(x, m)
  np.testing.assert_allclose(value, np.arange(4) - 3 + 0.5 + 2)
  assert count.tolist() == [0, 1, 2, 3]


def test_arrays_without_elements_run_no_threads() -> None:
  assert made_saxpy()(2.0, jnp.ones(0), jnp.ones(0)).shape == (0,)


# -- transformations -----------------------------------------------------------------------------
@pytest.mark.parametrize("chains", groups(12))
def test_kernels_compose_with_all_transformations(chains: Any) -> None:
  assert_chains_agree(chains, make=lambda effect: cg.kernel(wave, like=reference, effect=effect))


def test_derivatives_come_from_like_or_rules() -> None:
  kernel = made_saxpy()
  got = jax.grad(lambda x: kernel(2.0, x, x).sum())(X)
  np.testing.assert_allclose(got, 3 * np.ones(3))
  own = cg.kernel(saxpy, out=lambda a, x, y: x)
  own.defjvp(lambda primals, tangents, a: (own(a, *primals), own(a, *tangents)))
  np.testing.assert_allclose(jax.jvp(lambda x: own(2.0, x, x), (X,), (X,))[1], 3 * X)


def test_shards_launch_for_their_own_extents() -> None:
  mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
  split = NamedSharding(mesh, P("i"))
  x = jax.device_put(jnp.arange(16.0), split)
  kernel = made_saxpy(sharding="shard", thread_safe=True)
  got = jax.jit(lambda x: kernel(2.0, x, x))(x)
  np.testing.assert_array_equal(got, 3 * x)
  assert got.sharding.spec == P("i")
  rows = cg.kernel(wave, like=reference, sharding="[i] -> [i]")
  batch = jax.device_put(jnp.arange(32.0).reshape(8, 4) / 32, split)
  np.testing.assert_allclose(jax.jit(jax.vmap(rows))(batch), jax.vmap(reference)(batch), rtol=1e-5)


def test_an_exported_program_calls_by_name() -> None:
  from jax import export

  kernel = made_saxpy(name="warp.exported")
  program = export.export(jax.jit(lambda x: kernel(2.0, x, x)), disabled_checks=cg.export_checks())(
    X
  )
  np.testing.assert_allclose(export.deserialize(program.serialize()).call(X), 3 * X, rtol=1e-6)
  (open_,) = export.symbolic_shape("n")
  with pytest.raises(cg.GateDefinitionError, match="the launch depends on shapes"):
    export.export(jax.jit(lambda x: kernel(2.0, x, x)))(jax.ShapeDtypeStruct((open_,), "float32"))


# -- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda k: k(2.0, X.astype("int32"), X), "argument 'x': expected float32 of rank 1, got int32"),
    (lambda k: k(2.0, X[None], X), r"argument 'x': expected float32 of rank 1, got float32\[1,3\]"),
    (lambda k: k(2.0, X), "expected argument 'y', got none"),
    (lambda k: k(2.0, X, X, X), r"expected 3 arguments \(a, x, y\), got 4"),
    (lambda k: jax.jit(lambda a: k(a, X, X))(2.0), "'a': expected a number .*got a traced array"),
    (lambda k: k("2", X, X), "'a': expected a number that float32 holds, got '2'"),
  ],
)
def test_a_wrong_argument_is_named(call: Any, message: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=f"kernel '.*saxpy.*': .*{message}"):
    call(cg.kernel(saxpy, out=lambda a, x, y: x))


@pytest.mark.parametrize(
  ("kernel", "options", "message"),
  [
    (saxpy, {"outputs": "a"}, r"outputs: expected names of parameters that are arrays \(x, y, z\)"),
    (saxpy, {"outputs": "z", "inouts": "z"}, "expected 'z' in one of outputs and inouts, got both"),
    (saxpy, {"zeroed": [1]}, "zeroed: expected flat positions of the 1 results"),
    (saxpy, {"aliases": {0: 0}}, r"aliases: expected no aliases \(use inouts="),
    (saxpy, {"vmap": "grid"}, "vmap: expected 'each', 'whole', 'broadcast' or a rule for a warp"),
    (saxpy, {"arg_spec": ["args"]}, "arg_spec: expected nothing for a warp.Kernel"),
    (generic, {}, "expected a kernel without generic types; use wp.overload"),
  ],
)
def test_a_wrong_option_is_named(kernel: Any, options: Any, message: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=f"kernel 'named': {message}"):
    cg.kernel(kernel, name="named", out=lambda a, x, y: x, **options)


def test_a_wrong_dim_and_a_wrong_count_of_results_are_named() -> None:
  kernel = cg.kernel(saxpy, out=lambda a, x, y: x, dim=lambda x, y, a: -1)
  with pytest.raises(cg.GateDefinitionError, match=r"dim: expected an int .* got -1"):
    kernel(2.0, X, X)
  kernel = cg.kernel(saxpy, out=lambda a, x, y: (x, x))
  with pytest.raises(cg.GateDefinitionError, match=r"expected 1 results \(z\), got 2 from out"):
    kernel(2.0, X, X)


def test_structs_are_refused_by_the_parameters_name() -> None:
  with pytest.raises(
    cg.GateDefinitionError, match="parameter 'body': expected an array of numbers"
  ):
    cg.kernel(heavy, out=X)


# -- for CUDA ------------------------------------------------------------------------------------
@pytest.mark.parametrize("capabilities", [(90,), ()], ids=str)
def test_images_declare_the_parameters_that_launches_pass(capabilities: Any) -> None:
  x = jnp.ones(1000)
  plan = core(made_saxpy()).plan(CudaCall(shapes(x, x), shapes(x), {"a": 2.5}, None, capabilities))
  assert [image.capability for image in plan.images] == list(capabilities or (0,))
  check_plan(plan)
  assert (plan.launches[0].grid, plan.launches[0].block) == ((4, 1, 1), (256, 1, 1))


def test_a_plan_for_all_kinds_of_arguments_has_their_sizes() -> None:
  out = lambda flag, n, h, x, m: (jnp.ones(4), jnp.ones(4, "int32"))
  kernel = cg.kernel(mixed, outputs=["out", "count"], out=out)
  operands = shapes(jnp.ones(4, "uint8"), jnp.ones((4, 2, 2)))
  results = shapes(jnp.ones(4), jnp.ones(4, "int32"))
  check_plan(core(kernel).plan(CudaCall(operands, results, {"flag": True, "n": 3, "h": 0.5})))
  assert core(kernel).images("another", ()) is None


def test_a_lowered_program_launches_on_the_stream(fake: Any) -> None:
  kernel, x = made_saxpy(), jnp.arange(300.0)
  entry = core(kernel).plan(CudaCall(shapes(x, x), shapes(x), {"a": 2.0})).launches[0].entry

  def device(values: Any, grid: Any, block: Any) -> None:
    n, *_ = binary.unpack_from("I", values[0])
    (a,) = binary.unpack("f", values[1])
    at = [binary.unpack_from("Q", value)[0] for value in values[2:]]
    xs, ys, zs = (fake.view(pointer, (n,), np.float32) for pointer in at)
    zs[...] = np.float32(a) * xs + ys

  fake.register_kernel(entry, device, (24, 4, 56, 56, 56), reads=[2, 3], writes=[4])
  got = run(fake, lambda x: kernel(2.0, x, x), x)
  np.testing.assert_array_equal(got, 3 * x)
  (launch,) = fake.launches()
  assert (launch.grid, launch.block) == ((2, 1, 1), (256, 1, 1))
  got = run(fake, jax.vmap(lambda x: kernel(2.0, x, x)), x.reshape(3, 100))
  np.testing.assert_array_equal(got, 3 * x.reshape(3, 100))
