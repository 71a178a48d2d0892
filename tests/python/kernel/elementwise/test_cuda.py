# SPDX-License-Identifier: Apache-2.0
"""Elementwise kernels on CUDA: run on the host, compiled by NVRTC, launched by programs."""

from __future__ import annotations

import ctypes
from typing import Any

import host_cuda
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cuda_images import check_plan, needs_nvrtc
from fake_cuda import FakeCuda
from fake_programs import run
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples

import callgate as cg
from callgate import _callgate
from callgate._build import nvrtc
from callgate._core.public import core, core_of
from callgate._kernel.elementwise import cuda
from callgate._kernel.elementwise.cuda import Layout, collapsed, entry_of
from callgate._kernel.launch import CudaCall

DTYPES = (
  *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
  *("int8", "int32", "int64", "uint8", "uint16"),
  *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
)


def dtype_of(name: str) -> Any:
  return np.dtype(getattr(ml_dtypes, name, name))


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
  random = np.random.default_rng(seed)
  numbers = random.integers(1, 5, shape).astype(np.float64)
  if dtype.startswith("complex"):
    return (numbers + 1j * random.integers(-3, 4, shape)).astype(dtype)
  return numbers.astype(dtype_of(dtype))


def call_of(kernel: Any, operands: Any, capabilities: Any = (90,), **static: Any) -> CudaCall:
  structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
  results = jax.tree.leaves(core_of(kernel).out(*structs, **static))
  return CudaCall(tuple(structs), tuple(results), static, None, capabilities)


def launch_of(kernel: Any, operands: Any, **static: Any) -> tuple[Any, str, CudaCall]:
  """The launch of a call and its source, without CUDA's compiler."""
  made: list[str] = []

  def build(label: str, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
    made.append(source)
    return nvrtc.Built(nvrtc.CompiledImage(b"\0", 0), entry_of(kernel.name))

  call = call_of(kernel, operands, (), **static)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cuda.nvrtc, "build", build)
    plan = core_of(kernel).cuda.plan(call)
  return plan.launches[0], made[0], call


def on_host(kernel: Any, *operands: Any, **static: Any) -> list[Any]:
  """The results of the CUDA source, on the host."""
  launch, source, call = launch_of(kernel, operands, **static)
  results = [
    host_cuda.aligned(bytes(r.size * r.dtype.itemsize)).view(r.dtype).reshape(r.shape)
    for r in call.results
  ]
  inputs = [
    host_cuda.aligned(np.ascontiguousarray(x).tobytes()).view(x.dtype).reshape(x.shape)
    for x in map(np.asarray, operands)
  ]
  host_cuda.run(host_cuda.build(source, entry_of(kernel.name)), launch, inputs, results)
  return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_compute_what_the_cpus_kernel_does(dtype: str) -> None:
  with jax.enable_x64(True):
    kernel = cg.elementwise("T x, T y", "T z", "z = x * y + x;", name=f"same_{dtype}")
    x, y = values((37,), dtype), values((37,), dtype, 1)
    (got,) = on_host(kernel, x, y)
    want = np.asarray(kernel(x, y))
  np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_elements_that_no_vector_holds_are_done_one_by_one() -> None:
  kernel = cg.elementwise("float32 x, int8 y, float32 s", "float32 z", "z = x + y * s")
  for size in (1, 3, 4, 5, 1023, 1 << 12):
    x, y, s = values((size,), "float32"), values((size,), "int8", 1), np.float32(3)
    (got,) = on_host(kernel, x, y, s)
    np.testing.assert_array_equal(got, x + y * s)


def test_operands_broadcast() -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x - 10 * y")
  for shapes in (
    *(((4, 1, 5), (3, 1)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((1, 7), (2, 1, 1))),
    ((3,), (2, 2, 3)),
  ):
    x, y = (values(s, "float32", i) for i, s in enumerate(shapes))
    (got,) = on_host(kernel, x, y)
    np.testing.assert_array_equal(got, x - 10 * y)


def test_a_thread_takes_more_than_one_element_of_large_arrays(monkeypatch: Any) -> None:
  monkeypatch.setattr(cuda, "_BLOCKS", 2)
  kernel = cg.elementwise("float64 x", "float64 y, int32 j", "y = 2 * x; j = i")
  x = np.arange(5003.0)
  with jax.enable_x64(True):
    y, j = on_host(kernel, x)
  np.testing.assert_array_equal(y, 2 * x)
  np.testing.assert_array_equal(j, np.arange(5003))


def test_code_sees_places_raw_arrays_and_what_comes_before_and_after() -> None:
  kernel = cg.elementwise(
    "raw T x, int32 j", "T z, int32 k",
    "const T factor = twice(T(1)); z = factor * x[j] + x(i % 3, 1) + x.extent(0); "
    "k = n + _ind.size()",
    preamble="template <class T> T twice(T x) { return 2 * x; }",
    loop_prep="const int unused = 0; (void)unused;",
  )  # fmt: skip
  x, j = values((3, 2), "float32"), np.array([5, 0, 2, 1, 4], np.int32)
  z, k = on_host(kernel, x, j)
  np.testing.assert_array_equal(z, 2 * x.ravel()[j] + x[np.arange(5) % 3, 1] + 3)
  np.testing.assert_array_equal(k, np.full(5, 10))


def test_functions_of_complex_numbers_are_those_of_numpy() -> None:
  code = {
    "exp(z)": np.exp, "log(z)": np.log, "sqrt(z)": np.sqrt, "sin(z)": np.sin, "cos(z)": np.cos,
    "tan(z)": np.tan, "sinh(z)": np.sinh, "cosh(z)": np.cosh, "tanh(z)": np.tanh,
    "conj(z)": np.conj, "z / (z + 2)": lambda z: z / (z + 2), "pow(z, 2.5)": lambda z: z**2.5,
    "2 / z": lambda z: 2 / z, "T(abs(z), arg(z))": lambda z: np.abs(z) + 1j * np.angle(z),
    "T(norm(z), z.imag())": lambda z: np.abs(z) ** 2 + 1j * z.imag,
  }  # fmt: skip
  outputs = ", ".join(f"complex128 r{i}" for i in range(len(code)))
  lines = "; ".join(f"r{i} = {text}" for i, text in enumerate(code))
  kernel = cg.elementwise("T z", outputs, lines)
  random = np.random.default_rng(3)
  z = (random.normal(size=50) + 1j * random.normal(size=50)) * np.exp(random.normal(size=50))
  with jax.enable_x64(True):
    results = on_host(kernel, z)
  for got, (text, function) in zip(results, code.items(), strict=True):
    np.testing.assert_allclose(got, function(z), rtol=1e-12, err_msg=text)


def test_derivatives_are_kernels_for_cuda_too() -> None:
  kernel = cg.elementwise(
    "T x, T y", "T z", "z = x * y * y", jvp="dz = y * y * dx + 2 * x * y * dy"
  )
  x, y = values((9,), "float32"), values((9,), "float32", 1)
  derivative = core(kernel).derivatives[1].kernel
  (got,) = on_host(
    derivative, *(v for i, v in enumerate((x, y)) if i in core(kernel).derivatives[1].inputs)
  )
  np.testing.assert_array_equal(got, 2 * x * y)


@needs_nvrtc
@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "uint64", "float8_e8m0fnu", "float8_e3m4"])
def test_cudas_compiler_takes_every_dtype(dtype: str) -> None:
  with jax.enable_x64(True):
    op = "z = x ? y : x" if dtype == "bool" else "z = x * y + max(x, y) + std::abs(exp(x))"
    if dtype.startswith("complex"):
      op = "z = x * y + 2 * x + exp(x) * conj(y) + pow(x, 2)"
    kernel = cg.elementwise("T x, T y", "T z", op, name=f"nvrtc_{dtype}")
    x = values((64,), dtype)
    check_plan(core(kernel).cuda.plan(call_of(kernel, (x, x), (75, 90))))
    check_plan(core(kernel).cuda.plan(call_of(kernel, (x, x), ())))


@needs_nvrtc
def test_launches_pass_what_kernels_of_strides_and_raw_arrays_declare() -> None:
  kernel = cg.elementwise("T x, S y, raw T w, int32 o", "T z, S v", "z = x + w[i] + o; v = y")
  operands = values((4, 1, 5), "float32"), values((3, 1), "int8"), values((2, 30), "float32")
  check_plan(core(kernel).cuda.plan(call_of(kernel, (*operands, np.int32(3)), (75, 90))))


@needs_nvrtc
def test_neighbours_are_loaded_and_stored_at_once() -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x + y")
  x = values((1024,), "float32")
  ptx = core(kernel).cuda.plan(call_of(kernel, (x, x), ())).images[0].code.decode()
  # However often the loop is unrolled.
  assert ptx.count("ld.global.v4.f32") == 2 * ptx.count("st.global.v4.f32") > 0


@needs_nvrtc
def test_another_process_makes_the_same_images_from_the_key() -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x + y")
  x = values((10,), "float32")
  plan = core(kernel).cuda.plan(call_of(kernel, (x, x), (90,)))
  assert core(kernel).cuda.images(plan.key, (90,))[0].code == plan.images[0].code
  other = cg.elementwise("T x, S y", "T z", "z = x + y", name="other.images")
  assert core(other).cuda.images(plan.key, (90,)) is None


@needs_nvrtc
def test_errors_of_cudas_compiler_name_the_kernel() -> None:
  kernel = cg.elementwise("T x", "T y", "y = undefined_here(x)", name="refused")
  with pytest.raises(cg.CompileError, match=r"(?s)kernel 'refused': .*undefined_here"):
    core(kernel).cuda.plan(call_of(kernel, (values((3,), "float32"),)))


def test_where_programs_run_on_gpus_no_compiler_for_the_cpu_is_needed(monkeypatch: Any) -> None:
  kernel = cg.elementwise(
    "T x, T y", "T z", "z = x * y * y", jvp="dz = y * y * dx + 2 * x * y * dy"
  )
  built: list[str] = []

  def build(label: str, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
    built.append(name)
    return nvrtc.Built(nvrtc.CompiledImage(b"\0", 0), name)

  monkeypatch.setattr(cuda.nvrtc, "build", build)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setenv("CXX", "no-such-compiler")
  traced = jax.jit(jax.grad(lambda x: kernel(x, x).sum())).trace(np.float32(3))
  assert built == []
  traced.lower(lowering_platforms=("cuda",))
  assert len(built) == 2  # the kernel's value is not used
  with pytest.raises(cg.CompileError, match="CXX=no-such-compiler"):
    traced.lower(lowering_platforms=("cpu",))


def test_shapes_alike_share_a_variant_and_lanes_that_may_lie_unaligned_take_no_vectors() -> None:
  layout = lambda kernel, *xs: cuda.layout_of(
    core(kernel).user_code, xs, call_of(kernel, xs).results
  )
  plain = cg.elementwise("T x, T y", "T z", "z = x + y")
  a, b = np.zeros((3, 5), np.float32), np.zeros((7,), np.float32)
  assert layout(plain, a, a) == layout(plain, b, b) == Layout("ff", 0, 4, False, ())
  assert layout(plain, a, np.zeros(1, np.float32)).kinds == "fo"
  placed = cg.elementwise("T x", "T z", "z = x + i")
  assert layout(placed, b).vector == 1
  assert layout(placed, np.zeros(8, np.float32)).vector == 4


def test_empty_results_launch_nothing() -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x + y")
  launch, _, _ = launch_of(kernel, (np.zeros((0, 3), np.float32), np.zeros(3, np.float32)))
  assert launch.grid[0] == 0


@given(st.data())
@examples(27)
def test_collapsed_axes_say_where_each_operand_is(data: Any) -> None:
  shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
  operands = []
  for _ in range(data.draw(st.integers(1, 3))):
    kept = [data.draw(st.booleans()) for _ in shape]
    operand = tuple(e if k else 1 for e, k in zip(shape, kept, strict=True))
    operands.append(operand[data.draw(st.integers(0, len(shape))) :])
  axes = collapsed(operands, [jax.ShapeDtypeStruct(shape, np.float32)])
  for k, operand in enumerate(operands):
    own = np.arange(int(np.prod(operand))).reshape(operand)
    want = np.broadcast_to(own, shape).ravel()
    got = np.zeros(want.size, int)
    rest = np.arange(want.size)
    for extent, strides in axes:
      got += rest % extent * strides[k]
      rest //= extent
    np.testing.assert_array_equal(got, want)


@needs_nvrtc
def test_a_program_launches_the_same_code_on_cuda(fake: FakeCuda) -> None:
  kernel = cg.elementwise(
    "T x, T y", "T z", "z = x * y + 1", jvp="dz = y * dx + x * dy", arch="sm_90"
  )

  def function(x: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda x, y: jnp.sum(kernel(x, y)), (0, 1))(x, y)

  x, y = values((4, 8), "float32"), values((8,), "float32", 1)
  register(fake, kernel, (x, y))
  for derivative in core(kernel).derivatives.values():
    register(fake, derivative.kernel, [(x, y)[i] for i in derivative.inputs])
  got = run(fake, function, x, y)
  want = jax.value_and_grad(lambda x, y: jnp.sum(x * y + 1), (0, 1))(x, y)
  jax.tree.map(np.testing.assert_allclose, got, want)


def register(fake: FakeCuda, kernel: Any, operands: Any) -> None:
  """Launches of a kernel run its CUDA source on the host."""
  launch, source, _ = launch_of(kernel, operands)
  library = host_cuda.build(source, entry_of(kernel.name))
  capability = _callgate.cuda_capabilities() or [90]
  real = core_of(kernel).cuda.plan(call_of(kernel, operands, tuple(sorted(set(capability)))))
  sizes = [len(p.data) for p in launch.parameters]
  pointers = {i: p.addresses[0] for i, p in enumerate(launch.parameters) if p.addresses}

  def compute(data: list[bytes], grid: Any, block: Any) -> None:
    held = []
    for index, value in enumerate(data):
      if index in pointers:
        at = fake.driver.fakecuda_host(int.from_bytes(value[:8], "little"))
        value = np.uint64(at).tobytes() + value[8:]
      held.append(host_cuda.aligned(value))
    addresses = (ctypes.c_void_p * len(held))(*(h.ctypes.data for h in held))
    library.run(grid[0], block[0], addresses)

  reads = [i for i, a in pointers.items() if a.of == "operand"]
  writes = [i for i, a in pointers.items() if a.of == "result"]
  fake.register_kernel(real.launches[0].entry, compute, sizes, reads=reads, writes=writes)
