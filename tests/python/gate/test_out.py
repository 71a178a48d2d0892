# SPDX-License-Identifier: Apache-2.0
"""A wrong `out=` is refused with its reason, when the gate is made where that is possible."""

from __future__ import annotations

import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

X = jnp.arange(3.0)


def test_a_function_that_does_not_take_the_arguments_is_named() -> None:
  @cg.gate(out=lambda x: x, name="interp")
  def interp(x: Any, xp: Any) -> Any:
    return x

  with pytest.raises(cg.GateDefinitionError) as caught:
    jax.jit(interp)(X, X[:2])
  said = "takes 1 positional argument but 2 were given"
  assert str(caught.value) == (
    "gate 'interp': out: expected a function of the arguments' types that returns the results' "
    f"types, got a function that, called with (float32[3], float32[2]), raised TypeError: "
    f"{caught.value.__cause__}"
  )
  assert said in str(caught.value.__cause__)
  assert isinstance(caught.value.__cause__, TypeError)


def test_any_other_exception_of_it_names_the_gate_in_a_note() -> None:
  gate = cg.gate(lambda x: x, out=lambda x: x.no_such, name="noted")
  with pytest.raises(AttributeError, match="no_such") as caught:
    gate(X)
  assert "callgate: raised in out= of gate 'noted'" in "".join(
    traceback.format_exception_only(caught.value)
  )


@pytest.mark.parametrize(
  "out", [float, int, bool, np.float32, np.ndarray, jax.Array, jax.ShapeDtypeStruct]
)
def test_a_class_of_values_is_refused_when_the_gate_is_made(out: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match=f"out: expected .* class {out.__name__}"):
    cg.gate(lambda x: x, out=out)


def test_an_annotation_is_refused_when_the_gate_is_made() -> None:
  jaxtyping = pytest.importorskip("jaxtyping")
  with pytest.raises(cg.GateDefinitionError, match=r"out: expected .* class Float32"):
    cg.gate(lambda x: x, out=jaxtyping.Float32[jaxtyping.Array, "3"])


def test_a_class_in_a_pytree_is_no_type_of_a_result() -> None:
  with pytest.raises(
    cg.GateDefinitionError, match=r"out: result 0: expected .* got <class 'numpy.float32'>"
  ):
    cg.gate(lambda x: x, out={"y": np.float32})(X)


def test_a_class_may_be_the_function() -> None:
  assert cg.gate(lambda pair: list(pair), out=list)((X, X))[1].tolist() == X.tolist()


@pytest.mark.parametrize("array", [np.array([None, 1], object), np.array([1, 2], object)])
def test_an_argument_of_objects_is_said_to_be_one(array: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match="got an array of dtype object"):
    cg.gate(lambda x: x, out=lambda x: x)(array)


@pytest.mark.parametrize(
  ("shape", "dtype", "said"),
  [
    ((-2,), jnp.float32, r"extents of at least 0, got \(-2,\)"),
    ((2, -1), jnp.float32, r"extents of at least 0, got \(2, -1\)"),
    ((2**70,), jnp.float32, r"at most 9223372036854775807 bytes, got float32\[118059"),
    ((2**61,), jnp.float32, "at most .* bytes"),
    ((2**62, 2, 0), jnp.int8, "at most .* bytes"),
  ],
)
def test_extents_that_no_array_has_name_the_result(shape: Any, dtype: Any, said: str) -> None:
  out = (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct(shape, dtype))
  gate = cg.gate(lambda x: (x, x), out=out, name="crop")
  with pytest.raises(cg.GateDefinitionError, match=f"^gate 'crop': out: result 1: expected {said}"):
    jax.jit(gate)(X)


def test_symbolic_extents_beside_known_ones_are_no_error() -> None:
  gate = cg.gate(lambda x: x.T, out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype))
  (rows,) = jax.export.symbolic_shape("n")
  export = jax.export.export(jax.jit(gate), disabled_checks=cg.export_checks())
  exported = export(jax.ShapeDtypeStruct((rows, 0), jnp.float32))
  assert [str(n) for n in exported.out_avals[0].shape] == ["0", "n"]


@pytest.mark.parametrize("out", [1.0, {"y": True}, (X, 3)])
def test_a_number_in_the_place_of_a_type_says_what_to_pass(out: Any) -> None:
  said = r"out: result \d: expected a value with .shape and .dtype, got (1.0|True|3); .*jnp.asarray"
  for call in (cg.gate(np.sin, out=out, name="number"), lambda x: cg.call(np.sin, out, x)):
    with pytest.raises(cg.GateDefinitionError, match=said):
      call(1.0)
  with pytest.raises(cg.GateDefinitionError, match=said):
    cg.use(lambda held: held, cg.hold(lambda: 1.0)(), out=out)
