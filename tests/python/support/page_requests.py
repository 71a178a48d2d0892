# SPDX-License-Identifier: Apache-2.0
"""Requests to a live page, with whatever headers a test wants."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any, NamedTuple


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
