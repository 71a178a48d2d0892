# SPDX-License-Identifier: Apache-2.0
"""Gates in classes: methods of objects that are no pytrees, and of modules."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import time
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

X = jnp.arange(3.0)


class Scale:
  """Not hashable, and no pytree."""

  __hash__ = None  # type: ignore[assignment]

  def __init__(self, by: float) -> None:
    self.by = by

  @cg.gate(out=lambda x, times=1: x)
  def scaled(self, x: Any, times: int = 1) -> Any:
    """Scales."""
    return x * np.float32(self.by * times)

  @cg.gate(out=lambda x: x, effect="io")
  def derived(self, x: Any) -> Any:
    return x * np.float32(self.by)

  @derived.defjvp
  def derived_jvp(primals: Any, tangents: Any) -> Any:
    self, x = primals
    assert isinstance(self, Scale)
    return self.derived(x), 10 * tangents[1]

  @staticmethod
  @cg.gate(out=lambda x: x)
  def negated(x: Any) -> Any:
    return -x


class Decorated:
  """Has gates below other decorators, which hide them from Python's `__set_name__`."""

  times = 2

  def __init__(self, by: float) -> None:
    self.by = by

  @classmethod
  @cg.gate(out=lambda x: x, name="test decorated class", effect="io")
  def of_class(cls, x: Any) -> Any:
    return x * np.float32(cls.times)

  @property
  @cg.gate(out=np.float32(0), name="test decorated property")
  def as_property(self) -> Any:
    return np.float32(self.by)

  @functools.cached_property
  @cg.gate(out=np.float32(0), name="test decorated cached property")
  def as_cached_property(self) -> Any:
    return np.float32(self.by)

  @functools.partial(jax.jit, static_argnums=0)
  @cg.gate(out=lambda x: x, name="test decorated jit")
  def jitted(self, x: Any) -> Any:
    return x * np.float32(self.by)

  @cg.gate(out=lambda x, times: x, name="test decorated partial")
  def scaled(self, x: Any, times: int) -> Any:
    return x * np.float32(self.by * times)

  doubled = functools.partialmethod(scaled, times=2)


class Bound:
  """A descriptor of the user's, which does not show what it holds."""

  def __init__(self, function: Any) -> None:
    self._held = [function]

  def __get__(self, instance: Any, owner: Any = None) -> Any:
    return functools.partial(self._held[0], instance)


def hiding(function: Any) -> Any:
  return lambda *args: function(*args)


class Hidden(Decorated):
  """Has gates that their decorators hide from callgate."""

  @Bound
  @cg.gate(out=lambda x: x, name="test hidden descriptor")
  def described(self, x: Any) -> Any:
    return x * np.float32(self.by)

  @hiding
  @cg.gate(out=lambda x: x, name="test hidden decorator")
  def decorated(self, x: Any) -> Any:
    return x * np.float32(self.by)

  @staticmethod
  @hiding
  @cg.gate(out=lambda x: x, name="test hidden static")
  def static(x: Any) -> Any:
    return x

  scaled = Decorated.scaled
  tripled = functools.partialmethod(Scale.derived)


class Tenfold(Decorated):
  times = 10


def gone(watched: Any) -> bool:
  """True when it is, in a while: JAX frees programs when it gets round to it."""
  for _ in range(100):
    jax.jit(lambda x: x + 1)(X)
    gc.collect()
    if watched() is None:
      return True
    time.sleep(0.05)
  return False


def test_a_method_gets_its_object_and_out_does_not(engine: Any) -> None:
  two, three = Scale(2), Scale(3)
  assert two.scaled(X).tolist() == [0.0, 2.0, 4.0]
  assert three.scaled(X, times=2).tolist() == [0.0, 6.0, 12.0]
  assert jax.jit(lambda x: two.scaled(x) + three.scaled(x))(X).tolist() == [0.0, 5.0, 10.0]
  assert Scale.scaled(three, X).tolist() == [0.0, 3.0, 6.0]
  assert jax.vmap(three.scaled)(jnp.stack([X, X])).tolist() == [[0.0, 3.0, 6.0]] * 2
  assert two.negated(X).tolist() == Scale.negated(X).tolist() == [0.0, -1.0, -2.0]


def test_a_gate_below_another_decorator_is_a_method(engine: Any) -> None:
  one = Decorated(3)
  for _ in range(2):
    assert Decorated.of_class(X).tolist() == one.of_class(X).tolist() == [0.0, 2.0, 4.0]
    assert jax.jit(lambda x: Tenfold.of_class(x) + one.of_class(x))(X).tolist() == [0, 12, 24]
    assert jax.vmap(Tenfold(1).of_class)(X).tolist() == [0.0, 10.0, 20.0]
    assert one.as_property == jax.jit(lambda: Decorated(3).as_property)() == 3
    assert one.as_cached_property == 3
    assert one.jitted(X).tolist() == one.scaled(X, times=1).tolist() == [0.0, 3.0, 6.0]
    assert jax.jit(one.doubled)(X).tolist() == [0.0, 6.0, 12.0]


def test_a_gate_that_its_decorator_hides_is_a_method(engine: Any) -> None:
  for one in (Hidden(3), type("Sub", (Hidden,), {})(3)):
    for method in (one.described, one.decorated, one.tripled):
      assert method(X).tolist() == jax.jit(method)(X).tolist() == [0.0, 3.0, 6.0]
    with pytest.raises(cg.GateDefinitionError, match="argument 'x': expected an array"):
      one.static(one)


def test_a_gate_in_two_classes_is_a_method_of_both(engine: Any) -> None:
  for one in (Hidden(3), Decorated(3)):
    assert one.scaled(X, times=1).tolist() == [0.0, 3.0, 6.0]


def test_an_object_of_another_class_is_refused_with_what_to_do() -> None:
  words = r"It is a method of Scale: .*of a class with the gate .*: name = Scale\.name"
  with pytest.raises(cg.GateDefinitionError, match=words):
    Scale.scaled(Hidden(3), X)


def test_a_gate_of_a_metaclass_gets_the_class() -> None:
  class Meta(type):
    @cg.gate(out=lambda x: x, name="test of metaclass")
    def scaled(cls, x: Any) -> Any:
      return x * np.float32(cls.times)

    @property
    @cg.gate(out=np.float32(0), name="test property of metaclass")
    def by(cls) -> Any:
      return np.float32(cls.times)

  class Scaled(metaclass=Meta):
    times = 4

  assert Scaled.scaled(X).tolist() == jax.jit(Scaled.scaled)(X).tolist() == [0.0, 4.0, 8.0]
  assert Scaled.by == 4


def test_a_class_goes_with_an_exported_program() -> None:
  exported = jax.export.export(jax.jit(Tenfold.of_class), disabled_checks=cg.export_checks())(X)
  text = exported.serialize()
  assert b"Tenfold" in text
  assert b"#" not in text[text.index(b"Tenfold") - 60 : text.index(b"Tenfold") + 60]
  assert jax.jit(jax.export.deserialize(text).call)(X).tolist() == [0.0, 10.0, 20.0]


def test_an_object_is_known_by_identity_and_seen_as_it_is_when_the_program_runs() -> None:
  scale, other, traced = Scale(2), Scale(2), []

  def f(x: Any) -> Any:
    traced.append(1)
    return scale.scaled(x) + other.scaled(x)

  program = jax.jit(f)
  assert program(X).tolist() == [0.0, 4.0, 8.0]
  other.by = 5
  assert program(X).tolist() == [0.0, 7.0, 14.0]
  assert len(traced) == 1


def test_a_bound_method_is_what_python_makes_of_functions() -> None:
  scale = Scale(2)
  assert scale.scaled == scale.scaled
  assert scale.scaled.__self__ is scale
  assert scale.scaled.__doc__ == "Scales."
  assert scale.scaled.stats()["calls"] >= 0  # attributes are the gate's
  assert isinstance(Scale.scaled, cg.Gate)


def test_rules_get_the_object_as_the_first_argument() -> None:
  scale = Scale(2)
  _, tangent = jax.jvp(scale.derived, (X,), (jnp.ones(3),))
  assert tangent.tolist() == [10.0] * 3
  assert jax.jit(jax.grad(lambda x: scale.derived(x).sum()))(X).tolist() == [10.0] * 3
  nested = jax.vmap(jax.grad(lambda x: scale.derived(x).sum()))(jnp.stack([X, X]))
  assert nested.tolist() == [[10.0] * 3] * 2


def test_a_method_is_inherited_copied_and_pickled_with_its_object() -> None:
  class Sub(Scale):
    pass

  assert Sub(4).scaled(X).tolist() == [0.0, 4.0, 8.0]
  for again in (copy.deepcopy(Scale(2)), pickle.loads(pickle.dumps(Scale(2)))):
    assert again.scaled(X).tolist() == [0.0, 2.0, 4.0]


def test_a_program_keeps_the_object_and_lets_it_go() -> None:
  scale = Scale(2)
  watched, program = weakref.ref(scale), jax.jit(scale.scaled)
  del scale
  gc.collect()
  assert program(X).tolist() == [0.0, 2.0, 4.0]
  del program
  assert gone(watched)


def test_objects_that_programs_have_called_do_not_pile_up() -> None:
  watched = []
  for by in range(5):
    scale = Scale(by)
    watched.append(weakref.ref(scale))
    assert jax.jit(lambda x, scale=scale: 2 * scale.scaled(x))(X)[1] == 2 * by
    del scale
    gc.collect()
  jax.clear_caches()
  assert all(map(gone, watched))


def test_an_object_without_weak_references_is_kept() -> None:
  class Slotted:
    __slots__ = ("by",)

    @cg.gate(out=lambda x: x)
    def scaled(self, x: Any) -> Any:
      return x * np.float32(self.by)

  one = Slotted()
  one.by = 3
  assert jax.jit(one.scaled)(X).tolist() == [0.0, 3.0, 6.0]


def test_an_exported_program_says_that_its_object_is_elsewhere() -> None:
  scale = Scale(2)
  exported = jax.export.export(jax.jit(scale.scaled), disabled_checks=cg.export_checks())(X)
  assert exported.call(X).tolist() == [0.0, 2.0, 4.0]
  text = exported.serialize().replace(b"Scale#", b"Scale!")
  with pytest.raises(Exception, match=r"method of an object \(.*Scale!\d+\) that is not in this"):
    jax.jit(jax.export.deserialize(text).call)(X)


def test_messages_name_arguments_as_the_method_does() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"Scale\.scaled': argument 'x': .*got str"):
    Scale(2).scaled("no")


def test_an_object_in_the_place_of_an_array_is_still_refused_elsewhere() -> None:
  with pytest.raises(cg.GateDefinitionError, match="argument 'x': expected an array"):
    Scale.negated(Scale(2))


def test_methods_of_modules_have_their_arrays_as_arguments() -> None:
  eqx = pytest.importorskip("equinox", reason="equinox is not installed")

  class Model(eqx.Module):
    weight: jax.Array
    kind: str

    @cg.gate(out=lambda x: x, like=lambda self, x: self.weight * x)
    def applied(self, x: Any) -> Any:
      assert self.kind == "linear"
      assert isinstance(self.weight, np.ndarray)
      return self.weight * x

  model = Model(jnp.float32(3), "linear")
  assert eqx.filter_jit(lambda model, x: model.applied(x))(model, X).tolist() == [0.0, 3.0, 6.0]
  gradient = eqx.filter_grad(lambda model: model.applied(X).sum())(model)
  assert gradient.weight == 3.0


def test_calls_outside_of_programs_keep_few_objects() -> None:
  kept: weakref.WeakSet[Scale] = weakref.WeakSet()

  class Hashable(Scale):
    __hash__ = object.__hash__

  for by in range(100):
    one = Hashable(by)
    kept.add(one)
    assert one.scaled(X)[1] == by
  del one
  gc.collect()
  assert len(kept) <= 64
  jax.clear_caches()
  gc.collect()
  assert len(kept) == 0


def test_arrays_and_static_values_do_not_share_the_bound_of_objects() -> None:
  calls = []
  gate = cg.gate(lambda x, *, by: calls.append(by) or x, out=lambda x: x)
  for by in range(80):
    gate(X, by=by)
  assert gate._programs._kept[0].cache_info().currsize == 80
  assert calls == list(range(80))


class Point(NamedTuple):
  by: Any

  @cg.gate(out=lambda x: x)
  def scaled(self, x: Any) -> Any:
    return self.by * x


def test_methods_of_named_tuples_are_methods_too() -> None:
  """Python calls no __set_name__ for them before 3.13."""
  assert jax.jit(Point(jnp.float32(2)).scaled)(X).tolist() == [0.0, 2.0, 4.0]
  assert jax.jit(lambda p, x: p.scaled(x))(Point(jnp.float32(3)), X).tolist() == [0.0, 3.0, 6.0]


class Checked:
  @cg.gate(like=lambda self, x: x)
  def same(self, x: Any) -> Any:
    return x


def test_check_of_a_method_takes_the_object_first() -> None:
  Checked.same.check(Checked(), X)
  with pytest.raises(TypeError) as caught:
    Checked().same.check(X)
  said = "object as the first argument: Checked.same.check(object, ...)"
  assert said in "\n".join(caught.value.__notes__)


def test_a_gate_without_results_returns_an_empty_tuple() -> None:
  gate = cg.gate(lambda x: None, effect="io")
  assert gate(X) == ()
  assert jax.jit(gate)(X) == ()
