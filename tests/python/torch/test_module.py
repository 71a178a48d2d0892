# SPDX-License-Identifier: Apache-2.0
"""`cg.torch` of modules: parameters as a pytree, trained in JAX, loaded back; against torch."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from switch_interval import switch_interval

import callgate as cg

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 1, 0], np.int32)


def network(*layers: Any) -> Any:
  torch.manual_seed(0)
  return torch.nn.Sequential(torch.nn.Linear(3, 5), *layers, torch.nn.Linear(5, 2))


def loss_in_jax(scores: Any) -> Any:
  return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(4), Y])


def loss_in_torch(scores: Any) -> Any:
  return torch.nn.functional.cross_entropy(scores, torch.from_numpy(Y).long())


def same(params: Any, module: Any, rtol: float = 1e-5) -> None:
  own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
  assert params.keys() == own.keys()
  for name, value in own.items():
    np.testing.assert_allclose(
      params[name], value.detach().numpy(), rtol=rtol, atol=1e-6, err_msg=name
    )


def test_a_module_is_called_with_the_parameters_that_it_is_given() -> None:
  module = network(torch.nn.Tanh())
  model = cg.torch(module)
  assert isinstance(model, cg.TorchModule)
  assert list(model.params) == ["0.weight", "0.bias", "2.weight", "2.bias"]
  same(model.params, module)
  want = module(torch.from_numpy(X)).detach().numpy()
  np.testing.assert_allclose(jax.jit(model)(model.params, X), want, rtol=1e-5)
  doubled = jax.tree.map(lambda p: 2 * p, model.params)
  assert not np.allclose(model(doubled, X), want)
  same(model.params, module)  # the module's own are as they were


class Recurrent(torch.nn.Module):
  def __init__(self) -> None:
    super().__init__()
    self.of_kind = torch.nn.ModuleList([kind(3, 3) for kind in (torch.nn.GRU, torch.nn.LSTM)])

  def forward(self, x: Any) -> Any:
    for part in self.of_kind:
      x = part(x)[0]
    return x


def with_a_shared_layer() -> Any:
  layer = torch.nn.Linear(3, 3)
  return torch.nn.Sequential(layer, torch.nn.Tanh(), layer)


def with_tied_weights() -> Any:
  first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
  last.weight = first.weight
  return torch.nn.Sequential(first, torch.nn.Tanh(), last)


@pytest.mark.parametrize("make", [with_a_shared_layer, with_tied_weights, Recurrent])
def test_parameters_that_a_module_holds_by_several_names(make: Any) -> None:
  torch.manual_seed(0)
  module = make()
  model, x = cg.torch(module), torch.from_numpy(X)
  params = model.params
  other = jax.tree.map(lambda p: 0.5 * p + 0.1, params)
  with torch.no_grad():
    own = module(x).numpy()
  program = jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(model(p, X)))))
  for _ in range(2):
    value, gradient = program(other)
    same(params, module)  # the module's own are as they were, and so are its own calls
    with torch.no_grad():
      np.testing.assert_allclose(module(x).numpy(), own, rtol=1e-6)
  model.load(other)
  want = torch.sin(module(x)).sum()
  want.backward()
  assert float(value) == pytest.approx(float(want.detach()), rel=1e-5)
  for name, parameter in module.named_parameters():
    np.testing.assert_allclose(gradient[name], parameter.grad, rtol=1e-4, atol=1e-5, err_msg=name)


def test_functions_of_one_module_take_turns() -> None:
  module = network(torch.nn.Tanh())
  models = [cg.torch(module), cg.torch(module)]
  params = models[0].params
  programs = [jax.jit(model) for model in models]
  scaled = [jax.tree.map(lambda p, n=n: n * p, params) for n in (1.0, 2.0)]
  want = [np.asarray(program(p, X)) for program, p in zip(programs, scaled, strict=True)]
  wrong: list[int] = []

  def call(n: int) -> None:
    for _ in range(150):
      if not np.allclose(programs[n](scaled[n], X), want[n], rtol=1e-5):
        wrong.append(n)

  threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
  with switch_interval():
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert wrong == []
  same(params, module)


def test_gradients_and_hessians_of_a_module_agree_with_jax() -> None:
  model = cg.torch(network(torch.nn.Tanh()))

  def in_jax(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]

  loss = lambda f: lambda p: loss_in_jax(f(p, X))
  for transform in (jax.grad, jax.jit, jax.hessian):
    got, want = (jax.jit(transform(loss(f)))(model.params) for f in (model, in_jax))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, want)
  rows = lambda f: jax.jit(jax.vmap(jax.grad(lambda p, x: f(p, x).sum()), (None, 0)))
  got, want = rows(model)(model.params, X), rows(in_jax)(model.params, X)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_an_ensemble_is_a_map_over_parameters() -> None:
  module = network(torch.nn.ReLU())
  model = cg.torch(module)
  many = jax.tree.map(lambda p: jnp.stack([p, -p, 2 * p]), model.params)
  got = jax.vmap(model, (0, None))(many, X)
  for i, row in enumerate(got):
    np.testing.assert_allclose(row, model(jax.tree.map(lambda p: p[i], many), X), rtol=1e-4)


def test_training_in_a_scan_gives_torch_s_own_weights_and_load_writes_them_back() -> None:
  module, reference = network(torch.nn.Tanh()), network(torch.nn.Tanh())
  model = cg.torch(module)

  def step(params: Any, _: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: loss_in_jax(model(p, X)))(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

  params, losses = jax.jit(lambda p: jax.lax.scan(step, p, length=20))(model.params)
  optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
  for _ in range(20):
    optimizer.zero_grad()
    loss_in_torch(reference(torch.from_numpy(X))).backward()
    optimizer.step()
  assert losses[-1] < losses[0]
  same(params, reference, rtol=1e-4)
  model.load(params)
  same(params, module)


def test_buffers_and_frozen_parameters_have_a_zero_gradient() -> None:
  module = network(torch.nn.BatchNorm1d(5)).eval()
  module[0].bias.requires_grad_(False)
  model = cg.torch(module)
  assert model.trainable["0.weight"]
  assert not model.trainable["0.bias"]
  assert not model.trainable["1.running_mean"]
  grads = jax.grad(lambda p: model(p, X).sum(), allow_int=True)(model.params)
  for name, grad in grads.items():
    if grad.dtype != jax.dtypes.float0:
      assert bool(jnp.any(grad != 0)) == model.trainable[name], name


def test_a_module_that_writes_its_buffers_needs_mutable() -> None:
  for layer in (torch.nn.BatchNorm1d(5), torch.nn.InstanceNorm1d(5, track_running_stats=True)):
    model = cg.torch(torch.nn.Sequential(layer))
    with pytest.raises(cg.GateDefinitionError, match=r"buffer '0\..*module.eval\(\).*mutable=True"):
      model(model.params, jnp.ones((4, 5, 6)))


def test_mutable_gives_the_new_buffers_and_leaves_the_module_alone(engine: str) -> None:
  module, reference = network(torch.nn.BatchNorm1d(5)), network(torch.nn.BatchNorm1d(5))
  model = cg.torch(module, mutable=True)

  @jax.jit
  def step(params: Any) -> Any:
    loss = lambda p: (lambda out, new: (loss_in_jax(out), new))(*model(p, X))
    grads, buffers = jax.grad(loss, has_aux=True, allow_int=True)(params)
    moved = {k: params[k] - 0.1 * grads[k] for k in params if model.trainable[k]}
    return {**params, **moved, **buffers}

  params = start = model.params
  optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
  for _ in range(3):
    params = step(params)
    optimizer.zero_grad()
    loss_in_torch(reference(torch.from_numpy(X))).backward()
    optimizer.step()
  same(params, reference, rtol=1e-3)
  same(start, module)


def test_dropout_in_training_takes_a_key() -> None:
  model = cg.torch(network(torch.nn.Dropout(0.5)), random=True)
  call = jax.jit(lambda key: model(model.params, X, rng=key))
  assert jnp.array_equal(call(jax.random.key(0)), call(jax.random.key(0)))
  assert not jnp.array_equal(call(jax.random.key(0)), call(jax.random.key(1)))


def test_parameters_of_another_module_are_errors_that_name_them() -> None:
  model = cg.torch(network(), name="torch.model")
  params = model.params
  with pytest.raises(cg.GateDefinitionError, match=r"'torch.model': .*got no '0.bias'"):
    model({k: v for k, v in params.items() if k != "0.bias"}, X)
  with pytest.raises(cg.GateDefinitionError, match=r"got a 'extra'; expected the names"):
    model.load({**params, "extra": X})
  with pytest.raises(cg.GateDefinitionError, match=r"'0.bias': expected shape \[5\], got \[4\]"):
    model({**params, "0.bias": jnp.ones(4)}, X)
  with pytest.raises(cg.GateDefinitionError, match=r"'params': expected a dict .* got ndarray"):
    model(X)  # pyright: ignore[reportArgumentType]
  with pytest.raises(cg.GateDefinitionError, match=r"'weight' is float64.*module.float"):
    _ = cg.torch(torch.nn.Linear(2, 2).double()).params
  with pytest.raises(cg.GateDefinitionError, match="a module returns its results"):
    cg.torch(network(), style="inplace", out=X)


def test_shared_parameters_come_once() -> None:
  module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
  module[2].weight = module[0].weight
  model = cg.torch(module)
  assert "2.weight" not in model.params
  want = module(torch.from_numpy(X))
  want.sum().backward()
  np.testing.assert_allclose(model(model.params, X), want.detach().numpy(), rtol=1e-5)
  grads = jax.grad(lambda p: model(p, X).sum())(model.params)
  np.testing.assert_allclose(grads["0.weight"], module[0].weight.grad.numpy(), rtol=1e-4)


def test_half_precision_parameters_make_a_half_precision_model() -> None:
  model = cg.torch(network(torch.nn.ReLU()))
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model.params)
  got = model(half, X.astype(jnp.bfloat16))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(got.astype("float32"), model(model.params, X), atol=0.05)
  model.load(half)
  same(jax.tree.map(lambda p: p.astype("float32"), half), network(torch.nn.ReLU()), rtol=1e-2)


def test_calls_of_one_module_from_many_threads_keep_their_own_parameters() -> None:
  model = cg.torch(network(torch.nn.Tanh()))
  call = jax.jit(model)
  sets = [jax.tree.map(lambda p, k=k: p * k, model.params) for k in range(4)]
  want = [np.asarray(call(p, X)) for p in sets]
  wrong: list[int] = []

  def repeat(k: int) -> None:
    for _ in range(20):
      if not np.array_equal(call(sets[k], X), want[k]):
        wrong.append(k)

  threads = [threading.Thread(target=repeat, args=(k,)) for k in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert wrong == []


def test_modules_of_one_class_have_names_of_their_own() -> None:
  names = {cg.torch(torch.nn.Tanh()).name for _ in range(2)}
  assert all(name.startswith("torch.nn.modules.activation.Tanh") for name in names)
