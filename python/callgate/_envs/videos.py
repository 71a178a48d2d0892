# SPDX-License-Identifier: Apache-2.0
"""Pictures of one environment, one file for each episode, written in the environment's process.

A GIF or an MP4 has a whole episode; a PNG has one picture. Files appear under their final names
when they are complete.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol, get_args

import numpy as np

from callgate._core import extras, opened, png
from callgate._core import options as check
from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError, GateError, ResultError
from callgate._envs.options import VideoFormat

_EXPECTED = "(lane, folder) or (lane, folder, 'gif', 'png' or 'mp4')"
_RATE = 30.0  # default of pictures a second, if an environment has none


@dataclasses.dataclass(frozen=True)
class VideoPlan:
  """The environment whose pictures are kept, and their destination.

  Attributes:
    label: the beginning of messages.
    lane: the environment's number.
    folder: an absolute path.
    format: the format of the files.
    rate: pictures a second.
  """

  label: str
  lane: int
  folder: str
  format: VideoFormat
  rate: float = _RATE

  @classmethod
  def checked(cls, label: str, given: Any) -> VideoPlan | None:
    """Checks the option `record_video=`; a GateDefinitionError names its fault."""
    if given is None:
      return None
    if isinstance(given, (str, os.PathLike)):  # only the folder
      check.path(label, "record_video", given)
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):  # pyright: ignore
      check.refuse(label, "record_video", _EXPECTED, given)
    lane = check.count(label, "record_video[0]", given[0], what="the number of an environment")
    folder = check.path(label, "record_video[1]", given[1])
    kinds = get_args(VideoFormat)
    default = "gif" if importlib.util.find_spec("PIL") else "png"
    kind = check.choice(label, "record_video[2]", given[2], kinds) if len(given) > 2 else default
    _WRITERS[kind].library(label)
    return cls(label, lane, opened.resolved(folder), kind)

  def of(self, label: str, env: Any, count: int) -> VideoPlan:
    """Returns the plan for `count` environments like `env`."""
    if self.lane >= count:
      most = f"the number of an environment, from 0 to {count - 1}"
      check.refuse(label, "record_video[0]", most, self.lane)
    mode = getattr(env, "render_mode", "rgb_array")
    if mode != "rgb_array":
      raise GateDefinitionError(
        f"{label}: record_video: expected environments that render pictures, got "
        f"render_mode={mode!r}; make them with render_mode='rgb_array'"
      )
    rate = (getattr(env, "metadata", None) or {}).get("render_fps") or _RATE
    return dataclasses.replace(self, rate=float(rate))


class Video:
  """The episodes of one environment."""

  def __init__(self, plan: VideoPlan) -> None:
    self._plan = plan
    self._number, self._count = 0, 0  # the episode's number, and the number of its pictures
    self._writer: _Writer | None = None

  def add(self, given: Any) -> None:
    """Adds a picture to the current episode; begins one if there is none."""
    pixels = np.asarray(given)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
      got = "None" if given is None else type_text(pixels.dtype, pixels.shape)
      raise ResultError(f"render(): expected a picture, uint8[height,width,3], got {got}")
    if self._writer is None:
      folder = pathlib.Path(self._plan.folder)
      folder.mkdir(parents=True, exist_ok=True)
      begin = folder / f"episode-{self._number:04d}"
      self._writer = _WRITERS[self._plan.format](begin, self._plan.rate)
    self._writer.add(np.ascontiguousarray(pixels))
    self._count += 1

  def end(self) -> None:
    """Ends the current episode, if there is one; a reset without steps isn't an episode."""
    writer, self._writer, count, self._count = self._writer, None, self._count, 0
    if writer is not None:
      writer.end(keep=count > 1)
      self._number += count > 1


class _Writer(Protocol):
  def __init__(self, begin: pathlib.Path, rate: float) -> None: ...
  def add(self, pixels: np.ndarray[Any, Any]) -> None: ...
  def end(self, *, keep: bool) -> None: ...
  @staticmethod
  def library(label: str) -> Any: ...


class _Pngs:
  """A file for each picture: `episode-0003-00012.png`."""

  def __init__(self, begin: pathlib.Path, rate: float) -> None:
    del rate
    self._begin, self._paths = begin, list[pathlib.Path]()

  def add(self, pixels: np.ndarray[Any, Any]) -> None:
    path = self._begin.with_name(f"{self._begin.name}-{len(self._paths):05d}.png")
    path.write_bytes(png.png(pixels))
    self._paths.append(path)

  def end(self, *, keep: bool) -> None:
    for path in () if keep else self._paths:
      path.unlink(missing_ok=True)

  @staticmethod
  def library(label: str) -> None:
    """Needs no library."""


class _Gif:
  """An animation with 256 colors; it needs a byte for each pixel until the episode ends."""

  def __init__(self, begin: pathlib.Path, rate: float) -> None:
    self._path, self._rate = begin.with_name(f"{begin.name}.gif"), rate
    self._images = extras.library("PIL.Image", "Pillow", "video", by="record_video")
    self._pictures: list[Any] = []

  def add(self, pixels: np.ndarray[Any, Any]) -> None:
    self._pictures.append(self._images.fromarray(pixels).quantize())

  def end(self, *, keep: bool) -> None:
    if not keep:
      return
    first, *rest = self._pictures
    part = self._path.with_name(f".{self._path.name}.part")
    milliseconds = max(20, round(1000 / self._rate))  # players show no shorter times
    first.save(
      part, "GIF", save_all=True, append_images=rest, duration=milliseconds, loop=0
    )  # fmt: skip
    part.replace(self._path)

  @staticmethod
  def library(label: str) -> Any:
    return extras.library("PIL.Image", "Pillow", "video", by=f"{label}: record_video")


class _Mp4:
  """A video, which a process of ffmpeg writes as pictures come."""

  def __init__(self, begin: pathlib.Path, rate: float) -> None:
    self._path = begin.with_name(f"{begin.name}.mp4")
    self._part = begin.with_name(f".{begin.name}.part.mp4")
    self._rate, self._shape = rate, (0, 0)
    self._process: subprocess.Popen[bytes] | None = None

  def add(self, pixels: np.ndarray[Any, Any]) -> None:
    if self._process is None:
      self._shape = pixels.shape[:2]
      self._process = self._started()
    if pixels.shape[:2] != self._shape:
      raise GateError(f"render(): expected pictures of one size, {self._shape}, got {pixels.shape}")
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(pixels.data)
    except BrokenPipeError:
      self._ended()
      raise

  def _started(self) -> subprocess.Popen[bytes]:
    ffmpeg = extras.library("imageio_ffmpeg", "imageio-ffmpeg", "video", by="record_video")
    height, width = self._shape
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(self._rate)]
    even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # players need even edges and subsampled colors
    film = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-vf", even, str(self._part)]
    command = [ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *raw, "-i", "-", *film]
    # A process group of its own, which Ctrl-C in the terminal doesn't reach.
    return subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
      process_group=0,
    )  # fmt: skip

  def _ended(self) -> None:
    """Waits for the process; raises its message if it has failed."""
    process, self._process = self._process, None
    if process is None:
      return
    _, said = process.communicate()
    if process.returncode:
      self._part.unlink(missing_ok=True)
      text = said.decode(errors="replace").strip()
      raise GateError(f"record_video: ffmpeg exited with status {process.returncode}: {text}")

  def end(self, *, keep: bool) -> None:
    self._ended()
    if not self._part.exists():
      return
    if keep:
      self._part.replace(self._path)
    else:
      self._part.unlink(missing_ok=True)

  @staticmethod
  def library(label: str) -> Any:
    by = f"{label}: record_video with 'mp4'"
    return extras.library("imageio_ffmpeg", "imageio-ffmpeg", "video", by=by)


_WRITERS: dict[str, type[_Writer]] = {"png": _Pngs, "gif": _Gif, "mp4": _Mp4}


def picture_of(frames: Any, lane: int, count: int) -> Any:
  """Returns the picture of one of `count` environments that a vector environment renders."""
  if isinstance(frames, (Sequence, np.ndarray)) and len(frames) == count:  # pyright: ignore
    return frames[lane]
  raise ResultError(
    f"render(): expected {count} pictures, one for each environment, got "
    f"{len(frames) if hasattr(frames, '__len__') else type(frames).__name__}"
  )
