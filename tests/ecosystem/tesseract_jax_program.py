# SPDX-License-Identifier: Apache-2.0
"""A Tesseract in this process, with its gradient."""

import pathlib
import tempfile
import textwrap

import jax
import jax.numpy as jnp
from tesseract_core import Tesseract
from tesseract_jax import apply_tesseract

CALLBACKS_OF_ITS_OWN = True  # a primitive that lowers to JAX's internal callbacks

API = """
  import numpy as np
  from pydantic import BaseModel
  from tesseract_core.runtime import Array, Differentiable, Float32, ShapeDType

  class InputSchema(BaseModel):
    x: Differentiable[Array[(None,), Float32]]

  class OutputSchema(BaseModel):
    y: Differentiable[Array[(None,), Float32]]

  def apply(inputs: InputSchema) -> OutputSchema:
    return OutputSchema(y=np.sin(inputs.x))

  def abstract_eval(abstract_inputs):
    x = abstract_inputs.model_dump()["x"]
    return {"y": ShapeDType(shape=x["shape"], dtype=x["dtype"])}

  def vector_jacobian_product(inputs, vjp_inputs, vjp_outputs, cotangent_vector):
    return {"x": np.cos(inputs.x) * cotangent_vector["y"]}

  def jacobian_vector_product(inputs, jvp_inputs, jvp_outputs, tangent_vector):
    return {"y": np.cos(inputs.x) * tangent_vector["x"]}
"""


def run():
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "tesseract_api.py")
    path.write_text(textwrap.dedent(API), encoding="utf-8")
    tesseract = Tesseract.from_tesseract_api(path)
    call = lambda x: apply_tesseract(tesseract, {"x": x})["y"]
    x = jnp.arange(4.0)
    return {"y": jax.jit(call)(x), "gradient": jax.jit(jax.grad(lambda x: call(x).sum()))(x)}
