# SPDX-License-Identifier: Apache-2.0
"""`callgate.library`: kernels of a user's own shared library, checked by its table of types."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import shutil
import signal
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import printed_by, run_python
from jax import export
from kernel_libraries import KERNELS, WARNINGS, build

import callgate as cg
from callgate import _callgate

A = jax.ShapeDtypeStruct


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> cg.Library:
  folder = tmp_path_factory.mktemp("library")
  return cg.library(build(folder, "mine", KERNELS, "-std=c++17", "-O1", *WARNINGS))


def scaling(by: float, parameters: str = "scale, x, y") -> str:
  """The source of a library with one kernel."""
  return f"""
    #include "callgate/kernel.h"
    void scale(cg::In<float, 1> x, cg::Out<float, 1> y) {{
      for (int64_t i = 0; i < x.size(); ++i) y[i] = float({by}) * x[i];
    }}
    CALLGATE_KERNEL({parameters});
  """


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Path], Path]:
  """Puts a library that scales by a number to a path; each number is compiled once."""
  folder = tmp_path_factory.mktemp("scaled")
  built = functools.cache(lambda by: build(folder, f"by{by}", scaling(by)))

  def put(by: int, path: Path) -> Path:
    path.unlink(missing_ok=True)  # another file: this process may have the one before open
    return Path(shutil.copy(built(by), path))

  return put


# --- Calls ----------------------------------------------------------------------------------------


def test_a_kernel_of_the_library_runs_in_a_compiled_program(lib: cg.Library, engine: str) -> None:
  x, y = jnp.arange(4.0), jnp.ones(4)
  got = jax.jit(lambda x, y: lib.saxpy(2.0, x, y) + 1)(x, y)
  np.testing.assert_array_equal(got, 2 * x + y + 1)
  assert engine in ("callgate", "jax")


def test_arguments_may_be_given_by_name(lib: cg.Library) -> None:
  got = lib.saxpy(y=jnp.ones(2), x=jnp.arange(2.0), a=3)
  assert got.tolist() == [1.0, 4.0]


def test_lanes_static_values_and_results_in_place(lib: cg.Library) -> None:
  x = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
  got = jax.jit(jax.vmap(lambda v: lib.shift(10, v)))(x)
  np.testing.assert_array_equal(got, x + 10)


def test_several_and_scalar_results_are_inferred(lib: cg.Library) -> None:
  total, greatest = jax.jit(lib.total)(jnp.arange(6.0).reshape(2, 3))
  assert (total.shape, float(total), float(greatest)) == ((), 15.0, 5.0)


def test_a_variadic_parameter_infers_the_shape_that_its_arrays_share(lib: cg.Library) -> None:
  got = lib.add([jnp.ones((2, 2))] * 3)
  assert got.tolist() == [[3.0, 3.0], [3.0, 3.0]]
  with pytest.raises(
    cg.GateDefinitionError, match=r"'xs\[0\]' is float32\[2\], 'xs\[1\]' is float32\[3\]"
  ):
    lib.add([jnp.ones(2), jnp.ones(3)])


def test_a_square_product_infers_its_result_and_another_says_what_differs(lib: cg.Library) -> None:
  x = jnp.arange(4.0).reshape(2, 2)
  np.testing.assert_array_equal(lib.matmul(x, x), x @ x)
  with pytest.raises(cg.GateDefinitionError) as raised:
    jax.jit(lib.matmul)(jnp.ones((2, 3)), jnp.ones((3, 4)))
  assert str(raised.value) == (
    "kernel 'mine.matmul': the shape of result '2' (float32 of rank 2) does not follow from the "
    "arguments, since the arguments of that type differ: '0' is float32[2,3], '1' is float32[3,4]; "
    "pass out=, as in library.kernel('matmul', out=lambda *args: ...)"
  )


def test_results_of_a_type_that_no_argument_has_need_out(lib: cg.Library) -> None:
  with pytest.raises(
    cg.GateDefinitionError,
    match=r"'counts' \(int32 of rank 1\) .* no argument has that type; pass out=, as in "
    r"library.kernel\('histogram', out=lambda x: ...\)",
  ):
    lib.histogram(jnp.ones(3))
  with pytest.raises(cg.GateDefinitionError, match=r"'parts' .* any number of results"):
    lib.split(jnp.ones(3))


def test_kernel_takes_options(lib: cg.Library) -> None:
  histogram = lib.kernel("histogram", out=lambda x: A((3,), "int32"), thread_safe=True)
  x = jnp.array([[0.0, 2.0, 2.5], [1.0, 1.0, 1.0]])
  assert jax.jit(jax.vmap(histogram))(x).tolist() == [[1, 0, 2], [0, 3, 0]]
  split = lib.kernel("split", out=lambda x: [A((1,), "float32"), A((x.size - 1,), "float32")])
  assert [part.tolist() for part in split(jnp.arange(3.0))] == [[0.0], [1.0, 2.0]]
  product = lib.kernel("matmul", like=lambda a, b: a @ b, name="product")
  product.check(jnp.ones((2, 3)), jnp.ones((3, 4)))
  assert product.name == "product"
  gradient = jax.grad(lambda a: product(a, jnp.ones((3, 4))).sum())(jnp.ones((2, 3)))
  assert gradient.tolist() == [[4.0] * 3] * 2
  with pytest.raises(cg.GateDefinitionError, match="vmap"):
    lib.kernel("saxpy", vmap="some")  # pyright: ignore[reportArgumentType]


def test_a_parameter_without_a_name_is_told_by_its_place(lib: cg.Library) -> None:
  with pytest.raises(cg.GateDefinitionError) as raised:
    jax.make_jaxpr(lambda: lib.matmul(np.ones(2, "float32"), np.ones((2, 2), "float32")))()
  assert "argument '0': expected float32 of rank 2, got float32[2]" in str(raised.value)


def test_an_out_that_does_not_fit_is_refused(lib: cg.Library) -> None:
  wrong = lib.kernel("histogram", out=lambda x: A((3,), "float32"))
  with pytest.raises(cg.GateDefinitionError, match=r"'counts'\): expected int32 of rank 1, got f"):
    wrong(jnp.ones(3))


def test_an_exception_of_the_library_reaches_the_caller(lib: cg.Library) -> None:
  with pytest.raises(cg.KernelError, match=r"'mine.refuse': x\[1\] is negative"), cg.errors():
    jax.block_until_ready(jax.jit(lib.refuse)(jnp.array([1.0, -1.0])))
  assert lib.refuse(jnp.ones(2)).tolist() == [1.0, 1.0]


# --- The library as an object ---------------------------------------------------------------------


def test_the_library_lists_its_kernels_and_their_parameters(lib: cg.Library) -> None:
  assert list(lib)[:3] == ["saxpy", "matmul", "histogram"]
  assert len(lib) == 9
  assert "split" in lib
  assert "nothing" not in lib
  assert {"saxpy", "matmul", "kernel", "name"} <= set(dir(lib))
  text = repr(lib)
  assert text.startswith(f"<library 'mine' of {lib.path}: saxpy(float32 a, In<float32,1> x, ")
  assert "matmul(In<float32,2> 0, In<float32,2> 1, Out<float32,2> 2)" in text
  assert "shift(Attr<int32> by, InOut<int32,1> x)" in text
  assert "histogram(In<float32,*> x, Out<int32,1> counts)" in text


def test_an_attribute_is_the_same_kernel_each_time(lib: cg.Library) -> None:
  assert lib.saxpy is lib.saxpy
  assert lib["saxpy"] is lib.saxpy
  assert lib.saxpy.name == "mine.saxpy"
  assert lib.kernel("saxpy").name.startswith("mine.saxpy#")


def test_a_kernel_whose_name_the_library_has_is_found_by_index(lib: cg.Library) -> None:
  assert isinstance(lib.path, str)
  x = jnp.array([1j, 2.0], jnp.complex64)
  np.testing.assert_array_equal(jax.jit(lib["path"])(x), x * x)


def test_a_missing_kernel_is_an_attribute_error_that_lists_what_is_there(lib: cg.Library) -> None:
  with pytest.raises(AttributeError, match="has no kernel 'saxpi'; it has saxpy, matmul, histogr"):
    _ = lib.saxpi
  with pytest.raises(AttributeError, match="has no kernel 'dot'"):
    lib.kernel("dot")
  assert not hasattr(lib, "__wrapped__")


# --- Loading --------------------------------------------------------------------------------------


def test_a_path_without_a_file_says_where_it_looked(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.chdir(tmp_path)
  with pytest.raises(FileNotFoundError, match=f"found no file '{tmp_path}/libnone.so'"):
    cg.library("libnone.so")


def test_a_file_that_is_no_library_is_the_loaders_error(tmp_path: Path) -> None:
  path = tmp_path / "libtext.so"
  path.write_text("text")
  with pytest.raises(OSError, match=r"libtext.so' could not be loaded: .*(too short|invalid ELF)"):
    cg.library(path)


def test_a_library_without_kernels_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
  other = build(tmp_path, "other", 'extern "C" int f() { return 1; }')
  with pytest.raises(
    cg.GateDefinitionError, match="is not a library of kernels: expected the symbol"
  ):
    cg.library(other)
  empty = build(tmp_path, "empty", '#include "callgate/kernel.h"')
  assert repr(cg.library(empty)).endswith("no kernels>")


def test_a_library_of_another_binary_interface_is_refused_with_both_numbers(tmp_path: Path) -> None:
  source = """
    #include <cstdint>
    extern "C" {  // only the version's place is fixed for all time
    static const struct { uint32_t abi; char other[60]; } table = {77, {}};
    const void* callgate_kernels() { return &table; }
    }"""
  with pytest.raises(cg.GateDefinitionError) as raised:
    cg.library(build(tmp_path, "later", source))
  text = str(raised.value)
  assert f"interface {_callgate.KERNEL_ABI} " in text
  assert "got 77; build it again with this version's header" in text
  assert "liblater.so" in text


def test_a_wrong_number_of_names_is_refused(tmp_path: Path) -> None:
  path = build(tmp_path, "names", scaling(1, "scale, x"))
  with pytest.raises(cg.GateDefinitionError, match="a name for each of the 2 parameters, or none"):
    cg.library(path)


def test_two_kernels_of_one_name_in_a_library_are_refused(tmp_path: Path) -> None:
  source = """
    #include "callgate/kernel.h"
    void f(cg::Out<float, 0> y) { y() = 1; }
    void g(cg::Out<float, 0> y) { y() = 2; }
    CALLGATE_KERNEL_AS(same, f);
    namespace other { CALLGATE_KERNEL_AS(same, g); }"""
  with pytest.raises(cg.GateDefinitionError, match="exports two kernels 'same'"):
    cg.library(build(tmp_path, "twice", source))


def test_libraries_with_kernels_of_the_same_name_stand_beside_each_other(
  tmp_path: Path, scaled: Any
) -> None:
  opened: list[cg.Library] = []
  for by in (2, 7):
    (tmp_path / str(by)).mkdir()
    opened.append(cg.library(scaled(by, tmp_path / str(by) / "libsame.so")))
  two, seven = opened
  assert (two.name, seven.name) == ("same", "same#1")
  got = jax.jit(lambda x: (two.scale(x), seven.scale(x)))(jnp.ones(2))
  assert [y.tolist() for y in got] == [[2.0, 2.0], [7.0, 7.0]]


def test_opening_a_library_again_gives_the_same_object_while_it_is_in_use(
  tmp_path: Path, scaled: Any
) -> None:
  path = scaled(2, tmp_path / "libagain.so")
  kernel = cg.library(path).scale
  assert cg.library(os.fspath(path)).scale is kernel
  link = tmp_path / "link.so"
  link.symlink_to(path)
  assert cg.library(link).scale is kernel
  named = cg.library(path, name="by_name")
  assert named.scale.name == "by_name.scale"
  del kernel, named
  gc.collect()
  assert not [name for name in _callgate.registered_names() if name.startswith("again.")]
  assert cg.library(path).scale.name == "again.scale"


def test_a_library_name_that_is_taken_is_refused(
  lib: cg.Library, tmp_path: Path, scaled: Any
) -> None:
  path = scaled(2, tmp_path / "libthird.so")
  with pytest.raises(ValueError, match=f"'mine' is taken by the library '{lib.path}'"):
    cg.library(path, name="mine")


def test_a_library_that_was_built_again_is_loaded_anew(tmp_path: Path, scaled: Any) -> None:
  path = tmp_path / "libfresh.so"
  old = cg.library(scaled(2, path))
  assert old.scale(jnp.ones(1)).tolist() == [2.0]
  new = cg.library(scaled(7, path))
  assert new.scale(jnp.ones(1)).tolist() == [7.0]
  assert old.scale(jnp.ones(1)).tolist() == [2.0]


def test_a_library_that_was_built_with_fast_math_leaves_subnormal_numbers_alone(
  tmp_path: Path,
) -> None:
  kernel = cg.library(build(tmp_path, "fast", scaling(3), "-std=c++17", "-ffast-math")).scale
  smallest = np.float32(1e-45)
  assert smallest * np.float32(1) == smallest
  assert kernel(jnp.ones(1)).tolist() == [3.0]
  assert np.array([smallest]) * np.float32(1) == smallest


# --- The header in a user's build -----------------------------------------------------------------

BUILDS = {
  "C++17": ("-std=c++17", *WARNINGS),
  "C++20": ("-std=c++20", *WARNINGS),
  "C++23": ("-std=c++23", *WARNINGS),
  "no exceptions, no RTTI": ("-std=c++17", "-fno-exceptions", "-fno-rtti", *WARNINGS),
  "hidden symbols": ("-std=c++17", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
  "optimised, linked as a whole": ("-std=c++17", "-O3", "-flto", "-ffast-math"),
}
EVERYTHING = """
#include "callgate/kernel.h"
void all(float a, cg::In<cg::bfloat16, 1> x, cg::Ins<uint8_t, 1> us, cg::Out<double, 0> sum,
         cg::Attr<int64_t> n, cg::String mode, cg::Numbers<float> ws, const cg::Dict& options,
         const cg::Context& context, cg::Out<float, 1> y) {
  float* memory = context.scratch<float>(x.size());
  sum() = 0;
  auto fill = [&](int64_t i) { memory[i] = x[i] * a + ws[0]; };
  context.parallel_for(0, x.size(), 1, fill);
  for (int64_t i = 0; i < x.size(); ++i) sum() += double(y[i] = memory[i] + float(us[0](i)));
  if (mode == "more") sum() += double(n) + options.get<double>("more");
}
CALLGATE_KERNEL(all, a, x, us, sum, n, mode, ws, options, context, y);
"""


@pytest.mark.parametrize("name", BUILDS)
def test_the_header_compiles_and_works_in_a_build_with(name: str, tmp_path: Path) -> None:
  kernel = cg.library(build(tmp_path, "built", EVERYTHING, *BUILDS[name])).kernel(
    "all", out=lambda a, x, us: (A((), "float64"), A(x.shape, "float32"))
  )
  values = {"n": 2, "mode": "more", "ws": [0.5], "options": {"more": 0.25}}
  x = jnp.array([1.0, 2.0, 3.0], jnp.bfloat16)
  with jax.enable_x64(True):
    total, y = jax.jit(lambda x: kernel(2.0, x, [jnp.ones(3, "uint8")], **values))(x)
  assert y.tolist() == [3.5, 5.5, 7.5]
  assert float(total) == 16.5 + 2.25


def test_without_exceptions_an_index_outside_ends_the_process_with_its_text(tmp_path: Path) -> None:
  source = """
    #include "callgate/kernel.h"
    void beyond(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = x[x.size()]; }
    CALLGATE_KERNEL(beyond, x, y);"""
  path = build(tmp_path, "beyond", source, "-std=c++17", "-fno-exceptions")
  code = f"import callgate as cg, jax.numpy as jnp\ncg.library({str(path)!r}).beyond(jnp.ones(3))"
  done = run_python(code)
  assert done.returncode == -signal.SIGABRT
  assert "callgate: index 3 is outside [0, 3)" in done.stderr


# --- Programs from elsewhere ----------------------------------------------------------------------

LOAD = textwrap.dedent("""
  import json, pathlib, sys
  import callgate as cg, jax.numpy as jnp
  from jax import export
  opened = []
  for program, library in json.loads(sys.argv[1]):
    if library:
      opened.append(cg.library(library))
    loaded = export.deserialize(bytearray(pathlib.Path(program).read_bytes()))
    try:
      print(json.dumps(loaded.call(jnp.arange(3.0)).tolist()))
    except Exception as error:
      print(json.dumps(str(error)))
""")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, scaled: Any) -> list[Any]:
  """The results of programs in a process: without a library, with it, with one that has changed."""
  folder = tmp_path_factory.mktemp("elsewhere")

  def exported(name: str) -> tuple[str, str]:
    path = scaled(2, folder / f"lib{name}.so")
    program = jax.jit(cg.library(path).scale)
    made = export.export(program, disabled_checks=cg.export_checks())(jnp.arange(3.0))
    (folder / name).write_bytes(made.serialize())
    return str(folder / name), str(path)

  travelling, library = exported("travelling")
  changing = exported("changing")
  build(folder, "changing", scaling(2).replace("In<float, 1>", "In<float>"))
  given = [(travelling, ""), (travelling, library), changing]
  return [*map(json.loads, printed_by(LOAD, json.dumps(given)).splitlines())]


def test_an_exported_program_finds_its_kernel_once_the_library_is_open(
  elsewhere: list[Any],
) -> None:
  without, result, _ = elsewhere
  assert result == [0, 2, 4]
  assert "no gate or kernel named 'travelling.scale' is defined in this process" in without
  assert "callgate.library" in without


def test_a_library_whose_kernel_has_changed_refuses_the_program_of_before(
  elsewhere: list[Any],
) -> None:
  *_, said = elsewhere
  assert "called by a program that was compiled before" in said
  assert "In<float32,1>" in said
  assert "In<float32,*>" in said


def test_kernels_of_a_library_take_turns_together(tmp_path: Path) -> None:
  # Each says how many calls of either are inside; it gives others time to come in.
  source = """
    #include <atomic>
    #include <thread>
    #include "callgate/kernel.h"
    static std::atomic<int> inside{0};
    static int32_t linger() {
      int32_t now = ++inside;
      for (int i = 0; i < 300; ++i) std::this_thread::yield();
      --inside;
      return now;
    }
    void one(cg::In<float, 0>, cg::Out<int32_t, 0> z) { z() = linger(); }
    void other(cg::In<float, 0>, cg::Out<int32_t, 0> z) { z() = linger(); }
    extern "C" int plain(float) { return linger(); }
    CALLGATE_KERNEL(one, x, z);
    CALLGATE_KERNEL(other, x, z);
  """
  lib = cg.library(build(tmp_path, "turns", source, "-std=c++17", "-O1"))
  shape = A((), np.int32)
  lib.cdll.plain.argtypes, lib.cdll.plain.restype = [ctypes.c_float], ctypes.c_int
  kernels = [lib.kernel("one", out=shape), lib.kernel("other", out=shape), cg.cfunc(lib.cdll.plain)]
  most, barrier = list[int](), threading.Barrier(3, timeout=60)

  def call(kernel: cg.Kernel) -> None:
    program, x = jax.jit(kernel), np.float32(0)
    jax.block_until_ready(program(x))
    barrier.wait()
    most.extend(int(program(x)) for _ in range(20))

  threads = [threading.Thread(target=call, args=(kernel,)) for kernel in kernels]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert most == [1] * 60
