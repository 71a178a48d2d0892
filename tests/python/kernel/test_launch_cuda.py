# SPDX-License-Identifier: Apache-2.0
"""Kernels in programs for CUDA, from the call to the launch, on the fake driver.

The kernels' machine code is made up: the fake driver runs a Python function of the kernel's name in
its place. All else is what runs on a GPU.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_images import needs_nvrtc
from fake_programs import ProgramError, is_capturable, load, run
from programs import drop_programs_until

import callgate as cg
from callgate._build.nvrtc import CompiledImage
from callgate._kernel.cuda.kernel import CudaKernel
from callgate._kernel.cuda.options import CudaOptions
from callgate._kernel.kernel import Kernel
from callgate._kernel.launch import CudaCall, Launch, LaunchParameter, LaunchPlan
from callgate._kernel.parameters import Kind
from callgate._kernel.parameters import Parameter as KernelParameter

F32 = np.dtype(np.float32)
_numbers = itertools.count()


class Scale(CudaKernel):
  """y = a * x, a launch of as many threads as x has elements; `made` counts its images."""

  def __init__(self, name: str = "", **options: Any) -> None:
    signature = [
      KernelParameter("x", Kind.IN, F32),
      KernelParameter("a", Kind.NUMBER, F32, 0),
      KernelParameter("y", Kind.OUT, F32),
    ]
    self.made = 0
    self.scratch = options.pop("scratch", ())
    self.zeroed = options.pop("zeroed", ())
    name = name or f"scale{next(_numbers)}"  # programs of earlier tests may live
    super().__init__(name, signature, CudaOptions(out=lambda x, a: x, **options))

  def plan(self, call: CudaCall) -> LaunchPlan:
    size = int(np.prod(call.operands[0].shape))
    parameters = (
      LaunchParameter.pointer("operand", 0),
      LaunchParameter.scalar(call.static["a"], F32),
      LaunchParameter.pointer("result", 0),
      LaunchParameter.scalar(size, np.int32),
    )
    launch = Launch("scale", (int(size > 0), 1, call.batch or 1), (max(size, 1), 1, 1), parameters)
    images = self.images("scale", call.capabilities)
    assert images is not None
    return LaunchPlan("scale", images, (launch,), self.scratch, self.zeroed)

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    self.made += 1
    return (CompiledImage(b"code\0", 90),) if key == "scale" else None


@pytest.fixture(autouse=True)
def registered(fake):
  """The device's side of `Scale`."""

  def scale(values, grid, block):
    (x,), (a,), (y,), (n,) = (
      struct.unpack(code, value) for code, value in zip(("Q", "f", "Q", "i"), values, strict=True)
    )
    lanes = grid[2]
    fake.view(y, (lanes, n), F32)[...] = np.float32(a) * fake.view(x, (lanes, n), F32)

  fake.register_kernel("scale", scale, (8, 4, 8, 4), reads=[0], writes=[2])


def numbers(*shape):
  return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_a_kernel_computes_on_the_programs_stream(fake):
  kernel, x = Scale(), numbers(4)
  program = load(fake, lambda x: kernel(jnp.sin(x), 3.0) + 1, x)
  stream = fake.stream()
  stream.hold()
  pending = program.start(x, stream=stream)
  assert fake.launches() == []  # nothing waited for it
  stream.release()
  np.testing.assert_allclose(pending.get(), 3 * np.sin(x) + 1, rtol=1e-6)
  (launch,) = fake.launches()
  assert (launch.name, launch.grid, launch.block) == ("scale", (1, 1, 1), (4, 1, 1))


def test_static_values_are_the_calls_own(fake):
  kernel, x = Scale(), numbers(3)
  got = run(fake, lambda x: kernel(x, 2.0) + kernel(x, a=10), x)
  np.testing.assert_array_equal(got, 12 * x)


def test_vmap_loops_over_launches(fake):
  kernel, x = Scale(), numbers(2, 3, 4)

  def mapped(function):
    return jax.vmap(jax.vmap(function, in_axes=1), out_axes=1)

  got = run(fake, mapped(lambda x: kernel(x, 2.0)), x)
  np.testing.assert_array_equal(got, mapped(lambda x: 2 * x)(x))
  assert len(fake.launches()) == 8


def test_vmap_in_the_grid_is_one_launch(fake):
  kernel, x = Scale(vmap="grid"), numbers(2, 3, 4)
  got = run(fake, jax.vmap(jax.vmap(lambda x: kernel(x, 2.0))), x)
  np.testing.assert_array_equal(got, 2 * x)
  (launch,) = fake.launches()
  assert launch.grid == (1, 1, 6)


def test_vmap_whole_gives_the_kernel_all_lanes(fake):
  kernel, x = Scale(vmap="whole"), numbers(3, 4)
  np.testing.assert_array_equal(run(fake, jax.vmap(lambda x: kernel(x, 2.0)), x), 2 * x)
  (launch,) = fake.launches()
  assert launch.block == (12, 1, 1)


def test_arrays_without_elements_launch_nothing(fake):
  kernel = Scale()
  assert run(fake, lambda x: kernel(x, 2.0), numbers(0)).shape == (0,)
  assert fake.launches() == []


def test_derivatives_of_a_linear_kernel(fake):
  kernel, x = Scale(linear=0), numbers(4)
  Kernel(kernel).deftranspose(lambda ct, x, a: kernel(ct, a))
  got = run(fake, jax.grad(lambda x: jnp.sum(kernel(x, 3.0) ** 2)), x)
  np.testing.assert_array_equal(got, 18 * x)


def test_scan_and_cond_launch_as_often_as_they_run(fake):
  kernel, x = Scale(), numbers(4)

  def function(x):
    grown = jax.lax.scan(lambda c, _: (kernel(c, 2.0), None), x, length=5)[0]
    return jax.lax.cond(grown[1] > 10, lambda x: kernel(x, 0.5), lambda x: x, grown)

  np.testing.assert_array_equal(run(fake, function, x), 16 * x)
  assert len(fake.launches()) == 6


def test_a_graph_replays_the_launch(fake):
  kernel, x = Scale(), fake.put(numbers(4))
  program = load(fake, lambda x: kernel(x, 2.0), numbers(4))
  assert is_capturable("callgate.kernel")
  pending = program.capture(x)
  assert fake.launches() == []
  x.set(10 * numbers(4))
  stream = fake.stream()
  for _ in range(3):
    pending.graph.replay(stream)
  assert stream.finish() == 0
  np.testing.assert_array_equal(pending.results[0].get(), 20 * numbers(4))
  assert [launch.replayed for launch in fake.launches()] == [True] * 3


def test_scratch_memory_comes_from_xla_and_is_not_captured(fake):
  kernel, x = Scale(scratch=(64, 0)), numbers(4)
  program = load(fake, lambda x: kernel(x, 2.0), x)
  assert program.targets() == ["callgate.kernel.scratch"]
  assert not is_capturable("callgate.kernel.scratch")
  np.testing.assert_array_equal(program(x), 2 * x)


def test_results_are_set_to_zero_where_the_plan_says_so(fake):
  kernel, x = Scale(zeroed=(0,)), numbers(4)
  np.testing.assert_array_equal(run(fake, lambda x: kernel(x, 2.0), x), 2 * x)
  assert fake.calls("cuMemsetD8Async") + fake.calls("cuMemsetD32Async") > 0


def test_a_failed_launch_is_the_programs_error(fake):
  kernel, x = Scale("scale.fails"), numbers(4)
  program = load(fake, lambda x: kernel(x, 2.0), x)
  fake.fail("cuLaunchKernel", 1)
  with pytest.raises(ProgramError) as info:
    program(x)
  message = str(info.value)
  assert "kernel 'scale.fails': cuLaunchKernel: CUDA_ERROR_INVALID_VALUE" in message
  assert "grid (1, 1, 1), block (4, 1, 1), shared 0 bytes" in message
  assert "kernel/test_launch_cuda.py" in message
  np.testing.assert_array_equal(program(x), 2 * x)


def test_too_many_threads_are_explained(fake):
  kernel = Scale()
  with pytest.raises(ProgramError, match="runs with at most 1024 threads a block"):
    run(fake, lambda x: kernel(x, 2.0), numbers(2000))


def test_a_device_without_an_image_is_told_what_there_is(fake):
  class Old(Scale):
    def images(self, key, capabilities):
      return (CompiledImage(b"code\0", 75),)

  kernel = Old()
  with pytest.raises(ProgramError, match=r"capability 9\.0, or PTX, got images for 7\.5"):
    run(fake, lambda x: kernel(x, 2.0), numbers(4))


def test_a_program_finds_its_variant_by_name_when_it_is_loaded(fake):
  kernel, x = Scale("scale.reloaded"), numbers(4)
  program = load(fake, lambda x: kernel(x, 2.0), x)
  assert 'name = "scale.reloaded[cuda:scale]"' in program.text
  kernel.cuda_variants.clear()  # as in another process, where nothing has called it
  made = kernel.made
  np.testing.assert_array_equal(program(x), 2 * x)
  assert kernel.made >= made


def test_modules_go_with_their_kernel(fake, clean_caches):
  before = fake.live()["modules"]

  def use():
    kernel, x = Scale("scale.dies"), numbers(4)
    program = load(fake, lambda x: kernel(x, 2.0), x)
    program(x)
    assert fake.live()["modules"] == before + 1
    program.close()

  use()
  drop_programs_until(lambda: fake.live()["modules"] == before)


def test_it_compiles_for_the_capabilities_of_the_devices(fake):
  seen: list[tuple[int, ...]] = []

  class Seeing(Scale):
    def plan(self, call):
      seen.append(call.capabilities)
      return super().plan(call)

  kernel = Seeing()
  run(fake, lambda x: kernel(x, 2.0), numbers(4))
  assert seen == [(90,)]


# -- from source -----------------------------------------------------------------------------------
@needs_nvrtc
def test_a_kernel_from_source_is_launched_with_its_machine_code(fake, tmp_path, monkeypatch):
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path))

  def axpy(values, grid, block):
    (a,), (x,), n, (y,) = (
      struct.unpack("f", values[0]),
      struct.unpack("Q", values[1][:8]),
      struct.unpack("q", values[1][8:]),
      struct.unpack("Q", values[2]),
    )
    fake.view(y, n, F32)[...] = np.float32(a) * fake.view(x, n, F32)

  fake.register_kernel("axpy", axpy, (4, 16, 8), writes=[2])
  kernel = cg.cuda(
    """extern "C" __global__ void axpy(float a, cg::In<float, 1> x, float* y) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < x.size()) y[i] = a * x[i];
    }""",
    grid=lambda x: -(-x.size // 128),
    block=128,
    out=lambda a, x: x,
  )
  x = numbers(300)
  np.testing.assert_array_equal(run(fake, lambda x: kernel(3.0, x), x), 3 * x)
  (launch,) = fake.launches()
  assert (launch.grid, launch.block) == ((3, 1, 1), (128, 1, 1))
