# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the disk, a full disk or a kill at the wrong moment has damaged."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from interpreters import run_python

import callgate as cg
from callgate._checkpoints import files, parts
from callgate._core import paths
from callgate._core.public import core

LEAVES = (parts.Leaf("carry", (8,), "float32"),)
LIKE = np.zeros(8, np.float32)


def write(folder: Path, number: int, run: int = 1) -> None:
  whole = {0: ((slice(0, 8),), np.full(8, number, np.float32))}
  files.write(folder, number, run, "part_00000_00000", whole)
  files.finish(folder, number, run, LEAVES)


def found(folder: Path) -> int:
  return int(core(cg.Checkpoints(folder, resume=True))._loader._find(None)[0])


def flipped(offset: int, bit: int) -> Callable[[Path], object]:
  """One bit of the last entry in the zip's directory, or (from 100 on) of its end."""

  def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    start = data.rindex(b"PK\x01\x02") if offset < 100 else data.rindex(b"PK\x05\x06") - 100
    data[start + offset] ^= 1 << bit
    file.write_bytes(data)

  return damage


def changed(file: Path) -> None:
  data = bytearray(file.read_bytes())
  with zipfile.ZipFile(file) as archive:
    start = archive.getinfo("0.npy").header_offset
  data[start + 30 + len("0.npy") + 60] ^= 1
  file.write_bytes(data)


def folder_instead(path: Path) -> None:
  path.unlink()
  path.mkdir()


def link_to_nothing(path: Path) -> None:
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink()
  path.symlink_to("/nonexistent/file")


DAMAGES = {
  "method": ("part_*.npz", flipped(10, 4)),
  "encrypted": ("part_*.npz", flipped(8, 0)),
  "version": ("part_*.npz", flipped(6, 7)),
  "size": ("part_*.npz", flipped(27, 6)),
  "checksum": ("part_*.npz", flipped(16, 0)),
  "offset": ("part_*.npz", flipped(42, 5)),
  "directory": ("part_*.npz", flipped(112, 3)),
  "contents": ("part_*.npz", changed),
  "truncated": ("part_*.npz", lambda file: os.truncate(file, file.stat().st_size // 2)),
  "empty": ("part_*.npz", lambda file: os.truncate(file, 0)),
  "gone": ("part_*.npz", Path.unlink),
  "no file": ("part_*.npz", folder_instead),
  "no json": ("part_*.json", lambda file: file.write_text("[1]")),
  "json gone": ("part_*.json", Path.unlink),
  "json deep": ("part_*.json", lambda file: file.write_text("[" * 100_000)),
  "meta empty": ("meta.json", lambda file: os.truncate(file, 0)),
  "meta gone": ("meta.json", Path.unlink),
  "meta a number": ("meta.json", lambda file: file.write_text("1")),
  "meta no text": ("meta.json", lambda file: file.write_bytes(b"\xff\xfe")),
  "meta no file": ("meta.json", folder_instead),
  "a link to nothing": ("part_*.npz", link_to_nothing),
  "json a link to nothing": ("part_*.json", link_to_nothing),
  "json no file": ("part_*.json", folder_instead),
  "meta a link to nothing": ("meta.json", link_to_nothing),
  "all a link to nothing": (".", link_to_nothing),
}


def no_swap(*_: Any) -> bool:
  return False


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_passed_over_and_load_says_it(
  tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
  write(tmp_path, 10)
  write(tmp_path, 20)
  pattern, change = DAMAGES[damage]
  newest = tmp_path / "step_0000000020"
  change(newest if pattern == "." else next(newest.glob(pattern)))
  assert found(tmp_path) == 10
  assert "step_0000000020 is damaged and was skipped" in capfd.readouterr().err
  saves = cg.Checkpoints(tmp_path)
  for step in (None, 20):
    with pytest.raises(ValueError, match=r"damaged one|elements are missing"):
      saves.load(LIKE, step)
  np.testing.assert_array_equal(saves.load(LIKE, 10), np.full(8, 10.0))


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("change", [link_to_nothing, shutil.rmtree])
def test_a_step_is_saved_anew_where_a_link_or_a_file_has_its_name(
  tmp_path: Path, change: Callable[[Path], object], swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  write(tmp_path, 10)
  write(tmp_path, 20)
  change(named := tmp_path / "step_0000000020")
  if not named.is_symlink():
    named.write_text("a file")
  if not swaps:
    monkeypatch.setattr(paths, "exchange", no_swap)
  write(tmp_path, 20, run=2)
  assert found(tmp_path) == 20
  assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000000010", "step_0000000020"]


def test_a_checkpoint_that_cannot_be_read_is_passed_over(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  write(tmp_path, 10)
  write(tmp_path, 20)
  opened = zipfile.ZipFile

  def refused(file: Any, *args: Any) -> Any:
    if "0020" in str(file):
      raise PermissionError(errno.EACCES, "Permission denied", str(file))
    return opened(file, *args)

  monkeypatch.setattr(zipfile, "ZipFile", refused)
  assert found(tmp_path) == 10
  with pytest.raises(ValueError, match="damaged one: PermissionError"):
    cg.Checkpoints(tmp_path).load(LIKE)


# -- a full disk ----------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_nothing_is_left_of_what_did_not_fit(
  tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  """The n-th file or folder of a checkpoint can't be written to the disk."""
  write(tmp_path, 10)
  calls, fsync = [0], os.fsync

  def full(number: int) -> None:
    calls[0] += 1
    if calls[0] == call:
      raise OSError(errno.ENOSPC, "No space left on device")
    fsync(number)

  with monkeypatch.context() as patched:
    patched.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
      write(tmp_path, 20)
  assert {path.name for path in tmp_path.iterdir()} <= {"step_0000000010", "step_0000000020"}
  assert cg.Checkpoints(tmp_path).steps() == ((10, 20) if call == 5 else (10,))
  write(tmp_path, 20)
  assert found(tmp_path) == 20


def test_a_full_disk_leaves_nothing_while_the_loop_runs(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def full(file: Any, **_: Any) -> None:
    file.write(b"some")
    raise OSError(errno.ENOSPC, "No space left on device")

  saves = cg.Checkpoints(tmp_path, every=2)
  program = jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=4, save=saves)[0])
  with monkeypatch.context() as patched:
    patched.setattr(np, "savez", full)
    program(LIKE)
    with pytest.raises(OSError, match="No space left"):
      cg.barrier()
  assert list(tmp_path.iterdir()) == []
  program(LIKE)
  cg.barrier()
  assert saves.steps() == (2, 4)


@pytest.mark.parametrize("engine", ["callgate", "jax"])
def test_a_process_whose_checkpoints_could_not_be_written_ends_with_status_1(
  tmp_path: Path, engine: str
) -> None:
  """It asks for no barrier; of two folders the other one gets what was sent to it."""
  program = """
    import errno, sys
    import jax, callgate as cg, numpy as np
    from callgate._checkpoints import files

    write = files.write

    def full(folder, *args):
      if folder.name == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
      write(folder, *args)

    files.write = full
    cg.config(engine=ENGINE)
    kept = [cg.Checkpoints(FOLDER + "/" + name, every=2) for name in ("full", "other")]
    for saves in kept:
      jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=4, save=saves)[0])(1.0)
  """.replace("FOLDER", repr(str(tmp_path))).replace("ENGINE", repr(engine))
  done = run_python(program)
  assert done.returncode == 1
  assert "OSError: [Errno 28] No space left on device" in done.stderr
  assert "<Checkpoints in" in done.stderr
  assert "not delivered" not in done.stderr
  assert cg.Checkpoints(tmp_path / "other").steps() == (2, 4)
  assert cg.Checkpoints(tmp_path / "full").steps() == ()


# -- a step that is saved anew --------------------------------------------------------------------
class Killed(BaseException):
  pass


@pytest.mark.parametrize("swaps", [True, False])
def test_an_end_at_each_moment_leaves_one_of_the_two(
  tmp_path: Path, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Ends a writer that replaces a step at its first change of the disk, its second, and so on."""
  left = 1000

  def counted(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
      nonlocal left
      if left == 0:
        raise Killed
      left -= 1
      return function(*args, **options)

    return call

  if not swaps:
    monkeypatch.setattr(paths, "exchange", no_swap)
  for owner, name in (
    (paths, "exchange"), (os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "open"),
    (np, "savez"), (files.shutil, "rmtree"),
  ):  # fmt: skip
    monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
  write(tmp_path, 10, run=1)
  for moment in range(40):
    left = moment
    try:
      write(tmp_path, 10, run=moment + 2)
    except Killed:
      left = 1000
    else:
      break
    assert cg.Checkpoints(tmp_path).steps() == (10,)
    np.testing.assert_array_equal(cg.Checkpoints(tmp_path).load(LIKE), LIKE + 10)
    if moment % 2:
      files.clean(tmp_path)  # as the next run does
      assert [path.name for path in tmp_path.iterdir()] == ["step_0000000010"]
  else:
    pytest.fail("the writer never got to its end")
  left = 1000
  files.clean(tmp_path)
  files.keep_newest(tmp_path, 3)
  assert [path.name for path in tmp_path.iterdir()] == ["step_0000000010"]


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_kill_after_any_rename_leaves_one_of_the_two(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  write(tmp_path, 10, run=1)
  renamed = Path.rename
  for moment in range(6):

    def rename(self: Path, to: Path, moment: int = moment, done: list[int] = [0]) -> Path:  # noqa: B006
      made = renamed(self, to)
      done[0] += 1
      if done[0] > moment:
        os.kill(os.getpid(), signal.SIGKILL)
      return made

    if (child := os.fork()) == 0:
      monkeypatch.setattr(Path, "rename", rename)
      write(tmp_path, 10, run=moment + 2)
      os._exit(0)
    os.waitpid(child, 0)
    assert cg.Checkpoints(tmp_path).steps() == (10,)


def test_a_replaced_step_has_the_later_order(tmp_path: Path) -> None:
  write(tmp_path, 10)
  write(tmp_path, 20)
  write(tmp_path, 10, run=2)
  assert cg.Checkpoints(tmp_path).steps() == (20, 10)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000000010", "step_0000000020"]
