# SPDX-License-Identifier: Apache-2.0
"""Kernels of Triton: compiled without a device, and the launches that programs hold of them."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # newer versions ask for it to be set

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_images import call, check_plan, declared, struct
from fake_cuda import FakeCuda
from fake_programs import run

import callgate as cg
from callgate._core.public import core

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

BOTH = (75, 90)


@triton.jit
def add_kernel(x_ptr, y_ptr, n, a, out_ptr, BLOCK: tl.constexpr):
  at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  mask = at < n
  x = tl.load(x_ptr + at, mask=mask)
  y = tl.load(y_ptr + at, mask=mask)
  tl.store(out_ptr + at, a * x + y, mask=mask)


@triton.jit
def tutorial_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
  at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  mask = at < n
  x = tl.load(x_ptr + at, mask=mask)
  tl.store(out_ptr + at, x + tl.load(y_ptr + at, mask=mask), mask=mask)


@triton.jit
def scalars_kernel(x_ptr, flag, i8: tl.int8, i64: tl.int64, big, f64: tl.float64, half, out_ptr):
  value = tl.load(x_ptr) + i8 + i64 + big + f64 + half
  if flag:
    value = value + 1
  tl.store(out_ptr, value)


@triton.autotune(
  configs=[triton.Config({"BLOCK": 128}, num_warps=2), triton.Config({"BLOCK": 512}, num_warps=8)],
  key=["n"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
  at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  if EVEN:
    tl.store(out_ptr + at, tl.load(x_ptr + at))
  else:
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def made_add(**options: Any) -> Any:
  options = {"out": lambda x, y: x, "BLOCK": 256, **options}
  return cg.triton(
    add_kernel, grid=lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),), **options
  )


@pytest.mark.parametrize("capabilities", [(90,), (75,), BOTH, ()], ids=str)
def test_images_declare_the_parameters_that_launches_pass(capabilities: Any) -> None:
  x = struct((1000,))
  plan = core(made_add()).plan(call((x, x), (x,), capabilities, n=1000, a=2.5))
  assert [image.capability for image in plan.images] == list(capabilities or (0,))
  check_plan(plan)
  (launch,) = plan.launches
  assert launch.entry == "add_kernel"
  assert (launch.grid, launch.block) == ((4, 1, 1), (128, 1, 1))


def test_operands_scalars_and_results_are_passed_in_the_kernels_order() -> None:
  x = struct((1000,))
  (launch,) = core(made_add()).plan(call((x, x), (x,), n=1000, a=2.5)).launches
  of = [[(a.of, a.index) for a in p.addresses] for p in launch.parameters[:5]]
  assert of == [[("operand", 0)], [("operand", 1)], [], [], [("result", 0)]]
  assert launch.parameters[2].data == np.int32(1000).tobytes()
  assert launch.parameters[3].data == np.float32(2.5).tobytes()
  # The version adds null pointers for a kernel without scratch memory.
  assert all(p.data == bytes(8) and not p.addresses for p in launch.parameters[5:])


def test_an_integer_of_one_is_compiled_in_and_multiples_of_16_are_told() -> None:
  x = struct((1024,))
  kernel = made_add()
  keys = {
    n: json.loads(core(kernel).plan(call((x, x), (x,), n=n, a=2.0)).key)["args"][2]
    for n in (1, 1000, 1024)
  }
  assert keys == {1: ["constexpr", 1, False], 1000: ["i32", None, False], 1024: ["i32", None, True]}


def test_programs_with_other_numbers_share_an_image() -> None:
  x = struct((1000,))
  kernel = made_add()
  plans = [core(kernel).plan(call((x, x), (x,), n=n, a=a)) for n, a in ((1000, 2.0), (999, 3.0))]
  assert plans[0].key == plans[1].key
  assert plans[0].images == plans[1].images


def test_pointers_are_aligned_only_where_every_lane_is() -> None:
  kernel = made_add()
  told = {}
  for size in (1000, 1001):
    x = struct((size,))
    told[size] = json.loads(core(kernel).plan(call((x, x), (x,), n=size, a=2.0)).key)["args"][0]
  assert told == {1000: ["*fp32", None, True], 1001: ["*fp32", None, False]}


def test_another_process_makes_the_same_images_from_the_key() -> None:
  x = struct((1000,))
  kernel = made_add()
  plan = core(kernel).plan(call((x, x), (x,), n=1000, a=2.5))
  again = core(made_add(name="another")).images(plan.key, (90,))
  assert again is not None
  assert again[0].code == plan.images[0].code


def test_scalars_are_passed_in_the_types_that_the_kernel_declares() -> None:
  kernel = cg.triton(scalars_kernel, grid=1, out=struct((1,)))
  static = {"flag": True, "i8": 3, "i64": 5, "big": 2**40, "f64": 0.5, "half": 1.5}
  plan = core(kernel).plan(call((struct((1,)),), (struct((1,)),), BOTH, **static))
  check_plan(plan)
  sizes = [len(p.data) for p in plan.launches[0].parameters]
  assert sizes[:8] == [8, 1, 1, 8, 8, 8, 4, 8]


def test_parameters_left_open_take_the_results_wherever_they_are() -> None:
  grid = lambda meta: triton.cdiv(meta["n"], meta["BLOCK"])
  kernel = cg.triton(tutorial_kernel, grid=grid, out=lambda x, y: x, BLOCK=128)
  x = struct((300,))
  assert jax.eval_shape(lambda x, y: kernel(x, y, n=300), x, x) == x
  (launch,) = core(kernel).plan(call((x, x), (x,), n=300)).launches
  assert [a.of for p in launch.parameters for a in p.addresses] == ["operand", "operand", "result"]
  named = cg.triton(
    tutorial_kernel, grid=grid, out=lambda x, y: x, outputs="out_ptr", BLOCK=128, name="named"
  )
  assert jax.eval_shape(lambda x, y: named(x, y, 300), x, x) == x


def test_a_result_in_an_operands_memory_needs_no_parameter_of_its_own() -> None:
  @triton.jit
  def double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

  kernel = cg.triton(double_kernel, grid=1, out=lambda x: x, aliases={0: 0}, BLOCK=64)
  (launch,) = core(kernel).plan(call((struct((50,)),), (struct((50,)),), n=50)).launches
  assert [(a.of, a.index) for p in launch.parameters for a in p.addresses] == [("operand", 0)]


def test_a_cluster_multiplies_the_grid() -> None:
  x = struct((1000,))
  (launch,) = core(made_add(num_ctas=2)).plan(call((x, x), (x,), n=1000, a=2.0)).launches
  assert (launch.grid, launch.cluster) == ((8, 1, 1), (2, 1, 1))


def test_results_are_zeroed_by_position_name_or_function() -> None:
  x = struct((1000,))
  for given in (0, [0], "out_ptr", lambda meta: [0] if meta["BLOCK"] == 256 else []):
    plan = core(made_add(zeroed_outputs=given)).plan(call((x, x), (x,), n=1000, a=2.0))
    assert plan.zeroed == (0,)
  with pytest.raises(cg.GateDefinitionError, match=r"zeroed_outputs: expected positions.*got 'x_p"):
    core(made_add(zeroed_outputs="x_ptr")).plan(call((x, x), (x,), n=1000, a=2.0))


def test_a_grid_of_two_parameters_gets_the_shapes() -> None:
  seen: list[Any] = []

  def grid(meta: Any, shapes: Any) -> int:
    seen.append((meta["num_warps"], [s.shape for s in shapes]))
    return 1

  kernel = cg.triton(add_kernel, grid=grid, out=lambda x, y: x, BLOCK=64, num_warps=8)
  x = struct((8,))
  (launch,) = core(kernel).plan(call((x, x), (x,), n=8, a=2.0)).launches
  assert seen == [(8, [(8,), (8,), (8,)])]
  assert launch.block == (256, 1, 1)


def test_without_a_device_the_first_configuration_is_taken_and_a_warning_says_so(
  caplog: Any, tmp_path: Any, monkeypatch: Any
) -> None:
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path))
  kernel = cg.triton(tuned_kernel, grid=lambda m: triton.cdiv(m["n"], m["BLOCK"]), out=lambda x: x)
  x = struct((1024,))
  with caplog.at_level(logging.WARNING, logger="callgate"):
    plan = core(kernel).plan(call((x,), (x,), n=1024))
  assert "no device to measure the 2 configurations" in caplog.text
  assert (plan.launches[0].grid, plan.launches[0].block) == ((8, 1, 1), (64, 1, 1))
  assert json.loads(plan.key)["args"][3:] == [["constexpr", 128, False], ["constexpr", True, False]]


def test_the_fastest_configuration_is_kept_on_disk(tmp_path: Any, monkeypatch: Any) -> None:
  triton_compile = compiler()
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path))
  function = triton_compile.base_function(tuned_kernel)
  arguments = {"x_ptr": struct((1024,)), "n": 1024}
  found = triton_compile.candidates("kernel 'k'", tuned_kernel, arguments, {})
  assert [s["BLOCK"] for s in found] == [128, 512]
  assert [s["EVEN"] for s in found] == [True, True]
  times = {128: 2.0, 512: 1.0}
  measured: list[int] = []

  def measure(settings: Any) -> float:
    measured.append(settings["BLOCK"])
    return times[settings["BLOCK"]]

  pick = lambda measure: triton_compile.chosen(
    "k", tuned_kernel, function, found, arguments, measure
  )
  assert pick(measure)["BLOCK"] == 512
  assert measured == [128, 512]
  assert pick(None)["BLOCK"] == 512  # from the disk, whatever the device
  times = {128: float("inf"), 512: float("inf")}
  for file in tmp_path.rglob("*.json"):
    file.write_text("{")  # damaged: as if it weren't there
  with pytest.raises(cg.GateDefinitionError, match="expected a configuration that runs"):
    pick(measure)


def compiler() -> Any:
  from callgate._kernel.cuda import triton_compile

  return triton_compile


def test_wrong_arguments_are_refused_by_name() -> None:
  kernel = made_add()
  x = jnp.ones(8)
  with pytest.raises(cg.GateDefinitionError, match="argument 'BLOCK' which it doesn't take"):
    kernel(x, x, 8, 2.0, BLOCK=2)
  with pytest.raises(cg.GateDefinitionError, match="'n' is left open before 'out_ptr'"):
    kernel(x, x, out_ptr=x)
  with pytest.raises(cg.GateDefinitionError, match=r"constants: expected names.*got 'BLOK'"):
    made_add(BLOK=3, name="misspelt")
  no_block = cg.triton(add_kernel, grid=1, out=lambda x, y: x, name="no_block")
  with pytest.raises(cg.GateDefinitionError, match="expected argument 'BLOCK', got none"):
    no_block(x, x, 8, 2.0)
  with pytest.raises(cg.GateDefinitionError, match=r"'BLOCK': expected a value that is known when"):
    jax.eval_shape(lambda b: no_block(x, x, 8, 2.0, BLOCK=b), x)
  with pytest.raises(cg.GateDefinitionError, match=r"expected a function of @triton.jit.*got <f"):
    cg.triton(lambda x: x, grid=1)
  c, s = struct((8,), np.complex64), struct((8,))
  with pytest.raises(cg.GateDefinitionError, match="Triton has no pointers to complex64"):
    core(kernel).plan(call((c, c), (c,), n=8, a=2.0))
  with pytest.raises(
    cg.GateDefinitionError, match=r"expected a parameter for each of 2 arrays and 2"
  ):
    core(kernel).plan(call((s, s), (s, s), n=8, a=2.0))


def test_errors_of_triton_name_the_kernel_and_the_device() -> None:
  @triton.jit
  def broken_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) + undefined_name)  # noqa: F821 - the fault on purpose

  kernel = cg.triton(broken_kernel, grid=1, out=lambda x: x, name="broken")
  with pytest.raises(
    cg.CompileError, match=r"kernel 'broken': Triton .* 'broken_kernel' for sm_90"
  ):
    core(kernel).plan(call((struct((1,)),), (struct((1,)),)))


def test_pre_hooks_of_configurations_are_refused() -> None:
  tuned = triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, pre_hook=lambda args: None)], key=["n"]
  )(tutorial_kernel)
  kernel = cg.triton(tuned, grid=1, out=lambda x, y: x, name="hooked")
  x = struct((64,))
  with pytest.raises(cg.GateDefinitionError, match=r"triton\.Config without pre_hook"):
    core(kernel).plan(call((x, x), (x,), n=64))


def test_a_program_launches_the_kernel_with_its_arrays(fake: FakeCuda) -> None:
  kernel = made_add(arch="sm_90")
  x = struct((1000,))
  probe = core(kernel).plan(call((x, x), (x,), n=1000, a=2.5))
  sizes = [size for _, size in declared(probe.images[0], "add_kernel")]

  def compute(values: list[bytes], grid: Any, block: Any) -> None:
    pointers = [int.from_bytes(values[i], "little") for i in (0, 1, 4)]
    x, y, out = (fake.view(p, (1000,), np.float32) for p in pointers)
    n, a = np.frombuffer(values[2], np.int32)[0], np.frombuffer(values[3], np.float32)[0]
    assert grid == (4, 1, 1)
    assert block == (128, 1, 1)
    out[:n] = a * x[:n] + y[:n]

  fake.register_kernel("add_kernel", compute, sizes, reads=(0, 1), writes=(4,))
  a, b = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
  got = run(fake, lambda x, y: kernel(x, y, 1000, 2.5) + 1, a, b)
  np.testing.assert_allclose(got, 2.5 * a + b + 1)
