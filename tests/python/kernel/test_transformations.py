# SPDX-License-Identifier: Apache-2.0
"""Kernels in the table of transformations, whose rules are a gate's; their programs elsewhere.

Numba's kernels have `numba/test_programs.py`.
"""

from __future__ import annotations

import json
import random
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import printed_by
from jax import export
from programs import CACHED
from transformation_table import (
  EFFECT_PAIRS,
  TRANSFORMATIONS,
  TRIPLES,
  F,
  X,
  assert_chains_agree,
  expected,
  groups,
  reference,
)

import callgate as cg

EACH = """
  void wave(cg::In<float, 1> x, cg::Out<float, 1> y) {
    float sum = 1;
    for (float e : x) sum += e;
    for (int64_t i = 0; i < x.size(); ++i) y[i] = std::sin(x[i]) * sum;
  }
"""
# Any number of leading axes.
ROWS = """
  template <class T, int R> void wave(cg::In<T, R> x, cg::Out<T, R> y) {
    int64_t n = x.extent(R - 1);
    for (int64_t row = 0; row < x.size(); row += n) {
      T sum = 1;
      for (int64_t i = 0; i < n; ++i) sum += x[row + i];
      for (int64_t i = 0; i < n; ++i) y[row + i] = std::sin(x[row + i]) * sum;
    }
  }
"""


def cpp(source: str, **options: Any) -> Callable[[Any], F]:
  return lambda effect: cg.cpp(source, effect=effect, flags=("-O0",), **options)


def with_jvp(effect: Any) -> F:
  kernel: Any = cpp(EACH, out=lambda x: x, thread_safe=True)(effect)

  @kernel.defjvp
  def _(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    sum_ = 1 + jnp.sum(x)
    return kernel(x), jnp.cos(x) * sum_ * dx + jnp.sin(x) * jnp.sum(dx)

  return kernel


def pointwise(x: Any) -> Any:
  return jnp.sin(x) * (1 + x)


def in_elementwise(effect: Any) -> F:
  return cg.elementwise("T x", "T z", "z = sin(x) * (1 + x)", like=pointwise, effect=effect)


KINDS: dict[str, tuple[Callable[[Any], F], F]] = {
  "each": (cpp(EACH, like=reference), reference),
  "each, defjvp, on threads": (with_jvp, reference),
  "whole, a template": (cpp(ROWS, like=reference, vmap="whole"), reference),
  "broadcast": (cpp(ROWS, like=reference, vmap="broadcast"), reference),
  "elementwise": (in_elementwise, pointwise),
}


CHAINS = [(kind, chains) for kind in KINDS for chains in groups(4)]


@pytest.mark.parametrize(("kind", "chains"), [*CHAINS, *(("each", c) for c in groups(0, 8, 11))])
def test_pairs_of_transformations_agree_with_jax(kind: str, chains: Any) -> None:
  make, truth = KINDS[kind]
  assert_chains_agree(chains, make=make, truth=truth)


@pytest.mark.parametrize("kind", KINDS)
def test_triples_of_transformations_agree_with_jax(kind: str) -> None:
  make, truth = KINDS[kind]
  assert_chains_agree(random.Random(kind).sample(TRIPLES, 4), make=make, truth=truth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("effect", ["io", "ordered"])
def test_pairs_of_transformations_take_effects(kind: str, effect: Any) -> None:
  make, truth = KINDS[kind]
  chains = random.Random(kind + effect).sample(EFFECT_PAIRS, 6)
  assert_chains_agree(chains, effect, make=make, truth=truth)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_work_outside_jit(name: str) -> None:
  kernel = KINDS["each"][0]("pure")
  wanted = zip(TRANSFORMATIONS, expected(tuple((each,) for each in TRANSFORMATIONS)), strict=True)
  got = TRANSFORMATIONS[name](kernel)(X)
  np.testing.assert_allclose(got, dict(wanted)[name], rtol=1e-4, atol=1e-5)


# -- programs in other processes -----------------------------------------------------------------
KERNELS = textwrap.dedent("""
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  same = lambda x, *_, **__: x
  double = cg.cpp('''
    void f(cg::In<float, 1> x, cg::Out<float, 1> y) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i];
    }''', out=same, name="elsewhere.double", flags=("-O0",))
  scale = cg.cpp('''
    template <class T, int R, bool kNegate>
    void f(cg::In<T, R> x, cg::Attr<double> by, cg::Dict more, cg::String how, cg::Out<T, R> y) {
      double sign = (kNegate ? -1 : 1) * more.get<double>("factor") * double(how.size());
      for (int64_t i = 0; i < x.size(); ++i) y[i] = T(sign * by * x[i]);
    }''', out=same, name="elsewhere.scale", flags=("-O0",), vmap="whole")
  join = cg.cpp('''
    void f(cg::Ins<float, 1> xs, cg::Outs<float, 1> ys) {
      for (int k = 0; k < xs.size(); ++k) ys[xs.size() - 1 - k][0] = xs[k][0];
    }''', out=same, name="elsewhere.join", flags=("-O0",))
  count = cg.cpp('''
    int calls = 0;
    void f(cg::In<float, 0> x, cg::Out<float, 0> y) { y() = x() + float(++calls); }
    ''', out=same, name="elsewhere.count", flags=("-O0",), effect="ordered")
""")
MORE = textwrap.dedent("""
  X = jnp.array([3.0, 1.0, 2.0])
  def scaled(x):
    return scale(x, 1.5, {"factor": 2.0}, "abc", kNegate=True)
  PROGRAMS = {
    "plain": (lambda x: double(x) + 1, X),
    "lanes": (jax.vmap(double), jnp.stack([X, -X])),
    "template": (scaled, X),
    "template, whole": (jax.vmap(scaled), jnp.stack([X, -X])),
    "template of integers": (scaled, jnp.arange(4)),
    "variadic": (lambda x: join([x[:1], x[1:2], x[2:]]), X),
    "ordered": (lambda x: count(count(x)) - x, jnp.float32(1)),
  }
""")
CALL = textwrap.dedent("""
  import json, pathlib
  from jax import export
  for name, x, dtype in json.loads(sys.argv[2]):
    loaded = export.deserialize(bytearray(pathlib.Path(sys.argv[3], name).read_bytes()))
    try:
      got = jax.tree.map(lambda v: v.tolist(), loaded.call(jnp.array(x, dtype)))
    except jax.errors.JaxRuntimeError as error:
      got = str(error)
    print(json.dumps([name, got]))
  print("end of the calls")
""")
# The kernel of this name has another parameter in the other processes.
CHANGED = """
changed = cg.cpp("void f(cg::In<float, 1> x, %s cg::Out<float, 1> y) { y[0] = x[0]; }", out=same,
                 name="elsewhere.changed", flags=("-O0",))
"""
_here: dict[str, Any] = {}
exec(KERNELS + CHANGED % "" + MORE, _here)
NAMES = list(_here["PROGRAMS"])


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
  """The lines of two processes, one after the other, that define the kernels.

  They call the programs that were exported here, and then trace and compile their own, with a
  persistent cache.
  """
  exports, cache = (tmp_path_factory.mktemp(name) for name in ("exports", "cache"))
  arguments: list[Any] = []
  programs = {**_here["PROGRAMS"], "changed": (_here["changed"], _here["X"])}
  for name, (function, x) in programs.items():
    exported = export.export(jax.jit(function), disabled_checks=cg.export_checks())(x)
    (exports / name).write_bytes(exported.serialize())
    arguments.append([name, x.tolist(), x.dtype.name])
  code = KERNELS + CHANGED % "float a," + "import sys" + CALL + MORE + CACHED
  given = str(cache), json.dumps(arguments), str(exports)
  return [printed_by(code, *given, PYTHONHASHSEED=seed).splitlines() for seed in "12"]


@pytest.mark.parametrize("name", NAMES)
def test_exported_programs_run_in_a_process_that_never_traced_them(
  name: str, elsewhere: list[list[str]]
) -> None:
  function, x = _here["PROGRAMS"][name]
  want = jax.tree.map(lambda v: v.tolist(), jax.jit(function)(x))
  if name == "ordered":
    want = 3.0  # this process has counted on
  for printed in elsewhere:
    assert dict(map(json.loads, printed[: len(NAMES)]))[name] == want


def test_a_kernel_that_has_changed_since_the_export_is_refused(elsewhere: list[list[str]]) -> None:
  name, said = json.loads(elsewhere[0][len(NAMES)])
  assert name == "changed"
  assert "In<float32,1>,Out<float32,1>" in said
  assert "In<float32,1>,float32,Out<float32,1>" in said


def test_a_second_process_finds_every_program_in_the_persistent_cache(
  elsewhere: list[list[str]],
) -> None:
  first, second = (
    [line.split(": ") for line in printed[printed.index("end of the calls") + 1 :]]
    for printed in elsewhere
  )
  assert [line[:2] for line in second] == [[name, "1"] for name in NAMES]
  assert [line[2] for line in first] == [line[2] for line in second]
