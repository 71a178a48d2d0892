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
  """Returns a batching rule, one of the common methods, or one of `more`; else raises."""
  spellings.answer_vmap(label, value)
  methods = ("each", "whole", "broadcast", *more)
  return value if callable(value) else check.choice(label, option, value, methods)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CallOptions:
  """The options that gates and kernels share: their results, and how transformations treat them.

  Attributes:
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function that takes the
      arguments' ShapeDtypeStructs and returns such a pytree. Default with effect="io" or "ordered":
      (), no results. jaxtyping annotations of a gate's function can replace it.
    like: a JAX function with the same signature, the reference. It gives the results' shapes if
      `out` is not given, the derivatives if the function has none of its own, and the values that
      `check` compares with.
    name: the name in compiled programs. Set it if another process runs your exported programs.
      Default: module, qualified name and order of creation.
    effect: "pure" (XLA may remove, merge or repeat calls), "io" (each call runs exactly once per
      execution, in any order) or "ordered" (as "io", in program order, also from one call of the
      program to the next).
    aliases: a dict from flat input positions to flat output positions: each pair shares memory, for
      updates in place.
    vmap: "each" (one call for each lane, in lane order, from a loop in C++), "whole" (one call; the
      batched arguments have one leading batch axis, the others have none), "broadcast" (one call;
      all arguments have the batch axis) or a rule as for `Gate.defvmap`. "whole" and "broadcast"
      fold nested vmaps into one batch axis.
    sharding: the dimensions that may stay split in a program over several devices. None or
      "gather": no dimension; one device calls for all, with whole arrays. "shard": the leading
      dimensions that all arrays share; each device calls with its shard. A rule such as "i k, k j
      -> i j": dimensions of the same name are split alike; a dimension stays whole if it is `[k]`
      or `_`, or is not in every result; `...` stands for leading dimensions. Or a function that
      takes the mesh and the operands' ShapeDtypeStructs (with shardings) and returns one of these,
      or a tuple (PartitionSpecs of the operands, PartitionSpecs of the results). The lanes of a
      vmap are always split.
    linear: True if the function is linear in all arguments; or the position, or a sequence of the
      positions, of its linear arguments. See `Gate.deftranspose`.
    gradient: "finite-difference" computes derivatives by central differences, with two calls for
      each input element. Use it for small inputs.
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
    """Returns the options as plain values; `label` names their owner in messages.

    Raises:
      GateDefinitionError: an option has a wrong value, or no option gives the results' shapes.
    """
    made = check.checked(label, self)
    if made.gradient is not None and made.effect != "pure":
      raise GateDefinitionError(
        f"{label}: gradient='finite-difference' calls the gate many times, so its effect must be "
        f"'pure', got {made.effect!r}"
      )
    _check_no_class(label, made.out)
    out = () if made.out is None and made.like is None and made.effect != "pure" else made.out
    if out is None and made.like is None:
      raise GateDefinitionError(
        f"{label}: the results' shapes are not known; expected out= (a pytree of "
        "ShapeDtypeStructs, or a function of the arguments' ShapeDtypeStructs that returns one) "
        "or like= (a JAX function of the same signature)"
      )
    return dataclasses.replace(made, out=out)


def _check_no_class(label: str, out: Any) -> None:
  """Raises if `out` is a type of values, such as float; other classes may be functions."""
  if not isinstance(out, type):
    return
  if out in _PLAIN or hasattr(out, "dtype") or hasattr(out, "dim_str"):
    raise GateDefinitionError(
      f"{label}: out: expected a pytree of ShapeDtypeStructs, or a function of the arguments' "
      f"ShapeDtypeStructs that returns one, got the class {out.__name__}"
    )


_PLAIN = (bool, int, float, complex, str, bytes)


def shared(kind: type[_Options], options: CallOptions, **changes: Any) -> _Options:
  """Returns options of `kind` with the values that `options` has for its fields, and `changes`."""
  names = {f.name for f in dataclasses.fields(kind) if f.init}
  have = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
  return kind(**{**{n: v for n, v in have.items() if n in names}, **changes})
