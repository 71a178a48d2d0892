"""The call of a callback in a program, as the modules of `callgate.compat` emit it.

Unlike a gate's, the error of a failing callback is always returned to XLA, on several devices, too:
that is what JAX's own callbacks do, and what programs written for them expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from callgate import _compat, _lowering, _runtime
from callgate._callgate import Callee


def emit_call(
  ctx: Any,
  callee: Callee,
  operands: Sequence[Any],
  operand_avals: Sequence[Any],
  result_avals: Sequence[Any],
  *,
  has_side_effect: bool,
  token: Any = None,
  aliases: Mapping[int, int] | None = None,
  sharding: Any = None,
  sharded: Any = None,
  spec: str = "",
  keep: bool = True,
  target: str = _runtime.GATE_TARGET,
) -> tuple[Sequence[Any], Any]:
  """The call's results and, given a token, the token that later calls depend on.

  With `keep` the program keeps `callee` alive, and can't be exported. The other arguments are those
  of `_lowering.emit`.
  """
  if keep:
    _compat.add_keepalive(ctx, callee)
  return _lowering.emit(
    ctx,
    operands,
    operand_avals,
    result_avals,
    name=callee.name,
    spec=spec,
    has_side_effect=has_side_effect,
    token=token,
    aliases=aliases,
    sharding=sharding,
    sharded=sharded,
    on_error="return",
    target=target,
  )
