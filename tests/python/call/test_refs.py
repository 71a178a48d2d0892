# SPDX-License-Identifier: Apache-2.0
"""A `jax.Ref` in the place of an array: the host gets what it holds when the call is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import callgate as cg

_seen: list[Any] = []


def _keep(x: Any) -> Any:
  _seen.append(np.asarray(x).tolist())
  return x


def _check(ref: Any) -> Any:
  cg.check(ref[0] > 50, "{x}", x=ref)
  return ref[0]


_gate = cg.gate(_keep, out=lambda x: x, effect="io")
_keyword = cg.gate(lambda x, *, y: _keep(y), out=lambda x, *, y: y, effect="io")
USES: dict[str, Callable[[Any], Any]] = {
  "tap": lambda ref: cg.tap(ref, _keep),
  "tap in a dict": lambda ref: cg.tap({"r": ref}, lambda value: _keep(value["r"])),
  "gate": _gate,
  "keyword": lambda ref: _keyword(1.0, y=ref),
  "call": lambda ref: cg.call(_keep, jax.ShapeDtypeStruct((3,), np.float32), ref, effect="io"),
  "started": lambda ref: _gate.start(ref).result(),
}


@pytest.mark.parametrize("name", USES)
def test_calls_read_it(name: str, engine: str) -> None:
  _seen.clear()

  @jax.jit
  def program(ref: Any) -> Any:
    ref[0] = 9.0
    USES[name](ref)
    ref[1] = 7.0

  program(jax.new_ref(jnp.arange(3.0)))
  cg.barrier()
  jax.effects_barrier()
  assert _seen == [[9, 1, 2]]


def test_checks_show_it(engine: str) -> None:
  with pytest.raises(cg.CheckError, match=r"\[0. 1. 2.\]"), cg.errors():
    jax.jit(_check)(jax.new_ref(jnp.arange(3.0))).block_until_ready()


@pytest.mark.parametrize("text", ["{}", "{x}"])
def test_prints_are_jaxs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
  def program(put: Any) -> None:
    def body(ref: Any) -> None:
      ref[0] = 9.0
      put(text, ref) if text == "{}" else put(text, x=ref)
      put("{}", ref.at[1:])

    jax.jit(body)(jax.new_ref(jnp.arange(3.0)))

    def kernel(x: Any, out: Any) -> None:
      put("{}", x)
      out[...] = 2 * x[...]

    shape = jax.ShapeDtypeStruct((3,), np.float32)
    jax.jit(pl.pallas_call(kernel, out_shape=shape, interpret=True))(np.arange(3, dtype=np.float32))

  program(cg.print)
  cg.barrier()
  got = capsys.readouterr().out
  assert got.splitlines() == ["[9. 1. 2.]", "[1. 2.]", "[0. 1. 2.]"]


def test_a_predicate_may_be_one(engine: str) -> None:
  seen = list[float]()
  program = jax.jit(lambda ref: cg.tap(1.0, lambda x: seen.append(float(x)), where=ref))
  program(jax.new_ref(jnp.array(True)))
  program(jax.new_ref(jnp.array(False)))
  cg.barrier()
  assert seen == [1]
