# SPDX-License-Identifier: Apache-2.0
"""The options that gates and kernels share."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from callgate._core import options as check
from callgate._core import spellings
from callgate._core.errors import GateDefinitionError
from callgate._core.options import option

Effect = Literal["pure", "io", "ordered"]
Vmap = Literal["each", "whole", "broadcast", "grid"]
_Options = TypeVar("_Options", bound="CallOptions")


def check_vmap(label: str, option: str, value: Any, *, more: tuple[str, ...] = ()) -> Any:
  """A rule, a method of all calls, or one of `more`."""
  spellings.answer_vmap(label, value)
  methods = ("each", "whole", "broadcast", *more)
  return value if callable(value) else check.choice(label, option, value, methods)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CallOptions:
  """Describes a call's results, and how transformations treat it.

  Attributes:
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one. Default with effect="io" or "ordered": (), no results. A
      gate's may be left to jaxtyping's annotations of its function.
    like: a JAX-traceable reference of the same signature: gives the results' shapes when `out` is
      not given, derivatives where there is no rule, and the truth of `check`.
    name: what programs call it by; needed to call exported programs in another process. Default:
      module, qualified name and order of creation.
    effect: "pure" (may be removed, merged, repeated), "io" (runs exactly once per execution, in no
      particular order) or "ordered" (as io, in program order, also across calls of the program).
    aliases: flat input position to flat output position: both are one memory, in place.
    vmap: "each" (one call a lane, looped over in C++, in lane order), "whole" (one call; batched
      arguments have one leading batch axis, others none), "broadcast" (one call, all arguments
      batched) or a rule as for `Gate.defvmap`. Nested vmaps reach "whole" and "broadcast" as one
      folded axis.
    sharding: which dimensions of the arrays may stay split in a program over several devices. None
      or "gather": none, and one device calls for all. "shard": the leading ones that all arrays
      share; each device calls with its part. A rule, as "i k, k j -> i j": dimensions of one name
      are split alike; `[k]`, `_` and what is in no result are whole; `...` are leading dimensions.
      Or a function of the mesh and the operands' ShapeDtypeStructs (with shardings) that returns
      one of these or (PartitionSpecs of operands, of results). Lanes of a vmap are always split.
    linear: True, a position or positions of arguments in which it is linear; see
      `Gate.deftranspose`.
    gradient: "finite-difference": derivatives by central differences, two calls for each input
      element. For small inputs.
  """

  out: Any = None
  like: Callable[..., Any] | None = option(None, check.function)
  name: str | None = None
  effect: Effect = option("pure", check.choice, allowed=get_args(Effect))
  aliases: Mapping[int, int] | None = option(None, check.aliases)
  vmap: Vmap | Callable[..., Any] = option("each", check_vmap)
  sharding: Any = option(None, check.sharding)
  linear: bool | int | Sequence[int] = option(False, check.linear)
  gradient: Literal["finite-difference"] | None = option(
    None, check.choice, allowed=("finite-difference",)
  )

  def checked(self: _Options, label: str) -> _Options:
    """The options as plain values; `label` says whose.

    Raises:
      GateDefinitionError: one is none that it can be, or nothing tells the results' shapes.
    """
    made = check.checked(label, self)
    if made.gradient is not None and made.effect != "pure":
      raise GateDefinitionError(
        f"{label}: gradient='finite-difference' calls the gate many times, so its effect must "
        f"be 'pure', got {made.effect!r}"
      )
    _check_no_class(label, made.out)
    out = () if made.out is None and made.like is None and made.effect != "pure" else made.out
    if out is None and made.like is None:
      raise GateDefinitionError(
        f"{label}: the results' shapes are not known; expected out= (a pytree of "
        "ShapeDtypeStructs, or a function from the arguments' ShapeDtypeStructs to one) or like= "
        "(a JAX function of the same signature)"
      )
    return dataclasses.replace(made, out=out)


def _check_no_class(label: str, out: Any) -> None:
  """Raises where `out` is a type of values; classes that serve as functions pass."""
  if not isinstance(out, type):
    return
  if out in _PLAIN or hasattr(out, "dtype") or hasattr(out, "dim_str"):
    raise GateDefinitionError(
      f"{label}: out: expected a pytree of ShapeDtypeStructs, or a function from the arguments' "
      f"ShapeDtypeStructs to one, got the class {out.__name__}"
    )


_PLAIN = (bool, int, float, complex, str, bytes)


def shared(kind: type[_Options], options: CallOptions, **changes: Any) -> _Options:
  """Options of `kind`: those that `options` has too, with changes."""
  names = {f.name for f in dataclasses.fields(kind) if f.init}
  have = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
  return kind(**{**{n: v for n, v in have.items() if n in names}, **changes})
