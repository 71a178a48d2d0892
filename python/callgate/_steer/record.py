# SPDX-License-Identifier: Apache-2.0
"""Changes of knobs as records of the channels that have a stream: who reads a run sees them."""

from __future__ import annotations

import threading
from typing import Any

import jax

from callgate import _callgate, _part
from callgate._core.levels import encode_levels
from callgate._core.public import core
from callgate._steer.knob import Knob
from callgate._tap import site as _site
from callgate._tap.channel import Channel, has_stream, open_channels, tap_of


def record(knob: Knob) -> None:
  """Sends what the knob holds to every open channel that has a stream, as `knob:NAME`."""
  for channel in open_channels().values():
    if not has_stream(channel):
      continue
    if _callgate.delivers_here():  # a full channel may wait for this very thread
      given = channel, knob.name, core(knob).as_array()
      threading.Thread(target=_send, args=given, name="callgate knob").start()
    else:
      _send(channel, knob.name, core(knob).as_array())


def _send(channel: Channel, name: str, number: Any) -> None:
  site = _site.TapSite(tree=jax.tree.structure(0), name=f"knob:{name}", dtypes=(None,))
  held = _site.encode(site, transforms=(), role="primal", repeated=False)
  held["batch"] = encode_levels(())
  tap_of(channel).handle.send(repr((held["spec"], held["tap"])), held, -1, [number])


_part.on("knob changed", record)
