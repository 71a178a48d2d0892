# SPDX-License-Identifier: Apache-2.0
"""Numba kernels under JAX's transformations, in other processes, and from the disk."""

# Numba has no types, so what its decorators return fits every overload.
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import random
import shutil
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import printed_by
from jax import export
from programs import drop_programs_until
from transformation_table import TRANSFORMATIONS, TRIPLES, X, expected, groups, reference, run

import callgate as cg
from callgate import _callgate

nb = pytest.importorskip("numba")

like_x = lambda x, *_, **__: x


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CALLGATE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield


# -- transformations -----------------------------------------------------------------------------
def in_place(out: Any, x: Any) -> None:
  total = np.float32(1)
  for i in range(x.size):
    total += x[i]
  for i in range(x.size):
    out[i] = np.sin(x[i]) * total


def whole(out: Any, x: Any) -> None:
  """As `in_place`, for all lanes at once."""
  rows, results = x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])
  for i in range(rows.shape[0]):
    in_place_compiled(results[i], rows[i])


in_place_compiled = nb.njit(in_place)
KERNELS = {
  "each": lambda: cg.numba(in_place, like=reference),
  "thread-safe": lambda: cg.numba(in_place, like=reference, thread_safe=True),
  "whole": lambda: cg.numba(whole, like=reference, vmap="whole"),
  "broadcast": lambda: cg.numba(whole, like=reference, vmap="broadcast"),
  "io": lambda: cg.numba(in_place, like=reference, effect="io"),
  "ordered": lambda: cg.numba(in_place, like=reference, effect="ordered"),
}


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("pairs", [[(name,) for name in TRANSFORMATIONS], *groups(7)])
def test_chains_of_transformations_agree_with_jax(pairs: Any, kind: str) -> None:
  chains = [*pairs, *random.Random(kind).sample(TRIPLES, 5)]
  got = run(chains, KERNELS[kind]())
  want = expected(tuple(chains))
  for chain, a, b in zip(chains, got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(chain))


def test_the_oracle_s_engine_gives_the_same() -> None:
  kernel = KERNELS["each"]()
  kernel.check(X)
  chains = [["vmap", "grad"], ["scan"], ["jvp", "vmap"]]
  ours = run(chains, kernel)
  with cg.config(engine="jax"):
    theirs = run(chains, kernel)
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


@nb.njit
def solved(out: Any, diagonal: Any, lower: Any, right: Any) -> None:
  """Forward substitution with a bidiagonal matrix."""
  for i in range(right.size):
    out[i] = right[i] if i == 0 else right[i] - lower[i - 1] * out[i - 1]
    out[i] /= diagonal[i]


def dense(diagonal: Any, lower: Any, right: Any) -> Any:
  return jnp.linalg.solve(jnp.diag(diagonal) + jnp.diag(lower, -1), right)


D, L, R = jnp.array([2.0, 3.0, 4.0]), jnp.array([1.0, -1.0]), jnp.array([1.0, 2.0, 3.0])


def test_rules_that_call_kernels_give_jax_s_derivatives() -> None:
  solve = cg.numba(solved, out=lambda d, low, r: r)

  @solve.defjvp
  def _(primals: Any, tangents: Any) -> Any:
    (d, low, r), (dd, dl, dr) = primals, tangents
    x = solve(d, low, r)
    change = dr - dd * x - jnp.concatenate([jnp.zeros(1), dl * x[:-1]])
    return x, solve(d, low, change)

  ours = jax.jit(jax.jacfwd(jax.vmap(solve, (None, None, 0)), (0, 1)))(D, L, jnp.stack([R, -R]))
  theirs = jax.jacfwd(jax.vmap(dense, (None, None, 0)), (0, 1))(D, L, jnp.stack([R, -R]))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)


def test_a_linear_kernel_is_transposed_by_its_rule() -> None:
  solve = cg.numba(solved, out=lambda d, low, r: r, linear=2)
  backwards = cg.numba(
    lambda out, d, low, r: solved(out[::-1], d[::-1], low[::-1], r[::-1]), out=lambda d, low, r: r
  )
  solve.deftranspose(lambda ct, d, low, r: backwards(d, low, ct))
  ours = jax.grad(lambda r: (solve(D, L, r) * R).sum())(R)
  np.testing.assert_allclose(ours, jax.grad(lambda r: (dense(D, L, r) * R).sum())(R), rtol=1e-5)


def test_finite_differences_are_close_to_the_derivative() -> None:
  kernel = cg.numba(in_place, out=like_x, gradient="finite-difference")
  ours = jax.jacrev(kernel)(X)
  np.testing.assert_allclose(ours, jax.jacrev(reference)(X), atol=2e-3)


# -- other processes -----------------------------------------------------------------------------
DEFINE = textwrap.dedent("""
  import callgate as cg, jax, jax.numpy as jnp, numba as nb, numpy as np, sys, pathlib
  from jax import export

  COMPILED = []
  class Listener(nb.core.event.Listener):
    def on_start(self, event):
      COMPILED.append(str(event.data["dispatcher"]) if "dispatcher" in event.data else "?")
    def on_end(self, event):
      pass

  nb.core.event.register("numba:compile", Listener())
  PASSES = []
  run_pass = nb.core.compiler_machinery.PassManager.run
  nb.core.compiler_machinery.PassManager.run = lambda self, state: (
    PASSES.append(state.func_id.func_name), run_pass(self, state))[1]

  FACTOR = 3

  @nb.njit
  def helper(x):
    if x < 0:
      raise ValueError("negative", x)
    return x * FACTOR

  @cg.numba(out=lambda x, **_: x, name="numba.scaled")
  def scaled(out, x, *, by=1.0):
    for i in range(x.size):
      out[i] = helper(x[i]) * by

  @cg.numba(out=lambda x: x, name="numba.parallel", parallel=True)
  def parallel(out, x):
    for i in nb.prange(x.size):
      out[i] = helper(x[i])

  X = jnp.arange(4.0)
""")
USE = textwrap.dedent("""
  def use(function, x):
    try:
      with cg.errors():
        return function(x).tolist()
    except ValueError as error:
      return error.args

  f = jax.jit(lambda x: scaled(x, by=0.5) + jax.vmap(parallel)(x.reshape(2, 2)).ravel())
  print(use(f, X), use(f, -X), use(scaled, -X))
  print(len(PASSES))
""")


def fresh(code: str, folder: Path, *arguments: str, **environment: str) -> list[str]:
  environment["CALLGATE_CACHE_DIR"] = str(folder)
  return printed_by(code, *arguments, preload="numba", **environment).splitlines()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
  """A cache on disk, and what the process that filled it printed."""
  folder = tmp_path_factory.mktemp("numba-cache")
  return folder, fresh(DEFINE + USE, folder)


def test_a_second_process_compiles_nothing(first: Any) -> None:
  folder, printed = first
  assert int(printed[1]) > 2
  again = fresh(DEFINE + USE, folder)
  assert again == [printed[0], "0"]
  assert again[0].startswith("[0.0, 4.5, 9.0, 13.5] ('negative', -1.0) ('negative', -1.0)")


@pytest.mark.parametrize(
  ("what", "new"),
  [("FACTOR = 3", "FACTOR = 5"), ("x * FACTOR", "x + FACTOR"), ("out[i] = ", "out[i] = 1 + ")],
  ids=["global", "helper", "function"],
)
def test_a_change_in_what_a_function_uses_is_compiled_again(
  what: str, new: str, first: Any
) -> None:
  folder, printed = first
  again = fresh(DEFINE.replace(what, new) + USE, folder)
  assert int(again[1]) > 2
  assert again[0] != printed[0]


def test_a_damaged_entry_is_compiled_again(first: Any, tmp_path: Path) -> None:
  folder, printed = first
  for entry in (folder / "numba").rglob("*.bin"):
    copy = tmp_path / entry.relative_to(folder)
    copy.parent.mkdir(parents=True, exist_ok=True)
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
  again = fresh(DEFINE + USE, tmp_path)
  assert again == printed
  assert fresh(DEFINE + USE, tmp_path) == [printed[0], "0"]


def test_machine_code_that_others_may_have_written_is_not_used(first: Any, tmp_path: Path) -> None:
  folder, printed = first
  shutil.copytree(folder / "numba", tmp_path / "numba")
  (tmp_path / "numba").chmod(0o777)
  listen = """
import warnings
warnings.simplefilter("always", RuntimeWarning)
warnings.showwarning = lambda message, *_: print(message)
"""
  said, *compiled = fresh(listen + DEFINE + USE, tmp_path)
  assert compiled == printed  # in this process
  assert f"{tmp_path / 'numba'} can be written to by others" in said
  assert "chmod -R go-w" in said


def test_a_cache_that_can_t_be_written_does_no_harm(first: Any, tmp_path: Path) -> None:
  (tmp_path / "numba").write_text("not a folder")
  assert fresh(DEFINE + USE, tmp_path) == first[1]


def test_an_exported_program_calls_its_kernels_in_a_process_that_never_traced_them(
  first: Any, tmp_path: Path
) -> None:
  here: dict[str, Any] = {"__name__": "__main__"}
  exec(DEFINE.partition("COMPILED")[0] + "\n" + DEFINE[DEFINE.index("FACTOR = 3") :], here)
  program = jax.jit(lambda x: here["parallel"](here["scaled"](x, by=0.25)) + 1)
  exported = export.export(program, disabled_checks=cg.export_checks())(here["X"])
  file = tmp_path / "program"
  file.write_bytes(exported.serialize())
  call = "print(export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes())).call(X))"
  assert fresh(DEFINE + call, first[0], str(file)) == [str(program(here["X"]))]
  printed = fresh(
    "import callgate, jax, jax.numpy as jnp, pathlib, sys\nfrom jax import export\n"
    f"try:\n  {call.replace('X', 'jnp.arange(4.0)')}\n"
    "except jax.errors.JaxRuntimeError as error:\n  print(error)",
    first[0],
    str(file),
  )
  assert "numba.scaled" in printed[0] or "numba.parallel" in printed[0]


def test_a_kernel_lives_as_long_as_a_program_that_can_call_it(clean_caches: None) -> None:
  kernel = cg.numba(in_place, out=like_x)
  name = kernel.name
  compiled = jax.jit(kernel).lower(X).compile()
  del kernel
  jax.clear_caches()
  np.testing.assert_allclose(compiled(X), reference(X), rtol=1e-5)
  del compiled
  drop_programs_until(
    lambda: not any(known.startswith(name) for known in _callgate.registered_names())
  )
