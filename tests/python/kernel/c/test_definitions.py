# SPDX-License-Identifier: Apache-2.0
"""Refusals of `callgate.cfunc`, and their messages: before anything runs, by name."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate._kernel.c import expressions, types

X = np.arange(3, dtype=np.float32)
SAXPY = "void saxpy(int n, float a, const float *x, float *y)"
ADDRESS = 8  # never called here


# -- declarations ---
@pytest.mark.parametrize(
  ("text", "kinds"),
  [
    ("int f(void)", []),
    ("void f();", []),
    ("double norm(int n, const double *x)", ["int32", "const float64*"]),
    ("extern float f (unsigned, unsigned long long int, long x)", ["uint32", "uint64", "int64"]),
    ("void f(double x[], float restrict y[3], int8_t *z)", ["float64*", "float32*", "int8*"]),
    ("void f(float _Complex z, double complex *w)", ["complex64", "complex128*"]),
    ("void f(size_t n, Py_ssize_t m, enum order o)", ["uint64", "int64", "int32"]),
    ("void f(void *p, const void * /* q */, bool b)", ["void*", "const void*", "bool"]),
    ("void f(struct s *p, FILE *q, char **r, int (*g)(int))", ["opaque*"] * 4),
    ("void (signed char, unsigned char, char *)", ["int8", "uint8", "int8*"]),
  ],
)
def test_declarations_are_read_as_c_reads_them(text: str, kinds: list[str]) -> None:
  def kind(t: types.CType) -> str:
    if t.opaque:
      return "opaque*"
    name = "void" if t.dtype is None else t.dtype.name
    return f"{'const ' if t.const and t.pointer else ''}{name}{'*' if t.pointer else ''}"

  assert [kind(p.type) for p in types.parse(text).parameters] == kinds


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("double norm", "expected a C declaration such as"),
    (
      "int printf(const char *format, ...)",
      r"variadic functions \('...'\) can't be called; call it in a C function",
    ),
    ("long double f(double)", "'long double': arrays can't have elements of that type"),
    ("void f(struct point p)", "'struct point': arrays can't have elements of that type"),
    ("void f(int, )(", "expected a C declaration"),
    ("void f(std::vector x)", "expected a C type, got 'std::vector x'"),
  ],
)
def test_a_declaration_that_is_not_callable_is_refused(text: str, expected: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match="(?s)" + expected.replace(".", r"\.")):
    cg.cfunc(ADDRESS, text, args="")


def test_an_object_that_is_no_function_is_refused() -> None:
  for value in (len, "f", 1.5, True, None):
    with pytest.raises(cg.GateDefinitionError, match=r"expected a C function .from ctypes or cffi"):
      cg.cfunc(value, SAXPY, args="n, a, x[n], out y[n]")
  with pytest.raises(cg.GateDefinitionError, match="an address doesn't tell the function's"):
    cg.cfunc(ADDRESS, args="x")
  with pytest.raises(cg.GateDefinitionError, match=r"void saxpy\(.*is a null pointer"):
    cg.cfunc(0, SAXPY, args="n, a, x[n], out y[n]")
  with pytest.raises(
    cg.GateDefinitionError, match=r"'labs' doesn't declare its arguments; .*argtypes"
  ):
    cg.cfunc(ctypes.CDLL(None).labs, args="x -> out y")
  with pytest.raises(cg.GateDefinitionError, match=r"needs the GIL; .*callgate\.gate"):
    cg.cfunc(ctypes.pythonapi.PyGILState_Check, "int f(void)", args="-> out y")


def test_cffis_variadic_functions_are_refused() -> None:
  ffi = pytest.importorskip("cffi").FFI()
  ffi.cdef("int printf(const char *, ...);")
  with pytest.raises(
    cg.GateDefinitionError,
    match=r"variadic functions \('...'\) can't be called; call it in a C function",
  ):
    cg.cfunc(ffi.dlopen(None).printf, args="'x' -> ignored")
  with pytest.raises(cg.GateDefinitionError, match=r"expected a function, got cffi's 'int \*'"):
    cg.cfunc(ffi.new("int *"), args="")


# -- args ---
@pytest.mark.parametrize(
  ("args", "expected"),
  [
    (None, "expected args=, an item for each argument of 'void saxpy"),
    ("n, a, x[n]", "expected 4 items, one for each argument of .*, got 3: n, a, x"),
    ("n, a, out x[n], out y[n]", "'out x.n.': expected a pointer to numbers that are not con"),
    (
      "n, out a, x[n], out y[n]",
      "'out a': expected a pointer to numbers that are not const",
    ),
    ("n, a[n], x[n], out y[n]", "'a.n.': expected no extents, since C takes one value; C has 'fl"),
    ("'N', a, x[n], out y[n]", "''N'': expected a number, since C takes no text; C has 'int'"),
    ("1.5, a, x[n], out y[n]", "'1.5': expected another number; C has 'int' there"),
    ("3000000000, a, x[n], out y[n]", "expected at most 2147483647; C has 'int' there"),
    ("n, NULL, x[n], out y[n]", "'NULL': expected a pointer; C has 'float' there"),
    ("n, a, 2, info", "'info': expected a pointer to an integer; C has 'float"),
    ("n + k, a, x[n], out y[n]", "'n [+] k': 'k' is not known; expected a dimension of an operand"),
    ("z.size, a, x[n], out y[n]", "'z.size': 'z' is not known"),
    ("n / 2, a, x[n], out y[n]", "'n / 2': expected an integer, a dimension's name, x.size"),
    ("open(n), a, x[n], out y[n]", "'open.n.': expected an integer, a dimension's name"),
    ("n, static n, x[n], out y[n]", "'n': 'n' is not known; expected a dimension of an operand"),
    ("n, a, copy x[n], out x[n]", "'x' is mentioned twice, as a copy of an operand"),
    ("n, a, x[n], out y[n] -> out z", "'-> out z': .* returns nothing; remove the '->'"),
    ("n, a, x[n], out", "'out': expected a name after 'out'"),
    ("n, a, x[n], out 3", "'out 3': expected a name after 'out'"),
    ("n, a, x[n], scratch(k)", "'k' is not known"),
    ("n, a, x[n], out y", "the type of result 'y' .'float [*]'. is not known; expected extents"),
    ("n, x, x[n], out y[n]", "'x' is mentioned twice"),
  ],
)
def test_args_that_do_not_fit_the_function_are_refused(args: Any, expected: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match=expected):
    cg.cfunc(ADDRESS, SAXPY, args=args)


@pytest.mark.parametrize(
  ("declaration", "args", "expected"),
  [
    (
      "int f(int)",
      "x",
      "expected at the end a use of the value that 'int f.int.' returns: '-> out n",
    ),
    ("int f(int)", "x -> y", "'-> y': expected a use of the value that"),
    ("double f(int)", "x -> status", "'-> status': expected a function that returns an integer"),
    ("char *f(int)", "x -> out y", "'-> out y': expected a use of the value that"),
    ("void f(FILE *, double *)", "x, out y[3]", "expected NULL or a name of pointers="),
    ("void f(FILE *, double *)", "1, out y[3]", "'1': expected an array, NULL or a name of point"),
    ("void f(double **, double *)", "out x, out y[3]", "'out x': expected a pointer to numbers"),
  ],
)
def test_functions_of_other_kinds_have_messages_of_their_own(
  declaration: str, args: str, expected: str
) -> None:
  with pytest.raises(cg.GateDefinitionError, match=expected):
    cg.cfunc(ADDRESS, declaration, args=args)


@pytest.mark.parametrize(
  ("declaration", "args", "expected"),
  [
    (SAXPY, "n, a, x[n], out y[n]", "expected x, out x, static x or a value: a loop passes single"),
    ("void f(double *)", "inout x", "'inout x': expected x, out x, static x or a value"),
    ("void f(double *)", "x", "expected a result, 'out x' or '-> out x', got none"),
    ("int f(void *)", "x", "expected a parameter with an element type"),
  ],
)
def test_a_loop_passes_single_elements(declaration: str, args: str, expected: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=expected):
    cg.cfunc(ADDRESS, declaration, args=args, loop=True)


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    (
      {"order": "K"},
      r"order: expected 'C' or 'F', or a mapping from names \(a, x, y\) to these; got 'K'",
    ),
    ({"order": {"z": "F"}}, "order: expected 'C' or 'F', or a mapping from names"),
    ({"errors": {"many": "text"}}, "errors: expected a text, or texts by numbers, '>0' and '<0'"),
    ({"errors": {1: 2}}, "errors: expected a text"),
    ({"pointers": {"p": "text"}}, "pointers: 'p': expected an address, a pointer, array or"),
    ({"vmap": "some"}, "vmap: expected one of 'each', 'whole', 'broadcast'"),
  ],
)
def test_options_say_what_they_take(options: Any, expected: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=expected):
    cg.cfunc(ADDRESS, SAXPY, args="n, a, x[n], out y[n]", **options)


@pytest.mark.parametrize(
  "text", ["n if m else k", "x[0]", "n ** 2", "'n'", "1.5", "x.shape[n]", "f(n)"]
)
def test_expressions_are_integers_of_shapes_alone(text: str) -> None:
  with pytest.raises(SyntaxError):
    expressions.parse(text)


# -- calls ---
def test_an_extent_that_does_not_fit_is_an_error_that_names_the_argument() -> None:
  saxpy = cg.cfunc(ADDRESS, SAXPY, args="n, a, x[n], inout y[n]")
  expected = r"argument 'y': expected float32\[n\] with n = 3 from 'x', got float32\[2\]"
  for program in (saxpy, jax.jit(saxpy)):
    with pytest.raises(cg.GateDefinitionError, match=expected):
      program(2.0, X, X[:2])


def test_a_dtype_that_jax_does_not_have_yet_names_its_option() -> None:
  dot = cg.cfunc(ADDRESS, "void f(const double *x, double y, long k)", args="x[n], y, n", out=())
  expected = r"'x': expected float64 \(which needs jax_enable_x64\) of rank 1, got float32\[3\]"
  with pytest.raises(cg.GateDefinitionError, match=expected):
    dot(X, jnp.float32(1))


def test_results_of_another_type_than_c_writes_are_refused() -> None:
  kernel = cg.cfunc(
    ADDRESS, SAXPY, args="n, a, x[n], out y[n + 1]", out=lambda a, x: jnp.zeros(x.shape)
  )
  expected = r"result 'y': expected float32\[n \+ 1\] with n = 3 from 'x', got float32\[3\]"
  with pytest.raises(cg.GateDefinitionError, match=expected):
    kernel(1.0, X)
  kernel = cg.cfunc(ADDRESS, SAXPY, args="n, a, x[n], out y", out=np.zeros(3, np.int32))
  with pytest.raises(
    cg.GateDefinitionError, match=r"'y'\): expected float32 of any rank, got int32"
  ):
    kernel(1.0, X)


def test_values_that_c_can_not_hold_are_refused() -> None:
  kernel = cg.cfunc(
    ADDRESS, "void f(signed char n, const float *x, float *y)", args="100 * n, x[n], out y[n]"
  )
  with pytest.raises(cg.GateDefinitionError, match=r"'100 [*] n' is 300, which C's 'signed char"):
    kernel(X)
  kernel = cg.cfunc(
    ADDRESS, "void f(float *w, const float *x, float *y)", args="scratch(n - 4), x[n], out y[n]"
  )
  with pytest.raises(cg.GateDefinitionError, match="expected a size of 0 or more, got -1"):
    kernel(X)
  kernel = cg.cfunc(
    ADDRESS, "void f(int k, const float *x, float *y)", args="1 // (n - 3), x[n], out y[n]"
  )
  with pytest.raises(cg.GateDefinitionError, match=r"has no value: .*zero"):
    kernel(X)
  kernel = cg.cfunc(
    ADDRESS, "void f(int k, const float *x, float *y)", args="x.shape[2], x, out y[1]"
  )
  with pytest.raises(
    cg.GateDefinitionError, match=r"has no value: 'x' of shape \[3\] has no axis 2"
  ):
    kernel(X)


def test_arguments_of_a_loop_that_do_not_broadcast_are_named() -> None:
  kernel = cg.cfunc(ADDRESS, "float f(float x, float y)")
  expected = r"expected arguments that broadcast to one shape, got 'x' \[3\], 'y' \[2\]"
  with pytest.raises(cg.GateDefinitionError, match=expected):
    kernel(X, X[:2])
  kernel = cg.cfunc(ADDRESS, "float f(float x, float y)", out=lambda x, y: x)
  expected = r"result 'result': expected the arguments' broadcast shape \[3\], got float32\[\]"
  with pytest.raises(cg.GateDefinitionError, match=expected):
    kernel(X[0], X)


def test_without_a_compiler_the_error_says_what_to_install(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
  monkeypatch.setenv("CXX", str(tmp_path / "none"))
  kernel = cg.cfunc(ADDRESS, "float f(float x)")
  with pytest.raises(cg.CompileError, match=r"no C.. compiler was found"):
    kernel(X)
