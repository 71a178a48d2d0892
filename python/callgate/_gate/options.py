# SPDX-License-Identifier: Apache-2.0
"""The options of `callgate.gate`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

from callgate._arrays import bind, gpu
from callgate._call.options import CallOptions
from callgate._core import options as check
from callgate._core import signatures, spellings
from callgate._core.errors import GateDefinitionError
from callgate._core.options import option
from callgate._core.public import Public, core
from callgate._places import threads
from callgate._places.executors import ExecutorPlace
from callgate._places.place import XLA, Place
from callgate._places.workers import Workers, shared

Style = Literal["return", "inplace", "context"]
Arrays = Literal["numpy", "buffer", "jax", "torch", "cupy", "numba"]
Thread = Literal["xla", "own"]
RunOn = Literal["xla", "own", "processes"] | Workers | threads.Thread | concurrent.futures.Executor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GateOptions(CallOptions):
  """The options of a gate.

  Attributes:
    arrays: what the callable gets: "numpy" views, "buffer" (`callgate.Buffer`), "jax" or "torch"
      arrays, all zero-copy on the CPU. Torch has no read-only tensors: do not write to inputs
      (`config(check_writes=True)` finds who does). On a CUDA GPU see above.
    run_on: where the callable runs. "xla": on XLA's calling thread: fastest. "own": on a thread of
      callgate's; XLA's is free meanwhile, so the callable may itself run JAX programs of any size.
      `callgate.thread`: the same, always on that one thread.
      "processes": in worker processes, as many as CPUs; or those of `callgate.workers`. Or a
      `concurrent.futures.Executor`. The lanes of vmap="each" are spread over workers, and run at
      once. See the guide "Workers".
    thread: "own" is another spelling of run_on="own".
    timeout: seconds after which the program fails with a report. The callable keeps running; its
      result is ignored. Implies run_on="own", and private copies of the arrays. A worker is ended
      and replaced instead.
    retries: how often lanes run again whose worker has ended; with effect="pure".
    affinity: "lane": a lane always runs on the same worker; of a class, each lane has its own
      object. Default: any worker.
    in_flight: how many pieces of a call's lanes an executor has at a time. Default: two for each
      of its workers.
    cast: allow same-kind casts of results (float64 to float32, say). Default: as `config(cast=)`
      says, which is False. Integers of another width, and Python's numbers to a kind that includes
      theirs, are cast in any case; one that the result's dtype does not hold is an error.
    copy: arguments are private copies, which the callable may keep, and of NumPy's may write to;
      for arrays in the host's memory. Results' views (`out`) are still XLA's.
    collective: every device makes its call, also where several have the same shard, and knows its
      position: `context.rank`, `.size`, `.coordinates` on the mesh. For gates that talk to each
      other.
    command_buffer: on a CUDA GPU, lets XLA record what the callable launches into a CUDA graph and
      replay that. Elsewhere it changes nothing. See above.
    style: "return" (`fn(*args)` returns the results, checked strictly and copied once), "inplace"
      (`fn(out, *args)` writes into views of XLA's result memory, and returns None or `out`) or
      "context" (`fn(context, out, *args)`, with `context.stage`, `.stream`,
      `.stream_as(library)`, `.device`, and `.rank`, `.size`, `.coordinates` of the shard).
  """

  arrays: Arrays = option("numpy", check.choice, allowed=get_args(Arrays))
  run_on: RunOn = "xla"
  thread: Thread = option("xla", check.choice, allowed=get_args(Thread))
  timeout: float | None = option(None, check.seconds)
  retries: int = option(0, check.count, most=1000)
  affinity: Literal["lane"] | None = option(None, check.choice, allowed=("lane",))
  in_flight: int | None = option(None, check.count, least=1)
  cast: bool | None = option(None, check.boolean)
  copy: bool = option(False, check.boolean)
  collective: bool = option(False, check.boolean)
  command_buffer: bool = option(False, check.boolean)
  style: Style = option("return", check.choice, allowed=get_args(Style))

  def checked(self, label: str) -> "GateOptions":
    made = super().checked(label)
    made = dataclasses.replace(made, run_on=_run_on(label, made.run_on, made.thread))
    _check_place(label, made)
    if made.copy and made.arrays in gpu.KINDS and made.arrays not in ("buffer", "torch"):
      raise no_copy(label, made.arrays)
    problem = ""
    if not bind.is_native(made.arrays):
      kinds = ", ".join(map(repr, gpu.KINDS))
      problem = f"arrays that stay on the GPU ({kinds}), got arrays={made.arrays!r}"
    elif made.style == "return":
      got = "got style='return', whose results are gone at a replay"
      problem = f"style='inplace' or 'context', {got}"
    elif made.effect != "pure":
      why = "a graph that is replayed does not call the callable"
      problem = f"effect='pure', got effect={made.effect!r}: {why}"
    if made.command_buffer and problem:
      raise GateDefinitionError(f"{label}: command_buffer=True: expected {problem}")
    return made


def place_of(run_on: Any) -> Place:
  """The place of a checked `run_on=`."""
  if isinstance(run_on, Public):
    return core(run_on)
  return XLA if isinstance(run_on, str) else ExecutorPlace(run_on)


def _run_on(label: str, value: Any, thread: Thread) -> RunOn:
  """`run_on=value`, checked: one of "xla" and "own", workers, a thread or an executor."""
  if isinstance(value, str) and value in ("xla", "own", "processes"):
    name = str(value)
    if thread == "own" and name == "processes":
      check.refuse(label, "run_on", "'own', as thread='own' says", value)
    if name == "processes":
      return shared()
    return "own" if "own" in (thread, name) else "xla"
  if not isinstance(value, (Workers, threads.Thread, concurrent.futures.Executor)):
    check.refuse(
      label, "run_on",
      "one of 'xla', 'own', 'processes', callgate.workers(...), callgate.thread(...) or a "
      "concurrent.futures.Executor", value,
    )  # fmt: skip
  if thread == "own":
    check.refuse(label, "run_on", "'own', as thread='own' says", value)
  return value


# The options that few places take, and which.
_OF_PLACES = {
  "retries": "workers or an executor", "affinity": "'processes' or workers",
  "in_flight": "an executor",
}  # fmt: skip


def _check_place(label: str, made: "GateOptions") -> None:
  """Raises for options that the place where a gate runs has no use for."""
  place, at = place_of(made.run_on), f"{label}: run_on={made.run_on!r}"
  for name, expected in _OF_PLACES.items():
    if getattr(made, name) and name not in place.takes:
      raise GateDefinitionError(f"{label}: {name}: expected run_on= {expected}")
  if made.retries and made.effect != "pure":
    raise GateDefinitionError(
      f"{label}: retries={made.retries}: expected effect='pure', got effect={made.effect!r}, which "
      "runs once"
    )
  if made.command_buffer and place is not XLA:
    raise GateDefinitionError(f"{at}: expected command_buffer=False")
  if place.is_here:
    return
  check.choice(label, f"run_on={made.run_on!r}: arrays", made.arrays, place.arrays)
  if made.style == "context":
    raise GateDefinitionError(
      f"{at}: expected style='return' or 'inplace', got 'context': other processes have no stream"
    )
  if made.collective:
    raise GateDefinitionError(f"{at}: expected collective=False")


# Type checkers take the keywords of one style from these.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InplaceOptions(GateOptions):
  style: Literal["inplace"] = dataclasses.field()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ContextOptions(GateOptions):
  style: Literal["context"] = dataclasses.field()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReturnOptions(GateOptions):
  style: Literal["return"] = "return"


def no_copy(label: str, arrays: str) -> GateDefinitionError:
  which = "arrays='numpy' or 'jax'; 'buffer' and 'torch' in programs for the CPU"
  expected = f"expected arrays in the host's memory ({which})"
  got = f"got arrays={arrays!r} on a GPU, which are XLA's own"
  return GateDefinitionError(f"{label}: copy=True: {expected}, {got}")


def take_options(
  caller: str, fn: Callable[..., Any], given: dict[str, Any]
) -> tuple[tuple[str, Any], ...]:
  """Takes a gate's options out of what a call was given; the rest are its static keywords."""
  known = {field.name for field in dataclasses.fields(GateOptions)} & given.keys()
  others = {name: value for name, value in given.items() if name not in known}
  spellings.answer(caller, others, signatures.accepted(fn, others))
  return tuple((key, given.pop(key)) for key in sorted(known))
