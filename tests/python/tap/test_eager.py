# SPDX-License-Identifier: Apache-2.0
"""Taps and prints outside of programs: a function that is made for one call costs no program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import callgate as cg
from callgate._tap import primitive

X = jnp.arange(3.0)


def programs_kept() -> int:
  return primitive._programs().cache_info().currsize


# Calls outside of programs that send to a function that is made for one call.
EAGER: dict[str, Callable[[Callable[[Any], None]], object]] = {
  "tap": lambda f: cg.tap(X, f),
  "dataflow": lambda f: cg.tap(X, f, effect="dataflow"),
  "ordered": lambda f: cg.tap(X, f, ordered=True),
  "where": lambda f: cg.tap(X, f, where=jnp.bool_(True)),
  "vmap": lambda f: jax.vmap(lambda x: cg.tap(x, f))(jnp.stack([X, X])),
  "sized": lambda f: cg.tap(X, f, logical_shape=(jnp.int32(2),)),
  "packed": lambda f: cg.tap(X.astype(jnp.int4), f),
}


@pytest.mark.parametrize("how", EAGER)
def test_a_tap_to_a_function_made_for_one_call_makes_no_program(how: str) -> None:
  expected: list[Any] = []
  consumer = lambda value: expected.append((value.tolist(), value.dtype.name))
  program = jax.jit(lambda: EAGER[how](consumer))
  program()
  cg.barrier()
  before = programs_kept()
  found: list[Any] = []
  for _ in range(3):
    EAGER[how](lambda value: found.append((value.tolist(), value.dtype.name)))
  cg.barrier()
  assert found == expected * 3
  assert programs_kept() == before


def test_a_print_outside_of_programs_makes_no_program(capsys: pytest.CaptureFixture[str]) -> None:
  before = programs_kept()
  for number in range(3):
    cg.print("{} {}", X, number)
  cg.barrier()
  assert capsys.readouterr().out == "".join(f"[0. 1. 2.] {number}\n" for number in range(3))
  assert programs_kept() == before


def test_ordered_taps_outside_of_programs_keep_the_order_with_programs() -> None:
  seen: list[int] = []
  program = jax.jit(
    lambda n: jax.lax.fori_loop(
      0, 5, lambda i, c: (cg.tap(n + i, lambda v: seen.append(int(v)), ordered=True), c)[1], 0
    )
  )
  for start in range(0, 30, 10):
    program(start)
    cg.tap(jnp.int32(start + 5), lambda v: seen.append(int(v)), ordered=True)
  cg.barrier()
  assert seen == sorted(seen)
  assert len(seen) == 18


def test_the_info_of_an_eager_tap_is_that_of_a_programs() -> None:
  infos: list[cg.TapInfo] = []

  def consume(value: Any, info: cg.TapInfo) -> None:
    infos.append(info)

  cg.tap(X, lambda value, info: consume(value, info), name="told")
  jax.jit(lambda x: cg.tap(x, consume, name="told"))(X)
  cg.barrier()
  eager, compiled = (
    dataclasses.replace(info, time_ns=0, run=-1, seq=0, transforms=()) for info in infos
  )
  assert eager == compiled


def test_a_tap_of_an_array_whose_program_failed_sends_nothing() -> None:
  @cg.gate(out=lambda x: x)
  def fail(x: Any) -> Any:
    raise ValueError("no")

  got: list[Any] = []
  with pytest.raises((ValueError, jax.errors.JaxRuntimeError)), cg.errors():
    cg.tap(jax.jit(fail)(X), lambda value: got.append(value))
  assert got == []
