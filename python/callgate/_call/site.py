"""What is fixed about a call when it is traced."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from callgate._core import encoding

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

  gate: Any
  site: CallSite
  wanted: tuple[int, ...]  # flat positions of arguments
  outputs: tuple[int, ...]  # flat positions of the results that have tangents
