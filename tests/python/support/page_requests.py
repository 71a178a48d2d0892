# SPDX-License-Identifier: Apache-2.0
"""A live page, and requests to it with whatever headers a test wants."""

from __future__ import annotations

import http.client
import json
import re
import tempfile
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from interpreters import Module, Process, same_path, start


class Answer(NamedTuple):
  status: int
  headers: http.client.HTTPMessage
  text: str

  @property
  def value(self) -> Any:
    return json.loads(self.text)


def request(
  url: str, path: str = "", body: Any = None, *, method: str | None = None, **headers: str
) -> Answer:
  """The answer to a request; what is no string is sent as JSON. In names "_" stands for "-"."""
  parts = urllib.parse.urlsplit(url)
  sent = body if body is None or isinstance(body, str) else json.dumps(body)
  names = {name.replace("_", "-"): value for name, value in headers.items()}
  if sent is not None:
    names = {"Content-Type": "application/json", **names}
  connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
  method = method or ("GET" if sent is None else "POST")
  try:
    connection.request(method, f"{parts.path}{path}", sent, names)
    answer = connection.getresponse()
    return Answer(answer.status, answer.headers, answer.read().decode())
  finally:
    connection.close()


def get(url: str, path: str, **query: Any) -> Any:
  """The answer of `api/PATH`; fails where it refuses."""
  answer = request(url, f"api/{path}?{urllib.parse.urlencode(query)}")
  assert answer.status == 200, answer.text
  return answer.value


@contextmanager
def watching(*arguments: object) -> Iterator[tuple[Process, str]]:
  """Runs `watch` in a process of its own; gives it, and the address of its page."""
  with tempfile.TemporaryFile("w+b") as errors:
    process = start(
      Module("callgate"), "watch", "--port", "0", "--no-browser", *arguments, stderr=errors,
      environment=same_path(),
    )  # fmt: skip
    try:
      assert process.stdout is not None
      line = process.stdout.readline()
      found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
      if found is None:
        process.wait(60)
        errors.seek(0)
        raise AssertionError(line + errors.read().decode())
      yield process, found[0]
    finally:
      process.kill()
      process.communicate()
