# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate watch`: what the page is told, its server, and the page in a browser."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import re
import signal
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import stream_bytes as sb
from page_requests import get, request, watching

import callgate as cg
from callgate import __main__ as cli
from callgate._core.png import png
from callgate._watch.answers import PageAnswers
from callgate._watch.cli import names_of
from callgate._watch.images import image_of
from callgate._watch.model import Model


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


def model_of(*paths: Path) -> Model:
  model = Model(runs=[path.name for path in paths])
  for source, path in enumerate(paths):
    with cg.open_stream(path) as stream:
      model.add(list(stream), source)
  return model


class Page:
  """The answers to a page that asks for one thing after the other."""

  def __init__(self, model: Model, **options: int) -> None:
    self.answers = PageAnswers(model, lambda: ["run.cgs: following"], **options)

  def leaf(self, label: str, **query: Any) -> Any:
    state = self.answers.state()
    number = {leaf["label"]: leaf["id"] for leaf in state["leaves"]}
    if query.get("x") in number:
      query["x"] = number[query["x"]]
    asked = {"id": number[label], **query}
    answer = self.answers.leaf({name: [str(value)] for name, value in asked.items()})
    return json.loads(json.dumps(answer, allow_nan=False))


@pytest.fixture
def page(tmp_path: Path) -> Page:
  (tmp_path / "run.cgs").write_bytes(training())
  return Page(model_of(tmp_path / "run.cgs"))


# -- what the page is told -------------------------------------------------------------------------
def test_there_is_a_leaf_a_plot_and_a_curve_a_device(page):
  state = json.loads(json.dumps(page.answers.state(), allow_nan=False))
  assert [leaf["label"] for leaf in state["leaves"]] == ["loss", "grads/w"]
  assert [leaf["records"] for leaf in state["leaves"]] == [600, 100]
  assert [leaf["array"] for leaf in state["leaves"]] == [False, True]
  assert state["streams"] == ["run.cgs: following"]
  assert state["totals"]["records"] == 700
  assert set(state["devices"]["records"]) == {"0", "1"}
  assert sum(map(sum, state["devices"]["records"].values())) == 700
  answer = page.leaf("loss")
  assert [one["device"] for one in answer["series"]] == [0, 1]
  assert [len(one["mean"]) for one in answer["series"]] == [300, 300]
  assert "low" not in answer["series"][0]  # of numbers, which are their own band
  (curve,) = page.leaf("grads/w", x="seconds")["series"]
  assert all(
    low < mean < high
    for low, mean, high in zip(curve["low"], curve["mean"], curve["high"], strict=True)
  )
  np.testing.assert_allclose(curve["x"], np.arange(100) * 0.03)


def test_a_part_of_the_axis_comes_with_more_points(tmp_path):
  values = np.sin(np.arange(12_000) / 50)
  values[7_001] = 5
  (tmp_path / "s").write_bytes(sb.losses(values.astype(np.float32)))
  page = Page(model_of(tmp_path / "s"), points=500)
  (whole,) = page.leaf("loss")["series"]
  assert 250 <= len(whole["x"]) <= 500
  assert max(whole["high"]) == 5  # no peak is lost
  at = int(np.argmax(whole["high"]))
  part = {"from": whole["x"][at] - 10, "to": whole["x"][at] + 30}
  (near,) = page.leaf("loss", **part)["series"]
  assert len(near["x"]) == 43  # each record of the part, and one beyond each end
  np.testing.assert_allclose(near["mean"], values[int(near["x"][0]) :][:43], atol=1e-6)
  assert near["mean"][near["x"].index(7_001)] == 5
  assert page.leaf("loss", **{"from": 20_000, "to": 30_000})["series"][0]["x"] == []
  (recent,) = page.leaf("loss", window="recent", points=1000)["series"]
  np.testing.assert_allclose(recent["mean"], values[-1000:], atol=1e-6)


def test_curves_over_another_tap_take_its_value_at_their_time(tmp_path):
  data = sb.session() + sb.source(0, "loss", sb.LOSS) + sb.source(1, "rate", sb.LOSS)
  for i in range(6):
    data += sb.record(1, [np.float32(10 * i)], seq=2 * i, time_ns=1000 * i + 500)
    data += sb.record(0, [np.float32(i)], seq=2 * i + 1, time_ns=1000 * i + 600)
  (tmp_path / "s").write_bytes(data)
  answer = Page(model_of(tmp_path / "s")).leaf("loss", x="rate")
  assert answer["x"] == "rate"
  assert answer["series"][0]["x"] == [0, 10, 20, 30, 40, 50]
  assert answer["series"][0]["mean"] == [0, 1, 2, 3, 4, 5]
  assert Page(model_of(tmp_path / "s")).leaf("rate", x="loss")["series"][0]["x"][0] is None


def test_runs_lie_over_each_other_from_their_own_beginnings(tmp_path):
  paths = [tmp_path / "a.cgs", tmp_path / "b.cgs"]
  for begin, path in enumerate(paths):
    data = sb.session() + sb.source(0, "loss", sb.LOSS)
    for seq in range(4):
      data += sb.record(
        0, [np.float32(seq + 10 * begin)], seq=seq, time_ns=begin * 10**12 + seq * 10**9
      )
    path.write_bytes(data)
  answer = Page(model_of(*paths)).leaf("loss", x="seconds")
  assert [one["run"] for one in answer["series"]] == ["a.cgs", "b.cgs"]
  assert [one["x"] for one in answer["series"]] == [[0, 1, 2, 3]] * 2
  assert [one["mean"][0] for one in answer["series"]] == [0, 10]
  assert names_of(["x/a.cgs", "x/b.cgs"]) == ["a.cgs", "b.cgs"]
  assert names_of(["a/run", "b/run"]) == ["a/run", "b/run"]
  assert names_of(["unix:a/run"]) == ["unix:a/run"]


def test_lanes_have_curves_of_their_own(tmp_path):
  data = sb.session() + sb.source(0, "x", [("", "float32", (3,))], lanes="3:1")
  for seq in range(4):
    data += sb.record(0, [np.arange(3, dtype=np.float32) + 10 * seq], seq=seq)
  (tmp_path / "s").write_bytes(data)
  page = Page(model_of(tmp_path / "s"))
  (leaf,) = page.answers.state()["leaves"]
  assert (leaf["lanes"], leaf["shards"]) == (3, 0)
  answer = page.leaf("x", show="lanes")
  assert [one["lane"] for one in answer["series"]] == [0, 1, 2]
  assert [one["mean"] for one in answer["series"]] == [
    [0, 10, 20, 30],
    [1, 11, 21, 31],
    [2, 12, 22, 32],
  ]


def test_histograms_over_time_count_each_element_once(tmp_path):
  data = sb.session() + sb.source(0, "w", [("", "float32", (500,))])
  arrays = np.random.default_rng(0).normal(size=(300, 500)).astype(np.float32)
  arrays[7, 3] = np.nan
  for seq, array in enumerate(arrays):
    data += sb.record(0, [array], seq=seq)
  (tmp_path / "s").write_bytes(data)
  (run,) = Page(model_of(tmp_path / "s")).leaf("w", show="histograms")["runs"]
  assert 32 <= len(run["held"]) <= 64
  for one in run["held"]:
    array = arrays[one["record"]]
    finite = array[np.isfinite(array)].astype(np.float64)
    want, edges = np.histogram(finite, 32)
    assert one["counts"] == want.tolist()
    assert (one["low"], one["high"]) == (edges[0], edges[-1])
  assert np.unique(np.diff([one["record"] for one in run["held"]])).size == 1


@pytest.mark.parametrize(
  ("array", "size"),
  [
    (np.arange(48.0).reshape(6, 8), (6, 8)),
    (np.arange(192, dtype=np.uint8).reshape(8, 8, 3), (8, 8)),
    (np.zeros((1000, 300, 1), np.float32), (250, 75)),
    (np.full((4, 4, 4), np.nan), (4, 4)),
    (np.ones((5, 5), np.complex64), (5, 5)),
    (np.zeros((3, 100)), None),
    (np.zeros((5, 5, 2)), None),
    (np.zeros(100), None),
  ],
)
def test_arrays_that_may_be_pictures_are_some(array, size):
  image_module = pytest.importorskip("PIL.Image")
  image = image_of(array)
  if size is None:
    assert image is None
    return
  assert image is not None
  opened = image_module.open(io.BytesIO(png(image.pixels)))
  assert (opened.height, opened.width) == size
  np.testing.assert_array_equal(np.asarray(opened.convert("RGB")), image.pixels)
  if array.dtype == np.uint8:
    np.testing.assert_array_equal(image.pixels, array)


def test_the_latest_value_of_an_array_comes_with_its_picture(tmp_path):
  data = sb.session() + sb.source(0, "w", [("", "float32", (8, 16))])
  array = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16)
  (tmp_path / "s").write_bytes(data + sb.record(0, [array]))
  answer = Page(model_of(tmp_path / "s")).leaf("w", show="latest")
  np.testing.assert_array_equal(answer["values"], array.reshape(-1))
  assert answer["kind"] == "float32[8, 16]"
  assert (answer["image"]["height"], answer["image"]["width"]) == (8, 16)
  assert base64.b64decode(answer["image"]["png"]).startswith(b"\x89PNG")


# -- names that are meant for a browser ------------------------------------------------------------
# Each would, had it its way, set `window.stolen`.
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


# -- the server ------------------------------------------------------------------------------------
@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
  """Starts servers, which end with the test; gives the addresses of their pages."""
  with ExitStack() as stack:
    yield lambda *arguments: stack.enter_context(watching(*arguments))[1]


def wait_for(address: str, condition: Callable[[Any], bool]) -> Any:
  """Asks for the state until it is as it should be."""
  deadline = time.monotonic() + 90
  while not condition(state := get(address, "state")):
    assert time.monotonic() < deadline, state
    time.sleep(0.05)
  return state


def says(records: int, *states: str) -> Callable[[Any], bool]:
  return lambda state: (
    state["totals"]["records"] == records
    and all(any(part in one for one in state["streams"]) for part in states)
  )


def test_the_served_page_follows_its_stream(tmp_path, serve):
  path = tmp_path / "run.cgs"
  path.write_bytes(training())
  address = serve(path, "--plots", "3")
  state = wait_for(address, says(700, "following"))
  assert state["plots"] == 3
  (curve, _) = get(address, "leaf", id=0)["series"]
  assert len(curve["x"]) == 300
  with path.open("ab") as file:
    file.write(sb.losses([1.0, 2.0], begin=300) + sb.end(2))
  wait_for(address, says(702, "closed by its writer"))
  (curve, _) = get(address, "leaf", id=0)["series"]
  assert curve["mean"][-2:] == [1, 2]
  for query, words in (
    ({"id": 9}, "expected the number of one of 2 leaves, got '9'"),
    ({"id": "-1"}, "expected the number of one of 2 leaves"),
    ({"id": 0, "show": "no"}, "show: expected one of curves, lanes, histograms, latest, got 'no'"),
    ({"id": 0, "points": 1}, "points: expected 2 to 20000, got 1"),
    ({"id": 0, "from": "nan"}, "from: expected a number, got 'nan'"),
  ):
    answer = request(address, f"api/leaf?{urllib.parse.urlencode(query)}")
    assert answer.status in (400, 404)
    assert words in answer.value["error"]


def test_the_server_answers_its_page_alone(tmp_path, serve):
  """Somebody else's page can have its own name resolved to this machine's loopback."""
  path = tmp_path / "run.cgs"
  path.write_bytes(training(3))
  address = serve(path)
  port = urllib.parse.urlsplit(address).port
  own = ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"]
  for host in [*own, *(f"{one}:{port}" for one in own), "localhost:8080"]:  # through a tunnel
    for page in ("", "page.js", "api/state"):
      assert request(address, page, Host=host).status == 200, host
  others = ["", "evil.example", f"evil.example:{port}", "localhost.evil.example", "[::1", "0.0.0.0",
            "127.0.0.1.nip.io", "localhost@evil.example", "localhost."]  # fmt: skip
  for host in others:
    for page in ("", "page.js", "api/state"):
      answer = request(address, page, Host=host)
      assert answer.status == 403, (host, page)
      assert "one of localhost, 127.0.0.1, ::1" in answer.text
  assert request(address, "api/state", Origin="http://127.0.0.1:1").status == 403
  assert request(f"http://127.0.0.1:{port}/").status == 403  # without the secret
  assert request(address, "api/knobs", {"a": 1}).status == 404  # nothing to set
  for host in socket.gethostbyname_ex(socket.gethostname())[2]:
    if not host.startswith("127."):
      with socket.socket() as other:
        other.settimeout(10)
        assert other.connect_ex((host, port)) != 0


def test_the_page_loads_nothing_but_the_servers_files(tmp_path, serve):
  path = tmp_path / "run.cgs"
  path.write_bytes(hostile())
  address = serve(path)
  wait_for(address, says(20))
  for page, kind in (("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css"),
                     ("chart.js", "text/javascript"), ("controls.js", "text/javascript"),
                     ("common.js", "text/javascript"),
                     ("api/state", "application/json"), ("no", "application/json"),
                     ("api/no", "application/json"), ("../cli.py", "application/json"),
                     ):  # fmt: skip
    answer = request(address, page)
    assert answer.headers.get_content_type() == kind, page
    policy = dict(
      part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; ")
    )
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
      assert policy[name] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Access-Control-Allow-Origin"] is None
    if kind != "application/json":
      assert answer.status == 200
      assert not re.search(r"(https?:)?//[a-z]+\.", answer.text)  # of nobody else's
      assert "stolen" not in answer.text
    elif page != "api/state":
      assert answer.status == 404
  assert not re.search(r"<script>|\son\w+=|style=", request(address).text)


def test_a_stream_that_is_not_there_yet_is_waited_for_if_asked(tmp_path, serve):
  path = tmp_path / "later.cgs"
  address = serve("--wait", path)
  wait_for(address, says(0, "later.cgs: waiting for it"))
  (tmp_path / "partial").write_bytes(training(10))
  (tmp_path / "partial").rename(path)
  wait_for(address, says(24))


# -- in a browser ----------------------------------------------------------------------------------
NEEDS_BROWSER = pytest.mark.skipif(
  browser.find() is None, reason="needs chromium: apt-get install chromium"
)


@NEEDS_BROWSER
def test_a_browser_draws_the_page_and_what_comes_while_it_is_open(tmp_path, serve):
  image = pytest.importorskip("PIL.Image")
  path = tmp_path / "run.cgs"
  path.write_bytes(training())
  address = serve(path)

  async def look(devtools: str) -> bytes:
    async with browser.open_tab(devtools, address) as tab:
      await tab.wait_until("document.body?.dataset.records === '700'")
      with path.open("ab") as file:
        file.write(sb.losses([1.0, 2.0], begin=300) + sb.end(2))
      await tab.wait_until("document.body?.dataset.records === '702'")
      names = "[...document.querySelectorAll('.card h2')].map(h => h.textContent)"
      assert await tab.evaluate(names) == ["loss", "grads/w"]
      for show in ("histograms", "latest", "lanes", "curves"):
        for box in ("logx", "logy"):
          await tab.evaluate(f"document.getElementById('{box}').click()")
        await choose(tab, "show", show)
      await choose(tab, "smooth", "0.9")
      await choose(tab, "x", "0")  # the loss over itself
      await choose(tab, "x", "record")
      # A part of the first plot, by dragging over it.
      drag = """(() => {
        const canvas = document.querySelector('.card canvas'), box = canvas.getBoundingClientRect();
        canvas.setPointerCapture = () => {};
        for (const [kind, x] of [['pointerdown', 100], ['pointermove', 200], ['pointerup', 200]]) {
          const place = {clientX: box.left + x, clientY: box.top + 50, pointerId: 1};
          canvas.dispatchEvent(new PointerEvent(kind, place));
        }
      })()"""
      await tab.evaluate(drag)
      await tab.wait_until("!document.querySelector('.card .whole').hidden")
      await tab.evaluate("document.querySelector('.card .whole').click()")
      await tab.evaluate("document.querySelector('#leaves input').click()")
      await tab.wait_until("document.querySelectorAll('.card').length === 1")
      await tab.evaluate("document.querySelector('#leaves input').click()")
      await tab.wait_until("document.querySelectorAll('.card').length === 2")
      await choose(tab, "smooth", "0")
      if await tab.evaluate("document.documentElement.dataset.theme") == "dark":
        await tab.evaluate("document.getElementById('theme').click()")
      await tab.evaluate("new Promise(done => setTimeout(done, 1500))")
      assert await tab.evaluate("document.querySelector('#head .lost')") is None
      return await tab.screenshot()

  (tmp_path / "profile").mkdir()
  with browser.chromium(tmp_path / "profile") as devtools:
    png_bytes = asyncio.run(look(devtools))
  pixels = np.asarray(image.open(io.BytesIO(png_bytes)).convert("RGB")).reshape(-1, 3)
  colors, counts = np.unique(pixels, axis=0, return_counts=True)
  drawn = {tuple(color): int(n) for color, n in zip(colors.tolist(), counts, strict=True)}
  assert drawn.get((59, 118, 214), 0) > 100  # the first device's curve
  assert drawn.get((224, 123, 40), 0) > 100  # the second one's


async def choose(tab: Any, name: str, value: str) -> None:
  """Chooses on the page, and waits until it has been drawn so."""
  control = f"document.getElementById('{name}')"
  await tab.evaluate(f"document.body.dataset.records = ''; {control}.value = '{value}';"
                     f"{control}.dispatchEvent(new Event('input', {{bubbles: true}}))")  # fmt: skip
  await tab.wait_until("document.body.dataset.records !== ''")
  assert await tab.evaluate("document.querySelector('#head .lost')?.textContent") is None


@NEEDS_BROWSER
def test_a_browser_runs_nothing_of_what_a_stream_has_for_names(tmp_path, serve):
  path = tmp_path / "<img src=x onerror=window.stolen=1>.cgs"
  path.write_bytes(hostile())
  address = serve(path, "--plots", "100")

  async def look(devtools: str) -> None:
    async with browser.open_tab(devtools, address) as tab:
      await tab.wait_until("document.body?.dataset.records === '20'")
      await tab.wait_until(f"document.querySelectorAll('.card').length === {2 * len(HOSTILE)}")
      texts = await tab.evaluate("document.body.innerText")
      for text in HOSTILE:
        assert text in texts, text
      await tab.evaluate("new Promise(done => setTimeout(done, 300))")
      assert await tab.evaluate("window.stolen") is None
      made = "document.querySelectorAll('[onerror], [onload], iframe, img, svg, a, style').length"
      assert await tab.evaluate(made) == 0

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
  assert f"the file '{tmp_path / 'no.cgs'}' doesn't exist" in fails(capsys, tmp_path / "no.cgs")


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


def test_a_termination_ends_the_server(tmp_path):
  path = tmp_path / "run.cgs"
  path.write_bytes(training(3))
  with watching(path) as (process, _):
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
