# SPDX-License-Identifier: Apache-2.0
"""The options of `callgate.torch`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from callgate._call.options import CallOptions
from callgate._core import options as check
from callgate._core.options import option
from callgate._gate.options import Thread

Style = Literal["return", "inplace"]
Vmap = Literal["auto", "whole", "each"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TorchOptions(CallOptions):
  """The options of `callgate.torch`.

  Attributes:
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one. Default: found by a run on tensors without values.
    effect: "pure", "io" or "ordered", as for `callgate.gate`. Derivatives are always pure.
    aliases: flat input position to flat output position, with style="inplace": both are one memory.
    vmap: "auto" ("whole" where torch takes the function, which is tried when the program is traced;
      else "each"), "whole" (all lanes in one call through `torch.func.vmap`), "each" (lane by lane)
      or a rule as for `callgate.gate`.
    thread: "xla" or "own", as for `callgate.gate`.
    timeout: seconds, as for `callgate.gate`.
    cast: allow same-kind casts of results, as for `callgate.gate`: float64 to float32 where JAX has
      no float64. Integers whose values fit are cast in any case.
    gradient: "finite-difference": derivatives by central differences instead of torch's.
    enable_grad: run the function with autograd on, for one that calls it itself.
    mutable: for modules that write into their buffers (batch normalisation in training): calls
      return `(result, buffers)`, the new values by name.
    style: "return", or "inplace" for `fn(out, *args)`, which writes into tensors over XLA's result
      memory, as torch's `out=` does; it needs `out` and has no derivative of its own.
    random: the function draws random numbers; calls then take `rng=`, a JAX key that seeds torch's
      generator, which the function does not get.
  """

  linear: bool | int | Sequence[int] = dataclasses.field(init=False, default=False)
  vmap: Vmap | Callable[..., Any] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
  thread: Thread = "xla"
  timeout: float | None = None
  cast: bool | None = option(None, check.boolean)
  enable_grad: bool = option(False, check.boolean)
  mutable: bool = option(False, check.boolean)
  style: Style = option("return", check.choice, allowed=get_args(Style))
  random: bool = option(False, check.boolean)


# Type checkers take the keywords from these: of functions with a parameter for the results, and of
# those whose calls take a key.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TorchInplaceOptions(TorchOptions):
  style: Literal["inplace"] = dataclasses.field()
  random: Literal[False] = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RandomOptions(TorchOptions):
  style: Literal["return"] = "return"
  random: Literal[True] = dataclasses.field()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TorchReturnOptions(TorchOptions):
  style: Literal["return"] = "return"
  random: Literal[False] = False
