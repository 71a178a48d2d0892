# SPDX-License-Identifier: Apache-2.0
"""Public classes, and objects of them, show the names that the reference has, and no others."""

import enum
import functools
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
ENTRY = re.compile(r"^::: ([\w.]+)$(?:\n    options:\n      members: \[(.*)\])?", re.MULTILINE)
# The entries of all pages, and the members that one lists; None where it takes all with a text.
ENTRIES: dict[str, list[str] | None] = {
  name: members.split(", ") if members else [] if found.group(0).endswith("[]") else None
  for page in sorted(REFERENCE.glob("*.md"))
  for found in ENTRY.finditer(page.read_text(encoding="utf-8"))
  for name, members in [found.groups()]
}
CLASSES = {
  name: pkgutil.resolve_name(name)
  for name in ENTRIES
  if inspect.isclass(pkgutil.resolve_name(name)) and not name.startswith("callgate.compat")
}
ATTRIBUTE = re.compile(r"^  (\w+(?:, \w+)*): ", re.MULTILINE)


def of_text(kind: type) -> set[str]:
  """The names that a class's docstring describes, as attributes or as options that it keeps."""
  text = inspect.cleandoc(vars(kind).get("__doc__") or "")
  sections = re.split(r"\n(?=(?:Attributes|Args):\n)", text)[1:]
  parts = (section.split("\n\n")[0] for section in sections)
  return {n for part in parts for found in ATTRIBUTE.findall(part) for n in found.split(", ")}


def documented(kind: type) -> set[str]:
  """The names of a class in the reference, those of its bases included."""
  names = set[str]()
  for base in kind.__mro__:
    members = next((ENTRIES[name] for name, one in CLASSES.items() if one is base), None)
    names |= of_text(base) | set(members or ())
    if members is None and base.__module__.startswith("callgate"):
      own = {n: v for n, v in vars(base).items() if not n.startswith("_")}
      names |= {n for n, value in own.items() if inspect.getdoc(value)}
  return names


def of_python(kind: type) -> set[str]:
  """The names that classes of Python's own bring: those of exceptions and tuples, say."""
  others = (base for base in kind.__mro__ if not base.__module__.startswith("callgate"))
  members = {*kind.__members__} if issubclass(kind, enum.Enum) else set[str]()  # described at once
  return {name for base in others for name in vars(base)} | members


def shown(value: Any) -> set[str]:
  return {name for name in dir(value) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_shows_what_the_reference_has(name: str) -> None:
  kind = CLASSES[name]
  assert shown(kind) - of_python(kind) - documented(kind) == set()


def tenth(x: Any) -> Any:
  return x / 10


OBJECTS: dict[str, Callable[[Any], Any]] = {
  "gate": lambda path: cg.gate(tenth, out=lambda x: x),
  "kernel": lambda path: cg.elementwise("T x", "T y", "y = x / 10"),
  "hold": lambda path: cg.hold(dict),
  "handle": lambda path: cg.hold(dict)(),
  "linear solver": lambda path: cg.linear_solver(factor=np.linalg.inv, solve=np.matmul),
  "root": lambda path: cg.root(lambda x, t: x - t, solver=lambda t, x: t),
  "ticket": lambda path: cg.gate(tenth, out=lambda x: x).start(jnp.ones(3)),
  "channel": lambda path: cg.channel("shown names"),
  "feed": lambda path: cg.feed([np.float32(1)]),
  "knob": lambda path: cg.knob("shown names", 1.0),
  "thread": lambda path: cg.thread("shown names"),
  "workers": lambda path: cg.workers(1),
  "checkpoints": lambda path: cg.Checkpoints(path),
  "recording": lambda path: cg.record(path / "calls"),
  "replay": lambda path: cg.replay(path / "calls"),
  "progress": lambda path: cg.Progress(),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_shows_what_the_reference_has(kind: str, tmp_path: Path) -> None:
  made = OBJECTS[kind](tmp_path)
  assert shown(made) - of_python(type(made)) - documented(type(made)) == set()
  if kind == "ticket":
    assert np.allclose(made.result(), 0.1)
  elif hasattr(made, "close"):
    made.close()


def test_a_torch_function_shows_what_the_reference_has() -> None:
  torch = pytest.importorskip("torch", reason="needs PyTorch")
  for made in (cg.torch(torch.sin), cg.torch(torch.nn.Linear(1, 1))):
    assert shown(made) - documented(type(made)) == set()


def test_a_gate_shows_few_names() -> None:
  assert len(shown(cg.Gate)) <= 17
  assert shown(cg.Gate) <= shown(cg.gate(tenth, out=lambda x: x))
  assert jax.jit(cg.gate(tenth, out=lambda x: x))(1.0) == np.float32(0.1)


def test_a_wrapper_of_a_gate_takes_none_of_its_core() -> None:
  made = {times: cg.gate(lambda x, times=times: x * times, like=lambda x: x) for times in (2, 3)}
  assert functools.wraps(made[2])(made[3])(1.0) == 3
  for wrapper in (jax.vmap(made[3]), functools.wraps(made[3])(lambda x: made[3](x))):
    again = cloudpickle.loads(cloudpickle.dumps(wrapper))
    assert again(jnp.ones(2)).tolist() == [3, 3]


@pytest.mark.parametrize("kind", ["Gate", "Kernel", "Hold", "Knob", "Thread", "Workers"])
def test_a_class_that_is_called_names_the_function_that_makes_one(kind: str) -> None:
  for given in ((), (tenth,), (tenth, 1)):
    with pytest.raises(
      TypeError, match=rf"callgate\.{kind}: the class can't be called; use callgate\.\w+"
    ):
      getattr(cg, kind)(*given)


def test_options_of_checkpoints_are_for_good(tmp_path: Path) -> None:
  made = cg.Checkpoints(tmp_path, every=2, keep=5, resume=True)
  has = (made.folder, made.every, made.keep, made.resume, made.format)
  assert has == (tmp_path, 2, 5, True, "npz")
  for name in ("folder", "every", "keep", "resume", "format"):
    with pytest.raises(AttributeError):
      setattr(made, name, 3)


def test_objects_are_shown_by_their_names(tmp_path: Path) -> None:
  path = str(tmp_path / "calls")
  assert [repr(cg.record(path)), repr(cg.replay(path))] == [
    f"<callgate.record({path!r})>",
    f"<callgate.replay({path!r})>",
  ]
  kernel = cg.elementwise("T x", "T y", "y = x + 1", "test shown")
  assert "jit_test_shown" in jax.jit(kernel).lower(1.0).as_text().splitlines()[0]
