# SPDX-License-Identifier: Apache-2.0
"""The options of `callgate.gate`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from typing import Literal, get_args

from callgate._arrays import bind, gpu
from callgate._call.options import CallOptions
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError

Style = Literal["return", "inplace", "context"]
Arrays = Literal["numpy", "buffer", "jax", "torch", "cupy", "numba"]
Thread = Literal["xla", "own"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _OfAllStyles(CallOptions):
  """The options of a gate but its style.

  Attributes:
    arrays: what the callable gets: "numpy" views, "buffer" (`callgate.Buffer`), "jax" or "torch"
      arrays, all zero-copy on the CPU. Torch has no read-only tensors: do not write to inputs
      (`config(check_writes=True)` finds who does). On a CUDA GPU see above.
    thread: "xla" (XLA's calling thread: fastest) or "own" (a thread of callgate's; XLA's is free
      meanwhile, so the callable may itself run JAX programs of any size).
    timeout: seconds after which the program fails with a report. The callable keeps running; its
      result is ignored. Implies thread="own", and private copies of the arrays.
    cast: allow same-kind casts of results (float64 to float32, say). Default: as `config(cast=)`
      says, which is False. Integers of another width, and Python's numbers to a kind that includes
      theirs, are cast in any case; one that the result's dtype does not hold is an error.
    copy: arguments are private copies, which the callable may keep, and of NumPy's may write to;
      for arrays in the host's memory. Results' views (`out`) are still XLA's.
    collective: every device makes its call, also where several have the same shard, and knows its
      place: `context.rank`, `.size`, `.coordinates` on the mesh. For gates that talk to each other.
    command_buffer: on a CUDA GPU, lets XLA record what the callable launches into a CUDA graph and
      replay that. Elsewhere it changes nothing. See above.
  """

  arrays: Arrays = "numpy"
  thread: Thread = "xla"
  timeout: float | None = None
  cast: bool | None = None
  copy: bool = False
  collective: bool = False
  command_buffer: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GateOptions(_OfAllStyles):
  """The options of a gate.

  Attributes:
    style: "return" (`fn(*args)` returns the results, checked strictly and copied once), "inplace"
      (`fn(out, *args)` writes into views of XLA's result memory, and returns None or `out`) or
      "context" (`fn(context, out, *args)`, with `context.stage`, `.stream`,
      `.stream_as(library)`, `.device`, and `.rank`, `.size`, `.coordinates` of the shard).
  """

  style: Style = "return"

  def checked(self, label: str, *, grid: bool = False) -> "GateOptions":
    flags = ("copy", "collective", "command_buffer")
    made = dataclasses.replace(
      super().checked(label, grid=grid),
      **check.booleans(label, **{name: getattr(self, name) for name in flags}),
      cast=check.or_none(check.boolean, label, "cast", self.cast),
      timeout=check.or_none(check.seconds, label, "timeout", self.timeout),
    )
    check.choice(label, "style", made.style, get_args(Style))
    check.choice(label, "arrays", made.arrays, get_args(Arrays))
    check.choice(label, "thread", made.thread, get_args(Thread))
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


# What type checkers take the keywords of one style from.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InplaceOptions(_OfAllStyles):
  style: Literal["inplace"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ContextOptions(_OfAllStyles):
  style: Literal["context"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReturnOptions(_OfAllStyles):
  style: Literal["return"] = "return"


def no_copy(label: str, arrays: str) -> GateDefinitionError:
  which = "arrays='numpy' or 'jax'; 'buffer' and 'torch' in programs for the CPU"
  expected = f"expected arrays in the host's memory ({which})"
  got = f"got arrays={arrays!r} on a GPU, which are XLA's own"
  return GateDefinitionError(f"{label}: copy=True: {expected}, {got}")
