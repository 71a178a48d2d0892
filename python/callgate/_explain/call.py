# SPDX-License-Identifier: Apache-2.0
"""Describes one call in a program."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedCall:
  """A call in a program.

  Attributes:
    kind: "gate", "kernel", "tap", "feed", "check", "breakpoint", or "JAX callback".
    name: what programs call it by.
    source: "file:line (function)" of the code that traced it; "" where it is not known.
    effect: "pure", "io", "ordered" or "dataflow".
    loops: the steps of the loops around it, outermost first; None for those of a `while_loop`.
    lanes: for how many lanes of `vmap` it is called, one after another.
    copies: bytes that are copied for one call, all lanes, beside the function's own work.
    gathers: bytes that collectives make on each device for one call; None for one device.
    waits: whether the program waits for it.
    gil: whether it holds the GIL of this process.
    advice: what would make it faster.
  """

  kind: str
  name: str
  source: str
  effect: str
  loops: tuple[int | None, ...]
  lanes: int
  copies: int
  gathers: int | None
  waits: bool
  gil: bool
  advice: tuple[str, ...] = ()
