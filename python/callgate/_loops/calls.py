# SPDX-License-Identifier: Apache-2.0
"""Which of callgate's calls with effects a jaxpr holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from callgate._core.effects import (
  GateEffect,
  ProgressEffect,
  TapEffect,
  WaitEffect,
  WholeTapEffect,
)
from callgate._tap.primitive import dataflow_taps_in

# The first one that an effect is of says its kind.
_KINDS = (
  (WholeTapEffect, "whole tap"),
  (TapEffect, "tap"),
  (GateEffect, "gate"),
  (WaitEffect, "wait"),
  (ProgressEffect, "bar"),
)
APART = frozenset({"gate", "tap", "wait"})  # that each lane makes for itself alone


def kinds_in(jaxprs: Sequence[Any]) -> set[str]:
  """The kinds of calls in jaxprs: "gate", "tap", "whole tap" (`TapSite.whole`), "wait", "bar"."""
  kinds = kinds_of(effect for jaxpr in jaxprs for effect in jaxpr.effects)
  kinds |= {"tap"} if dataflow_taps_in(jaxprs) else set()
  return kinds | ({"whole tap"} if dataflow_taps_in(jaxprs, whole=True) else set())


def kinds_of(effects: Iterable[Any]) -> set[str]:
  """The kinds of calls with these effects."""
  each = ([kind for of, kind in _KINDS if isinstance(it, of)] for it in effects)
  return {kinds[0] for kinds in each if kinds}
