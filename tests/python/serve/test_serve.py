# SPDX-License-Identifier: Apache-2.0
"""`callgate.serve`: the page of a program's own channels, its knobs and its stop button."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import begin_program, finish, output_of
from page_requests import get, request
from waiting import until

import callgate as cg
from callgate import __main__ as cli


@pytest.fixture
def server() -> Iterator[cg.Server]:
  with cg.serve(control=True) as made:
    yield made


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
  """Exit status and outputs of `python -m callgate ...`."""
  try:
    status = cli.main([*map(str, arguments)])
  except SystemExit as error:
    status = int(error.code or 0)
  captured = capsys.readouterr()
  return status, captured.out, captured.err


# -- control ---------------------------------------------------------------------------------------
def test_a_running_program_is_set_and_stopped_from_a_terminal(server, capsys):
  rate = cg.knob("serve rate", 0.5, range=(0.1, 2.0))
  begun, changed = threading.Event(), threading.Event()

  def watch(value: Any) -> None:
    begun.set()
    if value == 1.5:
      changed.set()

  def step(i: Any) -> Any:
    cg.tap(rate.read(), watch)
    return i + 1

  looking = lambda i: (i < 2**31 - 2) & ~cg.stop_requested()
  run = jax.jit(lambda: jax.lax.while_loop(looking, step, 0))
  done: list[Any] = []
  thread = threading.Thread(target=lambda: done.append(int(run())))
  thread.start()
  assert begun.wait(60)
  assert command(capsys, "set", server.url, "serve rate=1.5") == (0, "serve rate = 1.5\n", "")
  assert changed.wait(60)
  assert command(capsys, "stop", server.url, "enough") == (0, "asked to stop: enough\n", "")
  thread.join(60)
  assert not thread.is_alive()
  assert 0 < done[0] < 2**31 - 2
  assert cg.stop_reason() == "enough"
  assert get(server.url, "state")["control"]["stop_reason"] == "enough"
  assert command(capsys, "stop", server.url)[0] == 0
  assert cg.stop_reason() == "stopped from the command line"


def test_knobs_of_every_kind_are_listed_and_set(server, capsys):
  cg_knobs = {
    "serve a": cg.knob("serve a", 1e-3, range=(1e-5, 1e-1), scale="log"),
    "serve b": cg.knob("serve b", np.int32(4), range=(1, 64)),
    "serve c=d": cg.knob("serve c=d", True),
    "serve e": cg.knob("serve e", np.float32("inf")),
  }
  status, out, _ = command(capsys, "knobs", server.url)
  assert status == 0
  for line in (
    "serve a = 0.001 (float32, 1e-05 to 0.1, log)",
    "serve b = 4 (int32, 1 to 64)",
    "serve c=d = True (bool)",
    "serve e = inf (float32)",
  ):
    assert line in out.splitlines()
  given = ["serve a=3e-4", "serve b=32", "serve c=d=false", "serve e=-inf"]
  status, out, error = command(capsys, "set", server.url, *given)
  assert (status, error) == (0, "")
  assert [knob.value for knob in cg_knobs.values()] == [3e-4, 32, False, -np.inf]
  listed = {one["name"]: one for one in get(server.url, "knobs")["knobs"]}
  assert listed["serve a"] == {
    "name": "serve a", "value": 3e-4, "dtype": "float32", "range": [1e-5, 0.1], "scale": "log",
  }  # fmt: skip
  assert jax.jit(cg_knobs["serve b"].read)() == 32


def test_a_refusal_says_why_and_changes_nothing(server, capsys):
  one, two = cg.knob("serve one", 1.0, range=(0.0, 2.0)), cg.knob("serve two", 1)
  free = cg.knob("serve free", 1.0)
  refusals = [
    (["serve one=2", "serve two=1.5"], "knob 'serve two': value: expected an integer"),
    (["serve one=3"], "knob 'serve one': value: expected 0.0 to 2.0, got 3"),
    (["serve one=nan"], "knob 'serve one': value: expected a number, true or false, got 'nan'"),
    (["serve free=NaN"], "knob 'serve free': value: expected a number, true or false, got 'NaN'"),
    (["serve one=true"], "knob 'serve one': value: expected a number"),
    (["serve one=much"], "knob 'serve one': value: expected a number, true or false, got 'much'"),
    (["serve one=2", "serve no=1"], "knob: expected one of "),
    (["serve one=1", "serve one=2"], "expected each name once, got 'serve one' twice"),
  ]
  for given, words in refusals:
    status, out, error = command(capsys, "set", server.url, *given)
    assert (status, out) == (1, ""), given
    assert words in error
    assert error.count("\n") == 1
  status, _, error = command(capsys, "set", server.url, "serve one")
  assert status == 2
  assert "expected NAME=VALUE, got 'serve one'" in error
  for value in (None, [1], {"a": 1}):
    answer = request(server.url, "api/knobs", {"serve two": value})
    assert answer.status == 400
    assert "knob 'serve two': value: expected an integer" in answer.value["error"]
  answer = request(server.url, "api/knobs", '{"serve free": NaN}')  # which Python's JSON has
  assert answer.status == 400
  assert "expected a number, true or false, got 'NaN'" in answer.value["error"]
  assert (one.value, two.value, free.value) == (1.0, 1, 1.0)


def test_addresses_that_lead_nowhere_say_what_is_wrong(server, capsys, tmp_path):
  wrong = server.url[:-2] + ("A" if server.url[-2] != "A" else "B") + "/"
  with cg.serve() as uncontrolled, socket.socket() as free, socket.socket() as other:
    free.bind(("127.0.0.1", 0))
    other.bind(("127.0.0.1", 0))
    other.listen()

    def answer() -> None:
      peer, _ = other.accept()
      with peer:
        peer.recv(1000)
        peer.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")

    threading.Thread(target=answer, daemon=True).start()
    for address, words in (
      (wrong, "wrong secret"),
      (uncontrolled.url, "control is off; pass callgate.serve(control=True)"),
      (f"http://127.0.0.1:{free.getsockname()[1]}/x/", "the connection was refused"),
      (
        f"http://127.0.0.1:{other.getsockname()[1]}/x/",
        "expected a page by callgate, got b'hello'",
      ),
      ("http://example.org:80/x/", "expected an address such as http://127.0.0.1:PORT/TOKEN/"),
      ("http://127.0.0.1/x/", "expected an address such as"),
      ("http://127.0.0.1:99999/x/", "expected an address such as"),
      (tmp_path / "no", "No such file"),
    ):
      for arguments in (["knobs", address], ["set", address, "a=1"], ["stop", address]):
        if "hello" in words and arguments[0] != "knobs":
          continue  # it answers once
        status, out, error = command(capsys, *arguments)
        assert (status, out) == (1, ""), address
        assert words in error


# -- who gets an answer ----------------------------------------------------------------------------
def test_only_the_page_itself_and_who_has_the_token_changes_something(server):
  knob = cg.knob("serve guarded", 1)
  url, value = server.url, {"serve guarded": 2}
  port = urllib.parse.urlsplit(url).port
  bare = f"http://127.0.0.1:{port}/"
  short, long = bare + "x" * 31 + "/", bare + "x" * 3000 + "/"
  for other in (bare, short, long, url[:-1] + "x/", url.replace(url[-10:], "/")):
    assert request(other, "api/knobs", value).status == 403, other
    assert request(other, "api/state").status == 403
    assert request(other).status == 403
  for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.nip.io", "[::1", "0.0.0.0", ""):
    assert request(url, "api/knobs", value, Host=host).status == 403, host
    assert request(url, "api/state", Host=host).status == 403
  for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", "http://127.0.0.1:1",
                 f"http://localhost:{port}", ""):  # fmt: skip
    answer = request(url, "api/knobs", value, Origin=origin)
    assert answer.status == 403, origin
    assert "from the page itself" in answer.value["error"]
  for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
    assert request(url, "api/knobs", value, Content_Type=kind).status == 415
  for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
    body = None if method == "GET" else value
    assert request(url, "api/stop", body, method=method).status in (404, 501), method
  for body, status in (("[1]", 400), ("{", 400), ("[" * 5000, 400), (" " * 70_000, 413)):
    assert request(url, "api/knobs", body).status == status
  assert request(url, "api/stop", {"reason": 1}).status == 400
  assert request(url, "api/no", {}).status == 404
  assert request(url, "../api/state").status in (403, 404)
  assert knob.value == 1
  own = f"http://127.0.0.1:{port}"
  assert request(url, "api/knobs", value, Origin=own).status == 200
  assert knob.value == 2
  through = request(
    url, "api/knobs", {"serve guarded": 3}, Host="localhost:1", Origin="http://localhost:1"
  )
  assert through.status == 200  # of a tunnel from another machine
  assert knob.value == 3


def test_a_connection_that_says_nothing_holds_nobody_up(server):
  port = urllib.parse.urlsplit(server.url).port
  silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
  assert get(server.url, "state")["totals"]["records"] == 0
  server.close()
  for one in silent:
    with one:
      one.settimeout(60)
      with contextlib.suppress(ConnectionResetError):
        assert one.recv(1) == b""  # the server has hung up
  with pytest.raises(ConnectionRefusedError):
    request(server.url)


def test_connections_that_say_little_leave_places_for_who_has_the_token(server, monkeypatch):
  """More of them than there are places, each with a head that never ends."""
  port = urllib.parse.urlsplit(server.url).port
  with contextlib.ExitStack() as open_ones:
    slow = [
      open_ones.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)
    ]
    for one in slow:
      one.sendall(b"GET / HTTP/1.1\r\nX: y\r\n")
    for _ in range(3):
      assert get(server.url, "state")["totals"]["records"] == 0
    monkeypatch.setattr("callgate._watch.server._HEAD_SECONDS", 0.1)
    for one in slow:  # a line now and then is not enough
      one.settimeout(60)
      with contextlib.suppress(OSError):
        one.sendall(b"X: y\r\n")
        assert one.recv(1) == b""
    assert get(server.url, "state")["totals"]["records"] == 0


# -- what it shows ---------------------------------------------------------------------------------
def test_curves_are_those_of_the_channels_that_are_open_and_that_are_opened_later(server):
  @jax.jit
  def program(x: Any) -> Any:
    for i in range(3):
      value = {"loss": x + i, "grad": jnp.arange(4.0) + i}
      cg.tap(value, "serve early", name="train", ordered=True)
    return cg.tap(x * 2, "serve late")

  seen: list[Any] = []
  early = cg.channel("serve early", to=lambda value: seen.append(value["loss"]))
  with early, cg.channel("serve late", to=print):
    program(1.0)
    cg.barrier()
    state = get(server.url, "state")
  leaves = {leaf["label"]: leaf for leaf in state["leaves"]}
  assert set(leaves) == {"train/loss", "train/grad", "serve late"}
  (curve,) = get(server.url, "leaf", id=leaves["train/loss"]["id"])["series"]
  assert curve["run"] == "serve early"
  assert curve["mean"] == [1, 2, 3] == seen
  (curve,) = get(server.url, "leaf", id=leaves["train/grad"]["id"])["series"]
  assert (curve["low"], curve["high"]) == ([0, 1, 2], [3, 4, 5])
  counts = {one["channel"]: one["delivered"] for one in state["channels"]}
  assert counts["serve early"] == 3
  # Opened again, it goes on.
  with cg.channel("serve early", to=print), cg.channel("serve late", to=print):
    program(5.0)
  assert "serve early: closed" in get(server.url, "state")["streams"]
  (curve,) = get(server.url, "leaf", id=leaves["train/loss"]["id"])["series"]
  assert curve["mean"] == [1, 2, 3, 5, 6, 7]


def test_carries_of_checkpoints_are_no_curves(server, tmp_path):
  def step(w: Any, _: Any) -> Any:
    cg.tap(w.sum(), "serve a saved loop")
    return 0.9 * w, None

  saves = cg.Checkpoints(tmp_path, every=10)
  with cg.channel("serve a saved loop", to=print):
    cg.scan(step, jnp.ones(3), length=50, save=saves)
    cg.barrier()
    state = get(server.url, "state")
  assert [leaf["label"] for leaf in state["leaves"]] == ["serve a saved loop"]
  assert state["totals"]["records"] == 50


def test_records_that_wait_for_a_consumer_wait_on(server):
  with cg.channel("serve waiting") as channel:
    jax.jit(lambda: [cg.tap(i, "serve waiting", ordered=True) for i in range(3)])()
    assert get(server.url, "state")["totals"]["records"] == 0
    records = channel.records()
    assert [int(next(records).value) for _ in range(3)] == [0, 1, 2]
    until(lambda: get(server.url, "state")["totals"]["records"] == 3, "all records")


def test_a_closed_page_gets_no_more_and_leaves_the_channels_as_they_were():
  seen: list[Any] = []
  program = jax.jit(lambda x: cg.tap(x, "serve left"))
  with cg.channel("serve left", to=seen.append) as channel:
    with cg.serve() as server:
      program(1.0)
      cg.barrier()
      assert get(server.url, "state")["totals"]["records"] == 1
      assert len(channel._consumers) == 2
    assert len(channel._consumers) == 1
    program(2.0)
    cg.barrier()
    server.close()
  assert seen == [1, 2]
  assert repr(server).endswith("closed>")
  token = server.url.split("/")[3]
  assert token not in repr(server)


def test_alerts_are_counted_by_their_messages(server):
  for value in (2.0, 3.0):
    cg.alert(True, "served alert of {x}", x=value)
  cg.barrier()
  (told,) = get(server.url, "state")["alerts"]
  assert (told["times"], told["alert"]) == (2, "served alert of 3.0")


def test_failed_checks_and_gates_are_counted(server):
  double = cg.gate(lambda x: 2 * x, out=lambda x: x, name="serve double")

  @jax.jit
  def program(x: Any) -> Any:
    cg.check(x > 0, "expected x > 0, got {x}", x=x)
    return double(x)

  program(1.0)
  for x in (-1.0, -2.0):
    with pytest.raises(cg.CheckError), cg.errors():
      program(x)
  state = get(server.url, "state")
  (failed,) = state["checks"]
  assert (failed["times"], failed["check"]) == (2, "expected x > 0, got -2.0")
  assert next(one for one in state["gates"] if one["gate"] == "serve double")["calls"] >= 1
  server.close()
  with pytest.raises(cg.CheckError), cg.errors():
    program(-3.0)


def test_without_control_the_page_has_none():
  with cg.serve() as server:
    assert get(server.url, "state")["control"] is None
    assert request(server.url, "api/stop", {}).status == 403


# -- ports, files, processes -----------------------------------------------------------------------
def test_a_port_in_use_is_an_error_that_says_what_to_do(server):
  port = urllib.parse.urlsplit(server.url).port
  with pytest.raises(OSError, match=rf"port {port} of 127.0.0.1: .*choose another port="):
    cg.serve(port=port)
  server.close()
  with cg.serve(port=port) as again:  # it is free at once
    assert again.url != server.url
    assert get(again.url, "state")["control"] is None


def test_the_file_is_the_users_alone_and_goes_with_the_server(tmp_path, capsys):
  path = tmp_path / "address"
  path.write_text("old")
  path.chmod(0o644)
  knob = cg.knob("serve by file", 1)
  with cg.serve(control=True, file=path) as server:
    assert path.read_text() == f"{server.url}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert command(capsys, "set", path, "serve by file=2")[0] == 0
    assert knob.value == 2
  assert not path.exists()
  with cg.serve(file=path):
    path.write_text("another's")
  assert path.read_text() == "another's"
  with pytest.raises(OSError, match="no folder"):
    cg.serve(file=tmp_path / "no folder" / "address")


PROGRAM = """
import sys
import jax
import callgate as cg

server = cg.serve(control=True, file={path!r})
knob = cg.knob("level", 0)
looking = lambda i: ~cg.stop_requested()
run = jax.jit(lambda: jax.lax.while_loop(looking, lambda i: i + knob.read(), 0))
print("go", flush=True)
run()
print(knob.value, cg.stop_reason())
"""


def test_two_programs_are_steered_by_their_files_and_leave_no_port(tmp_path, capsys):
  files = [tmp_path / name for name in "ab"]
  programs = [begin_program(PROGRAM.format(path=str(file))) for file in files]
  urls = [file.read_text().strip() for file in files]
  assert urls[0] != urls[1]
  for number, file in enumerate(files, 1):
    assert command(capsys, "set", file, f"level={number}") == (0, f"level = {number}\n", "")
  # A request counts for programs that have been dispatched: this one is about to be.
  for number, (file, program) in enumerate(zip(files, programs, strict=True), 1):

    def ended(file: Path = file, program: Any = program) -> bool:
      if file.exists():
        command(capsys, "stop", file, "that is all")
      return program.poll() is not None

    until(ended, "stopped")
    assert finish(program) == (f"{number} that is all\n", "")
  for file, url in zip(files, urls, strict=True):
    assert not file.exists()
    with pytest.raises(ConnectionRefusedError):
      request(url)


FORK = """
import os
import urllib.request
import callgate as cg

server = cg.serve(control=True, file="address")
port = int(server.url.split(":")[2].split("/")[0])
told, tell = os.pipe()
go, wait = os.pipe()
if os.fork() == 0:
  os.read(go, 1)
  server.close()  # the parent's: nothing happens
  os.write(tell, b"x" if os.path.exists("address") else b"-")
  os.read(go, 1)
  os._exit(0)
os.write(wait, b"x")
print(os.read(told, 1))
with urllib.request.urlopen(server.url) as answer:
  print(answer.status)
server.close()
print(os.path.exists("address"))
with cg.serve(port=port):  # though the child still runs
  print("free")
os.write(wait, b"x")
print(os.wait()[1])
"""


def test_a_forks_child_has_no_part_in_the_page(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert output_of(FORK).split() == ["b'x'", "200", "False", "free", "0"]


def test_a_page_that_nobody_closes_ends_with_its_program():
  source = """
  import jax
  import callgate as cg
  server = cg.serve(control=True)
  channel = cg.channel("left open", to=print)
  jax.jit(lambda: cg.tap(1, "left open"))()
  """
  assert output_of(source) == "1\n"


# -- in a browser ----------------------------------------------------------------------------------
@pytest.mark.skipif(browser.find() is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_moves_a_knob_and_stops_the_program(server, tmp_path):
  rate = cg.knob("serve <b>slider</b>", 0.1, range=(1e-3, 10.0), scale="log")
  steps = cg.knob("serve steps", 5)
  (tmp_path / "profile").mkdir()

  async def look(devtools: str) -> None:
    async with browser.open_tab(devtools, server.url, width=390, height=800) as tab:
      await tab.wait_until("document.querySelectorAll('.knob').length >= 2")
      knob = "[...document.querySelectorAll('.knob')].find(k => k.textContent.includes('{}'))"
      slider = f"{knob.format('<b>slider</b>')}.querySelector('[type=range]')"
      await tab.evaluate(f"{slider}.value = 250; {slider}.dispatchEvent(new Event('change'))")
      await _until(lambda: rate.value == 0.01)  # a quarter of the logarithms
      await tab.evaluate(f"{slider}.value = 1000; {slider}.dispatchEvent(new Event('change'))")
      await _until(lambda: rate.value == 10.0)
      field = f"{knob.format('serve steps')}.querySelector('input')"
      await tab.evaluate(f"{field}.value = '1.5'; {field}.dispatchEvent(new Event('change'))")
      refused = f"{knob.format('serve steps')}.querySelector('.refused').textContent"
      await tab.wait_until(f"{refused}.includes('expected an integer')")
      await tab.evaluate(f"{field}.value = '7'; {field}.dispatchEvent(new Event('change'))")
      await _until(lambda: steps.value == 7)
      await tab.wait_until(f"{refused} === ''")
      before = cg.stop_reason()
      await tab.evaluate("document.getElementById('stop').click()")
      await tab.wait_until("document.getElementById('stop').textContent === 'Really stop'")
      assert cg.stop_reason() == before
      await tab.evaluate("document.getElementById('stop').click()")
      await _until(lambda: cg.stop_reason() == "stopped on the live page")
      await tab.wait_until("document.getElementById('said').textContent.includes('live page')")
      # Nothing is wider than a phone.
      assert await tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

  with browser.chromium(tmp_path / "profile") as devtools:
    asyncio.run(look(devtools))


async def _until(condition: Any) -> None:
  for _ in range(600):
    if condition():
      return
    await asyncio.sleep(0.1)
  raise AssertionError("not so after a minute")
