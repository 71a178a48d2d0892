# SPDX-License-Identifier: Apache-2.0
"""`callgate.save_kernels` and `load_kernels`: exported programs run where nothing is defined."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from free_threaded import frees_functions
from hypothesis import given
from hypothesis import strategies as st
from interpreters import printed_by
from jax import export
from kernel_libraries import build
from programs import drop_programs, drop_programs_until
from property_checks import examples

import callgate as cg
from callgate import _callgate
from callgate._build import toolchain
from callgate._core import registry
from callgate._core.public import core
from callgate._kernel import files
from callgate._kernel.kernel import Kernel

pytest.importorskip("flatbuffers")

SCALE = """
  void scale(float a, cg::In<float> x, cg::Out<float> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[i] = a * x[i];
  }"""
REVERSE = """
  template <typename T, int R>
  void reverse(cg::In<T, R> x, cg::Out<T, R> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[i] = x[x.size() - 1 - i];
  }"""
# A process that defines nothing. Its jobs, one after the other: a name, the file of kernels, the
# programs to call, and the environment. It tells what was loaded and what the programs give.
LOAD = textwrap.dedent("""
  import contextlib, gc, json, os, pathlib, sys
  import callgate as cg, jax, jax.numpy as jnp
  from callgate._core import registry
  from jax import export

  folder, jobs = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
  before = dict(os.environ)

  def called(name):
    program = export.deserialize(bytearray((folder / name).read_bytes()))
    try:
      return jax.tree.map(lambda x: x.tolist(), program.call(jnp.arange(3.0)))
    except Exception as error:
      return f"{type(error).__name__} {error}"

  def told(kernels, programs):
    with cg.load_kernels(folder / kernels) if kernels else contextlib.nullcontext() as loaded:
      return [loaded and loaded.names, *map(called, programs)]

  for name, kernels, programs, environment in jobs:
    jax.clear_caches()
    gc.collect()
    assert not [known for known, _ in registry.operations() if known.startswith("files.")]
    os.environ.clear()
    os.environ.update(before, **environment)
    try:
      said = told(kernels, programs)
    except cg.CompileError as error:
      said = str(error)
    print(json.dumps([name, said]), flush=True)
""")
NO_COMPILER = {"CXX": "/nonexistent/c++"}


@pytest.fixture
def scale() -> Any:
  drop_programs()  # with them, the kernel of the test before
  yield cg.cpp(SCALE, out=lambda a, x: x, name="files.scale")
  drop_programs()


@pytest.fixture
def reverse() -> Any:
  drop_programs()
  yield cg.cpp(REVERSE, out=lambda x: x, name="files.reverse")
  drop_programs()


def loaded_program(function: Any, x: Any) -> Any:
  """An exported program as another process has it: it doesn't hold the function."""
  exported = export.export(jax.jit(function), disabled_checks=cg.export_checks())(x)
  return export.deserialize(bytearray(exported.serialize()))


def write_program(folder: Path, name: str, function: Any) -> None:
  checks = cg.export_checks()
  exported = export.export(jax.jit(function), disabled_checks=checks)(jnp.arange(3.0))
  (folder / name).write_bytes(exported.serialize())


def change(path: Path, edit: Any) -> None:
  """Rewrites a file of kernels with an edited manifest; the bytes stay."""
  with zipfile.ZipFile(path) as archive:
    members = {name: archive.read(name) for name in archive.namelist()}
  manifest = json.loads(members["manifest.json"])
  edit(manifest)
  members["manifest.json"] = json.dumps(manifest).encode()
  with zipfile.ZipFile(path, "w") as archive:
    for name, content in members.items():
      archive.writestr(name, content)


# --- Travelling -----------------------------------------------------------------------------------

OTHERS = {"machine": "x86_64 other", "abi": 77}


def write_files(folder: Path) -> None:
  """Programs, and files of kernels that the process of LOAD loads for them."""
  scale = cg.cpp(SCALE, out=lambda a, x: x, name="files.scale")
  reverse = cg.cpp(REVERSE, out=lambda x: x, name="files.reverse")

  def backward(residuals: Any, cotangent: Any) -> Any:
    a, x = residuals
    return jnp.vdot(x, cotangent), scale(a, cotangent)

  scale.defvjp(lambda a, x: (scale(a, x), (a, x)), backward)
  cg.save_kernels(folder / "not compiled", [reverse])
  programs = {
    "one": lambda x: scale(2.0, x) + 1,
    "two": lambda x: (reverse(x), reverse(x.astype(int)), reverse(x[None, :2])),
    "three": jax.vmap(lambda x: scale(3.0, reverse(x[None]))[0]),
    "gradient": jax.grad(lambda x: (scale(2.0, x) ** 2).sum()),
    "reverse": reverse,
  }
  for name, program in programs.items():
    write_program(folder, name, program)
  cg.save_kernels(folder / "kernels", [scale, reverse])
  for key, other in OTHERS.items():
    cg.save_kernels(folder / key, scale)
    change(folder / key, lambda m, new={key: other}: m["kernels"][0]["compiled"].update(new))
  (folder / "broken.so").write_bytes(b"not a library")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(core(scale), "_libraries", {"": folder / "broken.so"})
    cg.save_kernels(folder / "broken", scale)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
  """The folder, and by job what the process of LOAD tells."""
  drop_programs()
  folder = tmp_path_factory.mktemp("elsewhere")
  write_files(folder)
  drop_programs()
  in_cache = lambda name: {"CALLGATE_CACHE_DIR": str(folder / name)}
  alone = {**NO_COMPILER, **in_cache("cache")}
  (folder / "a file").write_text("")
  jobs: list[Any] = [
    ("first", "kernels", ["one", "two", "three"], alone),
    ("second", "kernels", ["one", "two", "three"], alone),  # finds the libraries of the first
    ("gradient", "kernels", ["gradient"], alone),
    ("not compiled", "not compiled", ["reverse"], {}),
    ("broken", "broken", ["one"], {}),
    ("no cache", "kernels", ["one"], {**NO_COMPILER, **in_cache("a file")}),
    ("missing", "", ["reverse"], {}),
  ]
  for key in OTHERS:
    jobs.append((key, key, ["one"], in_cache(f"cache of {key}")))
    jobs.append((f"{key}, no compiler", key, [], {**NO_COMPILER, **in_cache("none")}))
  # The last one, since the error that it leaves holds the kernel.
  jobs.append(("no compiler", "not compiled", ["reverse"], {**NO_COMPILER, **in_cache("none")}))
  printed = printed_by(LOAD, str(folder), json.dumps(jobs))
  return folder, dict(map(json.loads, printed.splitlines()))


def test_programs_run_in_a_fresh_process_without_compiler_or_cache(elsewhere: Any) -> None:
  folder, told = elsewhere
  assert told["first"] == told["second"] == [
    ["files.scale", "files.reverse"], [1, 3, 5], [[2, 1, 0], [2, 1, 0], [[1, 0]]], [0, 3, 6],
  ]  # fmt: skip
  installed = list((folder / "cache").rglob("*.so"))
  assert len(installed) == 4
  assert list((folder / "cache").rglob("*.so*")) == installed


def test_derivatives_travel_as_calls_that_the_program_holds(elsewhere: Any) -> None:
  want = jax.grad(lambda x: ((2.0 * x) ** 2).sum())(jnp.arange(3.0)).tolist()
  assert elsewhere[1]["gradient"][1] == want


def test_a_variant_that_was_not_compiled_when_saved_is_compiled_where_it_is_named(
  elsewhere: Any,
) -> None:
  told = elsewhere[1]
  assert told["not compiled"][1] == [2, 1, 0]
  assert "CXX=/nonexistent/c++" in told["no compiler"][1]


@pytest.mark.parametrize("key", OTHERS)
def test_for_another_cpu_or_interface_the_source_is_compiled(elsewhere: Any, key: str) -> None:
  folder, told = elsewhere
  assert told[key][1] == [1, 3, 5]
  assert (folder / f"cache of {key}" / "kernels").exists()
  assert not (folder / f"cache of {key}" / "loaded").exists()
  assert "CXX=/nonexistent/c++" in told[f"{key}, no compiler"]


def test_code_for_any_cpu_of_the_architecture_fits_all_of_them(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  kernel = cg.cpp(SCALE, out=lambda a, x: x, name="files.plain", debug=True)  # no -march=native
  kernel(1.0, jnp.ones(2))
  form = core(kernel).saved_form()
  assert form is not None
  monkeypatch.setattr(toolchain, "cpu", lambda: "another CPU")
  assert list(files.installed(form["compiled"])) == [""]


def test_a_library_that_the_system_cannot_load_is_compiled_anew(elsewhere: Any) -> None:
  assert elsewhere[1]["broken"][1] == [1, 3, 5]


def test_a_cache_that_cannot_be_written_is_no_obstacle(elsewhere: Any) -> None:
  assert elsewhere[1]["no cache"][1] == [1, 3, 5]


def test_a_missing_kernel_is_an_error_that_names_it_and_load_kernels(elsewhere: Any) -> None:
  _, said = elsewhere[1]["missing"]
  assert "no gate or kernel named 'files.reverse[T=float32,R=1]' is defined" in said
  assert "name='files.reverse'." in said
  assert "callgate.load_kernels" in said


@frees_functions
def test_a_missing_kernel_s_error_has_kernels_that_are_not_compiled_yet() -> None:
  kernel = cg.cpp(REVERSE, out=lambda x: x, name="files.typo")
  program = loaded_program(kernel, jnp.arange(2.0))
  del kernel
  drop_programs_until(lambda: "files.typo" not in dict(registry.operations()))
  others = [cg.gate(lambda x: x, out=lambda x: x, name=f"a.{i}") for i in range(9)]
  kernel = cg.cpp(REVERSE, out=lambda x: x, name="files.typos")
  assert kernel.name not in _callgate.registered_names()
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"Defined here: 'files\.typos', 'a\.0'"):
    jax.jit(program.call)(jnp.arange(2.0))
  assert len(others) == 9


# --- What is saved --------------------------------------------------------------------------------


def test_by_default_all_live_kernels_that_can_travel_are_saved(
  tmp_path: Path, scale: Any, reverse: Any
) -> None:
  library = cg.library(build(tmp_path, "staying", '#include "callgate/kernel.h"' + SCALE +
                             "\nCALLGATE_KERNEL(scale);"))  # fmt: skip
  stays = library.scale
  cg.save_kernels(tmp_path / "kernels")
  with cg.load_kernels(tmp_path / "kernels") as loaded:
    assert {"files.scale", "files.reverse"} <= set(loaded.names)
    assert stays.name not in loaded.names
  with pytest.raises(
    cg.GateDefinitionError, match=r"got <kernel 'staying.scale'>, whose code callgate"
  ):
    cg.save_kernels(tmp_path / "other", [scale, stays])
  assert not (tmp_path / "other").exists()
  with pytest.raises(cg.GateDefinitionError, match="expected kernels of"):
    cg.save_kernels(tmp_path / "other", [reverse, np.sin])  # pyright: ignore[reportArgumentType]


def test_saving_replaces_a_file_in_one_step_and_leaves_no_other(
  tmp_path: Path, scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
  path = tmp_path / "kernels"
  path.write_text("before")
  monkeypatch.setattr(
    zipfile.ZipFile, "writestr", lambda *_: (_ for _ in ()).throw(OSError("full"))
  )
  with pytest.raises(OSError, match="full"):
    cg.save_kernels(path, scale)
  assert path.read_text() == "before"
  assert list(tmp_path.iterdir()) == [path]
  monkeypatch.undo()
  cg.save_kernels(path, scale)
  assert zipfile.is_zipfile(path)
  assert list(tmp_path.iterdir()) == [path]


# --- Names and lives ------------------------------------------------------------------------------


def test_loading_what_is_live_already_uses_it_and_another_of_the_name_is_an_error(
  tmp_path: Path, scale: Any, reverse: Any
) -> None:
  path = tmp_path / "kernels"
  cg.save_kernels(path, [reverse, scale])
  with cg.load_kernels(path) as loaded, cg.load_kernels(path) as again:
    assert loaded.names == again.names == ("files.reverse", "files.scale")
    assert scale(2.0, jnp.ones(2)).tolist() == [2.0, 2.0]
  other = cg.cpp(SCALE, out=lambda a, x: x, name="files.taken")
  cg.save_kernels(path, [other])
  del other
  drop_programs()
  gate = cg.gate(lambda x: x, out=lambda x: x, name="files.taken")
  with pytest.raises(ValueError, match=r"kernels' has a kernel 'files.taken', a name .* live gate"):
    cg.load_kernels(path)
  del gate
  gc.collect()
  differs = cg.cpp(
    SCALE.replace("a * x[i]", "1 + a * x[i]"), out=lambda a, x: x, name="files.taken"
  )
  with pytest.raises(ValueError, match="live kernel of this process"):
    cg.load_kernels(path)
  assert differs(1.0, jnp.ones(1)).tolist() == [2.0]


def test_a_kernel_can_be_defined_after_its_file_was_loaded(tmp_path: Path) -> None:
  define = lambda source: cg.cpp(source, out=lambda a, x: x, name="files.after")
  kernel = define(SCALE)
  program = loaded_program(lambda x, kernel=kernel: kernel(3.0, x), jnp.ones(2))
  cg.save_kernels(tmp_path / "kernels", kernel)
  del kernel
  drop_programs_until(lambda: "files.after" not in dict(registry.operations()))
  with cg.load_kernels(tmp_path / "kernels"):
    with pytest.raises(ValueError, match=r"taken by another kernel, which callgate.load_kernels"):
      define(SCALE.replace("a * x[i]", "1 + a * x[i]"))
    kernel = define(SCALE)
    assert kernel.name == "files.after"
    assert kernel(2.0, jnp.ones(2)).tolist() == [2.0, 2.0]
    assert jax.jit(program.call)(jnp.ones(2)).tolist() == [3.0, 3.0]
    with cg.load_kernels(tmp_path / "kernels") as again:
      assert again.names == ("files.after",)


def test_a_name_that_is_taken_leaves_nothing_of_the_file_loaded(tmp_path: Path) -> None:
  first = cg.cpp(SCALE, out=lambda a, x: x, name="files.first")
  second = cg.cpp(SCALE, out=lambda a, x: x, name="files.second")
  cg.save_kernels(tmp_path / "kernels", [first, second])
  del first, second
  gc.collect()
  gate = cg.gate(lambda x: x, out=lambda x: x, name="files.second")
  with pytest.raises(ValueError, match=r"files\.second"):
    cg.load_kernels(tmp_path / "kernels")
  gc.collect()
  assert "files.first" not in _callgate.registered_names()
  assert gate.name == "files.second"


def test_loaded_kernels_stay_until_closed_even_when_the_handle_is_dropped(tmp_path: Path) -> None:
  kernel = cg.cpp(REVERSE, out=lambda x: x, name="files.staying")
  program = loaded_program(kernel, jnp.arange(2.0))
  cg.save_kernels(tmp_path / "kernels", kernel)
  del kernel
  drop_programs_until(lambda: "files.staying" not in dict(registry.operations()))
  cg.load_kernels(tmp_path / "kernels")
  gc.collect()
  call = jax.jit(program.call)
  assert call(jnp.arange(2.0)).tolist() == [1.0, 0.0]
  handle = cg.load_kernels(tmp_path / "kernels")  # the same kernels, shared
  assert repr(handle) == "<loaded kernels: files.staying>"
  handle.close()
  handle.close()
  assert call(jnp.arange(2.0)).tolist() == [1.0, 0.0]


def test_after_close_the_names_are_free_and_loaded_programs_go_on(tmp_path: Path) -> None:
  kernel = cg.cpp(SCALE, out=lambda a, x: x, name="files.closed")
  program = loaded_program(lambda x, kernel=kernel: kernel(3.0, x), jnp.ones(2))
  cg.save_kernels(tmp_path / "kernels", kernel)
  del kernel
  drop_programs_until(lambda: "files.closed" not in dict(registry.operations()))
  call = jax.jit(program.call)
  with cg.load_kernels(tmp_path / "kernels"):
    assert call(jnp.ones(2)).tolist() == [3.0, 3.0]
  gc.collect()
  assert call(jnp.ones(2)).tolist() == [3.0, 3.0]
  drop_programs()
  again = cg.cpp(SCALE, out=lambda a, x: x, name="files.closed")
  assert again(1.0, jnp.ones(1)).tolist() == [1.0]


def test_a_loaded_kernel_is_for_loaded_programs(tmp_path: Path) -> None:
  kernel = cg.cpp(SCALE, out=lambda a, x: x, name="files.no_calls")
  cg.save_kernels(tmp_path / "kernels", kernel)
  del kernel
  drop_programs()
  with cg.load_kernels(tmp_path / "kernels") as loaded:
    restored = Kernel(*loaded._kernels)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(cg.GateDefinitionError, match=r"in this process before callgate\.load_k"):
      restored(1.0, jnp.ones(1))
    # It can travel on, with what it brought.
    cg.save_kernels(tmp_path / "again", restored)
  assert (tmp_path / "again").read_bytes() == (tmp_path / "kernels").read_bytes()


# --- Damage ---------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
  content = path.read_bytes()
  if how == "cut":
    path.write_bytes(content[: len(content) // 2])
  elif how == "text":
    path.write_text("no archive", encoding="utf-8")
  elif how == "a flipped byte":
    middle = content.index(b"bytes/") + 2000  # within a compressed library
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
  elif how == "an archive of something else":
    with zipfile.ZipFile(path, "w") as archive:
      archive.writestr("manifest.json", '{"format": "other"}')
  elif how == "no manifest":
    with zipfile.ZipFile(path, "w") as archive:
      archive.writestr("other", "")
  elif how == "a manifest of another form":
    with zipfile.ZipFile(path, "w") as archive:
      archive.writestr("manifest.json", "[1, 2]")
  else:
    assert how == "a library that was exchanged"
    with zipfile.ZipFile(path) as archive:
      members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
      for name, member in members.items():
        archive.writestr(name, member + b"!" if name.startswith("bytes/") else member)


@pytest.mark.parametrize("how", ["cut", "text", "a flipped byte", "an archive of something else",
  "no manifest", "a manifest of another form", "a library that was exchanged"])  # fmt: skip
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, scale: Any, how: str) -> None:
  path = tmp_path / "kernels"
  cg.save_kernels(path, scale)
  damage(path, how)
  with pytest.raises(
    cg.KernelFileError, match=r"callgate.save_kernels wrote, got '.*/kernels', wh"
  ):
    cg.load_kernels(path)


def test_a_file_of_another_version_says_both(tmp_path: Path, scale: Any) -> None:
  cg.save_kernels(tmp_path / "kernels", scale)
  change(tmp_path / "kernels", lambda manifest: manifest.update(version=9))
  with pytest.raises(cg.KernelFileError, match="expected version 1 of the format, got 9; save the"):
    cg.load_kernels(tmp_path / "kernels")


def test_a_kind_that_is_not_known_is_named(tmp_path: Path, scale: Any) -> None:
  cg.save_kernels(tmp_path / "kernels", scale)

  def edit(manifest: Any) -> None:
    manifest["kernels"][0].update(kind="fortran", name="files.other")

  change(tmp_path / "kernels", edit)
  with pytest.raises(cg.KernelFileError, match=r"'files.other': expected one of .*cpp.*'fortran'"):
    cg.load_kernels(tmp_path / "kernels")


def test_a_file_that_is_not_there_is_file_not_found(tmp_path: Path) -> None:
  with pytest.raises(FileNotFoundError):
    cg.load_kernels(tmp_path / "none")


def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
  path = tmp_path_factory.mktemp("saved") / "kernels"
  kernel = cg.cpp(SCALE, out=lambda a, x: x, name="files.fuzzed", flags=["-O0"])
  cg.save_kernels(path, kernel)
  return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
  """A file of one kernel, which is not alive any more."""
  content = saved(tmp_path_factory)
  drop_programs()
  return content


@pytest.fixture(scope="module")
def damaged(whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> Any:
  """A file to write, in a process without a compiler and with an empty cache."""
  assert whole  # made while there was a compiler
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CALLGATE_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "empty"))
    patch.setenv("CXX", NO_COMPILER["CXX"])
    yield tmp_path_factory.mktemp("damaged") / "kernels"


def load_whatever_it_is(path: Path) -> None:
  """Checks the promise of `load_kernels` for any file."""
  said = [f"'{path}'", "CXX=/nonexistent/c++"]
  try:
    cg.load_kernels(path).close()
  except (cg.KernelFileError, cg.CompileError) as error:
    said = [text for text in said if text in str(error)]
  assert said


@given(content=st.binary(max_size=200))
def test_random_bytes_are_no_file_of_kernels(damaged: Path, content: bytes) -> None:
  damaged.write_bytes(content)
  with pytest.raises(cg.KernelFileError):
    cg.load_kernels(damaged)


@examples(150)
@given(
  changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3),
  ends=st.booleans(),
)
def test_changed_bytes_are_found_or_do_no_harm(
  whole: bytes, damaged: Path, changes: list[tuple[float, int]], ends: bool
) -> None:
  content = bytearray(whole)
  for place, value in changes:
    span = 400 if ends else len(content) - 1  # the directory of the archive is at its end
    content[len(content) - 1 - int(place * span)] = value
  damaged.write_bytes(content)
  load_whatever_it_is(damaged)


_numbers = itertools.count()


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
  """The places in a manifest."""
  found = [here]
  if isinstance(value, dict | list):
    for key in value if isinstance(value, dict) else range(len(value)):
      found += paths_of(value[key], (*here, key))
  return found


ODD = st.one_of(
  st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([[]]),
  st.just({}), st.just({"$bytes": "0"}), st.just({"$bytes": []}),
  st.just("a\0b"), st.just("\ud800"),
)  # fmt: skip


@examples(200)
@given(which=st.floats(0, 1, exclude_max=True), value=ODD, drop=st.booleans())
def test_a_manifest_with_anything_in_any_place_is_refused_or_does_no_harm(
  whole: bytes, damaged: Path, which: float, value: Any, drop: bool
) -> None:
  damaged.write_bytes(whole)

  def edit(manifest: Any) -> None:
    for kernel in manifest["kernels"]:
      kernel["name"] += str(next(_numbers))  # the last example's may still be alive
    paths = [path for path in paths_of(manifest) if path]
    *most, last = paths[int(which * len(paths))]
    place = functools.reduce(lambda held, key: held[key], most, manifest)
    if drop:
      del place[last]
    else:
      place[last] = value

  change(damaged, edit)
  load_whatever_it_is(damaged)


@pytest.mark.parametrize("how", ["deep", "encrypted", "of a method that is not known", "bomb"])
def test_an_archive_that_cannot_be_read_is_an_error_that_names_it(
  damaged: Path, whole: bytes, how: str
) -> None:
  if how in ("deep", "bomb"):
    with zipfile.ZipFile(damaged, "w") as archive:
      archive.writestr("manifest.json", "[" * 100_000 if how == "deep" else "1" * 100_000)
  else:
    content = bytearray(whole)
    directory = content.index(b"PK\1\2")
    for start, offset in ((0, 6), (directory, 8)):
      if how == "encrypted":
        content[start + offset] |= 1
      else:
        content[start + offset + 2] = 14  # LZMA, which this is not
    damaged.write_bytes(content)
  with pytest.raises(cg.KernelFileError, match=str(damaged)):
    cg.load_kernels(damaged)


def test_a_folder_is_no_file_of_kernels(tmp_path: Path) -> None:
  with pytest.raises(IsADirectoryError):
    cg.load_kernels(tmp_path)
