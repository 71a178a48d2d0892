"""The processes of `jax.distributed` as one of them sees them: who lives, and who ended and why.

The engine is JAX's coordination service, a store of texts that every process sees; callgate adds no
connection of its own. Each process has one `Group`, made when `jax.distributed.initialize` is done.
Its thread, "callgate-alive", counts up a key every few seconds, so that the others know a process
that died from one that takes its time. A process that ends says so on its way out.

Keys: `callgate/alive/P` a count, `callgate/ended/P` how process P ended; `_meeting` has more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import traceback

from callgate import _compat, _environment
from callgate.errors import ProcessError, original_of

_DETAILS = 8000  # characters of a traceback that travel


@dataclasses.dataclass(frozen=True)
class Failure:
  """What went wrong in a process, as it travels to the others.

  Attributes:
    process: its index.
    kind: name of the exception's type; "" without one.
    message: the exception's text, or what is known otherwise.
    details: the traceback's end.
  """

  process: int
  kind: str
  message: str
  details: str = ""

  @staticmethod
  def of(process: int, error: BaseException) -> Failure:
    """The failure that an exception is; one of another process stays that."""
    if isinstance(error, ProcessError):
      return Failure(error.process, error.kind, error.message)
    error = original_of(error)
    text = "".join(traceback.format_exception(error))
    return Failure(process, type(error).__name__, str(error), text[-_DETAILS:])

  @staticmethod
  def parse(text: str) -> Failure:
    """The failure of a text."""
    return Failure(**json.loads(text))

  def text(self) -> str:
    """As it is in the store."""
    return json.dumps(dataclasses.asdict(self))

  def error(self) -> ProcessError:
    """What to raise in another process."""
    error = ProcessError(self.process, self.kind, self.message)
    if self.details:
      error.add_note(f"callgate: in process {self.process}:\n{self.details.rstrip()}")
    return error


class Group:
  """The processes, as this one sees them.

  Attributes:
    store: the texts that all see.
    index: of this process.
    count: of processes.
    silent_seconds: after which a process that was heard of counts as dead.
    look_seconds: between two looks at the others.
    one_at_a_time: held by the thread that is in a meeting.
  """

  def __init__(self, store: _compat.CommonStore, index: int, count: int) -> None:
    self.store = store
    self.index = index
    self.count = count
    self.silent_seconds = max(1.0, _environment.seconds("CALLGATE_SILENT_SECONDS", 60))
    # Looks at the others are rarer the more there are: all ask one coordinator.
    self.look_seconds = 0.2 + 0.002 * count
    self._heard: dict[str, tuple[str, float]] = {}  # by process: its count, and since when
    self._heard_at = 0.0
    self._meetings = 0
    self.one_at_a_time = threading.Lock()
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._live, name="callgate-alive", daemon=True)
    self._thread.start()

  def next_number(self) -> int:
    """The number of the next meeting: the same in every process, as all take part in all."""
    self._meetings += 1
    return self._meetings

  def ended(self) -> dict[int, Failure]:
    """How those ended that did, by process."""
    found = self.store.under("callgate/ended/")
    return {int(process): Failure.parse(text) for process, text in found.items()}

  def silent(self) -> list[int]:
    """Processes whose count has stood still for `silent_seconds`."""
    now = time.monotonic()
    if now - self._heard_at >= self.silent_seconds / 8:
      self._heard_at = now
      for process, count in self.store.under("callgate/alive/").items():
        if self._heard.get(process, ("", 0.0))[0] != count:
          self._heard[process] = count, now
    return [
      int(process)
      for process, (_, since) in self._heard.items()
      if now - since > self.silent_seconds and int(process) != self.index
    ]

  def say_ended(self, error: BaseException | None) -> None:
    """Tells the others that this process ends: by an exception, or without one."""
    failure = Failure(self.index, "", "ended without coming here")
    if error is not None:
      failure = Failure.of(self.index, error)
    with contextlib.suppress(ConnectionError):  # nobody is left to be told
      self.store.put(f"callgate/ended/{self.index}", failure.text())  # the first word holds

  def leave(self) -> None:
    """Ends the thread."""
    self._over.set()
    if self._thread is not threading.current_thread():
      self._thread.join(timeout=2)

  def _live(self) -> None:
    count = 0
    while True:
      count += 1
      try:
        self.store.put(f"callgate/alive/{self.index}", str(count), overwrite=True)
      except ConnectionError:
        return  # the service has ended, and this process with it or soon
      if self._over.wait(self.silent_seconds / 8):
        return
