# SPDX-License-Identifier: Apache-2.0
"""Pictures of one environment, a file an episode."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("cloudpickle")

import environments
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import callgate as cg

WHERE = pytest.mark.parametrize("where", ["xla", "own", "thread", "workers"])


def run(env: cg.Envs, steps: int) -> None:
  @jax.jit
  def program(key: Any) -> Any:
    n = env.num_envs
    env.reset(key)
    act = lambda _, __: (None, env.step(jnp.zeros(n, jnp.int32))[1])
    return jax.lax.scan(act, None, length=steps)[1]

  jax.block_until_ready(program(list(range(1, env.num_envs + 1))))


def gif(path: pathlib.Path) -> list[Any]:
  """The pictures of a GIF."""
  found: list[Any] = []
  with pytest.importorskip("PIL.Image").open(path) as image:
    for index in range(image.n_frames):
      image.seek(index)
      found.append(np.asarray(image.convert("RGB")))
    assert image.info["duration"] == 100  # milliseconds: the environment says 10 a second
  return found


def picture(seed: int, count: int) -> Any:
  env = environments.Drawn()
  env.seed, env.count = seed, count
  return env.render()


def files(folder: pathlib.Path) -> list[str]:
  return sorted(path.name for path in folder.iterdir())


@WHERE
def test_each_episode_is_a_gif(
  where: str, two: cg.Workers, tmp_path: pathlib.Path, engine: str
) -> None:
  pytest.importorskip("PIL")
  place: Any = {"workers": two, "thread": cg.thread("of videos")}.get(where, where)
  folder = tmp_path / "in" / "videos"
  with cg.envs(environments.Drawn, n=3, run_on=place, record_video=(2, folder)) as env:
    run(env, 7)  # an episode of three steps, a reset, and another
    assert files(folder) == ["episode-0000.gif", "episode-0001.gif"]
    for path in sorted(folder.iterdir()):
      pictures = gif(path)
      assert len(pictures) == 4
      for count, one in enumerate(pictures):
        np.testing.assert_array_equal(one, picture(3, count))
    run(env, 2)  # and again: an episode that has not ended is there after close()
    assert len(files(folder)) == 2
  assert files(folder)[2:] == ["episode-0002.gif"]
  assert len(gif(folder / "episode-0002.gif")) == 3


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_pngs_of_all_modes(mode: Any, vector: bool, tmp_path: pathlib.Path) -> None:
  make: Any = environments.Drawn
  if vector:
    make = lambda: SyncVectorEnv([environments.Drawn] * 2, autoreset_mode=AutoresetMode(
      {"next_step": "NextStep", "same_step": "SameStep", "disabled": "Disabled"}[mode]
    ))  # fmt: skip
  more: Any = {} if vector else {"n": 2}
  folder = str(tmp_path / "made")
  with cg.envs(
    make, vector=vector, autoreset=mode, record_video=(0, folder, "png"), **more
  ) as env:  # fmt: skip
    run(env, 3)
    if mode == "disabled":
      env.reset([1, 2], mask=jnp.ones(2, bool))
    run(env, 1)
  last = 4 if mode != "same_step" or not vector else 3  # it has begun anew when it is rendered
  want = [f"episode-0000-{i:05d}.png" for i in range(last)]
  found = files(tmp_path / "made")
  assert [name for name in found if "-0000-" in name] == want
  assert [name for name in found if "-0001-" in name] == [
    f"episode-0001-{i:05d}.png" for i in range(2)
  ]
  assert len({name[:12] for name in found}) == 2
  if importlib.util.find_spec("PIL"):
    from PIL import Image

    with Image.open(tmp_path / "made" / want[2]) as image:
      got = np.asarray(image)
    np.testing.assert_array_equal(got, picture(1, 2))


def test_a_lane_of_vmap_and_a_program_that_fails(tmp_path: pathlib.Path) -> None:
  with cg.envs(environments.Drawn, n=2, record_video=(1, tmp_path, "png")) as env:

    @jax.jit
    @jax.vmap
    def program(key: Any) -> Any:
      env.reset(key)
      return env.step(jnp.zeros(2, jnp.int32))[0]

    jax.block_until_ready(program(jnp.array([[1, 2], [3, 4]])))
    with pytest.raises(cg.GateDefinitionError):
      env.step(jnp.zeros(3, jnp.int32))
  assert len(files(tmp_path)) == 2  # of the first lane's
  assert not any(name.startswith(".") for name in files(tmp_path))


def test_mp4_needs_an_extra_and_writes_with_it(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
  with pytest.raises(cg.GateDefinitionError, match=r"with 'mp4' needs .*'callgate\[video\]'"):
    cg.envs(environments.Drawn, record_video=(0, tmp_path, "mp4"))
  ffmpeg = tmp_path / "ffmpeg"
  ffmpeg.write_text("#!/bin/sh\nfor last; do :; done\necho $@ > $last.options\ncat > $last\n")
  ffmpeg.chmod(0o755)
  fake = types.SimpleNamespace(get_ffmpeg_exe=lambda: str(ffmpeg))
  monkeypatch.setitem(sys.modules, "imageio_ffmpeg", fake)  # pyright: ignore
  folder = tmp_path / "films"
  with cg.envs(environments.Drawn, record_video=(0, folder, "mp4")) as env:
    run(env, 3)
  pictures = np.frombuffer((folder / "episode-0000.mp4").read_bytes(), np.uint8)
  np.testing.assert_array_equal(pictures.reshape(4, 16, 24, 3), [picture(1, i) for i in range(4)])
  options = (folder / ".episode-0000.part.mp4.options").read_text()
  assert "-s 24x16 -r 10.0 -i -" in options
  ffmpeg.write_text("#!/bin/sh\necho no such codec >&2\nexit 3\n")
  with (
    cg.envs(environments.Drawn, record_video=(0, folder, "mp4")) as env,
    pytest.raises(cg.GateError, match="ffmpeg exited with status 3: no such codec"),
    cg.errors(),
  ):
    run(env, 3)
  assert "episode-0000.mp4" in files(folder)


def test_mp4_by_ffmpeg(tmp_path: pathlib.Path) -> None:
  ffmpeg = pytest.importorskip("imageio_ffmpeg")
  with cg.envs(environments.Drawn, record_video=(0, tmp_path, "mp4")) as env:
    run(env, 3)
  count, _ = ffmpeg.count_frames_and_secs(str(tmp_path / "episode-0000.mp4"))
  assert count == 4


def test_without_pillow_pngs_are_the_default(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name, *rest: None if name == "PIL" else find(name, *rest)
  )
  with cg.envs(environments.Drawn, record_video=(0, tmp_path)) as env:
    run(env, 3)
  assert files(tmp_path) == [f"episode-0000-{i:05d}.png" for i in range(4)]
  monkeypatch.setitem(sys.modules, "PIL.Image", None)
  with pytest.raises(cg.GateDefinitionError, match=r"Pillow, .*'callgate\[video\]'"):
    cg.envs(environments.Drawn, record_video=(0, tmp_path, "gif"))


@pytest.mark.parametrize(
  ("given", "said"),
  [
    ("folder", r"record_video: expected \(lane, folder\)"), ((1,), r"expected \(lane, folder\)"),
    ((0, "a", "gif", 1), r"expected \(lane, folder\)"), ((-1, "a"), r"record_video\[0\]: expected"),
    ((2, "a"), r"record_video\[0\]: expected the number of an"), ((0, ""), r"\[1\]: "),
    ((0, 3), r"\[1\]: expected a path"), ((0, "a", "avi"), r"\[2\]: expected one of 'gif', 'png'"),
  ],
)  # fmt: skip
def test_wrong_options_are_refused(given: Any, said: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=said):
    cg.envs(environments.Drawn, n=2, record_video=given)


def test_environments_without_pictures_are_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(
    cg.GateDefinitionError, match="got render_mode=None; make them with render_mode='rgb_array'"
  ):
    cg.envs(environments.cart_pole, record_video=(0, tmp_path))

  class Lies(environments.Drawn):
    def render(self) -> Any:
      return "nothing"

  with cg.envs(Lies, record_video=(0, tmp_path)) as env:
    with pytest.raises(cg.ResultError, match=r"expected a picture, uint8\[h") as info, cg.errors():
      jax.block_until_ready(env.reset(0))
    assert "environment 0 of 1" in str(info.value.__notes__)
  assert os.listdir(tmp_path) == []


def test_a_relative_folder_lies_in_the_run(tmp_path: pathlib.Path) -> None:
  with cg.run("films", folder=tmp_path) as training:
    with cg.envs(environments.Drawn, record_video=(0, "videos", "png")) as env:
      run(env, 2)
    cg.barrier()
  assert files(training.folder / "videos")
