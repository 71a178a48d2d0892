# SPDX-License-Identifier: Apache-2.0
"""Questions about calls in this process: shapes, values, lanes, effects, memory, threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import dtypes, split
from callgate._core.errors import ResultError
from callgate._runtime import config
from callgate._verify.subject import (
  LANES,
  Fault,
  NotAsked,
  Subject,
  count_text,
  difference,
  said,
  tolerance,
)

_ROUNDS = 10  # of calls of each thread
_QUICK = 0.01  # seconds: of calls that take less there are many in each round, so that some overlap
_MANY = 20
_HANGS = 60.0  # seconds until threads count as hanging


# -- results ---------------------------------------------------------------------------------------
def shapes(subject: Subject) -> str:
  """Calls with arguments of this size and of other sizes that `out=` or `like=` allow."""
  core = subject.core
  declared = callable(core.out) or core.out is None
  if not subject.is_gate or not declared:
    return "of this size, the only declared one" if not declared else "of this size"
  taken = 0
  for values in _of_other_sizes(subject.values()):
    try:
      subject.run(subject.jitted, values)
    except ResultError as error:
      sizes = ", ".join(dtypes.type_text(x.dtype, x.shape) for x in values)
      raise Fault(f"called with ({sizes}): {said(error)}") from error
    except Exception:  # noqa: BLE001 - the callable does not take such sizes
      continue
    taken += 1
  return f"of this size and {count_text(taken, 'other')}"


def _of_other_sizes(values: Sequence[Any]) -> Iterator[list[Any]]:
  """Yields the arrays with all extents changed in the same way, filled with their own elements."""
  for change in (lambda n: n + 1 if n > 1 else n, lambda n: 2 * n):
    made = [tuple(change(n) for n in x.shape) for x in values]
    if made != [x.shape for x in values] and not any(split.is_key(x) for x in values):
      yield [np.resize(x, shape) for x, shape in zip(values, made, strict=True)]


def like(subject: Subject) -> str:
  """Compares the values with the reference's, as `check` does."""
  core = subject.core
  if core.like is None:
    raise NotAsked("no like=")
  subject.compared()
  near = max(1e-5, *(tolerance(y.dtype) / 10 for y in subject.results))
  try:
    subject.function.check(*subject.args, rtol=near, atol=near / 10, **subject.kwargs)
  except AssertionError as error:
    raise Fault(str(error).strip()) from error
  return "as like="


# -- lanes -----------------------------------------------------------------------------------------
def vmap(subject: Subject) -> str:
  """Compares lanes with single calls, for arguments with and without a batch axis."""
  subject.compared()
  rows = list(zip(*subject.lanes, strict=True))  # by argument
  if not rows:
    raise NotAsked("no argument is an array")
  for axes in _axes(subject):
    lanes = [
      [row[n if axis is not None else 0] for row, axis in zip(rows, axes, strict=True)]
      for n in range(LANES)
    ]
    want = [subject.run(subject.jitted, lane) for lane in lanes]
    stacked = [_stacked(row, axis) for row, axis in zip(rows, axes, strict=True)]
    got = subject.run(jax.jit(jax.vmap(subject.flat, axes)), stacked)
    expected = [np.stack(results) for results in zip(*want, strict=True)]
    if found := difference(expected, got):
      shown = axes[0] if len(axes) == 1 else axes
      raise Fault(f"in_axes={shown}, lane by lane: {found}")
  alike = not any(difference([row[0]], [x]) for row in rows for x in row[1:])
  how = ", with the same values in all lanes" if alike else ""
  return f"as calls lane by lane, with {len(_axes(subject))} in_axes{how}"


def _stacked(row: Sequence[Any], axis: int | None) -> Any:
  if axis is None:
    return row[0]
  return jnp.stack(row, axis) if split.is_key(row[0]) else np.stack(row, axis)


def _axes(subject: Subject) -> list[tuple[int | None, ...]]:
  """Returns in_axes: all arguments, each alone, all but each, and all with the last axis."""
  values = subject.values()
  count = len(values)
  masks = [{*range(count)}]
  for i in range(min(count, 4)):
    masks += [{i}, {*range(count)} - {i}]
  found: list[tuple[int | None, ...]] = [
    tuple(0 if i in mask else None for i in range(count)) for mask in masks if mask
  ]
  if not any(split.is_key(x) for x in values):
    found.append(tuple(x.ndim for x in values))
  return list(dict.fromkeys(found))


# -- how often -------------------------------------------------------------------------------------
def effects(subject: Subject) -> str:
  """Counts the calls of programs, including calls by other threads."""
  core = subject.core
  if subject.varies and core.effect == "pure":
    raise Fault(
      "effect='pure': expected the same results from the same arguments, got different ones in "
      "a second call"
    )
  if not subject.is_gate:
    raise NotAsked("calls of native code are not counted")
  if config.engine() == "jax":
    raise NotAsked("config(engine='jax'): JAX's own callbacks make the calls")
  has_results, pure = any(y.size for y in subject.results), core.effect == "pure"
  once = 1 if has_results or not pure else 0
  program = jax.jit(subject.flat)
  _counted(subject, "the first call of a program", program, once)
  _counted(subject, "its second call", program, once)
  unused = jax.jit(lambda *xs: (subject.flat(*xs), jnp.zeros(()))[1])
  _counted(subject, "a program that uses no result", unused, 0 if pure else 1)
  asked = ["jit", "second call"]
  by_runtime = core.vmap_rule is None and not core.traits.autograd
  if by_runtime and subject.values() and once:
    stacked = [_stacked([x] * LANES, 0) for x in subject.values()]
    calls = LANES if core.vmap == "each" else 1
    mapped = jax.jit(jax.vmap(subject.flat))
    _counted(subject, f"vmap='{core.vmap}' over {LANES} lanes", mapped, calls, stacked)
    asked.append("vmap")
  if once and core.like is not None and core.jvp_rule is None and core.vjp_rules is None:
    inexact = [i for i, x in enumerate(subject.values()) if dtypes.is_inexact(x.dtype)]
    if inexact and any(dtypes.is_inexact(y.dtype) for y in subject.results):
      _counted(subject, "a program with its results and derivative", _with_gradient(subject), 1)
      asked.append("grad")
  return f"called as often as effect={core.effect!r} declares: {', '.join(asked)}"


def _counted(
  subject: Subject,
  what: str,
  program: Callable[..., Any],
  calls: int,
  leaves: Sequence[Any] | None = None,
) -> None:
  before = subject.core.callee.stats()["calls"]  # pyright: ignore[reportAttributeAccessIssue]
  subject.run(program, leaves)
  after = subject.core.callee.stats()["calls"]  # pyright: ignore[reportAttributeAccessIssue]
  if after - before != calls:
    raise Fault(f"{what}: expected {count_text(calls, 'call')}, got {after - before}")


def _with_gradient(subject: Subject) -> Callable[..., Any]:
  """Returns the call with its gradient."""
  places = [i for i, x in enumerate(subject.values()) if dtypes.is_inexact(x.dtype)]

  def program(*leaves: Any) -> Any:
    def moved(*xs: Any) -> list[Any]:
      given = list(leaves)
      for i, x in zip(places, xs, strict=True):
        given[i] = x
      return [y for y in subject.flat(*given) if dtypes.is_inexact(y.dtype)]

    results, back = jax.vjp(moved, *(leaves[i] for i in places))
    return results, back([jnp.ones_like(y) for y in results])

  return jax.jit(program)


# -- memory ----------------------------------------------------------------------------------------
def escape(subject: Subject) -> str:
  """Fails if the calls of an earlier question found a kept view."""
  if not subject.is_gate:
    raise NotAsked("native code gets pointers, which callgate can't track")
  subject.run(subject.jitted)
  subject.run(subject.jitted)
  if subject.escaped:
    raise Fault(subject.escaped)
  return "no view was kept after a call"


def writes(subject: Subject) -> str:
  """Fails if the first call, under `check_writes` or `check_memory`, wrote to an input."""
  if not subject.values():
    raise NotAsked("no argument is an array")
  return (
    "inputs are unchanged" if subject.is_gate else ("inputs and memory around arrays are unchanged")
  )


# -- threads ---------------------------------------------------------------------------------------
def threads(subject: Subject) -> str:
  """Compares calls of two threads at once, with different arguments, with calls of one thread."""
  subject.compared()
  given = subject.lanes[:2]
  want = [subject.run(subject.jitted, lane) for lane in given]
  begin = time.monotonic()
  subject.run(subject.jitted, given[0])
  count = _MANY if time.monotonic() - begin < _QUICK else 1
  faults: list[str] = []
  start = threading.Barrier(len(given))

  def calls(*leaves: Any) -> list[Any]:
    return [subject.jitted(*leaves) for _ in range(count)]

  def work(lane: int) -> None:
    try:
      start.wait(_HANGS)
      for _ in range(_ROUNDS):
        if found := difference(want[lane] * count, subject.run(calls, given[lane])):
          faults.append(found)
        if faults:
          return
    except Exception as error:  # noqa: BLE001 - the answer
      faults.append(said(error))

  workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(given))]
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-5)
  try:
    for worker in workers:
      worker.start()
    for worker in workers:
      worker.join(_HANGS)
  finally:
    sys.setswitchinterval(interval)
  if any(worker.is_alive() for worker in workers):
    raise Fault(f"calls from two threads at once did not return within {_HANGS:g} s")
  if faults:
    raise Fault(f"called from two threads at once: {faults[0]}")
  return f"two threads, {_ROUNDS * count} calls each"
