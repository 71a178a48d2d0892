# SPDX-License-Identifier: Apache-2.0
"""The folder of a run on the disk: `run.json`, and a stream for each channel.

`run.json` is replaced whole with each change. A run that says "running" whose process is gone has
crashed: a process is known by its number, and when and since which start of the machine it runs.
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
_MOST_BYTES = 64 << 20  # of a run.json that is read
_MOST_NAME = 150  # bytes of a channel's name in a file's
_KILLED = "the process ended within the block without an error: killed, or out of memory"


def make_folder(above: str, name: str) -> Path:
  """Makes a new folder below another, called as the run: with a number if there is one."""
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
  """The file of a channel's stream; of one process of several."""
  name = urllib.parse.quote(channel, safe=" ()+,=@")
  if len(name) > _MOST_NAME:
    name = f"{name[:_MOST_NAME]}~{hashlib.sha256(channel.encode()).hexdigest()[:16]}"
  part = "" if process is None else f".p{process}"
  return folder / STREAMS.replace("*", f"{name}{part}")


def write(folder: Path, about: dict[str, Any]) -> None:
  with paths.replaced(folder / FILE) as made:
    made.write_text(json.dumps(about, allow_nan=False, indent=1), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
  """The object of `run.json`, with the state that the run is in now.

  Raises:
    OSError: there is none.
    ValueError: it is none of callgate's.
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
  """The marks of this process that no other has, as `run.json` has them."""
  number = os.getpid()
  return {"host": socket.gethostname(), "boot": _boot(), "id": number, "began": _began(number)}


def _lives(process: Any) -> bool:
  """False if the process is known to be gone; one of another machine is believed."""
  if not isinstance(process, dict) or type(process.get("id")) is not int:
    return False
  if process.get("host") != socket.gethostname():
    return True
  if process.get("boot") != _boot():
    return False
  if (began := _began(process["id"])) is not None:
    return began == process.get("began")
  if process.get("began") is not None:  # this machine would say
    return False
  try:
    os.kill(process["id"], 0)
  except ProcessLookupError:
    return False
  except OSError:  # another user's
    return True
  return True


def _boot() -> str | None:
  with contextlib.suppress(OSError):
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  return None


def _began(number: int) -> int | None:
  """When a process began, in ticks since the machine did; None where that is not known.

  A dead one that nobody has asked for its end has none. See proc(5), /proc/PID/stat.
  """
  with contextlib.suppress(OSError, ValueError, IndexError):
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
  return None
