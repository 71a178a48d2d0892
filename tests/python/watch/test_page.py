# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate watch`: the page as a document, over its server, and in a browser."""

from __future__ import annotations

import asyncio
import html
import io
import itertools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import stream_bytes as sb

pytest.importorskip("bokeh")

from bokeh.client import pull_session
from bokeh.document import Document
from bokeh.models import PlainText
from interpreters import Module, Process, same_path, start

import callgate as cg
from callgate import __main__ as cli
from callgate._watch.model import Model
from callgate._watch.page import Page

# Bokeh's client asks tornado for a loop where there is none yet; Python 3.12 and newer warn.
pytestmark = pytest.mark.filterwarnings("ignore:There is no current event loop:DeprecationWarning")


def training(steps: int = 300) -> bytes:
  """Losses on two devices, and an array on the second one now and then."""
  seqs = itertools.count(), itertools.count()
  data = sb.session() + sb.source(0, "loss", sb.LOSS)
  data += sb.source(1, "grads", [("['w']", "float32", (8,))])
  noise = np.random.default_rng(0)
  for step in range(steps):
    for device in (0, 1):
      value = np.float32((1 + device) / (1 + 0.05 * step) + 0.05 * noise.normal())
      data += sb.record(0, [value], seq=next(seqs[device]), device=device, time_ns=step * 10**7)
    if step % 3 == 0:
      w = noise.normal(size=8).astype(np.float32)
      data += sb.record(1, [w], seq=next(seqs[1]), device=1, time_ns=step * 10**7)
  return data


def model_of(path: Path, data: bytes) -> Model:
  path.write_bytes(data)
  model = Model()
  with cg.open_stream(path) as stream:
    model.add(list(stream))
  return model


def named(document: Document, name: str) -> Any:
  found = document.select_one({"name": name})
  assert found is not None, name
  return found


def curve(document: Any, label: str) -> Any:
  """The data of a plot's first curve."""
  lines = [
    r for r in named(document, f"curves:{label}").renderers if type(r.glyph).__name__ == "Line"
  ]
  return lines[0].data_source.data


# -- the document ----------------------------------------------------------------------------------
@pytest.fixture
def page(tmp_path: Path) -> tuple[Document, Page, Model]:
  model = model_of(tmp_path / "run.cgs", training())
  document = Document()
  return document, Page(document, model, lambda: ["run.cgs: <following>"], 12), model


def test_the_page_has_a_plot_a_leaf_and_a_curve_a_device(page):
  document, _, model = page
  shown = [one.title.text for one in named(document, "plots").children]
  assert shown == ["loss", "grads/w"]
  lines = [r for r in named(document, "curves:loss").renderers if type(r.glyph).__name__ == "Line"]
  assert len(lines) == 2
  want = next(iter(model.curves(next(iter(model.versions())), "whole").values()))
  np.testing.assert_array_equal(curve(document, "loss")["mean"], want["mean"])
  assert named(document, "table").source.data["records"] == [600, 100]
  assert "&lt;following&gt;" in named(document, "head").text  # names of files are text, not HTML
  assert "700 records" in named(document, "head").text
  assert named(document, "lanes").y_range.factors == ["device 0", "device 1"]


def test_the_page_shows_what_is_chosen(page):
  document, _, _ = page
  named(document, "axis").active = 1
  np.testing.assert_allclose(curve(document, "loss")["x"], np.arange(300) * 0.01)
  named(document, "view").active = 1
  names = [one.name for one in named(document, "plots").children]
  assert names == ["curves:loss", "latest:grads/w"]
  (line, _) = named(document, "latest:grads/w").renderers
  assert len(line.data_source.data["y"]) == 8
  named(document, "choice").value = ["grads/w"]
  assert [one.name for one in named(document, "plots").children] == ["latest:grads/w"]


def test_the_recent_part_of_a_run_is_shown_in_full(tmp_path):
  model = model_of(tmp_path / "s", sb.losses([float(i) for i in range(3000)]))
  document = Document()
  Page(document, model, list, 12)
  assert len(curve(document, "loss")["x"]) <= 1000
  assert curve(document, "loss")["high"].max() == 2999
  named(document, "window").active = 1
  np.testing.assert_array_equal(curve(document, "loss")["mean"], np.arange(2000, 3000))


def test_leaves_that_come_later_are_shown_until_the_user_chooses(tmp_path):
  model = Model()
  document = Document()
  page = Page(document, model, list, 2)
  assert [one.name for one in named(document, "plots").children] == ["nothing"]
  for name in "abc":
    (tmp_path / name).write_bytes(sb.losses([1.0], name=name))
    with cg.open_stream(tmp_path / name) as stream:
      model.add(list(stream), source=ord(name))
    page.update()
  choice = named(document, "choice")
  assert (choice.options, choice.value) == (["a", "b", "c"], ["a", "b"])
  choice.value = ["c"]
  page.update()
  assert [one.name for one in named(document, "plots").children] == ["curves:c"]


def test_what_has_not_changed_is_not_sent_again(page):
  document, one, _ = page
  changed: list[Any] = []
  source = named(document, "curves:loss").renderers[0].data_source
  source.on_change("data", lambda attr, old, new: changed.append(new))
  one.update()
  assert changed == []


# -- names that are meant for a browser ------------------------------------------------------------
# What each would do, had it its way, is to set `window.stolen`.
HOSTILE = [
  "<img src=x onerror='window.stolen=1'>",
  "<img src=x onerror=window.stolen=1>",
  "\"'><svg onload=window.stolen=1>",
  "</script></title></style></div><script>window.stolen=1</script>",
  "<iframe srcdoc='<script>parent.stolen=1</script>'></iframe>",
  "$$\\href{javascript:window.stolen=1}{x}$$",
  "\\(\\unicode{<img src=x onerror=window.stolen=1>}\\)",
  "javascript:window.stolen=1",
  "&lt;img src=x onerror=window.stolen=1&gt;",
  "leaf&0",
]


def hostile() -> bytes:
  """A stream with such a text in every field that can hold one."""
  data = sb.session()
  for number, text in enumerate(HOSTILE):
    leaves = [(text, "float32", ()), (f"['{text}']", "float32", (8,))]
    note = json.dumps({text: text, "shards": None})
    data += sb.source(number, text, leaves, role=number % 5, description=note)
    for seq in range(2):
      data += sb.record(number, [np.float32(seq), np.zeros(8, np.float32)], seq=seq)
  return data


def test_names_of_a_stream_are_text_to_the_browser(tmp_path):
  model = model_of(tmp_path / "s", hostile())
  document = Document()
  Page(document, model, lambda: HOSTILE, 1000)
  choice = named(document, "choice")
  assert len(choice.options) == 2 * len(HOSTILE) == len(set(choice.value))
  for option in choice.options:
    value, shown = (option, option) if isinstance(option, str) else option
    assert value == html.escape(value, quote=False) or re.fullmatch(r"leaf&\d+", value)
    assert not set(shown) & set("<>\"'")
  # All that is there can be recognised.
  shown = {html.unescape(o if isinstance(o, str) else o[1]) for o in choice.options}
  assert all(any(text in label for label in shown) for text in HOSTILE)
  assert len(named(document, "plots").children) == len(choice.value)
  for plot in named(document, "plots").children:
    text = plot.title.text
    assert isinstance(text, PlainText) or not set(text) & set("$\\")
  head = named(document, "head")
  assert head.disable_math
  assert "<img" not in head.text
  assert "<svg" not in head.text


def test_a_name_that_looks_like_the_stand_in_of_another_has_its_own_plot(tmp_path):
  names = ["<a>", "leaf&0", "leaf&1", "a"]
  model = Model()
  for number, name in enumerate(names):
    (tmp_path / "s").write_bytes(sb.losses([1.0], name=name))
    with cg.open_stream(tmp_path / "s") as stream:
      model.add(list(stream), source=number)
  document = Document()
  Page(document, model, list, 12)
  assert [one.title.text for one in named(document, "plots").children] == names
  choice = named(document, "choice")
  choice.value = choice.value[1:2]
  assert [one.title.text for one in named(document, "plots").children] == ["leaf&0"]


# -- the server ------------------------------------------------------------------------------------
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
      found = re.search(r"http://127\.0\.0\.1:\d+/", line)
      if found is None:
        process.wait(60)
        errors.seek(0)
        raise AssertionError(line + errors.read().decode())
      yield process, found[0]
    finally:
      process.kill()
      process.communicate()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
  """Starts servers, which end with the test; gives the addresses of their pages."""
  with ExitStack() as stack:
    yield lambda *arguments: stack.enter_context(watching(*arguments))[1]


def wait_for(address: str, condition: Callable[[Document], bool]) -> Document:
  """Opens the page, in sessions of its own, until it is as it should be."""
  deadline = time.monotonic() + 90
  while True:
    session = pull_session(url=address)
    session.close()
    session._loop_until_closed()  # close() alone leaves the socket to the garbage collector
    if condition(session.document):
      return session.document
    assert time.monotonic() < deadline, named(session.document, "head").text


def says(*parts: str) -> Callable[[Document], bool]:
  return lambda document: all(part in named(document, "head").text for part in parts)


def test_the_served_page_follows_its_stream(tmp_path, serve):
  path = tmp_path / "run.cgs"
  path.write_bytes(training())
  address = serve(path)
  with urllib.request.urlopen(address, timeout=60) as answer:
    text = answer.read().decode()
  assert "callgate watch" in text
  assert not re.search(r"(src|href)=\"https?://", text)  # all scripts come from the server
  document = wait_for(address, says("700 records", "following"))
  assert len(curve(document, "loss")["x"]) == 300
  with path.open("ab") as file:
    file.write(sb.losses([1.0, 2.0], begin=300) + sb.end(2))
  document = wait_for(address, says("702 records", "closed by its writer"))
  assert list(curve(document, "loss")["mean"][-2:]) == [1, 2]


def test_the_server_listens_on_loopback_and_refuses_pages_of_others(tmp_path, serve):
  from tornado.httpclient import HTTPClientError, HTTPRequest
  from tornado.websocket import websocket_connect

  path = tmp_path / "run.cgs"
  path.write_bytes(training(3))
  address = serve(path)
  port = int(address.rstrip("/").rsplit(":", 1)[1])

  async def connect(origin: str) -> None:
    request = HTTPRequest(f"ws://127.0.0.1:{port}/ws", headers={"Origin": origin})
    connection = await websocket_connect(request, subprotocols=["bokeh"])
    connection.close()
    while await connection.read_message() is not None:  # None: the server has closed it, too
      pass

  with pytest.raises(HTTPClientError) as error:
    asyncio.run(connect("http://127.0.0.1:1"))
  assert error.value.code == 403
  own = socket.gethostbyname_ex(socket.gethostname())[2]
  for host in [one for one in own if not one.startswith("127.")]:
    with socket.socket() as other:
      other.settimeout(10)
      assert other.connect_ex((host, port)) != 0


def answer_of(address: str, path: str = "", **headers: str) -> tuple[int, Any, str]:
  """Status, headers and text of an answer."""
  request = urllib.request.Request(address + path, headers=headers)
  try:
    with urllib.request.urlopen(request, timeout=60) as answer:
      return answer.status, answer.headers, answer.read().decode()
  except urllib.error.HTTPError as error:
    with error:
      return error.code, error.headers, error.read().decode()


def test_only_requests_for_this_machine_are_answered(tmp_path, serve):
  """Somebody else's page can have its own name resolved to this machine's loopback."""
  from tornado.httpclient import HTTPClientError, HTTPRequest
  from tornado.websocket import websocket_connect

  path = tmp_path / "run.cgs"
  path.write_bytes(training(3))
  address = serve(path)
  port = int(address.rstrip("/").rsplit(":", 1)[1])
  own = ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"]
  for host in [*own, *(f"{one}:{port}" for one in own), "localhost:8080"]:  # through a tunnel
    assert answer_of(address, Host=host)[0] == 200, host
  others = ["", "evil.example", f"evil.example:{port}", "localhost.evil.example", "[::1", "0.0.0.0",
            "127.0.0.1.nip.io", "localhost@evil.example", "localhost."]  # fmt: skip
  for host in others:
    for page in ("", "ws", "static/js/bokeh.min.js", "metadata"):
      status, _, text = answer_of(address, page, Host=host)
      assert status in (400, 403), (host, page)  # 400: no name at all
      assert status == 400 or "one of localhost, 127.0.0.1, ::1" in text
      assert "bokeh" not in text.lower()

  async def connect(host: str) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    request = HTTPRequest(f"ws://127.0.0.1:{port}/ws", headers=headers)
    connection = await websocket_connect(request, subprotocols=["bokeh"])
    connection.close()
    while await connection.read_message() is not None:  # None: the server has closed it, too
      pass

  for host in (f"evil.example:{port}", "evil.example"):
    with pytest.raises(HTTPClientError) as error:
      asyncio.run(connect(host))
    assert error.value.code == 403
  asyncio.run(connect(f"localhost:{port}"))


def test_the_page_runs_no_script_but_the_servers(tmp_path, serve):
  path = tmp_path / "run.cgs"
  path.write_bytes(hostile())
  address = serve(path)
  nonces = set()
  for _ in range(2):
    status, headers, text = answer_of(address)
    assert status == 200
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    for kind in ("default-src", "base-uri", "form-action", "frame-ancestors"):
      assert policy[kind] == "'none'"
    assert "unsafe" not in policy["script-src"]
    (nonce,) = re.findall(r"'nonce-([^']+)'", policy["script-src"])
    nonces.add(nonce)
    scripts = re.findall(r"<script[^>]*>", text)
    assert scripts
    assert all(f'nonce="{nonce}"' in script for script in scripts)
    assert not re.search(r"\son\w+=", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    assert "stolen" not in text
  assert len(nonces) == 2
  for page in ("autoload.js", "metadata", "static/js/bokeh.min.js", "no"):
    status, headers, _ = answer_of(address, page)
    assert status == (200 if page.startswith("static") else 404)
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Access-Control-Allow-Origin"] is None


def test_a_stream_that_is_not_there_yet_is_waited_for_if_asked(tmp_path, serve):
  path = tmp_path / "later.cgs"
  address = serve("--wait", path)
  wait_for(address, says("later.cgs: waiting for it", "0 records"))
  (tmp_path / "partial").write_bytes(training(10))
  os.rename(tmp_path / "partial", path)
  wait_for(address, says("24 records"))


@pytest.mark.skipif(browser.find() is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_draws_the_page_and_what_comes_while_it_is_open(tmp_path, serve):
  image = pytest.importorskip("PIL.Image")
  path = tmp_path / "run.cgs"
  path.write_bytes(training())
  address = serve(path)

  async def look(devtools: str) -> tuple[int, bytes]:
    async with browser.open_tab(devtools, address) as tab:
      await tab.wait_until("window.Bokeh?.documents[0]?.is_idle")
      document = "Bokeh.documents[0]"
      await tab.wait_until(f"{document}.get_model_by_name('head').text.includes('700 records')")
      with path.open("ab") as file:
        file.write(sb.losses([1.0, 2.0], begin=300) + sb.end(2))
      await tab.wait_until(f"{document}.get_model_by_name('head').text.includes('702 records')")
      plots = await tab.evaluate(f"{document}.get_model_by_name('plots').children.length")
      await tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")
      return plots, await tab.screenshot()

  (tmp_path / "profile").mkdir()
  with browser.chromium(tmp_path / "profile") as devtools:
    plots, png = asyncio.run(look(devtools))
  assert plots == 2
  pixels = np.asarray(image.open(io.BytesIO(png)).convert("RGB")).reshape(-1, 3)
  colors, counts = np.unique(pixels, axis=0, return_counts=True)
  drawn = {tuple(color): int(n) for color, n in zip(colors.tolist(), counts, strict=True)}
  assert drawn.get((31, 119, 180), 0) > 100  # the first device's curve
  assert drawn.get((255, 127, 14), 0) > 100  # the second one's
  assert drawn[(255, 255, 255)] < len(pixels) * 0.98


@pytest.mark.skipif(browser.find() is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_runs_nothing_of_what_a_stream_has_for_names(tmp_path, serve):
  path = tmp_path / "<img src=x onerror=window.stolen=1>.cgs"
  path.write_bytes(hostile())
  address = serve(path, "--plots", "100")
  # Every element of the page, those in shadow trees too.
  elements = """(function all(root) {
    return [...root.querySelectorAll('*')].flatMap(
      e => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
  })(document)"""

  async def look(devtools: str) -> None:
    async with browser.open_tab(devtools, address) as tab:
      await tab.wait_until("window.Bokeh?.documents[0]?.is_idle")
      head = "Bokeh.documents[0].get_model_by_name('head').text"
      await tab.wait_until(f"{head}.includes('20 records')")
      await tab.wait_until(f"{elements}.filter(e => e.matches('.slick-row')).length >= 8")
      texts = f"{elements}.map(e => e.childElementCount ? '' : e.textContent)"
      choices = await tab.evaluate(f"{elements}.filter(e => e.matches('.choices__item')).length")
      assert choices >= 2 * len(HOSTILE)
      for text in HOSTILE[:4]:
        assert await tab.evaluate(f"{texts}.some(t => t.includes({json.dumps(text)}))"), text
      await tab.evaluate("new Promise(done => setTimeout(done, 300))")
      assert await tab.evaluate("window.stolen") is None
      made = (
        f"{elements}.filter(e => e.matches('[onerror], [onload], iframe, a[href^=javascript]'))"
      )
      assert await tab.evaluate(f"{made}.length") == 0

  (tmp_path / "profile").mkdir()
  with browser.chromium(tmp_path / "profile") as devtools:
    asyncio.run(look(devtools))


# -- errors ----------------------------------------------------------------------------------------
def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
  assert cli.main(["watch", "--port", "0", "--no-browser", *map(str, arguments)]) == 1
  captured = capsys.readouterr()
  assert captured.out == ""
  assert captured.err.startswith("python -m callgate watch: ")
  assert captured.err.count("\n") == 1
  return captured.err


def test_a_missing_file_is_named(tmp_path, capsys):
  assert f"there is no file '{tmp_path / 'no.cgs'}'" in fails(capsys, tmp_path / "no.cgs")


def test_a_file_of_another_kind_is_refused(tmp_path, capsys):
  path = tmp_path / "text.txt"
  path.write_bytes(b"hello, hello, hello, hello")
  # It is refused as it is read: the page says so, so here the reader is asked.
  with cg.open_stream(path) as stream, pytest.raises(ValueError) as error:
    next(stream)
  assert "text.txt" in str(error.value)
  assert capsys.readouterr().err == ""


def test_a_refused_connection_is_an_error_that_names_the_address(capsys):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  message = fails(capsys, f"tcp://127.0.0.1:{port}")
  assert f"tcp://127.0.0.1:{port}" in message
  assert "refused" in message.lower()


def test_a_port_in_use_is_an_error_that_says_what_to_do(tmp_path, capsys):
  path = tmp_path / "run.cgs"
  path.write_bytes(training(3))
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    message = fails(capsys, path, "--port", port)
  assert f"port {port} of 127.0.0.1" in message
  assert "--port" in message


def test_without_bokeh_the_message_says_what_to_install(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "bokeh.server.server", None)
  assert "pip install 'callgate[watch]'" in fails(capsys, tmp_path / "run.cgs")


def test_a_termination_ends_the_server(tmp_path):
  path = tmp_path / "run.cgs"
  path.write_bytes(training(3))
  with watching(path) as (process, _):
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
