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
from callgate._gate import turns
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
    arrays: the kind of arrays that the callable gets: "numpy" views, "buffer" (`callgate.Buffer`),
      "jax" or "torch" arrays, all zero-copy on the CPU. PyTorch has no read-only tensors, so don't
      write to inputs; `config(check_writes=True)` detects such writes. On a CUDA GPU the callable
      runs while XLA enqueues the program's work. It enqueues its own work on the same stream, and
      doesn't wait for it: see the guide "Python on the GPU".
    run_on: where the callable runs. "xla": on XLA's calling thread, the fastest choice. "own": on a
      thread of callgate, so that the callable may itself run JAX programs. A `callgate.thread`: on
      that thread, one call at a time. "processes": in a shared pool with one worker process for
      each CPU. A `callgate.workers`: in that pool. A `concurrent.futures.Executor`: in its threads
      or processes. With vmap="each" the lanes run in parallel on the workers. See the guide
      "Workers".
    thread: another spelling: thread="own" is run_on="own", and "xla" is the default of both.
    timeout: seconds after which a call fails its program with a report. The callable keeps running,
      and its result is ignored. Implies run_on="own" and private copies of the arrays. A worker
      process that takes too long is killed and replaced.
    retries: how often lanes run again if their worker process ends; needs effect="pure".
    affinity: "lane" always runs a lane on the same worker; a class then has one object for each
      lane. Default: any worker.
    in_flight: the number of tasks that a call gives an executor at a time; each task runs a part of
      the lanes. Default: two for each of the executor's workers.
    cast: True allows casts of results within a kind, such as float64 to float32. Default:
      `config(cast=)`, which is False. Integers of another width, and Python numbers that the
      declared kind can hold, are always cast. A value outside the dtype's range raises an error.
    copy: True passes private copies of the arguments, which the callable may keep. It may also
      write to NumPy copies. Needs arrays in the host's memory. The views of results (`out`) still
      belong to XLA.
    serial: True runs the gate's calls one at a time, for a function that isn't thread-safe.
      Default: False with the GIL. Without the GIL, the default is True for a gate that has an
      effect, runs on XLA's thread and is not collective, and False for all others.
    parallel: True runs the lanes of vmap="each" on several threads at once. Needs effect="pure",
      run_on="xla", and a thread-safe function. With the GIL it has no effect, and a warning says
      so once. Guide: "Python without the GIL".
    collective: True makes every device call, also if several devices have the same shard. Each call
      knows its position: `context.rank`, `.size` and `.coordinates` in the mesh. Use it for gates
      that communicate with each other.
    command_buffer: True lets XLA record the callable's launches on a CUDA GPU as a graph, and
      replay the graph. Has no effect on other devices. Guide: "Python on the GPU".
    style: "return" (`fn(*args)` returns the results, which callgate checks and copies once),
      "inplace" (`fn(out, *args)` writes into views of XLA's result memory, and returns None or
      `out`) or "context" (`fn(context, out, *args)` also gets a `callgate.Context`, with `stage`,
      `stream`, `stream_as(library)`, `device`, and `rank`, `size` and `coordinates` of the shard).
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
  serial: bool | None = option(None, check.boolean)
  parallel: bool = option(False, check.boolean)
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
      got = "got style='return', whose results a replayed graph doesn't have"
      problem = f"style='inplace' or 'context', {got}"
    elif made.effect != "pure":
      why = "a replayed graph does not call the callable"
      problem = f"effect='pure', got effect={made.effect!r}: {why}"
    if made.command_buffer and problem:
      raise GateDefinitionError(f"{label}: command_buffer=True: expected {problem}")
    _check_parallel(label, made)
    return made

  def by_default(self) -> "GateOptions":
    """Returns the options of a user's gate: without the GIL, calls with an effect take turns."""
    if not turns.is_free_threaded() or self.serial is not None:
      return self
    chosen = [self.effect, self.run_on, self.thread, self.timeout, self.collective]  # not checked
    given = [str(one) if isinstance(one, str) else one is None or one is False for one in chosen]
    of_xla = given[1:] == ["xla", "xla", True, True]
    return dataclasses.replace(self, serial=given[0] in ("io", "ordered")) if of_xla else self


def _check_parallel(label: str, made: "GateOptions") -> None:
  """Raises if the lanes of a gate with `parallel=True` can't run at once; warns with the GIL."""
  if not made.parallel:
    return
  for name, expected in (
    ("effect", "pure"), ("run_on", "xla"), ("vmap", "each"), ("serial", None), ("timeout", None),
    ("collective", False), ("command_buffer", False),
  ):  # fmt: skip
    if (got := getattr(made, name)) != expected and not (name == "serial" and got is False):
      raise GateDefinitionError(
        f"{label}: parallel=True: expected {name}={expected!r}, got {name}={got!r}"
      )
  if not turns.is_free_threaded():
    turns.warn_of_gil()


def place_of(run_on: Any) -> Place:
  """Returns the place of a checked `run_on=`."""
  if isinstance(run_on, Public):
    return core(run_on)
  return XLA if isinstance(run_on, str) else ExecutorPlace(run_on)


def _run_on(label: str, value: Any, thread: Thread) -> RunOn:
  """Returns a checked `run_on=`: "xla", "own", workers, a thread or an executor."""
  if isinstance(value, str) and value in ("xla", "own", "processes"):
    name = str(value)
    if thread == "own" and name == "processes":
      check.refuse(label, "run_on", "'own', because of thread='own'", value)
    if name == "processes":
      return shared()
    return "own" if "own" in (thread, name) else "xla"
  if not isinstance(value, (Workers, threads.Thread, concurrent.futures.Executor)):
    check.refuse(
      label, "run_on",
      "'xla', 'own', 'processes', callgate.workers(...), callgate.thread(...) or a "
"concurrent.futures.Executor", value,
    )  # fmt: skip
  if thread == "own":
    check.refuse(label, "run_on", "'own', because of thread='own'", value)
  return value


# The options that only some places accept, with those places.
_OF_PLACES = {
  "retries": "workers or an executor", "affinity": "'processes' or workers",
  "in_flight": "an executor",
}  # fmt: skip


def _check_place(label: str, made: "GateOptions") -> None:
  """Raises for options that the gate's place does not support."""
  place, at = place_of(made.run_on), f"{label}: run_on={made.run_on!r}"
  for name, expected in _OF_PLACES.items():
    if getattr(made, name) and name not in place.takes:
      raise GateDefinitionError(f"{label}: {name}: expected run_on= {expected}")
  if made.retries and made.effect != "pure":
    raise GateDefinitionError(
      f"{label}: retries={made.retries}: expected effect='pure', got effect={made.effect!r}, "
      "whose calls run once"
    )
  if made.command_buffer and place is not XLA:
    raise GateDefinitionError(
      f"{label}: command_buffer=True: expected run_on='xla', got run_on={made.run_on!r}; a CUDA "
      "graph has only calls on XLA's thread"
    )
  if place.is_here:
    return
  check.choice(label, f"run_on={made.run_on!r}: arrays", made.arrays, place.arrays)
  if made.style == "context":
    raise GateDefinitionError(
      f"{at}: expected style='return' or 'inplace', got 'context': other processes have no stream"
    )
  for name in ("collective", "serial"):
    if getattr(made, name):
      raise GateDefinitionError(f"{at}: expected {name}=False")


# Type checkers get the keywords of each style from these classes.
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
  expected = f"expected arrays in host memory ({which})"
  got = f"got arrays={arrays!r} on a GPU, which are XLA's own memory"
  return GateDefinitionError(f"{label}: copy=True: {expected}, {got}")


def take_options(
  caller: str, fn: Callable[..., Any], given: dict[str, Any]
) -> tuple[tuple[str, Any], ...]:
  """Removes a gate's options from a call's keywords; the others are its static keywords."""
  known = {field.name for field in dataclasses.fields(GateOptions)} & given.keys()
  others = {name: value for name, value in given.items() if name not in known}
  spellings.answer(caller, others, signatures.accepted(fn, others))
  return tuple((key, given.pop(key)) for key in sorted(known))
