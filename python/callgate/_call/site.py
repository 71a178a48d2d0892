"""What rules and lowering know of a call, and of what it calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from callgate._call.options import Effect, Vmap
from callgate._call.rules import Rules
from callgate._core import encoding
from callgate._core.encoding import Level
from callgate._sharding.calls import Called

ShapeDtype = tuple[tuple[int, ...], Any]
# Where callgate's runtime runs gates; JAX's own callbacks do elsewhere.
RUNTIME_PLATFORMS = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class CallSite:
  """What is fixed about a call when it is traced."""

  in_tree: Any  # of (args, kwargs), arrays as leaves
  out_tree: Any
  static: tuple[tuple[str, Any], ...]
  results: tuple[ShapeDtype, ...]  # of one lane
  by_jax: bool = False  # lowered to JAX's own callbacks

  @functools.cached_property
  def spec(self) -> str:
    """The text that programs hold for this call."""
    return encoding.encode(self.in_tree, self.out_tree, self.static)


@dataclasses.dataclass(frozen=True)
class TangentCall:
  """The call that computes the tangents of a call's results.

  Its operands are the call's own and then the tangents of those at `wanted`, in which it is linear.
  """

  gate: Callee
  site: CallSite
  wanted: tuple[int, ...]  # flat positions of arguments
  outputs: tuple[int, ...]  # flat positions of the results that have tangents


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Call:
  """A call in a program that is being lowered.

  Attributes:
    site: the call's static description.
    operands: abstract values, batch levels included.
    results: likewise.
    levels: batch levels that the runtime loops over.
    whole: the one leading axis of batched arguments that the function gets, or None.
    devices: how many run the program.
  """

  site: CallSite
  operands: Sequence[Any]
  results: Sequence[Any]
  levels: tuple[Level, ...]
  whole: Level | None
  devices: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emission:
  """What a program holds of a call.

  Attributes:
    callee: the runtime's, which has a name.
    target: the FFI target.
    attributes: beside those of every call.
    call: with the batch levels that the runtime loops over.
  """

  callee: Any
  target: str
  attributes: Mapping[str, Any]
  call: Call


# What makes the calls of programs for one platform.
Backend = Callable[[Call], Emission]


class Callee(Called, Protocol):
  """What the rules of the primitive see of a gate or kernel; `Operation` says what each is."""

  kind: str
  effect: Effect  # pyright: ignore[reportIncompatibleMethodOverride]
  out: Any
  like: Callable[..., Any] | None
  linear: bool | tuple[int, ...]
  rules: Rules
  vmap: Vmap
  vmap_rule: Callable[..., Any] | None
  parameters: tuple[str, ...]
  arrays: str
  style: str
  cast: bool
  autograd: bool
  same_on_all_platforms: bool

  def backend(self, platform: str) -> Backend: ...
  def batched(self, whole: Level | None) -> Callee: ...
  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap: ...
  def on_host(self, *args: Any, **kwargs: Any) -> Any: ...
  def apply_raw(
    self, args: tuple[Any, ...], kwargs: dict[str, Any], static: tuple[tuple[str, Any], ...]
  ) -> Any: ...
  def call_rule(
    self,
    function: Callable[..., Any],
    lead: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: tuple[tuple[str, Any], ...],
  ) -> Any: ...
  def tangent_call(self, site: CallSite, moved: Sequence[int]) -> TangentCall: ...
  def transpose_call(
    self, site: CallSite, cotangents: Sequence[Any], flat: Sequence[Any], linear: Sequence[int]
  ) -> Sequence[Any]: ...
