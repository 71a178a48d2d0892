# SPDX-License-Identifier: Apache-2.0
"""Emits the custom call `callgate.gate` in a lowering rule.

A program contains the gate's name, the call site's spec and source line and the batch levels; for a
kernel also a hash of these. It contains nothing that is specific to this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from callgate._core.attributes import key_of
from callgate._core.errors import GateDefinitionError
from callgate._jax import lowering, sources
from callgate._runtime.targets import (
  GATE_TARGET,
  KERNEL_SCRATCH_TARGET,
  KERNEL_TARGET,
  PARTITIONED,
  name_gpus,
  remember_site,
)
from callgate._sharding.calls import Sharded
from callgate._sharding.rules import Rule


def emit(
  context: Any,
  operands: Sequence[Any],
  avals_in: Sequence[Any],
  avals_out: Sequence[Any],
  *,
  name: str,
  spec: str = "",
  attributes: Mapping[str, Any] | None = None,
  batch: Mapping[str, Any] | None = None,
  has_side_effect: bool,
  order: Any = None,
  aliases: Mapping[int, int] | None = None,
  sharding: Any = None,
  on_error: str | None = None,
  target: str = GATE_TARGET,
  sharded: tuple[Sharded, Rule | None] | None = None,
  label: str = "",
) -> Sequence[Any]:
  """Emits a call of the callee registered as `name`, and returns its results.

  Args:
    context: the LoweringRuleContext.
    operands: MLIR values. Their abstract values may differ from the context's.
    spec: see `_core/encoding.py`.
    attributes: further attributes of the call.
    batch: batch levels (`levels.encode_levels`).
    has_side_effect: True if the call may be neither removed nor merged.
    order: the ordered effect of the call, whose token it takes and returns.
    aliases: flat operand position to flat result position: both share memory.
    sharding: the operation's sharding annotation.
    on_error: "return" returns the error of a failing call to XLA; "poison" poisons its results and
      keeps the error. Default: "poison" in programs over several devices, where the other devices
      would wait for a device that returned an error (src/xla/gate.cc).
    label: the call's name in profiles. Default: `name`.
    sharded: the call's description for the partitioner, and the rule for XLA's propagation.
  """
  platforms = context.module_context.platforms
  if not {"cpu", "cuda"} & set(platforms):
    raise GateDefinitionError(
      f"gate '{name}': no runtime for platform {'/'.join(platforms)}; expected cpu or cuda. Use "
      "callgate.config(engine='jax'), which runs gates through JAX's own callbacks there"
    )
  if "cuda" in platforms:
    name_gpus()
  held = {
    "name": name,
    "spec": spec,
    "site": remember_site(sources.call_site(context)),
    "on_error": on_error or ("poison" if lowering.device_count(context) > 1 else "return"),
    "batch": batch or {},
    **(attributes or {}),
  }
  held = {name: value for name, value in held.items() if not isinstance(value, dict) or value}
  open_results, rule = lowering.has_open_shapes(avals_out), None
  if sharded is not None:
    held["shard"], rule = sharded[0].text, sharded[1]
    if open_results and order is not None:
      raise GateDefinitionError(
        f"gate '{name}': effect='ordered' with results of symbolic shapes works in exported "
        "programs for one device; this program is partitioned over several devices. Export it "
        "with fixed shapes, or use effect='io'"
      )
  if target in (KERNEL_TARGET, KERNEL_SCRATCH_TARGET):
    # The runtime identifies the call by this key (src/xla/kernel.cc). It sorts first.
    held["_key"] = key_of(held)
  results = lowering.emit_ffi_call(
    context,
    target + PARTITIONED if sharded is not None else target,
    operands,
    avals_in,
    avals_out,
    held,
    has_side_effect=has_side_effect,
    aliases=aliases or {},
    order=order,
    gives_token=not open_results,
    sharding=sharding,
    named=label or name,
    # Propagation needs operands and results. Shardy's rules support neither tokens nor the operands
    # that represent symbolic shapes until the program is compiled.
    rule=rule if avals_in and avals_out and order is None and not open_results else None,
  )
  if open_results and order is not None:  # XLA doesn't refine such shapes beside a token
    lowering.emit_ffi_call(
      context, GATE_TARGET, results[:1], avals_out[:1], [], {"name": "callgate.after"},
      has_side_effect=True, aliases={}, order=order,
    )  # fmt: skip
  return results
