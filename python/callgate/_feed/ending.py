# SPDX-License-Identifier: Apache-2.0
"""The end of the process, for all feeds."""

from __future__ import annotations

from callgate._core.weak import members
from callgate._feed.producer import alive
from callgate._part import Part, Phase, Wait, join


def limit_all(seconds: float) -> None:
  """Running programs may take further items, but don't wait for ever for an iterator that hangs."""
  for producer in members(alive):
    producer.limit_patience(seconds)


def close_all(wait: Wait) -> None:
  """Programs have ended: so do the threads."""
  for producer in (producers := members(alive)):
    producer.release()
  for producer in producers:
    producer.close(wait.left)


class Feeds(Part):
  """Ends the feeds' threads."""

  name = "feeds"

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase == "hurry":
      limit_all(wait.left)
    elif phase == "join":
      close_all(wait)


join(Feeds())
