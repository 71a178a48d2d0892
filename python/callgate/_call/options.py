# SPDX-License-Identifier: Apache-2.0
"""The options that gates and kernels share."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from callgate._core import options as check
from callgate._core import spellings
from callgate._core.errors import GateDefinitionError

Effect = Literal["pure", "io", "ordered"]
Vmap = Literal["each", "whole", "broadcast", "grid"]
_Options = TypeVar("_Options", bound="CallOptions")


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
  like: Callable[..., Any] | None = None
  name: str | None = None
  effect: Effect = "pure"
  aliases: Mapping[int, int] | None = None
  vmap: Vmap | Callable[..., Any] = "each"
  sharding: Any = None
  linear: bool | int | Sequence[int] = False
  gradient: Literal["finite-difference"] | None = None

  def checked(self: _Options, label: str, *, grid: bool = False) -> _Options:
    """The options as plain values; `label` says whose, and with `grid` vmap may be "grid".

    Raises:
      GateDefinitionError: one is none that it can be, or nothing tells the results' shapes.
    """
    effect: Effect = check.choice(label, "effect", self.effect, ("pure", "io", "ordered"))
    methods = ("each", "whole", "broadcast", *(("grid",) if grid else ()))
    spellings.answer_vmap(label, self.vmap)
    vmap = self.vmap if callable(self.vmap) else check.choice(label, "vmap", self.vmap, methods)
    check.sharding(label, self.sharding)
    check.or_none(check.function, label, "like", self.like)
    linear, aliases = check.linear(label, self.linear), check.aliases(label, self.aliases)
    check.or_none(check.choice, label, "gradient", self.gradient, allowed=("finite-difference",))
    if self.gradient is not None and effect != "pure":
      raise GateDefinitionError(
        f"{label}: gradient='finite-difference' calls the gate many times, so its effect must "
        f"be 'pure', got {effect!r}"
      )
    _check_no_class(label, self.out)
    out = () if self.out is None and self.like is None and effect != "pure" else self.out
    if out is None and self.like is None:
      raise GateDefinitionError(
        f"{label}: the results' shapes are not known; expected out= (a pytree of "
        "ShapeDtypeStructs, or a function from the arguments' ShapeDtypeStructs to one) or like= "
        "(a JAX function of the same signature)"
      )
    return dataclasses.replace(
      self, out=out, effect=effect, vmap=vmap, linear=linear, aliases=aliases
    )


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
