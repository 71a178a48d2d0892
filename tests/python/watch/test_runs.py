# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate watch FOLDER`: the page of runs, its answers, and what a browser draws."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from interpreters import start
from page_requests import get, request, watching

import callgate as cg
from callgate import __main__ as cli
from callgate._watch.media import Media, shown
from callgate._watch.runs import RunsFollower
from callgate._watch.runs_answers import RunsAnswers


def train(folder: Path, name: str, rate: float, steps: int = 20, **more: Any) -> Any:
  """A run with a curve, images, texts and an alert."""
  with cg.run(name, folder=folder, config={"rate": rate, "model": {"width": 8}}, **more) as run:
    for i in range(steps):
      cg.tap(np.float32(np.exp(-rate * i)), "loss")
      if i % 5 == 0:
        cg.tap(np.full((4, 6, 3), i * 10, np.uint8), "picture", kind="image")
        cg.tap(("step {}", i), "words", kind="text")
    cg.alert(rate > 1, "too fast: {rate}", rate=rate)
    run.summary["accuracy"] = 1 - rate / 10
  return run


def crash(folder: Path) -> None:
  with cg.run("broken", folder=folder, config={"rate": 0.3}):
    cg.tap(1.0, "loss")
    raise ValueError("of the block")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
  with tempfile.TemporaryDirectory() as made:
    folder = Path(made) / "runs"
    train(folder, "slow", 0.1, tags=["sgd"], notes="the first")
    train(folder, "fast", 2.0, tags=["sgd", "doomed"])
    train(folder, "fast", 0.5, steps=10)
    with pytest.raises(ValueError, match="of the block"):
      crash(folder)
    yield folder


@contextmanager
def following(*folders: Path) -> Iterator[RunsAnswers]:
  runs = RunsFollower(list(map(str, folders)))
  runs.look()
  yield RunsAnswers(runs, points=1000, plots=12)
  for run in runs.runs():
    run.close()


def asked(answer: Callable[[Any], Any], **query: Any) -> Any:
  texts = {k: list(map(str, v)) if isinstance(v, list) else [str(v)] for k, v in query.items()}
  return json.loads(json.dumps(answer(texts), allow_nan=False))


# -- what the page is told -------------------------------------------------------------------------
def test_the_table_has_a_row_for_each_run_the_newest_first(folder):
  with following(folder) as page:
    state = asked(page.runs)
  assert state["folders"] == ["runs: 4 runs"]
  broken, second, fast, slow = state["runs"]
  assert [run["id"] for run in state["runs"]] == ["broken", "fast-2", "fast", "slow"]
  assert [run["state"] for run in state["runs"]] == ["crashed", "finished", "finished", "finished"]
  assert broken["error"].startswith("ValueError: of the block")
  assert (second["name"], second["records"]) == ("fast", 14)
  assert slow["config"] == {"rate": 0.1, "model.width": 8}
  assert slow["summary"] == {"accuracy": 0.99}
  assert slow["last"] == {"loss": pytest.approx(np.exp(-1.9), rel=1e-6)}
  assert slow["media"] == ["picture", "words"]
  assert (slow["tags"], slow["notes"]) == (["sgd"], "the first")
  assert [one["text"] for one in fast["alerts"]] == ["too fast: 2.0"]
  assert fast["alert_count"] == 1
  assert slow["alerts"] == []
  assert 0 < slow["seconds"] < 100


def test_curves_of_several_runs_come_together(folder):
  with following(folder) as page:
    answer = asked(page.curves, leaf="loss", run=["slow", "fast-2", "broken"])
    assert [one["run"] for one in answer["series"]] == ["slow", "fast-2", "broken"]
    assert [len(one["mean"]) for one in answer["series"]] == [20, 10, 1]
    np.testing.assert_allclose(answer["series"][0]["mean"], np.exp(-0.1 * np.arange(20)), rtol=1e-6)
    over = asked(page.curves, leaf="loss", run=["slow"], x="seconds")["series"]
    assert np.all(np.diff(over[0]["x"]) >= 0)
    assert 0 <= over[0]["x"][0] < 100  # since the run began
    over = asked(page.curves, leaf="loss", run=["slow"], x="loss")["series"]
    assert over[0]["x"] == over[0]["mean"]
    part = {"from": 3, "to": 5}
    assert len(asked(page.curves, leaf="loss", run=["slow"], **part)["series"][0]["x"]) == 5
    assert asked(page.curves, leaf="no", run=["slow"])["series"] == []


def test_images_and_texts_come_one_by_one(folder):
  images = pytest.importorskip("PIL.Image")
  with following(folder) as page:
    last = asked(page.media, run="slow", leaf="picture")
    assert (len(last["places"]), last["at"]) == (4, 3)
    picture = images.open(io.BytesIO(base64.b64decode(last["image"]["png"])))
    np.testing.assert_array_equal(np.asarray(picture), np.full((4, 6, 3), 150, np.uint8))
    first = asked(page.media, run="slow", leaf="words", at=0)
    assert (first["text"], first["places"][0]["record"]) == ("step 0", 0)
    assert asked(page.media, run="slow", leaf="words", at=99)["text"] == "step 15"


def test_a_knob_that_several_streams_have_is_one_curve(tmp_path):
  rate = cg.knob("watch.runs.rate", 1.0)
  with cg.run("r", folder=tmp_path):
    cg.tap(1.0, "a")
    cg.tap(1.0, "b")
    rate.set(0.5)
  with following(tmp_path) as page:
    (run,) = asked(page.runs)["runs"]
    assert run["knobs"]["watch.runs.rate"] == 0.5
    (one,) = asked(page.curves, leaf="knob:watch.runs.rate", run=["r"])["series"]
    assert one["mean"] == [0.5]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_an_image_without_a_number_has_ends_all_the_same(dtype):
  image = shown("image", np.full((8, 8), np.nan).astype(dtype))
  assert (image.low, image.high) == (0, 0)


def test_a_large_image_keeps_its_proportions():
  assert shown("image", np.zeros((4000, 3000, 3), np.uint8)).pixels.shape == (250, 188, 3)


def test_many_images_are_thinned_evenly_and_the_last_is_there():
  media = Media()
  for i in range(1000):
    media.add(i, i * 0.5, 0, "image", np.full((4, 4), i % 250, np.uint8))
  held = media.all()
  assert 16 <= len(held) <= Media.MOST + 1
  assert held[-1].position == 999
  assert np.unique(np.diff([one.position for one in held[:-1]])).size == 1
  assert held[-1].value.pixels[0, 0, 0] == 999 % 250


def test_a_run_is_followed_while_it_goes_on(tmp_path):
  runs = RunsFollower([str(tmp_path)])
  page = RunsAnswers(runs, points=1000, plots=12)
  with cg.run("r", folder=tmp_path) as run:
    runs.look()
    assert [one["state"] for one in asked(page.runs)["runs"]] == ["running"]
    for count in (1, 2):
      cg.tap(float(count), "loss")
      cg.barrier()
      runs.look()
      assert len(asked(page.curves, leaf="loss", run=["r"])["series"][0]["mean"]) == count
    cg.alert(True, "look")
    cg.barrier()
    run.summary["a"] = jnp.inf
    runs.look()
    (row,) = asked(page.runs)["runs"]
    assert ([one["text"] for one in row["alerts"]], row["summary"]) == (["look"], {"a": "Infinity"})
    cg.tap(3.0, "later")
  runs.look()
  (row,) = asked(page.runs)["runs"]
  assert (row["state"], row["last"]) == ("finished", {"loss": 2, "later": 3})
  (followed,) = runs.runs()
  assert all(reader is None for _, reader in followed._readers.values())  # no file stays open
  for path in run.folder.iterdir():
    path.unlink()
  runs.look()
  assert asked(page.runs)["runs"] == []


def test_runs_of_one_name_in_folders_of_one_name_are_told_apart(tmp_path):
  for where, loss in (("a", 1.0), ("b", 2.0)):
    with cg.run("r", folder=tmp_path / where / "runs"):
      cg.tap(loss, "loss")
  with following(tmp_path / "a" / "runs", tmp_path / "b" / "runs") as page:
    ids = [run["id"] for run in asked(page.runs)["runs"]]
    assert ids == ["b/runs/r", "a/runs/r"]
    series = asked(page.curves, leaf="loss", run=ids)["series"]
    assert [(one["run"], one["mean"]) for one in series] == [(ids[0], [2.0]), (ids[1], [1.0])]
    assert asked(page.runs)["folders"] == ["a/runs: 1 runs", "b/runs: 1 runs"]


def test_files_that_somebody_else_has_written_do_no_harm(tmp_path):
  texts = {
    "empty": "", "list": "[]", "deep": "[" * 100_000, "null": '{"state": null}',
    "odd": '{"state": "finished", "name": 3, "started_ns": "x", "ended_ns": [], "config": [1],'
    ' "summary": {"a": NaN, "b": [1, {}], "c": null}, "tags": 3, "alerts": [1, {"text": []}],'
    ' "error": {"a": 1}, "notes": 1e999, "checks": {}, "process": 3}',
    "long": json.dumps({"state": "finished", "name": "x" * 10**6}),
  }  # fmt: skip
  for name, text in texts.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / "run.json").write_text(text)
    (tmp_path / name / "stream.a.cgs").write_bytes(b"no stream, no stream, no stream")
  (tmp_path / "no run").mkdir()
  (tmp_path / "a file").write_text("")
  with following(tmp_path) as page:
    rows = {run["id"]: run for run in asked(page.runs)["runs"]}
    assert set(rows) == set(texts)
    assert [rows[name]["state"] for name in ("empty", "list", "deep", "null")] == ["unreadable"] * 4
    assert rows["odd"]["summary"] == {"a": None, "b": "1, {}", "c": None}
    assert len(rows["long"]["name"]) < 3000
    assert "stream.a.cgs" in rows["long"]["error"]
    for run in rows:
      assert asked(page.run, run=run)["traceback"] == ""


# -- the server ------------------------------------------------------------------------------------
def rows_of(address: str, holds: Callable[[Any], bool]) -> Any:
  deadline = time.monotonic() + 60
  while not holds(rows := get(address, "runs")["runs"]):
    assert time.monotonic() < deadline, rows
    time.sleep(0.05)
  return rows


def test_the_served_page_has_the_folders_runs_and_nothing_else(folder):
  with watching(folder, "--plots", "3") as (process, address):
    rows = rows_of(address, lambda rows: sum(row["records"] for row in rows) == 71)
    assert [row["id"] for row in rows] == ["broken", "fast-2", "fast", "slow"]
    assert get(address, "runs")["plots"] == 3
    assert "too fast" in get(address, "runs")["runs"][2]["alerts"][0]["text"]
    assert get(address, "run", run="broken")["folder"] == str(folder / "broken")
    assert "raise ValueError" in get(address, "run", run="broken")["traceback"]
    scripts = [(name, "text/javascript") for name in ("runs.js", "runs_table.js", "common.js")]
    for page, kind in [("", "text/html"), ("runs.css", "text/css"), *scripts]:
      answer = request(address, page)
      assert (answer.status, answer.headers.get_content_type()) == (200, kind)
      assert not re.search(r"(https?:)?//[a-z]+\.|<script>|\son\w+=|style=", answer.text)
    assert "runs.js" in request(address).text
    for query, status, words in (
      ("media?run=slow&leaf=loss", 404, "leaf: expected a leaf with images or texts, got 'loss'"),
      ("media?run=slow&leaf=words&at=x", 400, "at: expected an integer, got 'x'"),
      ("media?leaf=words", 400, "run: expected a value, got none"),
      ("curves?run=slow", 400, "leaf: expected a value, got none"),
      ("curves?leaf=loss&run=../slow", 404, "run: expected a run of the table, got '../slow'"),
      ("run?run=/etc", 404, "run: expected a run of the table, got '/etc'"),
      ("run?run=slow/..", 404, "run: expected a run of the table"),
      ("curves?leaf=loss&run=slow&points=1", 400, "points: expected 2 to 20000, got 1"),
      ("curves?leaf=loss&" + "&".join(["run=slow"] * 65), 400, "run: expected at most 64, got 65"),
      ("../run.json", 404, "expected a path"), ("run.json", 404, "expected a path"),
      ("..%2f..%2fetc%2fpasswd", 404, "expected a path"), ("leaf?id=0", 404, "expected a path"),
    ):  # fmt: skip
      answer = request(address, f"api/{query}")
      assert (answer.status, words in answer.value["error"]) == (status, True), query
    for path in ("slow/run.json", "../runs/slow/run.json", "stream.loss.cgs", "runs.py"):
      assert request(address, path).status == 404
    assert request(address, "api/runs", Host="evil.example").status == 403
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_run_that_comes_later_and_is_killed_says_so(tmp_path):
  source = """
import sys, time
import callgate as cg
with cg.run("late", folder=sys.argv[1]) as run:
  cg.tap(1.0, "loss")
  cg.barrier()
  time.sleep(100)
"""
  with watching(tmp_path) as (_, address):
    assert get(address, "runs")["runs"] == []
    process = start(source, tmp_path, environment={"JAX_PLATFORMS": "cpu"})
    (row,) = rows_of(address, lambda rows: bool(rows) and rows[0]["records"] == 1)
    assert row["state"] == "running"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (row,) = rows_of(address, lambda rows: rows[0]["state"] == "crashed")
    assert "killed" in row["error"]
    assert row["last"] == {"loss": 1}


def test_several_folders_and_one_run_are_shown_too(folder, tmp_path):
  train(tmp_path / "more", "other", 0.1, steps=1)
  with following(folder, tmp_path / "more") as page:
    names = {run["id"] for run in asked(page.runs)["runs"]}
  assert names == {"runs/broken", "runs/fast", "runs/fast-2", "runs/slow", "more/other"}
  with following(folder / "slow") as page:
    assert [run["id"] for run in asked(page.runs)["runs"]] == ["slow"]


def test_folders_and_streams_together_are_refused(folder, capsys):
  stream = folder / "slow" / "stream.loss.cgs"
  assert cli.main(["watch", "--port", "0", "--no-browser", str(folder), str(stream)]) == 1
  assert "expected only folders of runs, or only streams, got" in capsys.readouterr().err


def test_the_page_of_a_stream_shows_a_taps_kind(folder):
  for name, key in (("words", "text"), ("picture", "image")):
    with watching(folder / "slow" / f"stream.{name}.cgs") as (_, address):
      deadline = time.monotonic() + 60
      while not (leaves := get(address, "state")["leaves"]) and time.monotonic() < deadline:
        time.sleep(0.05)
      assert leaves[0]["shows"] == ["latest"]
      assert key in get(address, "leaf", id=0, show="latest")


# -- in a browser ----------------------------------------------------------------------------------
NEEDS_BROWSER = pytest.mark.skipif(
  browser.find() is None, reason="needs chromium: apt-get install chromium"
)
NAMES = "[...document.querySelectorAll('#runs .run button')].map(b => b.textContent)"


@NEEDS_BROWSER
def test_a_browser_shows_filters_sorts_and_compares(folder, tmp_path):
  async def look(devtools: str, address: str) -> None:
    async with browser.open_tab(devtools, address) as tab:
      await tab.wait_until("document.body?.dataset.records === '71'")
      assert await tab.evaluate(NAMES) == ["broken", "fast-2", "fast", "slow"]
      titles = "[...document.querySelectorAll('#plots h2')].map(h => h.textContent)"
      assert await tab.evaluate(titles) == ["loss"]
      assert await tab.evaluate("document.querySelectorAll('.medium').length") == 6
      assert "too fast: 2.0" in await tab.evaluate("document.getElementById('alerts').innerText")
      text = await tab.evaluate("document.getElementById('differences').innerText")
      assert re.search(r"rate\s+0\.3\s+0\.5\s+2\s+0\.1", text)

      async def filtered(words: str) -> list[str]:
        await tab.evaluate(
          "{document.body.dataset.runs = ''; const box = document.getElementById('filter');"
          f"box.value = {json.dumps(words)};"
          "box.dispatchEvent(new Event('input', {bubbles: true}))}"
        )
        await tab.wait_until("document.body.dataset.runs !== ''")
        return await tab.evaluate(NAMES)

      for words, left in (
        ("rate<0.4", ["broken", "slow"]), ("state=crashed", ["broken"]),
        ("fast", ["fast-2", "fast"]), ("tag=sgd rate>=2", ["fast"]),
        ("width=8 rate!=2", ["fast-2", "slow"]), ("nothing", []),
        ("accuracy>0.9", ["fast-2", "slow"]), ("first", ["slow"]), ("", None),
      ):  # fmt: skip
        found = await filtered(words)
        assert left is None or sorted(found) == sorted(left), words

      async def sorted_by(title: str) -> list[str]:
        await tab.evaluate(
          "document.body.dataset.runs = ''; [...document.querySelectorAll('#runs th button')]"
          f".find(b => b.lastChild.textContent.startsWith({json.dumps(title)})).click()"
        )
        await tab.wait_until("document.body.dataset.runs !== ''")
        return await tab.evaluate(NAMES)

      assert await sorted_by("rate") == ["slow", "broken", "fast-2", "fast"]
      assert await sorted_by("rate") == ["fast", "fast-2", "broken", "slow"]
      assert await sorted_by("rate") == ["broken", "fast-2", "fast", "slow"]
      await tab.evaluate("document.querySelector('#runs .run button').click()")
      await tab.wait_until(
        "document.getElementById('about').innerText.includes('raise ValueError')"
      )
      await tab.evaluate("document.querySelectorAll('#runs .run input')[3].click()")
      await tab.wait_until("document.querySelectorAll('.medium').length === 4")
      # The page draws only what is in sight, and may make the slider anew between two looks.
      await tab.evaluate("document.querySelector('.medium').scrollIntoView()")
      slider = "const one = document.querySelector('.medium input'); one.value = 0;"
      note = "document.querySelector('.medium .note').textContent"
      moved = f"{slider} one.dispatchEvent(new Event('input')); return {note}"
      await tab.wait_until(f"(() => {{ {moved}.includes('record 0') }})()")
      assert await tab.evaluate("document.querySelector('#head .lost').textContent") == "1 crashed"

  (tmp_path / "profile").mkdir()
  with watching(folder) as (_, address), browser.chromium(tmp_path / "profile") as devtools:
    asyncio.run(look(devtools, address))


HOSTILE = "<img src=x onerror=window.stolen=1>"


@NEEDS_BROWSER
def test_a_browser_runs_nothing_of_what_a_run_has_for_texts(tmp_path):
  more: Any = {"config": {HOSTILE: HOSTILE}, "notes": HOSTILE, "tags": [HOSTILE]}
  for index in range(2):
    with cg.run(HOSTILE, folder=tmp_path / "runs", **more) as run:
      cg.tap(float(index), HOSTILE)
      cg.tap(HOSTILE, "text", kind="text")
      cg.alert(True, HOSTILE)
      run.summary[HOSTILE] = HOSTILE

  async def look(devtools: str, address: str) -> None:
    async with browser.open_tab(devtools, address) as tab:
      await tab.wait_until("document.body?.dataset.records === '4'")
      await tab.evaluate("document.querySelector('#runs .run button').click()")
      await tab.wait_until("!document.getElementById('about-part').hidden")
      await tab.evaluate("new Promise(done => setTimeout(done, 300))")
      assert (await tab.evaluate("document.body.innerText")).count(HOSTILE) > 8
      assert await tab.evaluate("window.stolen") is None
      made = "document.querySelectorAll('[onerror], [onload], iframe, img, svg, a, style').length"
      assert await tab.evaluate(made) == 0

  (tmp_path / "profile").mkdir()
  profile = tmp_path / "profile"
  with watching(tmp_path / "runs") as (_, address), browser.chromium(profile) as devtools:
    asyncio.run(look(devtools, address))
