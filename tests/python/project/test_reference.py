# SPDX-License-Identifier: Apache-2.0
"""The reference of the documentation names what the package exports, inherited methods included."""

import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import re
from pathlib import Path

import interpreters
import pytest

import callgate as cg

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
ENTRIES = [
  entry
  for page in PAGES
  for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
COMPAT = ("buffer_callback", "callbacks", "host_callback", "host_callback_2023", "sharded_jit")
COMPAT_MODULES = (f"callgate.compat.{name}" for name in COMPAT)
MODULES = ("callgate", "callgate.executors", "callgate.sinks", *COMPAT_MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry_in_the_reference(module: str) -> None:
  found = importlib.import_module(module)
  entered = [pkgutil.resolve_name(entry) for entry in ENTRIES]
  missing = [n for n in found.__all__ if not any(getattr(found, n) is one for one in entered)]
  assert not missing


def test_entries_of_the_reference_exist_once_and_are_in_its_index() -> None:
  assert len(ENTRIES) == len(set(ENTRIES))
  index = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
  assert re.findall(r"\]\[([\w.]+)\]", index) == [
    entry
    for page in re.findall(r"\(reference/(\w+)\.md\)", index)
    for entry in ENTRIES
    if f"\n::: {entry}\n" in (ROOT / "docs" / "reference" / f"{page}.md").read_text("utf-8") + "\n"
  ]
  assert {page.stem for page in PAGES} == set(re.findall(r"\(reference/(\w+)\.md\)", index))


LISTED = re.compile(r"^::: ([\w.]+)\n    options:\n      members: \[(.+)\]$", re.MULTILINE)


def test_members_that_the_reference_lists_exist() -> None:
  assert "inherited_members: true" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
  found = [one for page in PAGES for one in LISTED.findall(page.read_text(encoding="utf-8"))]
  listed = {entry: members.split(", ") for entry, members in found}
  for entry, members in listed.items():
    kind = pkgutil.resolve_name(entry)
    assert [name for name in members if not hasattr(kind, name)] == []
  for name in ("Gate", "Kernel"):
    assert {"defjvp", "defvjp", "deftranspose", "defvmap"} <= {*listed[f"callgate.{name}"]}


@pytest.mark.parametrize("name", cg.__all__)
def test_a_public_name_is_callgates_own_wherever_it_is_defined(name: str) -> None:
  value = getattr(cg, name)
  if not inspect.ismodule(value):
    assert value.__module__ == "callgate"
    assert pickle.loads(pickle.dumps(value)) is value


# --- examples ----------------------------------------------------------------------------------
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Compilers and libraries that need not be here; `library` opens a file that the reader has.
NEEDED = {"numba": "numba", "torch": "torch", "triton": "triton", "cupy": "cupy"}
NEEDED |= {"numba_cuda": "numba_cuda", "cfunc": "scipy", "kernel": "warp"}
FUNCTIONS = [name for name in cg.__all__ if inspect.isfunction(getattr(cg, name))]


def examples(name: str) -> list[str]:
  return EXAMPLE.findall(inspect.getdoc(getattr(cg, name)) or "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_an_example(name: str) -> None:
  assert examples(name) or ">>>" in (inspect.getdoc(getattr(cg, name)) or "")


def test_examples_of_public_functions_run(tmp_path: Path) -> None:
  """Examples that begin with imports; the others need a program around them."""
  whole = [
    (name, code)
    for name in FUNCTIONS
    for code in examples(name)
    if re.match(r"(import|from) ", code) and name not in ("library", "load_kernels", "cuda")
    if importlib.util.find_spec(NEEDED.get(name, "jax")) is not None
  ]
  assert len(whole) > 20
  script = tmp_path / "examples.py"
  parts: list[str] = []
  for place, (name, code) in enumerate(whole):  # files: Warp reads the source of its kernels
    path = tmp_path / f"example_{place}.py"
    path.write_text(code)
    run = f"exec(compile({code!r}, {str(path)!r}, 'exec'), {{}})"
    parts.append(f"print({name!r}, flush=True)\n{run}")
  script.write_text("\n".join(parts) + "\n")
  interpreters.succeed(script, cwd=tmp_path, environment=interpreters.same_path(), timeout=300)
