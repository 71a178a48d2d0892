# SPDX-License-Identifier: Apache-2.0
"""C functions of libraries as they are installed: SciPy's BLAS, LAPACK and special functions, libm,
GSL; against what these libraries say through Python."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg
from callgate._core.public import core
from callgate._kernel.parameters import OPERANDS

pytest.importorskip("scipy")
import scipy.linalg.lapack
import scipy.special
from scipy.linalg import cython_blas, cython_lapack
from scipy.special import cython_special


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
  with jax.enable_x64(True):
    yield


def blas(symbol: str, args: str, **options: Any) -> cg.Kernel:
  return cg.cfunc(cython_blas.__pyx_capi__[symbol], args=args, **options)


def lapack(symbol: str, args: str, **options: Any) -> cg.Kernel:
  return cg.cfunc(cython_lapack.__pyx_capi__[symbol], args=args, **{"order": "F", **options})


def normal(*shape: int, dtype: str = "float64") -> Any:
  generator = np.random.default_rng(sum(shape))
  values = generator.normal(size=shape)
  if dtype.startswith("complex"):
    values = values + 1j * generator.normal(size=shape)
  return values.astype(dtype)


# -- BLAS ---
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_dot_products_of_every_blas_type(dtype: str) -> None:
  name = {"float32": "sdot", "float64": "ddot", "complex64": "cdotc", "complex128": "zdotc"}[dtype]
  x, y = normal(7, dtype=dtype), normal(2, 7, dtype=dtype)[1]
  dot = blas(name, "n, x[n], 1, y[n], 1 -> out d")
  got = jax.jit(dot)(x, y)
  assert got.dtype == dtype
  np.testing.assert_allclose(got, np.vdot(x, y), rtol=1e-5)


def test_matrix_products_take_row_major_matrices_by_the_right_words() -> None:
  # Column-major, c' = b' a'.
  args = "'N', 'N', n, m, k, 1.0, b[k, n], n, a[m, k], k, 0.0, out c[m, n], n"
  gemm = blas("dgemm", args)
  a, b = normal(3, 4), normal(4, 5)
  got = jax.jit(gemm)(b, a)
  np.testing.assert_allclose(got, a @ b, rtol=1e-12)
  plain = blas("dgemm", "'N', 'N', m, n, k, 1.0, a[m, k], m, b[k, n], k, 0.0, out c[m, n], m",
               order="F")  # fmt: skip
  np.testing.assert_allclose(jax.jit(plain)(a, b), a @ b, rtol=1e-12)


# -- LAPACK ---
def test_tridiagonal_systems_against_lapack_through_scipy() -> None:
  args = "n, k, copy dl[n - 1], copy d[n], copy du[n - 1], inout b[n, k], n, info"
  gtsv = lapack("dgtsv", args)
  dl, d, du, b = normal(4), normal(5) + 5, normal(4), normal(5, 2)
  want = scipy.linalg.lapack.dgtsv(dl, d, du, b)[3]
  np.testing.assert_allclose(jax.jit(gtsv)(dl, d, du, b), want, rtol=1e-12)


def test_systems_by_lanes_on_several_threads() -> None:
  args = "n, k, copy a[n, n], n, out pivots[n], inout b[n, k], n, info"
  gesv = lapack("dgesv", args, thread_safe=True)
  a, b = normal(30, 6, 6), normal(6, 2)
  pivots, x = jax.jit(jax.vmap(gesv, (0, None)))(a, b)
  np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-8)
  assert pivots.dtype == np.int32
  assert pivots[3].tolist() == (scipy.linalg.lapack.dgesv(a[3], b)[1] + 1).tolist()


def test_a_singular_matrix_is_the_users_error() -> None:
  args = "n, k, copy a[n, n], n, scratch(n), inout b[n, k], n, info"
  gesv = lapack("dgesv", args, errors={">0": "singular at {info}"}, name="test.gesv")
  with pytest.raises(cg.KernelError, match=r"kernel 'test\.gesv': singular at 1"), cg.errors():
    gesv(np.zeros((2, 2)), np.ones((2, 1))).block_until_ready()
  wrong = lapack("dgesv", "n, k, copy a[n, n], n - 1, scratch(n), inout b[n, k], n, info")
  # LAPACK also prints a line of its own.
  with pytest.raises(cg.KernelError, match="info = -4: argument 4 of C, 'n - 1'"), cg.errors():
    wrong(np.eye(3), np.ones((3, 1))).block_until_ready()


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_eigenvectors_of_symmetric_and_hermitian_matrices(dtype: str) -> None:
  a = normal(5, 5, dtype=dtype)
  a = a + a.conj().T
  if dtype == "float64":
    args = "'V', 'L', n, inout a[n, n], n, out w[n], scratch(34 * n), 34 * n, info"
    heev = lapack("dsyev", args)
  else:
    args = "'V', 'L', n, inout a[n, n], n, out w[n], scratch(34 * n), 34 * n, scratch(3 * n), info"
    heev = lapack("zheev", args)
  vectors, values = jax.jit(heev)(a)
  np.testing.assert_allclose(values, np.linalg.eigvalsh(a), rtol=1e-10)
  np.testing.assert_allclose(a @ vectors, vectors * values, atol=1e-10)


def test_sylvesters_equation_with_schur_forms_of_lapack() -> None:
  # dgees takes a function that selects eigenvalues, and a logical for each: none are selected.
  schur = lapack(
    "dgees",
    "'V', 'N', NULL, n, inout a[n, n], n, scratch(1), scratch(n), scratch(n), out q[n, n], n, "
    "scratch(40 * n), 40 * n, NULL, info",
  )
  args = "'N', 'N', 1, m, n, a[m, m], m, b[n, n], n, inout c[m, n], m, out scale[], info"
  trsyl = lapack("dtrsyl", args)

  def sylvester(a: Any, b: Any, c: Any) -> Any:
    (ta, qa), (tb, qb) = schur(a), schur(b)
    x, scale = trsyl(ta, tb, qa.T @ c @ qb)
    return qa @ (x / scale) @ qb.T

  a, b, c = normal(4, 4), normal(3, 3), normal(4, 3)
  got = jax.jit(jax.vmap(sylvester, (None, None, 0)))(a, b, np.stack([c, 2 * c]))
  want = scipy.linalg.solve_sylvester(a, b, c)
  np.testing.assert_allclose(got, np.stack([want, 2 * want]), rtol=1e-8)


def test_pivoted_qr_of_a_wide_matrix() -> None:
  work = "scratch(34 * (n + 1)), 34 * (n + 1)"
  args = f"m, n, inout a[m, n], m, inout pivots[n], out tau[min(m, n)], {work}, info"
  geqp3 = lapack("dgeqp3", args)
  a = normal(3, 5)
  factors, pivots, tau = jax.jit(geqp3)(a, np.zeros(5, np.int32))
  want = scipy.linalg.lapack.dgeqp3(a)
  np.testing.assert_allclose(factors, want[0], atol=1e-12)
  np.testing.assert_array_equal(pivots, want[1])
  np.testing.assert_allclose(tau, want[2], atol=1e-12)


# -- special functions ---
REAL = ["j0", "y1", "gammainc", "ndtri", "exp10", "struve", "boxcox1p", "__pyx_fuse_1expi",
        "__pyx_fuse_0_1eval_jacobi", "__pyx_fuse_1_1eval_chebyu", "obl_cv"]  # fmt: skip
COMPLEX = ["hankel1", "__pyx_fuse_0dawsn", "__pyx_fuse_0hyp1f1", "__pyx_fuse_0_0eval_chebyc"]


@pytest.mark.parametrize("name", REAL + COMPLEX)
def test_scipys_special_functions_of_numbers(name: str) -> None:
  kernel = cg.cfunc(cython_special.__pyx_capi__[name])
  ufunc = getattr(scipy.special, name.split("fuse_")[-1].lstrip("0123456789_"))
  counts = [p.dtype for p in core(kernel).signature or () if p.kind in OPERANDS]
  args = [
    np.arange(1, 4).astype(dtype) + (0.25 if dtype.kind in "fc" else 0) * (i + 1)
    for i, dtype in enumerate(d for d in counts if d is not None)
  ]
  if name == "ndtri":
    args = [args[0] / 5]
  if name in COMPLEX:
    args[-1] = args[-1] + 0.5j
  args[0] = args[0][:, None]
  got = jax.jit(kernel)(*args)
  np.testing.assert_allclose(got, ufunc(*args), rtol=1e-12)


def test_special_functions_with_several_results() -> None:
  sici = cg.cfunc(cython_special.__pyx_capi__["__pyx_fuse_1sici"], loop=True)
  x = np.linspace(0.1, 5, 6).reshape(2, 3)
  np.testing.assert_allclose(jax.jit(sici)(x), scipy.special.sici(x), rtol=1e-13)
  airy = cg.cfunc(
    cython_special.__pyx_capi__["__pyx_fuse_0airye"],
    args="z, out a, out b, out c, out d",
    loop=True,
    cast=True,
  )
  z = x.astype(np.complex64) * (1 + 1j)
  got = airy(z)
  assert all(y.dtype == np.complex64 for y in got)
  np.testing.assert_allclose(np.stack(got), np.stack(scipy.special.airye(z)), rtol=1e-5)


def test_every_capsule_of_scipys_numerical_modules_is_read() -> None:
  from callgate._kernel.c import functions

  for module in (cython_blas, cython_lapack, cython_special):
    for name, capsule in module.__pyx_capi__.items():
      if "expit" in name or "logit" in name:
        continue  # some of them take long double
      assert functions.resolve(capsule, None).declaration.parameters
  with pytest.raises(cg.GateDefinitionError, match="'long double': arrays can't have elements"):
    functions.resolve(cython_special.__pyx_capi__["__pyx_fuse_2logit"], None)


# -- libm and GSL ---
@pytest.mark.parametrize("name", ["cbrt", "tgamma", "lgamma", "log1p", "expm1", "nearbyint"])
def test_functions_of_libm(name: str) -> None:
  libm = ctypes.CDLL(ctypes.util.find_library("m"))
  kernel = cg.cfunc(getattr(libm, name), f"double {name}(double)")
  x = np.linspace(0.5, 4.5, 9)
  ufunc = {"tgamma": scipy.special.gamma, "lgamma": scipy.special.gammaln, "nearbyint": np.rint}
  np.testing.assert_allclose(kernel(x), (ufunc.get(name) or getattr(np, name))(x), rtol=1e-14)


def test_functions_of_gsl() -> None:
  found = ctypes.util.find_library("gsl")
  if found is None:
    pytest.skip("the GNU Scientific Library is not installed")
  blas_of_gsl = ctypes.util.find_library("gslcblas")
  if blas_of_gsl is not None:
    ctypes.CDLL(blas_of_gsl, ctypes.RTLD_GLOBAL)
  gsl = ctypes.CDLL(found)
  gsl.gsl_set_error_handler_off()
  bessel = cg.cfunc(gsl.gsl_sf_bessel_J0, "double gsl_sf_bessel_J0(double x)")
  x = np.linspace(0, 10, 7)
  np.testing.assert_allclose(bessel(x), scipy.special.j0(x), atol=1e-14)
  # A struct of two doubles, and a status.
  with_error = cg.cfunc(
    gsl.gsl_sf_gamma_e, "int gsl_sf_gamma_e(double x, double *result)", args="x, out r[2] -> status"
  )
  np.testing.assert_allclose(with_error(5.0)[0], 24.0)
  with pytest.raises(cg.KernelError, match="gsl_sf_gamma_e: status 1"), cg.errors():
    with_error(-1.0).block_until_ready()
