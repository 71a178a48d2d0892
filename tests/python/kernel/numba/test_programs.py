# SPDX-License-Identifier: Apache-2.0
"""Numba kernels under JAX's transformations, and from the disk."""

# Numba has no types, so what its decorators return fits every overload.
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import json
import random
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from interpreters import printed_by
from property_checks import is_soak
from transformation_table import TRIPLES, X, expected, groups, reference, run

import callgate as cg

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
@pytest.mark.parametrize("pairs", groups(7))
def test_chains_of_transformations_agree_with_jax(pairs: Any, kind: str) -> None:
  # How lanes and effects run is the same for all kernels: kernel/test_transformations.py.
  pairs = pairs if kind in ("each", "whole") or is_soak() else []
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


# -- the disk ------------------------------------------------------------------------------------
SOURCE = textwrap.dedent("""
  import callgate as cg, numba as nb

  FACTOR = 3

  @nb.njit
  def helper(x):
    if x < 0:
      raise ValueError("negative", x)
    return x * FACTOR

  @cg.numba(out=lambda x, **_: x)
  def scaled(out, x, *, by=1.0):
    for i in range(x.size):
      out[i] = helper(x[i]) * by

  @cg.numba(out=lambda x: x, parallel=PARALLEL)
  def other(out, x):
    for i in nb.prange(x.size):
      out[i] = helper(x[i])
""")
SERIAL = SOURCE.replace("PARALLEL", "False")  # which Numba compiles in a third of the time
# Runs each source with its cache, and tells results, the number of Numba's passes, and warnings.
PROCESS = textwrap.dedent("""
  import json, os, sys, warnings
  import callgate as cg, jax, jax.numpy as jnp, numba as nb

  passes, said = [], []
  manager = nb.core.compiler_machinery.PassManager
  run = manager.run
  manager.run = lambda self, state: (passes.append(state), run(self, state))[1]
  warnings.simplefilter("always", RuntimeWarning)
  warnings.showwarning = lambda message, *_: said.append(str(message))

  def use(function, x):
    try:
      with cg.errors():
        return function(x).tolist()
    except ValueError as error:
      return error.args

  for source, folder in json.loads(sys.argv[1]):
    os.environ["CALLGATE_CACHE_DIR"] = folder
    passes.clear()
    said.clear()
    made = {"__name__": "__main__"}
    exec(source, made)
    scaled, other, x = made["scaled"], made["other"], jnp.arange(4.0)
    f = jax.jit(lambda x: scaled(x, by=0.5) + jax.vmap(other)(x.reshape(2, 2)).ravel())
    print(json.dumps([[use(f, x), use(f, -x), use(scaled, -x)], len(passes), said]))
""")
CHANGES = {
  "a global": ("FACTOR = 3", "FACTOR = 5"),
  "a helper": ("x * FACTOR", "x + FACTOR"),
  "the function": ("out[i] = ", "out[i] = 1 + "),
}
RESULTS = [[0.0, 4.5, 9.0, 13.5], ["negative", -1.0], ["negative", -1.0]]


def told(steps: dict[str, tuple[str, Path]]) -> dict[str, Any]:
  """By step of a new process, what it tells."""
  given = json.dumps([(source, str(folder)) for source, folder in steps.values()])
  printed = printed_by(PROCESS, given, preload="numba").splitlines()
  return dict(zip(steps, map(json.loads, printed), strict=True))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
  """The answers of a process that fills a cache, and of one after it with that cache and copies."""
  first, damaged, of_others, blocked = (
    tmp_path_factory.mktemp(name) for name in ("first", "damaged", "others", "blocked")
  )
  parallel = tmp_path_factory.mktemp("parallel"), SOURCE.replace("PARALLEL", "True")
  found = told({"first": (SERIAL, first), "parallel": parallel[::-1]})
  for entry in (first / "numba").rglob("*.bin"):
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    copy = damaged / entry.relative_to(first)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(content)
  shutil.copytree(first / "numba", of_others / "numba")
  (of_others / "numba").chmod(0o777)
  (blocked / "numba").write_text("not a folder")
  changed = {name: (SERIAL.replace(*change), first) for name, change in CHANGES.items()}
  return found | told({
    "again": (SERIAL, first), "parallel again": parallel[::-1], **changed,
    "damaged": (SERIAL, damaged), "mended": (SERIAL, damaged), "of others": (SERIAL, of_others),
    "blocked": (SERIAL, blocked),
  })  # fmt: skip


@pytest.mark.parametrize(("first", "again"), [("first", "again"), ("parallel", "parallel again")])
def test_a_second_process_compiles_nothing(first: str, again: str, steps: Any) -> None:
  results, passes, said = steps[first]
  assert (results, said) == (RESULTS, [])
  assert passes > 2
  assert steps[again] == [RESULTS, 0, []]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_what_a_function_uses_is_compiled_again(change: str, steps: Any) -> None:
  results, passes, said = steps[change]
  assert results != RESULTS
  assert passes > 2
  assert said == []


def test_a_damaged_entry_is_compiled_again(steps: Any) -> None:
  assert steps["damaged"] == steps["first"]
  assert steps["mended"] == [RESULTS, 0, []]


def test_machine_code_that_others_may_have_written_is_not_used(steps: Any) -> None:
  *compiled, (said,) = steps["of others"]
  assert compiled == steps["first"][:2]  # in this process
  assert re.search(r"/numba can be written to by other users.*chmod -R go-w", said)


def test_a_cache_that_can_t_be_written_does_no_harm(steps: Any) -> None:
  assert steps["blocked"] == steps["first"]


# -- programs from elsewhere ---------------------------------------------------------------------
def test_a_program_of_a_kernel_of_another_kind_is_refused() -> None:
  source = "void twice(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = 2 * x[0]; }"
  kernel = cg.cpp(source, out=like_x, name="test other kind")
  exported = jax.export.export(jax.jit(kernel), disabled_checks=cg.export_checks())(X[:1])
  program = exported.serialize()
  del kernel, exported
  jax.clear_caches()

  def twice(y: Any, x: Any) -> None:
    y[0] = 2 * x[0]

  own = cg.numba(twice, out=like_x, name="test other kind")
  with pytest.raises(cg.GateDefinitionError, match="of another kind; define the same"), cg.errors():
    jax.export.deserialize(program).call(X[:1])
  del own
