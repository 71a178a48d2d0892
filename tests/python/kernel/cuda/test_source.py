# SPDX-License-Identifier: Apache-2.0
"""Kernels from CUDA C++ as far as no device is needed: parsing, plans, compiling, lowering."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap

import held_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_images import needs_nvrtc
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from programs import drop_programs

import callgate as cg
from callgate._build import nvrtc, toolchain
from callgate._core.public import core
from callgate._kernel import launch
from callgate._kernel.cuda import source as _source
from callgate._kernel.launch import Address, CudaCall, Launch, LaunchParameter, LaunchPlan
from callgate._kernel.options import DeviceOptions
from callgate._kernel.variants import from_json
from callgate._sharding import partitioner

SAXPY = """
__global__ void saxpy(float a, const float* x, const float* y, float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = a * x[i] + y[i];
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path / "cache"))


def f32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def cuda_text(function, *args):
  """The program for CUDA, as text."""
  return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(function, *args):
  return held_calls.calls(function, *args, platform="cuda")


def launches(function, *args):
  return [call["plan"]["launches"][0] for call in calls(function, *args)]


def saxpy(**options):
  options = {"grid": lambda x, y: -(-x.size // 256), "block": 256, **options}
  return cg.cuda(SAXPY, out=lambda a, x, y, n: x, **options)


# -- reading sources -------------------------------------------------------------------------------
def parameters(source, kernel=None):
  found = _source.find("kernel 'k'", source, kernel)
  return [(p.name, p.kind.name.lower(), p.element, p.rank_text) for p in found.parameters]


def test_pointers_views_and_numbers_are_read_by_their_types():
  source = """
    template <typename T, int R>
    __global__ void __launch_bounds__(256, 2) k(
        const float* __restrict__ x, double *y, T const * z, cg::In<T, R> v,
        callgate::Out<int, 2> w, cg::InOut<float, 1> u, const int n, unsigned long long m,
        __half h, float s[], size_t) {}"""
  assert parameters(source) == [
    ("x", "in", "float", ""),
    ("y", "out", "double", ""),
    ("z", "in", "T", ""),
    ("v", "in", "T", "R"),
    ("w", "out", "int", "2"),
    ("u", "inout", "float", "1"),
    ("n", "number", "int", ""),
    ("m", "number", "unsigned long long", ""),
    ("h", "number", "__half", ""),
    ("s", "out", "float", ""),
    ("10", "number", "size_t", ""),
  ]


@pytest.mark.parametrize(
  "head",
  [
    'extern "C" __global__ void',
    "static __global__ void",
    "__global__ static void",
    "void __global__",
    "__global__ __launch_bounds__(128) void",
    "__global__ void __cluster_dims__(2, 1, 1)",
    "// __global__ void other(int* x) {}\n__global__\nvoid",
  ],
)
def test_a_kernel_is_found_however_it_is_declared(head):
  assert parameters(f"{head} k(int* x) {{}}") == [("x", "out", "int", "")]


def test_declarations_comments_and_device_functions_are_no_kernels():
  source = """
    __global__ void later(int* x);
    __device__ void helper(int* x) {}
    /* __global__ void old(int* x) {} */
    namespace ns { __global__ void k(int* x) {} }"""
  assert _source.find("kernel 'k'", source, None).qualified == "ns::k"


def test_a_source_with_several_kernels_asks_which():
  source = "__global__ void a(int* x) {}\n__global__ void b(int* x) {}"
  with pytest.raises(cg.GateDefinitionError, match=r"expected kernel=.*several: a, b"):
    cg.cuda(source, grid=1, block=1, out=f32(1))
  with pytest.raises(cg.GateDefinitionError, match=r"one kernel `__global__ void c\(.*found none"):
    cg.cuda(source, "c", grid=1, block=1, out=f32(1))
  assert _source.find("k", source, "b").name == "b"


def test_a_source_without_a_kernel_is_refused():
  with pytest.raises(cg.GateDefinitionError, match="found none"):
    cg.cuda("void f() {}", grid=1, block=1, out=f32(1))


def test_a_struct_by_value_is_refused_by_name():
  with pytest.raises(cg.GateDefinitionError, match=r"parameter 'p'.*got the type 'Params'"):
    cg.cuda("__global__ void k(Params p, float* y) {}", grid=1, block=1, out=f32(1))


@pytest.mark.parametrize(
  ("text", "dtype"),
  [
    ("float", "float32"),
    ("unsigned  char", "uint8"),
    ("long long", "int64"),
    ("std::int64_t", "int64"),
    ("__half", "float16"),
    ("callgate::bfloat16", "bfloat16"),
    ("double2", "complex128"),
  ],
)
def test_types_are_dtypes(text, dtype):
  found = _source.element_dtype(text)
  assert found is not None
  assert found.name == dtype


def test_a_type_that_no_array_has_is_no_dtype():
  assert _source.element_dtype("float4") is None


def test_aliases_make_a_pointer_an_operand_in_place():
  in_place = cg.cuda(
    "__global__ void k(float* x, const float* y) {}", grid=1, block=1, out=f32(3), aliases={0: 0}
  )
  assert in_place.parameters == ("x", "y")
  beside = cg.cuda(
    "__global__ void k(const float* x, float* y) {}", grid=1, block=1, out=f32(3), aliases={0: 0}
  )
  assert beside.parameters == ("x",)


# -- launches --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"grid": 0.5}, r"grid: expected an int or a tuple of up to three, got 0\.5"),
    ({"grid": (1, 2, 3, 4)}, r"grid: expected an int"),
    ({"grid": True}, r"grid: expected an int"),
    ({"grid": -1}, r"grid\.x: expected 0 to 2147483647, got -1"),
    ({"grid": (1, 70000)}, r"grid\.y: expected 0 to 65535, got 70000"),
    ({"block": 0}, r"block\.x: expected 1 to 1024, got 0"),
    ({"block": (1, 1, 65)}, r"block\.z: expected 1 to 64, got 65"),
    ({"block": (64, 32)}, r"at most 1024 threads, got \(64, 32, 1\), 2048 threads"),
    ({"shared": -1}, r"shared: expected bytes"),
    ({"cluster": 3, "grid": 4}, r"cluster: expected extents that divide the grid's"),
    ({"cluster": 17, "grid": 34}, r"cluster: expected 1 to 16 blocks"),
    ({"zeroed": [-1]}, r"zeroed: expected flat positions"),
    ({"scratch": {"q": 4}}, r"scratch: expected names of the kernel's parameters, got 'q'"),
    ({"arch": "hopper"}, r"arch: expected a compute capability such as 'sm_90'"),
    ({"vmap": "lanes"}, r"vmap: expected one of 'each', 'whole', 'broadcast', 'grid'"),
  ],
)
def test_a_wrong_option_is_refused_by_name(options, message):
  with pytest.raises(cg.GateDefinitionError, match=message):
    saxpy(**{"grid": 1, "block": 1, **options})


@given(
  st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 65535), st.integers(0, 65535)),
  st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8)),
)
def test_launches_within_the_limits_pass_unchanged(grid, block):
  assert launch.checked("k", grid, block) == (grid, block, 0, None)


@given(st.integers(1, 2**31 - 1))
def test_an_int_is_an_extent_along_x(value):
  assert launch.extent("k", "grid", value) == (value, 1, 1)


def test_capabilities_are_read_from_names_and_numbers():
  assert DeviceOptions().capabilities("k") == ()
  assert DeviceOptions(arch="sm_90a").capabilities("k") == (90,)
  assert DeviceOptions(arch=[100, "8.6", 100]).capabilities("k") == (86, 100)


def test_a_plan_is_held_with_all_but_its_images():
  plan = LaunchPlan(
    "k",
    (),
    (
      Launch(
        "f",
        (4, 5, 6),
        (32, 2, 1),
        (
          LaunchParameter(b"\x01\x02"),
          LaunchParameter(bytes(16), (Address(0, "operand", 2), Address(8, "scratch", 0))),
        ),
        shared=1024,
        cluster=(2, 1, 1),
      ),
    ),
    scratch=(256,),
    zeroed=(1,),
  )
  encoded = launch.encode("k", plan)
  made = encoded["launches"]["0"]
  assert encoded["scratch"].tolist() == [256]
  assert encoded["zeroed"].tolist() == [1]
  assert made["entry"] == "f"
  assert [made[name].tolist() for name in ("grid", "block", "cluster")] == [
    [4, 5, 6],
    [32, 2, 1],
    [2, 1, 1],
  ]
  assert made["shared"] == 1024
  assert made["bytes"].tobytes() == b"\x01\x02" + bytes(30)
  assert made["starts"].tolist() == [0, 16]
  assert made["addresses"].tolist() == [16, 0, 2, 24, 2, 0]


def test_a_launch_without_a_functions_name_is_refused():
  plan = LaunchPlan("k", (), (Launch("", (1, 1, 1), (1, 1, 1), ()),))
  with pytest.raises(cg.GateDefinitionError, match="the name of a function in the image"):
    launch.encode("k", plan)


# -- programs --------------------------------------------------------------------------------------
@needs_nvrtc
def test_a_call_is_lowered_to_a_launch_with_its_numbers():
  program = lambda x, y: saxpy(arch=90)(2.0, x, y, n=1000)
  assert "@callgate.kernel(" in cuda_text(program, f32(1000), f32(1000))
  (made,) = launches(program, f32(1000), f32(1000))
  number = np.array([2], np.float32).tobytes(), np.array([1000], np.int32).tobytes()
  assert made == {
    "entry": "_Z5saxpyfPKfS0_Pfi",
    "grid": [4, 1, 1],
    "block": [256, 1, 1],
    "shared": 0,
    "bytes": [*number[0], *bytes(12), *bytes(48), *number[1]],
    "starts": [0, 16, 32, 48, 64],
    "addresses": [16, 0, 0, 32, 0, 1, 48, 1, 0],  # where, of what, of which
  }


@needs_nvrtc
def test_views_hold_their_extents():
  kernel = cg.cuda(
    "__global__ void k(cg::In<float, 2> x, cg::Out<float, 1> y) { y[0] = x(0, 1); }",
    grid=1,
    block=1,
    out=f32(3),
  )
  (made,) = launches(kernel, f32(3, 5))
  assert np.array(made["bytes"], np.uint8).view(np.int64).tolist() == [0, 3, 5, 0, 0, 3]
  assert made["starts"] == [0, 32]
  assert made["addresses"] == [0, 0, 0, 32, 1, 0]


@needs_nvrtc
def test_the_grid_may_depend_on_shapes_and_static_values():
  kernel = saxpy(grid=lambda x, y, n: (-(-n // 32), y.shape[0] // 100), block=lambda x, y: (32, 2))
  (made,) = launches(lambda x, y: kernel(1.0, x, y, n=100), f32(1000), f32(1000))
  assert made["grid"] == [4, 10, 1]
  assert made["block"] == [32, 2, 1]


@needs_nvrtc
@pytest.mark.parametrize("option", ["grid", "block", "shared"])
def test_a_function_of_other_arguments_is_refused_by_its_option(option):
  kernel = saxpy(**{option: lambda a, x, y, n: 1})
  wants = rf"{option}: expected a function of the call's 2 array\(s\), and of static .*\(a, n\);"
  with pytest.raises(cg.GateDefinitionError, match=rf"saxpy.*{wants} got one .* missing .*'y'"):
    cuda_text(lambda x, y: kernel(1.0, x, y, n=1), f32(1), f32(1))


@needs_nvrtc
def test_a_grid_outside_the_limits_is_refused_when_it_is_lowered():
  kernel = saxpy(grid=lambda x, y: (1, 70000))
  with pytest.raises(cg.GateDefinitionError, match=r"grid\.y: expected 0 to 65535"):
    cuda_text(lambda x, y: kernel(1.0, x, y, n=1), f32(1), f32(1))


@needs_nvrtc
def test_arrays_without_elements_launch_nothing():
  kernel = saxpy(grid=7)
  (made,) = launches(lambda x, y: kernel(1.0, x, y, n=0), f32(0), f32(0))
  assert made["grid"] == [0, 1, 1]


@needs_nvrtc
def test_scratch_memory_has_a_target_that_is_not_captured():
  kernel = cg.cuda(
    "__global__ void k(const float* x, float* tmp, float* y) {}",
    grid=1,
    block=1,
    scratch={"tmp": lambda x: 4 * x.size},
    zeroed=[0],
    out=lambda x: x,
  )
  assert "@callgate.kernel.scratch(" in cuda_text(kernel, f32(10))
  (call,) = calls(kernel, f32(10))
  assert call["plan"]["scratch"] == [40]
  assert call["plan"]["zeroed"] == [0]
  assert call["plan"]["launches"][0]["addresses"] == [0, 0, 0, 16, 2, 0, 32, 1, 0]


@needs_nvrtc
def test_vmap_is_a_loop_of_launches_of_one_lane():
  kernel = saxpy()
  (call,) = calls(
    jax.vmap(lambda x, y: kernel(2.0, x, y, n=1000), in_axes=(0, None)), f32(3, 1000), f32(1000)
  )
  assert call["batch"] == {"sizes": [3], "masks": [1, 0]}
  assert call["plan"]["launches"][0]["grid"] == [4, 1, 1]


@needs_nvrtc
def test_vmap_in_the_grid_is_one_launch_for_all_lanes():
  kernel = saxpy(vmap="grid")
  (call,) = calls(
    jax.vmap(jax.vmap(lambda x, y: kernel(2.0, x, y, n=1000), in_axes=(0, None))),
    f32(2, 3, 1000),
    f32(2, 1000),
  )
  assert "batch" not in call
  assert call["plan"]["launches"][0]["grid"] == [4, 1, 6]


@needs_nvrtc
@pytest.mark.parametrize(
  ("grid", "lanes", "message"),
  [((1, 1, 2), 3, "a grid with z = 1"), (1, 65536, "at most 65535 lanes")],
)
def test_vmap_in_the_grid_needs_its_z(grid, lanes, message):
  kernel = saxpy(vmap="grid", grid=grid)
  with pytest.raises(cg.GateDefinitionError, match=message):
    cuda_text(jax.vmap(lambda x: kernel(1.0, x, x, n=1)), f32(lanes, 1))


@needs_nvrtc
def test_derivatives_are_as_on_the_cpu():
  kernel = cg.cuda(
    "__global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }",
    grid=1,
    block=lambda x: x.size,
    out=lambda x: x,
    linear=True,
  )
  kernel.deftranspose(lambda ct, x: kernel(ct))
  assert len(launches(jax.grad(lambda x: jnp.sum(kernel(x) ** 2)), f32(8))) == 2


@needs_nvrtc
def test_templates_are_compiled_for_the_dtypes_of_a_call():
  kernel = cg.cuda(
    """template <typename T, int R, int K = 2>
    __global__ void scale(cg::In<T, R> x, cg::Out<T, R> y, T a) { y[0] = a * x[0] * T(K); }""",
    grid=1,
    block=1,
    out=lambda x, a, **_: x,
    name="templates",
  )
  single = cuda_text(lambda x: kernel(x, 3), f32(2, 2))
  assert 'name = "templates[cuda:scale<float, 2>]"' in single
  half = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
  (call,) = calls(lambda x: kernel(x, a=3, K=5), half)
  assert call["name"] == "templates[cuda:scale<__nv_bfloat16, 1, 5>]"
  assert call["plan"]["launches"][0]["bytes"][-2:] == [0x40, 0x40]  # bfloat16(3)


@needs_nvrtc
def test_a_template_argument_that_no_array_tells_is_asked_for():
  source = "template <int K> __global__ void k(const float* x, float* y) { y[0] = K; }"
  kernel = cg.cuda(source, grid=1, block=1, out=f32(1), name="asks")
  with pytest.raises(cg.GateDefinitionError, match=r"template parameter 'int K' by keyword"):
    cuda_text(kernel, f32(1))
  named = cg.cuda(source, "k<4>", grid=1, block=1, out=f32(1), name="named")
  assert 'name = "named[cuda:k<4>]"' in cuda_text(named, f32(1))


def test_a_traced_value_for_a_number_says_to_pass_an_array():
  kernel = saxpy()
  with pytest.raises(cg.GateDefinitionError, match=r"'a'.*Declare it as `const T\* a`"):
    jax.jit(lambda a, x: kernel(a, x, x, n=1)).trace(1.0, f32(1))


def test_a_number_that_its_type_does_not_hold_is_refused():
  kernel = saxpy()
  with pytest.raises(cg.GateDefinitionError, match=r"'n': expected a number that int32 holds"):
    jax.jit(lambda x: kernel(1.0, x, x, n=2**40)).trace(f32(1))


def test_an_array_of_another_dtype_is_refused_when_it_is_traced():
  kernel = saxpy()
  with pytest.raises(cg.GateDefinitionError, match="'x': expected float32 of any rank, got int32"):
    jax.jit(lambda x, y: kernel(1.0, x, y, n=1)).trace(jnp.ones(1, jnp.int32), f32(1))


def test_a_program_for_the_cpu_is_refused_by_platform():
  kernel = saxpy()
  with pytest.raises(
    cg.GateDefinitionError, match=r"platform cuda, got a program for platform cpu"
  ):
    jax.jit(lambda x: kernel(1.0, x, x, n=1)).trace(f32(1)).lower(lowering_platforms=("cpu",))


def test_a_kernel_for_the_cpu_is_refused_in_a_program_for_cuda():
  kernel = cg.cpp(
    "void k(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = x[0]; }", out=lambda x: x
  )
  with pytest.raises(cg.GateDefinitionError, match=r"callgate\.cuda for CUDA"):
    cuda_text(kernel, f32(1))


@needs_nvrtc
def test_a_kernel_for_both_platforms_has_one_name():
  kernel = cg.cpp(
    "void k(cg::In<float> x, cg::Out<float> y, cg::Attr<float> a) {"
    "  for (int64_t i = 0; i < x.size(); ++i) y[i] = a * x[i]; }",
    out=lambda x, a: x,
    name="both",
    cuda_source="""__global__ void k(const float* x, float* y, float a) {
      y[blockIdx.x] = a * x[blockIdx.x];
    }""",
    grid=lambda x: x.size,
    block=1,
    vmap="grid",
  )
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  np.testing.assert_array_equal(jax.vmap(lambda row: kernel(row, 3.0))(x), 3 * x)
  traced = jax.jit(lambda x: kernel(x, 3.0)).trace(x)
  text = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
  assert 'name = "both"' in text
  assert 'name = "both[cuda:k]"' in text
  np.testing.assert_array_equal(jax.jit(lambda x: kernel(x, 3.0))(x), 3 * x)


@needs_nvrtc
def test_arrays_that_the_cuda_source_lacks_are_named():
  kernel = cg.cpp(
    "void k(float a, cg::In<float> x, cg::Out<float> y) { y[0] = a * x[0]; }",
    out=lambda a, x: x,
    cuda_source="__global__ void k(const float* x, float* y) {}",
    grid=1,
    block=1,
  )
  with pytest.raises(cg.GateDefinitionError, match=r"expected 1 operands \(x\), .*got 2"):
    cuda_text(kernel, jnp.float32(1), f32(1))


def test_launch_options_need_a_cuda_source():
  with pytest.raises(cg.GateDefinitionError, match="cuda_source="):
    cg.cpp("void k(cg::In<float> x, cg::Out<float> y) {}", out=lambda x: x, grid=1)


@needs_nvrtc
def test_an_exported_program_finds_its_variant_by_its_key():
  def define():
    return saxpy(name="exported.saxpy")

  def exported():
    kernel = define()
    program = jax.jit(lambda x: kernel(2.0, x, x, n=4))
    checks = cg.export_checks()
    return export.export(program, platforms=["cuda"], disabled_checks=checks)(f32(4))

  program = exported().mlir_module()
  drop_programs()
  again = define()
  assert 'name = "exported.saxpy[cuda:saxpy]"' in program
  assert core(again).define_variant("cuda:saxpy")
  assert core(again).cuda_variants["saxpy"].name == "exported.saxpy[cuda:saxpy]"


# -- compiling -------------------------------------------------------------------------------------
@needs_nvrtc
@pytest.mark.parametrize(("capability", "made_for"), [(75, 75), (90, 90), (0, 0), (999, 0)])
def test_machine_code_is_for_what_the_compiler_knows_and_ptx_for_the_rest(capability, made_for):
  built = nvrtc.build("kernel 'saxpy'", "saxpy", SAXPY, "saxpy", capability)
  assert built.image.capability == made_for
  assert built.entry == "_Z5saxpyfPKfS0_Pfi"
  if made_for:
    assert built.image.code.startswith(b"\x7fELF")
  else:
    assert built.image.code.endswith(b"\0")
    assert b".target sm_" in built.image.code


@needs_nvrtc
def test_a_kernel_in_the_cache_is_not_compiled_again(monkeypatch):
  compiled: list[str] = []
  original = nvrtc._compile

  def counted(*args):
    compiled.append(args[0])
    return original(*args)

  monkeypatch.setattr(nvrtc, "_compile", counted)
  first = nvrtc.build("k", "saxpy", SAXPY, "saxpy", 90)
  second = nvrtc.build("k", "saxpy", SAXPY, "saxpy", 90)
  assert first == second
  assert len(compiled) == 1
  nvrtc.build("k", "saxpy", SAXPY, "saxpy", 90, options=["-DN=1"])
  nvrtc.build("k", "saxpy", SAXPY, "saxpy", 80)
  assert len(compiled) == 3


@needs_nvrtc
def test_a_header_that_changes_makes_another_kernel(tmp_path):
  (tmp_path / "outer.h").write_text('#include "inner.h"\n')
  (tmp_path / "inner.h").write_text("#define FACTOR 2\n")
  source = '#include "outer.h"\n__global__ void k(float* y) { y[0] = FACTOR; }'
  first = nvrtc.build("k", "k", source, "k", 0, include_dirs=[tmp_path])
  (tmp_path / "inner.h").write_text("#define FACTOR 3\n")
  second = nvrtc.build("k", "k", source, "k", 0, include_dirs=[tmp_path])
  assert first.image.code != second.image.code


@needs_nvrtc
def test_errors_of_the_compiler_have_the_users_line_numbers():
  kernel = cg.cuda(
    textwrap.dedent("""\
      __global__ void bad(const float* x, float* y) {
        y[0] = nothing;
      }"""),
    grid=1,
    block=1,
    out=lambda x: x,
  )
  with pytest.raises(cg.CompileError, match=r"bad\(2\): error: .*\"nothing\" is undefined") as info:
    cuda_text(kernel, f32(1))
  assert "bad(2)" in info.value.output


@needs_nvrtc
def test_an_unknown_option_is_reported():
  with pytest.raises(cg.CompileError, match="reported an error"):
    nvrtc.build("k", "saxpy", SAXPY, "saxpy", 90, options=["--no-such-option"])


@needs_nvrtc
def test_the_users_architecture_wins():
  built = nvrtc.build("k", "saxpy", SAXPY, "saxpy", 75, options=["--gpu-architecture=compute_80"])
  assert built.image.capability == 0
  assert b".target sm_80" in built.image.code


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["__half", "__nv_bfloat16", "cg::float16", "float2", "int64_t"])
def test_views_of_every_kind_of_element_compile(dtype):
  source = f"__global__ void k(cg::In<{dtype}, 2> x, cg::Out<{dtype}, 0> y) {{ y() = x(1, 2); }}"
  assert nvrtc.build("k", "k", source, "k", 75).image.capability == 75


@needs_nvrtc
def test_kernel_h_is_the_device_header_in_device_code():
  source = """#include "callgate/kernel.h"
    __global__ void k(cg::InOut<float, 3> x) {
      if (x.rank() == 3 && !x.empty() && x.stride(0) == x.extent(1) * x.extent(2))
        for (float& each : x) each += x.size();
    }"""
  assert nvrtc.build("k", "k", source, "k", 90).image.code


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_kernel_h_compiles_with_nvcc(tmp_path):
  unit = tmp_path / "kernel.cu"
  unit.write_text(
    '#include "callgate/kernel.h"\n'
    "__global__ void k(cg::In<float, 2> x, cg::Out<float, 1> y) { y[0] = x(1, 2) + x.size(); }\n"
  )
  for more in ([], ["-DCALLGATE_BOUNDS_CHECK=1"]):
    command = ["nvcc", "-cubin", "-arch=sm_90", f"-I{toolchain.include_dir()}", *more]
    made = subprocess.run(
      [*command, "-o", str(tmp_path / "kernel.cubin"), str(unit)],
      capture_output=True,
      text=True,
      check=False,
    )
    assert made.returncode == 0, made.stderr


@needs_nvrtc
def test_ptx_is_made_for_all_devices_where_the_environment_asks_for_it(monkeypatch):
  monkeypatch.setenv("CALLGATE_NVRTC_OUTPUT", "ptx")
  built = nvrtc.build("k", "saxpy", SAXPY, "saxpy", 80)
  assert built.image.capability == 0
  assert b".target sm_80" in built.image.code
  monkeypatch.setenv("CALLGATE_NVRTC_OUTPUT", "sass")
  with pytest.raises(cg.CompileError, match=r"CALLGATE_NVRTC_OUTPUT: .*'cubin' or 'ptx'.*'sass'"):
    nvrtc.build("k", "saxpy", SAXPY, "saxpy", 80)


def test_a_compiler_that_is_not_there_names_what_to_install(monkeypatch):
  monkeypatch.setenv("CALLGATE_NVRTC", "/nowhere/libnvrtc.so.12")
  with pytest.raises(cg.CompileError, match=r"pip install 'callgate\[cuda\]'"):
    nvrtc.build("k", "saxpy", SAXPY, "saxpy", 90)


@needs_nvrtc
def test_the_variants_of_a_part_are_named_by_expressions():
  kernel = saxpy(arch=(75, 90))
  plan = core(kernel).cuda.plan(
    CudaCall((f32(4), f32(4)), (f32(4),), {"a": 1.0, "n": 4}, None, (75, 90))
  )
  assert plan.key == "saxpy"
  assert [image.capability for image in plan.images] == [75, 90]


# -- programs over several devices -----------------------------------------------------------------
@needs_nvrtc
def test_a_call_on_tiles_has_a_grid_for_them():
  kernel = saxpy(name="tiled.saxpy")
  mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4])
  split = jax.NamedSharding(mesh, jax.P("i"))
  program = jax.jit(lambda x: kernel(2.0, x, x, n=1024), in_shardings=split)
  text = program.trace(f32(1024)).lower(lowering_platforms=("cuda",)).as_text()
  assert "@callgate.kernel.partitioned(" in text
  tiles = re.search(r'tiles = "((?:[^"\\]|\\.)*)"', text)
  assert tiles is not None
  about = tiles.group(1).replace("\\22", '"')
  call = {"name": "tiled.saxpy[cuda:saxpy]", "tiles": about}
  tile = ((256,), np.dtype(np.float32))
  assert core(kernel).retile(call, (), [tile, tile], [tile], "t") == "t"
  made = call["plan"]["launches"]["0"]
  assert made["grid"].tolist() == [1, 1, 1]
  assert made["bytes"][-4:].view(np.int32) == [1024]  # n, which is the call's
  assert call["name"] == "tiled.saxpy[cuda:saxpy]"
  # A call that not every device makes is not captured.
  call["shards"] = "10"
  assert core(kernel).retile(call, (), [tile, tile], [tile], "t") == "callgate.kernel.scratch"
  call["shards"] = "11"
  assert core(kernel).retile(call, (), [tile, tile], [tile], "t") == "t"


@needs_nvrtc
def test_a_call_on_tiles_with_its_lanes_in_the_grid_has_the_tiles_lanes():
  kernel = saxpy(name="tiled.grid", vmap="grid")
  about = '{"grid":true,"static":{"a":2.0,"n":5}}'
  call = {"name": "tiled.grid[cuda:saxpy]", "tiles": about}
  tile = ((3, 256), np.dtype(np.float32))
  assert core(kernel).retile(call, (), [tile, tile], [tile], "t") == "t"
  assert call["plan"]["launches"]["0"]["grid"].tolist() == [1, 1, 3]
  del kernel


def test_static_values_of_every_kind_survive_the_way_through_a_program():
  values = {
    "a": 2.5,
    "b": (1, "x", None, True),
    "c": 1 + 2j,
    "d": jnp.bfloat16,
    "e": np.float32(3),
    "f": float("inf"),
  }
  held = {name: launch._encoded(None, name, value) for name, value in values.items()}
  back = {name: from_json(value) for name, value in json.loads(json.dumps(held)).items()}
  assert back == {**values, "d": np.dtype(jnp.bfloat16), "e": 3.0}


def test_a_kernel_that_is_not_defined_where_a_program_is_compiled_is_named():
  with pytest.raises(LookupError, match="kernel 'gone' is not defined"):
    partitioner._defined("gone")
