# SPDX-License-Identifier: Apache-2.0
"""The folder of a run on the disk: `run.json`, and a stream for each channel.

Each change replaces `run.json` as a whole. A run in the state "running" whose process is gone has
crashed. A process is identified by its number, its start time and the machine's boot.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import urllib.parse
from pathlib import Path
from typing import Any

from callgate._core import paths

FILE = "run.json"
STREAMS = "stream.*.cgs"
_MOST_BYTES = 64 << 20  # the most bytes of a run.json that is read
_MOST_NAME = 150  # the most bytes of a channel's name in a file's name
_KILLED = "the process ended within the block without an error: killed, or out of memory"


def make_folder(above: str, name: str) -> Path:
  """Makes a new folder with the run's name in another one; adds a number if the name is taken."""
  base = re.sub(r"[^\w.+=@-]+", "-", name).strip("-.")[:100] or "run"
  Path(above).mkdir(parents=True, exist_ok=True)
  number = 1
  while True:
    made = Path(above).absolute() / (base if number == 1 else f"{base}-{number}")
    try:
      made.mkdir()
    except FileExistsError:
      number += 1
    else:
      return made


def stream_path(folder: Path, channel: str, process: int | None) -> Path:
  """Returns the file of a channel's stream; in a multi-host program that of one process."""
  name = urllib.parse.quote(channel, safe=" ()+,=@")
  if len(name) > _MOST_NAME:
    name = f"{name[:_MOST_NAME]}~{hashlib.sha256(channel.encode()).hexdigest()[:16]}"
  part = "" if process is None else f".p{process}"
  return folder / STREAMS.replace("*", f"{name}{part}")


def write(folder: Path, about: dict[str, Any]) -> None:
  with paths.replaced(folder / FILE) as made:
    made.write_text(json.dumps(about, allow_nan=False, indent=1), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
  """Returns the object of `run.json`, with the run's present state.

  Raises:
    OSError: there is no such file.
    ValueError: it isn't a file of callgate.
  """
  with open(folder / FILE, encoding="utf-8") as file:
    text = file.read(_MOST_BYTES)
  try:
    about = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{folder / FILE}: expected JSON: {error}") from None
  if not isinstance(about, dict) or not isinstance(about.get("state"), str):
    raise ValueError(f"{folder / FILE}: expected a JSON object with a state")
  if about["state"] == "running" and not _lives(about.get("process")):
    about |= {"state": "crashed", "error": _KILLED}
  return about


def this_process() -> dict[str, Any]:
  """Returns the unique identity of this process, as `run.json` has it."""
  number = os.getpid()
  return {"host": socket.gethostname(), "boot": _boot(), "id": number, "began": _began(number)}


def _lives(process: Any) -> bool:
  """False if the process is known to be gone; True for other machines."""
  if not isinstance(process, dict) or type(process.get("id")) is not int:
    return False
  if process.get("host") != socket.gethostname():
    return True
  if process.get("boot") != _boot():
    return False
  if (began := _began(process["id"])) is not None:
    return began == process.get("began")
  if process.get("began") is not None:  # on this machine it would be known
    return False
  try:
    os.kill(process["id"], 0)
  except ProcessLookupError:
    return False
  except OSError:  # another user's process
    return True
  return True


def _boot() -> str | None:
  with contextlib.suppress(OSError):
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
  return None


def _began(number: int) -> int | None:
  """Returns when a process began, in ticks since the machine's boot; None if unknown.

  A zombie has ended, so the result is None. See proc(5), /proc/PID/stat.
  """
  with contextlib.suppress(OSError, ValueError, IndexError):
    text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # after the name, which may be any bytes
    return None if fields[0] in "ZX" else int(fields[19])
  return None
