"""The sink Stream: what taps send, to a file that grows or a socket that others read.

The consumer is C++ (src/channel/stream_sink.h) and runs without the GIL, on the channel's thread.
Exported as `callgate.sinks.Stream`.
"""

from __future__ import annotations

import os

from callgate import _callgate, _options, _processes
from callgate.sinks._native import NativeSink


class Stream(NativeSink):
  """A stream: self-describing, checksummed, readable while it is written (`callgate.open_stream`).

  ```python
  import callgate as cg, jax

  with cg.channel("loss", to=cg.sinks.Stream("train.cgs")):
    jax.jit(lambda x: cg.tap(2 * x, "loss"))(3.0)
  assert [r.leaves[""] for r in cg.open_stream("train.cgs")] == [6.0]
  ```

  Args:
    destination: a file, which is appended to; `unix:PATH` or `tcp://HOST:PORT`, which readers
      connect to. The host is this machine unless it is named, and port 0 is any free one. With
      "{process}" in it, this process's index stands there: "run-{process}.cgs".
  """

  def __init__(self, destination: str | os.PathLike[str]) -> None:
    self._destination = _processes.fill_index(
      _options.path("sinks.Stream", "destination", destination)
    )
    known = _processes.known_index()
    self._sink = _callgate.stream_sink(
      self._destination, process_index=-1 if known is None else known
    )
    super().__init__(self._sink)

  def __repr__(self) -> str:
    return f"Stream({self._destination!r})"

  @property
  def address(self) -> str:
    """Where readers find the stream: the destination, with the port that was chosen."""
    return self._sink.address
