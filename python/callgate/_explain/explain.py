# SPDX-License-Identifier: Apache-2.0
"""`callgate.explain`: a table of a program's calls, with suggestions to make them faster."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from callgate._call.site import BoundCall
from callgate._core import options
from callgate._core.effects import GateEffect, HandleEffect, OrderedGateEffect, ProgressEffect
from callgate._explain import advice, gathers
from callgate._explain.call import ExplainedCall
from callgate._jax import execution, sources, walk
from callgate._runtime import config

_JAX_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")


@dataclasses.dataclass(frozen=True)
class Explanation:
  """The result of `explain` for a program; `str()` formats it as a table.

  Attributes:
    calls: the calls, in program order.
    devices: the number of devices that run the program.
    platform: the platform of the devices.
    dispatch: how JAX dispatches the program, and the reason.
  """

  calls: tuple[ExplainedCall, ...]
  devices: int
  platform: str
  dispatch: str

  def to_dict(self) -> dict[str, Any]:
    """Returns the same as dicts, lists and plain values, for JSON."""
    return dataclasses.asdict(self)

  def __str__(self) -> str:
    where = f"{self.devices} {self.platform} device{'s' if self.devices > 1 else ''}"
    lines = [f"{len(self.calls)} calls on {where}; dispatch: {self.dispatch}"]
    head = ("call", "effect", "times", "copies", "gathers", "program waits", "GIL")
    rows = [head, *(_row(call) for call in self.calls)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
      cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
      lines.append("  ".join(cells).rstrip())
      for text in self.calls[number - 1].advice if number else ():
        lines.append(f"    - {text}")
    return "\n".join(lines)


def _row(call: ExplainedCall) -> tuple[str, ...]:
  steps = [str(count) if count is not None else "n" for count in call.loops]
  times = " x ".join([*steps, *([f"{call.lanes} lanes"] if call.lanes != 1 else [])]) or "1"
  gathered = "" if call.gathers is None else _size(call.gathers)
  waits, gil = ("yes" if it else "no" for it in (call.waits, call.gil))
  return f"{call.kind} '{call.name}'", call.effect, times, _size(call.copies), gathered, waits, gil


def _size(count: int) -> str:
  for unit in ("B", "KiB", "MiB"):
    if count < 1024:
      return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
    count /= 1024  # pyright: ignore[reportAssignmentType]
  return f"{count:.3g} GiB"


def explain(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
  """Reports the cost of each call in a program, without running the program.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  sort = cg.gate(np.sort, out=lambda x: x, name="sort")
  report = cg.explain(jax.jit(jax.vmap(sort)), jnp.ones((1000, 64)))
  (call,) = report.calls
  assert (call.lanes, call.gil) == (1000, True)
  print(report)
  ```

  For each gate, kernel, tap, feed and JAX callback the report has the bytes that are copied and
  gathered, whether the program waits, whether the call holds the GIL, and how to make it faster.
  The program is traced and compiled for these arguments.

  Args:
    f: a function; pass the jitted function if its `jit` options matter.
    *args: the arguments of a call, or their types (`jax.ShapeDtypeStruct`).
    **kwargs: the keyword arguments of a call.

  Returns:
    An `Explanation`.

  Raises:
    GateDefinitionError: f is not callable.
  """
  options.function("explain", "f", f)
  jitted: Any = f if hasattr(f, "trace") else jax.jit(f)
  traced = jitted.trace(*args, **kwargs)
  compiled = traced.lower().compile()
  devices = _devices(compiled, args, kwargs)
  platform = jax.default_backend() if not devices else next(iter(devices)).platform
  found = list(_calls(traced.jaxpr, platform))
  if len(devices) > 1:
    found = _with_gathers(found, gathers.by_operation(compiled.as_text()))
  told = tuple(
    dataclasses.replace(call, advice=tuple(advice.of(call, gate))) for call, gate in found
  )
  path = _dispatch(traced.jaxpr.effects, len(devices), platform)
  if "C++" in path and execution.is_watched(compiled):
    path = "JAX's Python path, some 40 µs slower, because executions are watched (cg.stop)"
  return Explanation(told, max(len(devices), 1), platform, path)


def _devices(compiled: Any, *values: Any) -> set[Any]:
  shardings = [
    *jax.tree.leaves(compiled.input_shardings),
    *jax.tree.leaves(compiled.output_shardings),
  ]
  shardings += [x.sharding for x in jax.tree.leaves(values) if getattr(x, "sharding", None)]
  return set().union(*(sharding.device_set for sharding in shardings))


# -- a walk over the program -----------------------------------------------------------------------
_Found = tuple[ExplainedCall, Any]  # and its callee


def _calls(jaxpr: Any, platform: str) -> Iterator[_Found]:
  for *around, eqn in walk.paths(jaxpr):
    loops = tuple(_length(it) for it in around if it.primitive.name in ("scan", "while"))
    call = eqn.params.get("call")
    if isinstance(call, BoundCall):
      yield _of_gate(eqn, call, loops, platform)
    elif eqn.primitive.name == "tap":
      yield _of_tap(eqn, loops)
    elif eqn.primitive.name in _JAX_CALLBACKS:
      yield _of_jax(eqn, loops)


def _length(loop: Any) -> int | None:
  return None if loop.primitive.name == "while" else int(loop.params["length"])


def _of_gate(eqn: Any, call: BoundCall, loops: tuple[int | None, ...], platform: str) -> _Found:
  gate, site = call.gate, call.site
  by_jax = site.by_jax or config.engine() == "jax"
  native = gate.kind == "kernel"
  ins, outs = _bytes(eqn.invars), _bytes(eqn.outvars)
  elsewhere = getattr(gate, "remote", None) is not None
  private = getattr(gate, "copy", False) or getattr(gate, "timeout", 0)
  copies = 0 if native else outs if gate.style == "return" else 0
  if private:
    copies += ins
  if elsewhere or by_jax:
    copies = ins + outs
  if platform != "cpu" and not by_jax and not gate.traits.on_device:
    copies += ins + outs  # to the host and back
  kind, name = gate.kind, gate.name
  # The guard evaluates the predicate in C++. It calls the gate if a check fails or a breakpoint
  # stops.
  guard: str = getattr(getattr(gate, "guard", None), "name", "")
  if guard:
    kind, _, name = (
      guard.partition(":") if guard.startswith("check:") else ("breakpoint", "", guard)
    )
  found_late = kind == "check" and platform != "cpu" and not by_jax
  at_once = native or (not by_jax and (bool(guard) or gate.traits.reads_cell))
  return ExplainedCall(
    kind=kind, name=name, source=sources.source_of(eqn), effect=gate.effect, loops=loops,
    lanes=math.prod(size for size, _ in call.levels), copies=copies,
    gathers=None, waits=not found_late, gil=not at_once and not elsewhere,
  ), gate  # fmt: skip


def _of_tap(eqn: Any, loops: tuple[int | None, ...]) -> _Found:
  site = eqn.params["site"]
  sent = _bytes(eqn.invars[: site.values + len(site.logical)])
  return ExplainedCall(
    kind="tap", name=site.name, source=sources.source_of(eqn), effect=site.effect, loops=loops,
    lanes=1, copies=sent, gathers=None, waits=False, gil=False,
  ), site  # fmt: skip


def _of_jax(eqn: Any, loops: tuple[int | None, ...]) -> _Found:
  kind = eqn.primitive.name
  function = eqn.params.get("callback")
  function = getattr(function, "callback_func", function)
  name = getattr(function, "__name__", None) or kind
  ordered = bool(eqn.params.get("ordered"))
  effect = "pure" if kind == "pure_callback" else "ordered" if ordered else "io"
  return ExplainedCall(
    kind="JAX callback", name=name, source=sources.source_of(eqn), effect=effect, loops=loops,
    lanes=1, copies=_bytes(eqn.invars) + _bytes(eqn.outvars), gathers=None,
    waits=not kind.startswith("debug") or not config.installed(), gil=True,
  ), kind  # fmt: skip


def _bytes(atoms: Sequence[Any]) -> int:
  total = 0
  for atom in atoms:
    aval = atom.aval
    if all(isinstance(extent, int) for extent in getattr(aval, "shape", ())) and hasattr(
      aval, "dtype"
    ):
      itemsize = getattr(aval.dtype, "itemsize", 4)
      total += math.prod(aval.shape) * itemsize
  return total


def _with_gathers(found: list[_Found], moved: Mapping[str, int]) -> list[_Found]:
  """Adds the bytes of collectives to each call, by its name."""

  def of(call: ExplainedCall, gate: Any) -> int:
    name = gate if call.kind == "JAX callback" else f"callgate/{call.name}"
    variant = re.compile(rf".*/{re.escape(str(name))}(\[.*\])?")
    return max((size for op, size in moved.items() if variant.fullmatch(op)), default=0)

  return [(dataclasses.replace(call, gathers=of(call, gate)), gate) for call, gate in found]


def _dispatch(effects: Any, devices: int, platform: str) -> str:
  others = [it for it in effects if not isinstance(it, (GateEffect, HandleEffect, ProgressEffect))]
  if not effects or all(isinstance(it, ProgressEffect) for it in effects):
    return "JAX's C++ path, as without calls"
  if others:
    names = ", ".join(sorted({str(it) for it in others}))
    return f"JAX's Python path, some 40 µs slower, due to effects of others: {names}"
  if platform != "cpu":
    return f"JAX's Python path, some 40 µs slower, due to effects on {platform}"
  if devices > 1 and any(isinstance(it, OrderedGateEffect) for it in effects):
    return "JAX's Python path, some 100 µs slower, due to ordered calls on several devices"
  if not config.fast_dispatch():
    return "JAX's Python path, some 40 µs slower, due to config(fast_dispatch=False)"
  return "JAX's C++ path"
