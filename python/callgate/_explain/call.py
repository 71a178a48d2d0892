# SPDX-License-Identifier: Apache-2.0
"""Describes one call in a program."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedCall:
  """A call in a program.

  Attributes:
    kind: "gate", "kernel", "tap", "feed", "check", "breakpoint" or "JAX callback".
    name: the name in the program.
    source: "file:line (function)" of the code that traced the call; "" if unknown.
    effect: "pure", "io", "ordered" or "dataflow".
    loops: the number of steps of each loop around the call, outermost first; None for a
      `while_loop`.
    lanes: the number of `vmap` lanes, for which the call runs one after another.
    copies: bytes that callgate copies for one call with all lanes, not counting the function's
      work.
    gathers: bytes that collectives produce on each device for one call; None for one device.
    waits: True if the program waits for the call.
    gil: True if the call holds the GIL of this process.
    advice: suggestions that make the call faster.
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
