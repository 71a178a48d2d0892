# SPDX-License-Identifier: Apache-2.0
"""Kernels of Numba for CUDA: compiled without a device, and the launches that programs hold."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_images import call, check_plan, declared, struct
from fake_cuda import FakeCuda
from fake_programs import run

import callgate as cg
from callgate._core import static_values
from callgate._core.public import core

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
numba = pytest.importorskip("numba")
cuda = pytest.importorskip("numba.cuda")


@cuda.jit
def saxpy(a, x, y, out):
  i = cuda.grid(1)
  if i < out.size:
    out[i] = a * x[i] + y[i]


@cuda.jit
def out_first(out, x):
  i = cuda.grid(1)
  if i < x.size:
    out[i] = 2 * x[i]


@cuda.jit
def mixed(flag, f, c, i, half, m, out):
  tile = cuda.shared.array(0, dtype=np.float32)
  tile[cuda.threadIdx.x] = f
  if flag:
    out[0, 0] = m[0] + i + c.real + tile[0] + float(half)


@cuda.jit
def writes_to_its_input(x, out):
  x[0] = 1
  out[0] = x[0]


@cuda.jit
def lanes(x, out):
  lane = cuda.blockIdx.z
  i = cuda.grid(1)
  if i < x.shape[1]:
    out[lane, i] = 2 * x[lane, i]


def made_saxpy(**options: Any) -> Any:
  options = {"out": lambda x, y: x, "griddim": lambda x, y: -(-x.size // 256), **options}
  return cg.numba_cuda(saxpy, blockdim=256, **options)


@pytest.mark.parametrize("capabilities", [(90,), (75, 90), ()], ids=str)
def test_images_declare_the_parameters_that_launches_pass(capabilities: Any) -> None:
  x = struct((1000,))
  plan = made_saxpy().plan(call((x, x), (x,), capabilities, a=2.5))
  assert [image.capability for image in plan.images] == list(capabilities or (0,))
  check_plan(plan)
  assert (plan.launches[0].grid, plan.launches[0].block) == ((4, 1, 1), (256, 1, 1))


def test_arrays_are_passed_as_numbas_structs() -> None:
  x = struct((3, 5), np.int32)

  @cuda.jit
  def copy(x, out):
    out[0, 0] = x[0, 0]

  kernel = cg.numba_cuda(copy, griddim=1, blockdim=1, out=lambda x: x, name="copy")
  (launch,) = core(kernel).plan(call((x,), (x,))).launches
  numbers = [int.from_bytes(p.data, "little") for p in launch.parameters]
  assert numbers[:9] == [0, 0, 15, 4, 0, 3, 5, 20, 4]
  at = {i: (a.of, a.index) for i, p in enumerate(launch.parameters) for a in p.addresses}
  assert at == {4: ("operand", 0), 13: ("result", 0)}


def test_numbers_have_numbas_types_and_numpys_scalars_their_own() -> None:
  kernel = cg.numba_cuda(
    mixed, griddim=1, blockdim=(32, 2), sharedmem=128, out=struct((2, 2)), name="mixed"
  )
  m = np.ones(3, np.int32)
  operands, static = core(kernel)._arguments((True, np.float32(1), 2j, 3, np.float16(2), m), {})
  values = {name: static_values.thaw(value) for name, value in static}
  plan = core(kernel).plan(
    call([struct(x.shape, x.dtype) for x in operands], (struct((2, 2)),), **values)
  )
  check_plan(plan)
  (launch,) = plan.launches
  assert launch.shared == 128
  types = [entry[1] for entry in json.loads(plan.key)]
  assert types == ["bool", "float32", "complex128", "int64", "float16", "int32", "float32"]


def test_inputs_are_read_only_unless_they_are_a_results_memory() -> None:
  x = struct((4,))
  kernel = cg.numba_cuda(writes_to_its_input, griddim=1, blockdim=1, out=lambda x: x, name="writes")
  with pytest.raises(cg.CompileError, match=r"(?s)kernel 'writes': Numba can't compile.*readonly"):
    core(kernel).plan(call((x,), (x,)))
  aliased = cg.numba_cuda(
    writes_to_its_input, griddim=1, blockdim=1, out=lambda x: x, aliases={0: 0}, name="aliased"
  )
  check_plan(aliased.plan(call((x,), (x,))))


def test_results_come_first_where_outputs_says_so() -> None:
  kernel = cg.numba_cuda(
    out_first, griddim=1, blockdim=32, out=lambda x: x, outputs="out", name="first"
  )
  x = struct((8,))
  assert jax.eval_shape(kernel, x) == x
  (launch,) = core(kernel).plan(call((x,), (x,))).launches
  assert [a.of for p in launch.parameters for a in p.addresses] == ["result", "operand"]


def test_lanes_in_the_grid_are_the_arrays_first_axis() -> None:
  kernel = cg.numba_cuda(lanes, griddim=1, blockdim=32, out=lambda x: x, vmap="grid", name="lanes")
  x = struct((8,))
  for batch, extent in ((None, 1), (3, 3)):
    plan = core(kernel).plan(call((x,), (x,), batch=batch))
    check_plan(plan)
    (launch,) = plan.launches
    assert launch.grid == (1, 1, extent)
    assert [int.from_bytes(p.data, "little") for p in launch.parameters[5:9]] == [extent, 8, 32, 4]


def test_entries_and_keys_are_the_same_whatever_was_compiled_before() -> None:
  x = struct((1000,))
  plans = [made_saxpy(name=f"again{i}").plan(call((x, x), (x,), a=2.5)) for i in range(2)]
  assert plans[0].key == plans[1].key
  assert plans[0].launches[0].entry == plans[1].launches[0].entry
  images = made_saxpy(name="elsewhere").images(plans[0].key, (90,))
  assert images is not None
  launch = plans[0].launches[0]
  assert declared(images[0], launch.entry) == declared(plans[0].images[0], launch.entry)


def test_wrong_arguments_are_refused_by_name() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"expected a kernel of @numba.cuda.jit"):
    cg.numba_cuda(lambda x: x, griddim=1, blockdim=1)
  with pytest.raises(cg.GateDefinitionError, match="got a device function"):
    cg.numba_cuda(cuda.jit(device=True)(lambda x: x), griddim=1, blockdim=1)
  kernel = made_saxpy(name="refusing")
  x = struct((8,))
  with pytest.raises(cg.GateDefinitionError, match="expected at most 4 arguments"):
    kernel(1.0, jnp.ones(3), jnp.ones(3), jnp.ones(3), jnp.ones(3))
  e = struct((8,), jnp.float8_e4m3fn)
  with pytest.raises(cg.GateDefinitionError, match="Numba has no arrays of float8_e4m3fn on CUDA"):
    core(kernel).plan(call((e, e), (e,), a=1.0))
  large = cg.numba_cuda(saxpy, griddim=1, blockdim=(64, 32), out=lambda x, y: x, name="large")
  with pytest.raises(cg.GateDefinitionError, match="block: expected at most 1024 threads"):
    large.plan(call((x, x), (x,), a=1.0))


def test_a_program_launches_the_kernel_with_its_arrays(fake: FakeCuda) -> None:
  kernel = made_saxpy(name="launched", arch=90)
  x = struct((1000,))
  probe = core(kernel).plan(call((x, x), (x,), a=2.5))
  (launch,) = probe.launches
  pointers = {i: p.addresses[0].of for i, p in enumerate(launch.parameters) if p.addresses}

  def compute(values: list[bytes], grid: Any, block: Any) -> None:
    x, y, out = (
      fake.view(int.from_bytes(values[i], "little"), (1000,), np.float32) for i in pointers
    )
    assert (grid, block) == ((4, 1, 1), (256, 1, 1))
    out[:] = np.frombuffer(values[0], np.float64)[0] * x + y

  reads = [i for i, of in pointers.items() if of == "operand"]
  writes = [i for i, of in pointers.items() if of == "result"]
  sizes = [len(p.data) for p in launch.parameters]
  fake.register_kernel(launch.entry, compute, sizes, reads=reads, writes=writes)
  a, b = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
  np.testing.assert_allclose(run(fake, lambda x, y: kernel(2.5, x, y), a, b), 2.5 * a + b)
  batched = jax.vmap(lambda x: kernel(2.5, x, b))
  np.testing.assert_allclose(run(fake, batched, np.stack([a, b])), 2.5 * np.stack([a, b]) + b)
