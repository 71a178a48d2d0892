# SPDX-License-Identifier: Apache-2.0
"""Takes seeds for the fuzzers from callgate's own output: tests/fuzz/seeds/TARGET/NAME.

    .venv/bin/python tests/fuzz/make_seeds.py

Run again where a format has changed. Files whose names begin with "found-" are findings: inputs
that once broke a promise. They stay.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg
from callgate import _callgate, sinks
from callgate._core.attributes import listed
from callgate._core.levels import encode_levels
from callgate._kernel import launch as _launch
from callgate._tap import primitive

SEEDS = Path(__file__).resolve().parent / "seeds"


def keep(target: str, name: str, seed: bytes | str) -> None:
  (SEEDS / target).mkdir(parents=True, exist_ok=True)
  (SEEDS / target / name).write_bytes(seed.encode() if isinstance(seed, str) else seed)


def send(x: Any) -> Any:
  """Every kind of tap: a tree, batch levels, a predicate, packed and small elements."""
  tree = {"w": x, "b": (x > 1, x.astype(jnp.int4))}
  cg.tap(tree, "seeds", name="tree")
  batch = jnp.stack([x, x + 1])
  jax.vmap(lambda y: cg.tap(y, "seeds", name="lanes", where=y.sum() > 4))(batch)
  jax.vmap(lambda y: jax.vmap(lambda z: cg.tap((z, y), "seeds", name="levels"))(batch))(batch)
  both = ("primal", "cotangent")
  gradient = jax.grad(lambda y: (cg.tap(y, "seeds", name="both", roles=both) ** 2).sum())(x)
  small = cg.tap(x.astype(jnp.bfloat16), "seeds", name="small", every=2)
  return gradient, small


def run(function: Callable[[Any], Any], x: Any, sink: Any) -> None:
  with cg.channel("seeds", to=sink):
    jax.block_until_ready(jax.jit(function)(x))


def records(folder: Path) -> None:
  path, numbers = folder / "s.cgs", jnp.arange(3, dtype=jnp.float32)
  with cg.channel("seeds", to=sinks.Stream(path)):
    pass
  keep("stream", "empty", path.read_bytes())
  run(lambda x: cg.tap(x.sum(), "seeds", name="loss"), numbers, sinks.Stream(path))
  keep("stream", "two-sessions", path.read_bytes())
  path.unlink()
  run(send, numbers, sinks.Stream(path))
  whole = path.read_bytes()
  keep("stream", "every-kind", whole)
  keep("stream", "torn", whole[: len(whole) * 2 // 3])
  keep("stream", "zeros", whole[: len(whole) // 2] + bytes(1024))


def columns(folder: Path) -> None:
  for name, dtype in (("int16", jnp.int16), ("float32", jnp.float32)):
    path = folder / f"{name}.npy"
    run(lambda x: cg.tap(x, "seeds", name="x"), jnp.arange(3, dtype=dtype), sinks.Npy(path))
    keep("npy", name, path.read_bytes())
  np.save(folder / "numpy.npy", np.zeros((2, 3), np.int16))
  keep("npy", "numpys-own", (folder / "numpy.npy").read_bytes())
  np.save(folder / "numpy.npy", np.asfortranarray(np.zeros((2, 3), np.int16)))
  keep("npy", "fortran", (folder / "numpy.npy").read_bytes())


def outfeeds() -> None:
  arrays = [("float32", (3, 300)), ("bool", ()), ("uint8", (70_000,))]
  header = _callgate.outfeed_2020_header(7, arrays)
  size = struct.unpack_from("<I", header, 12)[0]
  words = header[16:]
  metadata = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))[:size]
  keep("outfeed_2020", "header", header)
  keep("outfeed_2020", "metadata", metadata)
  end = _callgate.outfeed_2020_header(0, [])
  message = _callgate.outfeed_2020_header(1, [("int16", (3,)), ("complex64", (2, 0))]) + bytes(6)
  keep("outfeed_2020", "messages", message * 2 + end)
  many = _callgate.outfeed_2020_header(2**63, [("int8", (1,))] * 40)
  keep("outfeed_2020", "blocks", many + bytes(40) + end)


def taps() -> None:
  """The attributes of taps in programs, as the runtime is given them."""
  given: list[dict[str, Any]] = []
  emit = primitive.emit

  def kept(*args: Any, attributes: dict[str, Any], levels: Any, **rest: Any) -> Any:
    held = {name: value for name, value in attributes.items() if name != "spec"}
    given.append({"batch": encode_levels(levels), **held})
    return emit(*args, attributes=attributes, levels=levels, **rest)

  primitive.emit = kept
  jax.clear_caches()
  try:
    jax.jit(send).lower(jnp.arange(3, dtype=jnp.float32))
  finally:
    primitive.emit = emit
  for number, held in enumerate(given):
    keep("tap", f"program-{number}", b"\0" + encoded(held))
  # For the operands of the target: lanes of two and three, a predicate, results.
  for name, (paths, results, levels, fields) in {
    "where": ("a", 0, [], {"where": np.bool_(True), "every": np.int64(2)}),
    "returned": ("ab", 2, [], {"returned": np.int64(2)}),
    "lanes": ("abc", 0, [(2, (1, 1, 1, 1))], {}),
  }.items():
    tap = {"name": "x", "role": "primal", "paths": listed(paths), **fields}
    held = {"batch": encode_levels(levels), "tap": tap}
    keep("tap", name, bytes([results]) + encoded(held))


def lanes() -> None:
  shapes = bytes([2, 2, 2, 3, 1, 3, 1, 2, 2, 3, 4])
  two = [(2, (True, False)), (3, (True, True))]
  for name, levels in {"none": [], "one": two[:1], "two": two, "zero": [(0, (True,))]}.items():
    keep("lanes", name, encoded(encode_levels(levels)) + shapes)


def plans() -> None:
  pointer, scalar = _launch.LaunchParameter.pointer, _launch.LaunchParameter.scalar
  launch = _launch.Launch
  simple = launch("add", (4, 1, 1), (256, 1, 1), (pointer("operand", 0), pointer("result", 1)))
  struct_parameter = _launch.LaunchParameter(
    bytes(24), (_launch.Address(0, "scratch", 0), _launch.Address(16, "operand", 2))
  )
  rich = launch(
    "_Z3sumPfi", (8, 2, 1), (32, 4, 1), (struct_parameter, scalar(3, "int32")), 1024, (2, 1, 1)
  )
  for name, plan in {
    "one": _launch.LaunchPlan("key", (), (simple,)),
    "two": _launch.LaunchPlan("key", (), (rich, simple), (4096, 0), (0, 3)),
  }.items():
    keep("launch_plan", name, encoded(_launch.encode("seed", plan)))


def encoded(entries: dict[str, Any]) -> bytes:
  """A dictionary in the form of tests/fuzz/built_attributes.h."""
  codes = {"bool": 1, "int32": 4, "int64": 5, "uint8": 6, "float64": 12, "complex64": 15}
  out = b""
  for name, value in entries.items():
    label = bytes([len(name)]) + name.encode()
    if isinstance(value, str):
      out += b"\x04" + label + bytes([len(value)]) + value.encode()
    elif isinstance(value, dict):
      out += b"\x02" + label + encoded(value)
    elif isinstance(value, np.ndarray):
      out += b"\x01" + label + bytes([codes[value.dtype.name], value.size]) + value.tobytes()
    else:
      out += b"\x03" + label + bytes([codes[value.dtype.name]]) + value.tobytes()
  return out + b"\x00"


def attributes() -> None:
  small = {"callgate:dtype": np.int32(16), "callgate:number": np.frombuffer(b"\x80?", np.uint8)}
  flags = {"callgate:dtype": np.int32(1), "callgate:numbers": np.ones(3, np.uint8)}
  values = {"a": np.float64(1), "axes": np.arange(3, dtype=np.int64), "mode": "fast"}
  nested = {"inner": {"n": np.int32(3), "empty": {}}, "small": small, "flags": flags}
  keep("attributes", "values", encoded({"attributes": values}))
  keep("attributes", "nested", encoded({"name": "gate", "attributes": values | nested}))


def addresses() -> None:
  for number, text in enumerate(
    ["run.cgs", "unix:/tmp/socket", "tcp://:7000", "tcp://localhost:0", "tcp://[::1]:65535"]
  ):
    keep("stream_address", f"address-{number}", text)


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    records(Path(folder))
    columns(Path(folder))
  outfeeds()
  taps()
  lanes()
  plans()
  attributes()
  addresses()


if __name__ == "__main__":
  main()
