# SPDX-License-Identifier: Apache-2.0
"""Sharding rules as users write them, and the tilings that follow from them."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from property_checks import examples

from callgate._core.errors import GateDefinitionError
from callgate._sharding import rules, tiles
from callgate._sharding.rules import Rule
from callgate._sharding.tiles import Tiling


def parse(text: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Rule:
  return rules.parse("gate 'g'", text, tuple(operands), tuple(results))


def test_a_contracted_dimension_is_whole() -> None:
  rule = parse("i k, k j -> i j", [(4, 3), (3, 5)], [(4, 5)])
  i, k = rule.operands[0]
  j = rule.operands[1][1]
  assert rule.operands[1][0] == k
  assert rule.results == ((i, j),)
  # j is not among the first operand's, and needs not be: that operand is everybody's.
  assert rule.whole == {k}


def test_a_dimension_that_one_result_lacks_is_whole() -> None:
  rule = parse("i j -> i j, i", [(4, 3)], [(4, 3), (4,)])
  assert rule.whole == {rule.operands[0][1]}


def test_a_dimension_of_results_alone_is_whole() -> None:
  assert parse("i -> i n", [(4,)], [(4, 2)]).whole == {1}
  assert parse(" -> n", [], [(2,)]).whole == {0}


def test_brackets_and_underscores_mark_whole_dimensions() -> None:
  rule = parse("i [j] _ -> i j _", [(4, 3, 2)], [(4, 3, 2)])
  i, j, k = rule.operands[0]
  assert rule.results[0][:2] == (i, j)
  assert rule.whole == {j, k, rule.results[0][2]}


def test_an_ellipsis_is_aligned_from_the_right_as_numpy_broadcasts() -> None:
  rule = parse("... [k], ... k -> ...", [(2, 4, 3), (4, 3)], [(2, 4)])
  assert rule.operands[1][0] == rule.operands[0][1]
  assert rule.results[0] == rule.operands[0][:2]
  # The first operand's leading dimension is nobody else's, and the result has it.
  assert rule.whole == {rule.operands[0][2]}


def test_an_extent_of_one_under_an_ellipsis_is_broadcast() -> None:
  rule = parse("..., ... -> ...", [(4, 3), (1, 3)], [(4, 3)])
  assert rule.operands[1][1] == rule.operands[0][1]
  assert rule.operands[1][0] in rule.whole


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("i j", "expected '->' between the operands' terms and the results', got none"),
    ("i -> i j", "expected 2 name(s) for operand 0 of shape [4, 3], got 'i'"),
    ("i j, i -> i j", "expected 1 term(s) for 1 operand(s), got 2"),
    ("i j -> i j, i", "expected 1 term(s) for 1 result(s), got 2"),
    ("i i -> i i", "operand 0 of shape [4, 3]"),
    ("i j -> j i", "expected one extent for 'j', got 3 at operand 0, dimension 1 and 4"),
    (
      "i 1 -> i j",
      "expected names such as 'i', '[i]' for a dimension that stays whole, '_' or '...', got '1'",
    ),
    ("i ... -> i ...", "expected '...' once, at the beginning of the term of operand 0"),
  ],
)
def test_a_malformed_rule_is_refused_by_name(text: str, said: str) -> None:
  with pytest.raises(GateDefinitionError) as caught:
    parse(text, [(4, 3)], [(4, 3)])
  message = str(caught.value)
  assert message.startswith("gate 'g': sharding: ")
  if text != "i i -> i i":
    assert said in message
  else:
    assert "extent" in message or "twice" in message


def test_a_name_twice_in_one_term_is_refused() -> None:
  with pytest.raises(GateDefinitionError, match="different names in the term of operand 0"):
    parse("i i -> i", [(4, 4)], [(4,)])


def test_shard_splits_the_leading_dimensions_that_all_arrays_share() -> None:
  rule = rules.leading([(4, 3), (4, 5), ()], [(4, 3)])
  assert rule.operands[0][0] == rule.operands[1][0] == rule.results[0][0]
  assert rule.operands[2] == ()
  assert rule.whole == {rule.operands[0][1], rule.operands[1][1], rule.results[0][1]}


def test_shard_of_a_scalar_result_is_gathered() -> None:
  rule = rules.leading([(4, 3)], [()])
  assert rule.whole == {0, 1}


def test_lanes_are_factors_before_the_others() -> None:
  rule = parse("i j -> j", [(4, 3)], [(3,)]).under([(5, (True,))])
  lane = rule.operands[0][0]
  assert rule.results[0][0] == lane
  assert lane not in rule.whole


def test_rules_survive_being_text() -> None:
  rule = parse("i [k], k j, -> i j", [(4, 3), (3, 5), ()], [(4, 5)])
  assert Rule.read(rule.text, 3, 1) == rule
  empty = parse(" -> ", [], [])
  assert Rule.read(empty.text, 0, 0) == empty


def tilings(draw: st.DrawFn, rank: int) -> Tiling:
  """How an array of `rank` dimensions lies on a mesh of 2 x 2 x 2 devices."""
  where = [draw(st.sampled_from([None, *range(rank)])) for _ in range(3)]
  position = np.stack(np.unravel_index(np.arange(8), (2, 2, 2)), 1)
  index = np.zeros((8, rank), int)
  counts = [1] * rank
  for axis, dim in enumerate(where):
    if dim is not None:
      index[:, dim] = index[:, dim] * 2 + position[:, axis]
      counts[dim] *= 2
  return Tiling(tuple(counts), index, np.zeros(8, int))


@hypothesis.given(st.data())
@examples(67)
def test_a_plan_keeps_factors_together_and_whole_ones_whole(data: st.DataObject) -> None:
  names = st.lists(st.sampled_from("ijkl"), max_size=3, unique=True)
  ins = data.draw(st.lists(names, min_size=1, max_size=3), "operands")
  outs = data.draw(st.lists(names, max_size=2), "results")
  extents = {name: data.draw(st.sampled_from([4, 8, 12]), name) for name in "ijkl"}
  shapes = [[tuple(extents[n] for n in term) for term in side] for side in (ins, outs)]
  text = f"{', '.join(map(' '.join, ins))} -> {', '.join(map(' '.join, outs))}"
  rule = parse(text, shapes[0], shapes[1])
  given = [[tilings(data.draw, len(shape)) for shape in side] for side in shapes]
  plan = tiles.plan(rule, (shapes[0], shapes[1]), (given[0], given[1]), 8)
  split: dict[int, tuple[int, tuple[int, ...]]] = {}
  for terms, sides, side_shapes in (
    (rule.operands, plan.operands, shapes[0]),
    (rule.results, plan.results, shapes[1]),
  ):
    for term, tiling, shape in zip(terms, sides, side_shapes, strict=True):
      assert tiling.expressible
      back = Tiling.of_grid(tiling.grid(), len(shape))
      assert back.counts == tiling.counts
      np.testing.assert_array_equal(back.index, tiling.index)
      for axis, factor in enumerate(term):
        assert factor not in rule.whole or tiling.counts[axis] == 1
        assert shape[axis] % tiling.counts[axis] == 0
        this = tiling.counts[axis], tuple(tiling.index[:, axis])
        assert split.setdefault(factor, this) == this
  assert sorted(device for group in plan.groups for device in group) == list(range(8))


def test_arrays_that_lie_right_stay_as_they_lie() -> None:
  rule = parse("i j -> i j", [(8, 8)], [(8, 8)])
  position = np.stack(np.unravel_index(np.arange(8), (4, 2)), 1)
  there = Tiling((4, 2), position, np.zeros(8, int))
  plan = tiles.plan(rule, ([(8, 8)], [(8, 8)]), ([there], [Tiling.replicated(2, 8)]), 8)
  np.testing.assert_array_equal(plan.operands[0].index, position)
  np.testing.assert_array_equal(plan.results[0].index, position)


def test_tiles_that_would_be_uneven_are_whole() -> None:
  rule = parse("i -> i", [(6,)], [(6,)])
  four = Tiling((4,), np.arange(8)[:, None] // 2, np.zeros(8, int))
  plan = tiles.plan(rule, ([(6,)], [(6,)]), ([four], [four]), 8)
  assert plan.operands[0].counts == (1,)


def test_devices_of_one_manual_part_are_kept_apart() -> None:
  grid = np.arange(8).reshape(2, 2, 2)  # tile, copy, manual
  tiling = Tiling.of_grid(grid, 1)
  assert tiling.expressible
  np.testing.assert_array_equal(np.sort(tiling.grid().ravel()), np.arange(8))
  np.testing.assert_array_equal(Tiling.of_grid(tiling.grid(), 1).manual, tiling.manual)
