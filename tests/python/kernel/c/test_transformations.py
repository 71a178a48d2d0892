# SPDX-License-Identifier: Apache-2.0
"""C functions under JAX's transformations, and their glue on the disk."""

from __future__ import annotations

import ctypes
import sys
import textwrap
from pathlib import Path
from typing import Any

import c_library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_cpp
from interpreters import printed_by
from transformation_table import groups, run

import callgate as cg


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return c_library.build(tmp_path_factory.mktemp("c"))


def cubes(x: Any) -> Any:
  return x**3 * 0.3


def shifted(x: Any) -> Any:
  return 1.5 * x + jnp.flip(x)


def kernel(kind: str, path: Path, **options: Any) -> Any:
  """A function of R^3 to R^3 with a C function in its middle, and the same in JAX."""
  lib = ctypes.CDLL(str(path))
  if kind == "loop":
    declaration = "double cube(double x)"
    cube = cg.cfunc(lib.cube, declaration, cast=True, like=lambda x: x**3, **options)
    return (lambda x: cube(x) * 0.3), cubes
  saxpy = cg.cfunc(
    lib.saxpy,
    "void saxpy(int n, float a, const float *x, float *y)",
    args="n, a, x[n], inout y[n]",
    like=lambda a, x, y: a * x + y,
    **options,
  )
  return (lambda x: saxpy(1.5, x, jnp.flip(x))), shifted


@pytest.mark.parametrize(("kind", "effect"), [("loop", "pure"), ("call", "pure"), ("call", "io")])
@pytest.mark.parametrize("chains", groups(14))
def test_pairs_of_transformations_agree_with_jax(
  chains: Any, kind: str, effect: Any, path: Path
) -> None:
  options: dict[str, Any] = {"thread_safe": True, "effect": effect}
  function, reference = kernel(kind, path, **options)
  want = run(chains, reference)
  results = {"callgate": run(chains, function)}
  if effect == "pure":
    with cg.config(engine="jax"):
      results["jax"] = run(chains, kernel(kind, path, **options)[0])
  for engine, got in results.items():
    for chain, a, b in zip(chains, got, want, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"{engine}: {chain}")


@pytest.mark.parametrize("kind", ["loop", "call"])
@pytest.mark.parametrize("vmap", ["each", "whole", "broadcast"])
def test_every_vmap_method_maps(kind: str, vmap: Any, path: Path) -> None:
  lib = ctypes.CDLL(str(path))
  if kind == "loop":
    declaration, args = "double cube(double x)", None
    cube = cg.cfunc(lib.cube, declaration, args=args, cast=True, vmap=vmap)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(jax.vmap(cube)(x), x**3)
    return
  fill = cg.cfunc(
    lib.copy_bytes,
    "void (const void *from, void *to, size_t bytes)",
    args="x, out y, 4 * x.size",
    out=lambda x: x,
    vmap=vmap,
  )
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  np.testing.assert_array_equal(jax.jit(jax.vmap(fill, 1, 1))(x), x)


def test_the_batching_of_a_loop_is_one_call(path: Path) -> None:
  lib = ctypes.CDLL(str(path))
  cube = cg.cfunc(lib.cube, "double cube(double x)", cast=True)
  text = jax.jit(jax.vmap(jax.vmap(cube))).lower(np.zeros((4, 5, 2), np.float32)).as_text()
  (call,) = [line for line in text.splitlines() if "@callgate.kernel" in line]
  assert "tensor<4x5x2xf32>" in call


def test_linear_functions_have_transposes(path: Path) -> None:
  lib = ctypes.CDLL(str(path))
  double = cg.cfunc(lib.twice_float32, "float twice(float x)", linear=True)
  double.deftranspose(lambda cotangent, x: double(cotangent))
  x = np.arange(3, dtype=np.float32)
  np.testing.assert_array_equal(jax.grad(lambda x: (double(x) * x).sum())(x), 4 * x)
  np.testing.assert_array_equal(jax.jvp(jax.vmap(double), (x,), (x,))[1], 2 * x)


# -- the disk ---
DEFINITIONS = textwrap.dedent("""
  import ctypes, os, sys
  import callgate as cg, jax, jax.numpy as jnp
  os.environ["CALLGATE_CACHE_DIR"] = sys.argv[2]
  lib = ctypes.CDLL(sys.argv[1])
  cube = cg.cfunc(lib.cube, "double cube(double x)", cast=True)
  saxpy = cg.cfunc(lib.saxpy, "void saxpy(int n, float a, const float *x, float *y)",
                   args="n, a, x[n], inout y[n]")
  program = lambda x: saxpy(2.0, jax.vmap(cube)(x), x)
  result = program(jnp.arange(3.0)).tolist()
""")


def test_the_compiled_glue_is_kept_between_processes(
  path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("CXX", quick_cpp.plain())
  monkeypatch.setenv("CALLGATE_CACHE_DIR", "")  # as it was before, once this has ended
  monkeypatch.setattr(sys, "argv", ["", str(path), str(tmp_path)])
  here: dict[str, Any] = {}
  exec(DEFINITIONS, here)
  made = sorted(tmp_path.rglob("*.so"))
  stamps = [file.stat().st_mtime_ns for file in made]
  assert len(made) == 2
  printed = printed_by(DEFINITIONS + "print(result)", str(path), str(tmp_path))
  assert printed == f"{here['result']}\n"
  assert [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("*.so"))] == stamps
