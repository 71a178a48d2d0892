# SPDX-License-Identifier: Apache-2.0
"""The options of `callgate.torch`."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

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
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function that takes the
      arguments' ShapeDtypeStructs and returns such a pytree. Default: found by a run on torch's
      fake tensors, which have no values.
    effect: "pure", "io" or "ordered", as for `callgate.gate`. Derivatives are always pure.
    aliases: a dict from flat input positions to flat output positions: each pair shares memory.
      Needs style="inplace".
    vmap: "auto" ("whole" if torch can batch the function, which callgate tries during tracing;
      otherwise "each"), "whole" (one call for all lanes, through `torch.func.vmap`), "each" (one
      call for each lane) or a rule as for `callgate.gate`.
    thread: "xla" or "own": the thread of the function, as `run_on=` of `callgate.gate`.
    timeout: seconds, as for `callgate.gate`.
    cast: True allows casts of results within a kind, as for `callgate.gate`, such as float64 to
      float32 without `jax_enable_x64`. Integers whose values fit are always cast.
    gradient: "finite-difference" computes derivatives by central differences instead of autograd.
    enable_grad: True runs the function with autograd on, for a function that itself calls autograd.
    mutable: True for modules that write to their buffers (batch normalization in training): calls
      return `(result, buffers)`, with the new values by name.
    style: "return", or "inplace" for `fn(out, *args)`, which writes into tensors over XLA's result
      memory, as torch's `out=` does. "inplace" needs `out`, and has no derivative from autograd.
    random: True for a function that draws random numbers. Calls then take `rng=`, a JAX key that
      seeds torch's generator. The function does not get the key.
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


# Type checkers get the keywords from these: for functions with a parameter for the results, and for
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
