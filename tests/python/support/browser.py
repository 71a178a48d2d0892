# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests, driven by its DevTools protocol: no driver, no virtual time."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
  from tornado.websocket import WebSocketClientConnection

_websocket = pytest.importorskip("tornado.websocket", reason="tornado is not installed")


def find() -> str | None:
  """The path of a Chromium, or None."""
  return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
  """Runs a browser; gives the address of its DevTools.

  Args:
    profile: an empty folder that it may fill.
  """
  arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--no-first-run", "--disable-extensions", "--remote-debugging-port=0",
               f"--user-data-dir={profile}", "--window-size=1400,1100", "about:blank"]  # fmt: skip
  environment = {**os.environ, "HOME": str(profile)}
  process = subprocess.Popen(
    [str(find()), *arguments],
    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
  )  # fmt: skip
  assert process.stderr is not None
  try:
    said = ""
    for line in process.stderr:
      said += line
      if found := re.search(r"DevTools listening on (ws://\S+)", line):
        break
    else:
      raise RuntimeError(f"chromium did not start: {said}")
    yield found[1]
  finally:
    process.kill()
    process.stderr.close()
    process.wait()


class Tab:
  """A page of a browser."""

  def __init__(self, connection: WebSocketClientConnection, session: str) -> None:
    self._connection = connection
    self._session = session
    self._ids = itertools.count(1000)

  async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
    """Calls a method of the DevTools protocol."""
    return await _call(self._connection, next(self._ids), method, parameters, self._session)

  async def evaluate(self, expression: str) -> Any:
    """The value of a JavaScript expression, which may be a promise."""
    answer = await self.call(
      "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
    )
    if "exceptionDetails" in answer:
      raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
    return answer["result"].get("value")

  async def wait_until(self, expression: str, seconds: float = 90) -> None:
    """Waits until a JavaScript expression is true."""
    deadline = time.monotonic() + seconds
    while not await self.evaluate(f"Boolean({expression})"):
      assert time.monotonic() < deadline, f"after {seconds} s it is not true that {expression}"
      await asyncio.sleep(0.1)

  async def screenshot(self) -> bytes:
    """A picture of the page, as PNG."""
    answer = await self.call("Page.captureScreenshot", format="png")
    return base64.b64decode(answer["data"])


@asynccontextmanager
async def open_tab(
  devtools: str, address: str, width: int = 1360, height: int = 1000
) -> AsyncIterator[Tab]:
  """Opens a page in a browser and starts to load an address.

  Args:
    devtools: what `chromium` gave.
    address: of the page.
    width: of the page, in pixels.
    height: likewise.
  """
  connection = await _websocket.websocket_connect(devtools, max_message_size=1 << 28)
  try:
    target = await _call(connection, 1, "Target.createTarget", {"url": "about:blank"})
    attached = await _call(
      connection, 2, "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
    )
    tab = Tab(connection, attached["sessionId"])
    await tab.call("Page.enable")
    await tab.call(
      "Emulation.setDeviceMetricsOverride",
      width=width, height=height, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    await tab.call("Page.navigate", url=address)
    yield tab
    await _call(connection, 3, "Target.closeTarget", {"targetId": target["targetId"]})
  finally:
    connection.close()
    while await connection.read_message() is not None:
      pass  # until the other side has closed it, too


async def _call(
  connection: WebSocketClientConnection, number: int, method: str, parameters: dict[str, Any],
  session: str | None = None,
) -> dict[str, Any]:  # fmt: skip
  message = {"id": number, "method": method, "params": parameters}
  await connection.write_message(json.dumps(message | ({"sessionId": session} if session else {})))
  while True:
    text = await asyncio.wait_for(connection.read_message(), 90)
    assert text is not None, f"chromium went away during {method}"
    answer = json.loads(text)
    if answer.get("id") == number:
      assert "error" not in answer, f"{method}: {answer['error']}"
      return answer["result"]
