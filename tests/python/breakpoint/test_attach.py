# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate attach` passes on all lines that it gets, however they arrive."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path

import interpreters
import pytest
from waiting import until

PROGRAM = """
import jax
import callgate as cg

print("result", float(jax.jit(lambda c: cg.breakpoint(out="c", c=c))(4.0)), flush=True)
"""


@pytest.mark.parametrize("last", ["c\n", "c", "c\np 1\np 2\n"])
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_lines_that_arrive_together_all_run(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, last: str
) -> None:
  monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
  program = interpreters.start(PROGRAM)
  here, there = os.pipe() if kind == "pipe" else pty.openpty()[::-1]
  try:
    path = tmp_path / "callgate" / f"{program.pid}.sock"
    until(path.exists, "the program waits")
    typed = f"p c + 38\n!c = 9\np c\n{last}".encode()
    os.write(there, typed if kind == "pipe" or last[-1] == "\n" else typed + b"\n")
    if kind == "pipe":
      os.close(there)
    done = subprocess.run(
      [sys.executable, "-m", "callgate", "attach"], stdin=here, capture_output=True, text=True,
      timeout=20,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "42.0" in done.stdout
    assert "(callgate) 9\n" in done.stdout
    out, err = program.communicate(timeout=20)
    assert out == "result 9.0\n", err
  finally:
    program.kill()
    os.close(here)
    if kind == "terminal":
      os.close(there)


def test_the_answers_before_the_end_of_input_come(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
  program = interpreters.start(PROGRAM)
  try:
    path = tmp_path / "callgate" / f"{program.pid}.sock"
    until(path.exists, "the program waits")
    lines = "".join(f"p c + {n}\n" for n in range(2000))  # more than a pipe or a read holds
    done = subprocess.run(
      [sys.executable, "-m", "callgate", "attach"], input=lines, capture_output=True, text=True,
      timeout=20, check=True,
    )  # fmt: skip
    assert done.stdout.count("(callgate)") == 2001
    assert "2003.0" in done.stdout
    _, err = program.communicate(timeout=20)
    assert "the user quit a breakpoint's debugger" in err
  finally:
    program.kill()


def test_a_character_that_arrives_in_parts_is_shown(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
  (tmp_path / "callgate").mkdir(mode=0o700)
  with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
    server.bind(str(tmp_path / "callgate" / "1.sock"))
    server.listen()
    client = subprocess.Popen(
      [sys.executable, "-m", "callgate", "attach"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    connection, _ = server.accept()
    first, *rest = (bytes([one]) for one in "ä€\n".encode())
    connection.sendall(first)
    assert client.stdout is not None
    for one in rest:  # the client has probably read the byte before
      time.sleep(0.02)
      connection.sendall(one)
    connection.close()
    out, _ = client.communicate(timeout=20)
  assert out.decode() == "ä€\n"
