# SPDX-License-Identifier: Apache-2.0
"""Reads streams for the live page, on a thread for each, which waits, follows and reconnects.

A follower survives its stream's writer: a new writer may continue or replace the file, or serve the
socket again. It ends when it is stopped, or when a file is damaged.
"""

from __future__ import annotations

import os
import threading

from callgate._part import Wait
from callgate._stream.reader import StreamReader, is_address, open_stream
from callgate._stream.records import StreamRecord
from callgate._watch.model import Model

_CHUNK = 4096  # the most records that the model gets at once
_PATIENCE = 0.1  # the most seconds that a record waits for others of its chunk


class Follower(threading.Thread):
  """Follows one file, pattern of files or address, on a thread of its own."""

  def __init__(self, where: str, model: Model, source: int, *, retry_seconds: float = 1.0) -> None:
    super().__init__(name=f"callgate-watch-{source}", daemon=True)
    self.where, self._model = where, model
    self._source = source  # the stream's number in the model
    self._retry_seconds = retry_seconds  # between two attempts to open a missing stream
    self.state = "waiting for it"  # a short description of the present state
    self._inode = 0
    self._ending = threading.Event()
    self._reader: StreamReader | None = None

  def connect(self) -> StreamReader:
    """Opens the stream now, so that the caller gets the OSError or ValueError."""
    while True:
      self._inode = _inode(self.where)
      reader = open_stream(self.where, follow=True)
      if _inode(self.where) == self._inode:
        self._reader = reader
        return reader
      reader.close()  # the file came or was replaced meanwhile, so it is unknown which one is open

  def stop(self) -> None:
    self._ending.set()
    self.join()

  def run(self) -> None:
    while not self._ending.is_set():
      try:
        with self._reader or self.connect() as reader:
          self._follow(reader)
      except ConnectionError as error:
        self.state = f"{error}; trying again"
      except FileNotFoundError:
        self.state = "waiting for it"
      except (OSError, ValueError) as error:
        self.state = str(error)
        if self._reader is not None and not is_address(self.where):
          return  # damaged; reading it from the beginning would count everything twice
      self._reader = None
      self._model.begin_session(self._source)
      self._ending.wait(self._retry_seconds)

  def _follow(self, reader: StreamReader) -> None:
    while not self._ending.is_set():
      wait = Wait(_PATIENCE)
      chunk: list[StreamRecord] = []
      try:
        while len(chunk) < _CHUNK and (left := wait.left) > 0:
          if (record := reader.read(left)) is None:
            break
          chunk.append(record)
      finally:  # also the records before damage
        self._model.add(chunk, self._source)
      if chunk:
        self.state = "following"
        continue
      if reader.ended:
        self.state = "closed by its writer"
        if is_address(self.where):
          return
      elif self.state == "waiting for it":
        self.state = "following"
      if not is_address(self.where) and _inode(self.where) not in (0, self._inode):
        return  # another file has replaced it
      self._ending.wait(wait.left)


def _inode(where: str) -> int:
  """Returns the identity of a file; 0 if there is none, or several."""
  try:
    return os.stat(where).st_ino
  except OSError:
    return 0
