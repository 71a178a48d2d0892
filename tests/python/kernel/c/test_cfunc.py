# SPDX-License-Identifier: Apache-2.0
"""C functions as kernels: every way to hand one over, every kind of argument, every dtype."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import gc
import tempfile
import weakref
from pathlib import Path
from typing import Any

import c_library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from property_checks import examples

import callgate as cg

X = np.arange(3, dtype=np.float32)
SAXPY = "void saxpy(int n, float a, const float *x, float *y)"
DOT = "double dot(const double *x, const double *y, size_t n)"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return c_library.build(tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def lib(path: Path) -> ctypes.CDLL:
  return ctypes.CDLL(str(path))


def address(function: Any) -> int:
  return ctypes.cast(function, ctypes.c_void_p).value or 0


# -- ways to hand a function over ---
def from_ctypes(path: Path, folder: Path) -> Any:
  pointer = ctypes.POINTER(ctypes.c_double)
  lib = ctypes.CDLL(str(path))
  return c_library.declared(lib, "dot", ctypes.c_double, pointer, pointer, ctypes.c_size_t)


def from_ndpointer(path: Path, folder: Path) -> Any:
  vector = np.ctypeslib.ndpointer(np.float64, 1, flags="C")
  lib = ctypes.CDLL(str(path))
  return c_library.declared(lib, "dot", ctypes.c_double, vector, vector, ctypes.c_size_t)


def from_cffi(path: Path, folder: Path) -> Any:
  ffi = pytest.importorskip("cffi").FFI()
  ffi.cdef(f"{DOT};")
  return ffi.dlopen(str(path)).dot


def from_a_cast_of_cffi(path: Path, folder: Path) -> Any:
  ffi = pytest.importorskip("cffi").FFI()
  raw = address(ctypes.CDLL(str(path)).dot)
  return ffi.cast("double (*)(const double *, const double *, size_t)", raw)


def from_a_module_that_cffi_compiles(path: Path, folder: Path) -> Any:
  import importlib.util

  pytest.importorskip("setuptools")  # cffi builds with it
  ffi = pytest.importorskip("cffi").FFI()
  ffi.cdef(f"{DOT};")
  source = f"#include <stddef.h>\nextern {DOT};"
  links = [f"-Wl,-rpath,{path.parent}"]
  ffi.set_source("of_cffi", source, extra_objects=[str(path)], extra_link_args=links)
  spec = importlib.util.spec_from_file_location("of_cffi", ffi.compile(str(folder)))
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.lib.dot


def from_a_capsule(path: Path, folder: Path) -> Any:
  new = ctypes.pythonapi.PyCapsule_New
  new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
  # The capsule keeps the pointer to its name.
  from_a_capsule.name = b"double (double *, double *, size_t)"  # type: ignore[attr-defined]
  return new(address(ctypes.CDLL(str(path)).dot), from_a_capsule.name, None)  # type: ignore[attr-defined]


WAYS = {
  "ctypes": from_ctypes,
  "ndpointer": from_ndpointer,
  "cffi": from_cffi,
  "cffi.cast": from_a_cast_of_cffi,
  "cffi module": from_a_module_that_cffi_compiles,
  "capsule": from_a_capsule,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_function_from_anywhere_is_called(way: str, path: Path, tmp_path: Path) -> None:
  dot = cg.cfunc(WAYS[way](path, tmp_path), args="x[n], y[n], n -> out d")
  with jax.enable_x64(True):
    x, y = np.arange(4.0), np.array([2.0, -1.0, 0.5, 3.0])
    assert jax.jit(dot)(x, y) == np.dot(x, y)


@pytest.mark.parametrize("way", ["ctypes without types", "address"])
def test_a_declaration_says_what_a_function_does_not(way: str, lib: ctypes.CDLL) -> None:
  function = lib.saxpy if way != "address" else address(lib.saxpy)
  saxpy = cg.cfunc(function, SAXPY, args="n, a, x[n], inout y[n]")
  assert jax.jit(saxpy)(2.0, X, X + 1).tolist() == (3 * X + 1).tolist()
  assert saxpy(a=2.0, x=X, y=X + 1).tolist() == (3 * X + 1).tolist()


def test_an_operand_that_is_also_a_result_keeps_its_value_outside(lib: ctypes.CDLL) -> None:
  saxpy = cg.cfunc(lib.saxpy, SAXPY, args="n, a, x[n], inout y[n]")
  y = jnp.ones(3)
  assert jax.jit(saxpy)(1.0, X, y).tolist() == [1.0, 2.0, 3.0]
  assert y.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("args", [None, "x -> out y", "static x -> out y"])
def test_a_wide_number_is_converted_where_jax_has_none_so_wide(args: str | None) -> None:
  declaration, given = "unsigned long labs(unsigned long)", {"x": 3} if args else {}
  labs = functools.partial(cg.cfunc, ctypes.CDLL(None).labs, declaration, args=args)
  operands = () if args and args.startswith("static") else (np.uint32(3),)
  keywords = {} if operands else given
  result = labs(cast=True)(*operands, **keywords)
  assert (result, result.dtype) == (3, np.uint32)
  with pytest.raises(cg.GateDefinitionError, match="or cast=True"):
    labs()(*operands, **keywords)


# -- dtypes ---
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
C_NAMES = {
  "bool": "bool",
  "int16": "short",
  "int32": "int",
  "int64": "long long",
  "uint8": "unsigned char",
  "uint32": "unsigned int",
  "uint64": "unsigned long",
  "float16": "_Float16",
  "float32": "float",
  "float64": "double",
  "complex64": "float complex",
  "complex128": "double _Complex",
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_c_goes_in_and_out(dtype: str, lib: ctypes.CDLL) -> None:
  c = C_NAMES.get(dtype, f"{dtype}_t")
  try:
    functions = getattr(lib, f"scale_{dtype}"), getattr(lib, f"twice_{dtype}")
  except AttributeError:
    pytest.skip(f"the C compiler has no {c}")
  scale = cg.cfunc(
    functions[0], f"void (const {c} *x, {c} by, {c} *y, long n)", args="x[n], by, out y[n], n"
  )
  twice = cg.cfunc(functions[1], f"{c} ({c} x)")
  once = cg.cfunc(functions[1], f"{c} ({c} x)", args="x -> out y")
  with jax.enable_x64(True):
    x = np.array([0, 1, 2, 3, 1]).astype(dtype)
    by = x[2] if dtype[0] != "c" else x.dtype.type(2 - 1j)
    got = jax.jit(lambda x, by: (scale(x, by), twice(x), once(x[3])))(x, by)
    assert all(y.dtype == dtype for y in got)
    np.testing.assert_array_equal(got[0], x * by)
    np.testing.assert_array_equal(got[1], (x + x).astype(dtype))
    np.testing.assert_array_equal(got[2], (x + x).astype(dtype)[3])


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float8_e4m3fn", "float32", "complex64"])
def test_a_void_pointer_takes_any_dtype(dtype: str, lib: ctypes.CDLL) -> None:
  size = jnp.dtype(dtype).itemsize
  copy = cg.cfunc(
    lib.copy_bytes,
    "void (const void *from, void *to, size_t bytes)",
    args=f"x, out y, x.size * {size}",
    out=lambda x: x,
  )
  x = jnp.arange(6).reshape(2, 3).astype(dtype)
  got = copy(x)
  assert got.dtype == x.dtype
  assert got.tolist() == x.tolist()


# -- memory ---
@pytest.mark.parametrize("shape", [(3, 4), (20, 33), (1, 5), (0, 3)])
def test_column_major_arrays_are_transposed_both_ways(shape: Any, lib: ctypes.CDLL) -> None:
  add_index = cg.cfunc(
    lib.add_index_,
    "void (int *m, int *n, double *a, int *lda)",
    args="m, n, inout a[m, n], max(1, m)",
    order="F",
  )
  with jax.enable_x64(True):
    a = np.random.default_rng(0).normal(size=shape)
    want = a + 10 * np.arange(shape[0])[:, None] + np.arange(shape[1])
    np.testing.assert_allclose(jax.jit(add_index)(a), want)


def test_arrays_of_three_axes_are_column_major_too(lib: ctypes.CDLL) -> None:
  fill = cg.cfunc(
    lib.fill_columns,
    "void (float *out, int m, int n, int k)",
    args="out y[m, n, k], static m, static n, static k",
    order={"y": "F"},
  )
  want = np.arange(24, dtype=np.float32).reshape(2, 3, 4, order="F")
  np.testing.assert_array_equal(fill(m=2, n=3, k=4), want)
  first = cg.cfunc(
    lib.first_column_,
    "void (int *m, int *n, int *k, const float *a, float *out)",
    args="m, n, k, a[m, n, k], out y[m, n]",
    order="F",
  )
  np.testing.assert_array_equal(first(want), want[:, :, 0])


def test_order_is_by_name_where_it_is_given_so(lib: ctypes.CDLL) -> None:
  first = cg.cfunc(
    lib.first_column_,
    "void (int *m, int *n, int *k, const float *a, float *out)",
    args="m, n, k, a[m, n, k], out y[m, n]",
    order={"a": "F", "y": "C"},
  )
  a = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
  np.testing.assert_array_equal(first(a), a[:, :, 0].ravel(order="F").reshape(2, 3))


def test_c_may_write_into_a_copy(lib: ctypes.CDLL) -> None:
  total = cg.cfunc(lib.sum_and_clear, "double (double *x, long n)", args="copy x[n], n -> out y")
  with jax.enable_x64(True):
    x = jnp.arange(5.0)
    assert jax.jit(lambda x: (total(x), x.sum()))(x) == (10, 10)
    assert x.tolist() == list(range(5))


def test_scratch_memory_is_of_the_size_that_shapes_give(lib: ctypes.CDLL) -> None:
  reverse = cg.cfunc(
    lib.reversed,
    "void (const double *x, double *work, double *y, int n)",
    args="x[n], scratch(n), out y[n], n",
    thread_safe=True,
  )
  with jax.enable_x64(True):
    x = np.random.default_rng(0).normal(size=(50, 7))
    np.testing.assert_array_equal(jax.vmap(reverse)(x), x[:, ::-1])


@examples(10)
@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(-20, 20))
def test_expressions_of_shapes_are_what_python_makes_of_them(m: int, n: int, k: int) -> None:
  x = np.zeros((m, n), np.float32)
  got = expressions()(x, k=k)
  assert got.tolist() == [eval(e, {"m": m, "n": n, "k": k, "x": x}) for e in EXPRESSIONS]


EXPRESSIONS = [
  "2 * max(m, n, 4) - x.size // 4",
  "-n % 4 + len(x) * x.ndim",
  "min(x.shape[-1], k, m)",
  "k // m - k % n",
]


@functools.cache
def expressions() -> cg.Kernel:
  lib = ctypes.CDLL(str(c_library.build(Path(tempfile.mkdtemp()))))
  return cg.cfunc(
    lib.four_numbers,
    "void (const float *x, int a, int b, int c, int d, int k, int *out)",
    args=f"x[m, n], {', '.join(EXPRESSIONS)}, static k, out y[4]",
  )


# -- single numbers ---
def test_text_and_characters_are_passed(lib: ctypes.CDLL) -> None:
  spell = cg.cfunc(
    lib.spell,
    "void (const char *text, char mark, unsigned char *out, size_t n)",
    args="'A, \"ä\"', '*', out y[k], static k",
  )
  assert bytes(spell(k=10)) == 'A, "ä"***'.encode()


def test_static_numbers_pass_by_value_and_by_pointer(lib: ctypes.CDLL) -> None:
  power = cg.cfunc(lib.power, "double (double x, const int *n)", args="x, static n -> out y")
  with jax.enable_x64(True):
    assert jax.jit(lambda x: power(x, n=5))(2.0) == 32
    assert power(2.0, 3) == 8
    with pytest.raises(cg.GateDefinitionError, match="'n': expected a number that int32 holds"):
      power(2.0, n=1.5)


def test_an_operand_of_rank_0_passes_where_c_takes_a_pointer(lib: ctypes.CDLL) -> None:
  power = cg.cfunc(lib.power, "double (double x, const int *n)", args="x, n[] -> out y")
  with jax.enable_x64(True):
    got = jax.vmap(power, (None, 0))(2.0, np.arange(4, dtype=np.int32))
    assert got.tolist() == [1, 2, 4, 8]


# -- failures ---
def status_of(lib: ctypes.CDLL, **options: Any) -> cg.Kernel:
  return cg.cfunc(lib.half, "int half(int x, int *y)", args="x, out y[] -> status", **options)


@pytest.mark.parametrize(
  ("errors", "x", "message"),
  [
    (None, 1, "half: status 3"),
    ("failed with {info}, 100%", -1, "half: failed with -7, 100%"),
    ({3: "odd", "<0": "below: {info}"}, 1, "half: odd"),
    ({3: "odd", "<0": "below: {info}"}, -1, "half: below: -7"),
    ({4: "four", ">0": "above"}, 1, "half: above"),
    ({4: "four"}, 1, "half: status 3"),
  ],
)
def test_a_status_other_than_0_is_an_error_with_the_users_text(
  errors: Any, x: int, message: str, lib: ctypes.CDLL
) -> None:
  half = status_of(lib, errors=errors)
  program = jax.jit(half)
  assert program(np.int32(6)) == 3
  for _ in range(2):
    with pytest.raises(cg.KernelError) as caught, cg.errors():
      program(np.int32(x)).block_until_ready()
    assert caught.value.message == message
  assert program(np.int32(8)) == 4


def test_a_failing_lane_fails_the_call(lib: ctypes.CDLL) -> None:
  half = status_of(lib)
  with pytest.raises(cg.KernelError, match="status 3"), cg.errors():
    jax.vmap(half)(np.array([2, 4, 5], np.int32)).block_until_ready()


@pytest.mark.parametrize("parallel", [False, True])
def test_a_failing_element_of_a_loop_is_named(parallel: bool, lib: ctypes.CDLL) -> None:
  half = cg.cfunc(
    lib.half, "int half(int, int *)", args="x, out y -> status", loop=True, thread_safe=parallel
  )
  x = np.full((40, 100), 2, np.int32)
  assert half(x).tolist() == (x // 2).tolist()
  x[7, 5] = 1
  with pytest.raises(cg.KernelError, match="half: status 3 at element 705"), cg.errors():
    half(x).block_until_ready()


def test_info_names_the_argument_that_is_not_valid(lib: ctypes.CDLL) -> None:
  checked = cg.cfunc(
    lib.checked_,
    "void checked_(int *n, double *x, double *y, int *info)",
    args="x.size, x[n], out y[n], info",
  )
  with jax.enable_x64(True):
    assert checked(np.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(cg.KernelError, match="info = 4\n"), cg.errors():
      checked(-np.ones(3)).block_until_ready()
    invalid = "info = -1: argument 1 of C, 'x.size', is not valid"
    with pytest.raises(cg.KernelError, match=invalid), cg.errors():
      checked(np.ones(4)).block_until_ready()


def test_a_number_that_says_what_happened_can_be_a_result(lib: ctypes.CDLL) -> None:
  half = cg.cfunc(lib.half, "int half(int x, int *y)", args="x, out y[] -> out code")
  assert [int(v) for v in half(np.int32(6))] == [3, 0]
  assert int(half(np.int32(5))[1]) == 3
  unseen = cg.cfunc(lib.half, "int half(int x, int *y)", args="x, out y[] -> ignored")
  assert unseen(np.int32(6)) == 3


# -- pointers ---
class Counter(ctypes.Structure):
  _fields_ = (("calls", ctypes.c_long), ("step", ctypes.c_double))


def count_to_six(advance: cg.Kernel) -> None:
  with jax.enable_x64(True):
    program = jax.jit(lambda x: jax.lax.scan(lambda x, _: (advance(x), None), x, length=10)[0])
    assert program(1.0) == 6


def test_an_object_of_the_librarys_is_passed_by_name_and_kept_alive(lib: ctypes.CDLL) -> None:
  counter = Counter(0, 0.5)
  types = ctypes.c_double, ctypes.POINTER(Counter), ctypes.c_double
  function = c_library.declared(lib, "advance", *types)
  advance = cg.cfunc(function, args="c, x -> out y", pointers={"c": counter}, effect="io")
  count_to_six(advance)
  assert counter.calls == 10
  died = weakref.ref(counter)
  del counter
  gc.collect()
  assert died() is not None
  count_to_six(advance)
  del advance
  jax.clear_caches()
  gc.collect()
  assert died() is None


def test_functions_and_null_are_passed(lib: ctypes.CDLL) -> None:
  declaration = "double apply(double (*f)(double), double x, void *unused)"
  for function in (lib.cube, address(lib.cube)):
    apply = cg.cfunc(lib.apply, declaration, args="f, x, NULL -> out y", pointers={"f": function})
    with jax.enable_x64(True):
      assert apply(3.0) == 27


def test_cffis_pointers_are_passed(lib: ctypes.CDLL) -> None:
  ffi = pytest.importorskip("cffi").FFI()
  ffi.cdef("struct counter { long calls; double step; };")
  state = ffi.new("struct counter *", {"step": 2.0})
  advance = cg.cfunc(
    lib.advance,
    "double (struct counter *c, double x)",
    args="c, x -> out y",
    pointers={"c": state},
    effect="io",
  )
  with jax.enable_x64(True):
    assert advance(1.0) == 3
  assert state.calls == 1


# -- loops ---
def libm(name: str, count: int) -> Any:
  found = ctypes.util.find_library("m")
  double = ctypes.c_double
  return c_library.declared(ctypes.CDLL(found), name, double, *[double] * count)


hypot = cg.cfunc(libm("hypot", 2), cast=True, name="test_cfunc.hypot")
threaded = cg.cfunc(libm("hypot", 2), cast=True, thread_safe=True, name="test_cfunc.threaded")
shapes = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=4, min_side=0)


@examples(14)
@given(shapes=shapes, kernel=st.sampled_from([hypot, threaded]))
def test_a_function_of_numbers_broadcasts_as_a_ufunc(shapes: Any, kernel: cg.Kernel) -> None:
  generator = np.random.default_rng(0)
  x, y = (generator.normal(size=s).astype(np.float32) for s in shapes.input_shapes)
  got = kernel(x, y)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, np.hypot(x, y), rtol=1e-6)


def test_a_long_loop_is_the_same_on_several_threads() -> None:
  x = np.random.default_rng(0).normal(size=(70, 300)).astype(np.float32)
  np.testing.assert_array_equal(threaded(x, x[0]), hypot(x, x[0]))
  np.testing.assert_array_equal(threaded(x, x[:, :1]), hypot(x, x[:, :1]))


axes = st.one_of(st.none(), st.integers(0, 1))


@examples(9)
@given(first=axes, second=axes, rank=st.integers(0, 2), nested=st.booleans())
def test_a_loop_maps_over_any_axes(first: Any, second: Any, rank: int, nested: bool) -> None:
  if first is None and second is None:
    first = 0
  generator = np.random.default_rng(0)
  x = generator.normal(size=(2, 2, 3)).astype(np.float32)
  y = generator.normal(size=(2, 2, 3)[: max(rank, 1 if second is None else second + 1)])
  y = y.astype(np.float32)
  program = jax.vmap(lambda a, b: hypot(a, b[..., :1] if b.ndim else b), (first, second))
  want = jax.vmap(lambda a, b: jnp.hypot(a, b[..., :1] if b.ndim else b), (first, second))
  if nested:
    program, want = jax.vmap(program, (0, None)), jax.vmap(want, (0, None))
    x = np.stack([x, -2 * x])
  np.testing.assert_allclose(program(x, y), want(x, y), rtol=1e-6)


@pytest.mark.parametrize(
  ("dtypes", "result"),
  [
    (("float32", "float32"), "float32"),
    (("bfloat16", "float32"), "float32"),
    (("float16", "int32"), "float16"),
    (("int32", "int8"), "float32"),
    (("bool", "bfloat16"), "bfloat16"),
  ],
)
def test_cast_converts_as_c_does(dtypes: Any, result: str) -> None:
  x, y = (np.array([0, 1, 1]).astype(jnp.dtype(d)) for d in dtypes)
  got = hypot(x, y)
  assert got.dtype == jnp.dtype(result)
  want = np.hypot(x.astype(float), y.astype(float)).astype(jnp.dtype(result))
  np.testing.assert_array_equal(np.asarray(got, float), want.astype(float))


def test_cast_leaves_float64_as_it_is() -> None:
  with jax.enable_x64(True):
    x = np.array([0.1, 1e300])
    np.testing.assert_array_equal(hypot(x, x), np.hypot(x, x))
    assert hypot(3, 4) == 5


def test_cast_refuses_to_lose_an_imaginary_part_or_a_fraction(lib: ctypes.CDLL) -> None:
  with pytest.raises(
    cg.GateDefinitionError, match="argument 'x0': expected float64 or a dtype that C"
  ):
    hypot(np.complex64(1), 1.0)
  twice = cg.cfunc(lib.twice_int32, "int twice(int x)", cast=True)
  assert twice(np.int8(100)) == 200
  with pytest.raises(
    cg.GateDefinitionError, match="argument 'x': expected int32 or a dtype that C"
  ):
    twice(1.5)


def test_cast_serves_single_values_of_a_call(lib: ctypes.CDLL) -> None:
  saxpy = cg.cfunc(lib.saxpy, SAXPY, args="n, a, x[n], inout y[n]", cast=True)
  assert saxpy(np.int32(2), X, X).tolist() == (3 * X).tolist()
  with pytest.raises(cg.GateDefinitionError, match="argument 'x': expected float32"):
    saxpy(np.int32(2), X.astype(np.float16), X)


def test_a_loop_has_a_result_for_each_pointer_that_c_writes_through(lib: ctypes.CDLL) -> None:
  split = cg.cfunc(lib.split, "void split(double x, double *whole, double *part)", loop=True)
  with jax.enable_x64(True):
    x = np.array([[1.5, 2.25], [3.0, -0.5]])
    whole, part = jax.jit(split)(x)
    np.testing.assert_array_equal(whole, np.trunc(x))
    np.testing.assert_array_equal(part, x - np.trunc(x))


def test_a_loop_passes_pointers_to_elements_static_values_and_constants(lib: ctypes.CDLL) -> None:
  declaration = "double power(double x, const int *n)"
  power = cg.cfunc(lib.power, declaration, loop=True)
  with jax.enable_x64(True):
    n = np.arange(3, dtype=np.int32)
    np.testing.assert_array_equal(power(np.array([[2.0], [3.0]]), n), [[1, 2, 4], [1, 3, 9]])
    fixed = cg.cfunc(lib.power, declaration, args="x, static n -> out y", loop=True)
    assert fixed(np.arange(3.0), n=3).tolist() == [0, 1, 8]
    square = cg.cfunc(lib.power, declaration, args="x, 2 -> out y", loop=True)
    assert jax.vmap(square)(np.arange(3.0)).tolist() == [0, 1, 4]


# -- results ---
def test_out_gives_the_results_their_structure(lib: ctypes.CDLL) -> None:
  split = cg.cfunc(
    lib.split,
    "void split(double x, double *whole, double *part)",
    loop=True,
    out=lambda x: (x, {"part": x}),
  )
  with jax.enable_x64(True):
    whole, rest = jax.vmap(split)(np.array([1.5, 2.0]))
    assert rest["part"].tolist() == [0.5, 0.0]
    assert whole.tolist() == [1.0, 2.0]
