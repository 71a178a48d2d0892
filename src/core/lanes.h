// SPDX-License-Identifier: Apache-2.0
// Lanes: the batch levels that vmap put around a call, outermost first.
//
// Every result carries all levels as leading axes; an operand carries those levels in which it is
// batched, in the same order, and is shared by the lanes of the others. A call with lanes runs once
// per lane, in row-major order, on views without the leading axes.
//
// Some levels may be numbered: the program runs their lanes one after the other, in calls of their
// own, and gives each call the number of its lane among them, in row-major order. No array has an
// axis of a numbered level. The position of a lane counts all levels, numbered ones included.
//
// A program that was exported with symbolic shapes leaves extents open: the arrays of a call tell
// them (`LanesOfCall`).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/array_view.h"
#include "core/attributes.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

class Lanes {
 public:
  static constexpr std::int64_t kOpen = -1;

  Lanes() = default;

  // `sizes`: the extent of each level, or kOpen. `masks`: for each level, one 0 or 1 per operand,
  // level after level; its length is sizes.size() times the number of operands. `flags`: for each
  // level a 1 where it is numbered; empty for none. Throws Error otherwise.
  Lanes(std::vector<std::int64_t> sizes, std::span<const std::int64_t> masks,
        std::span<const std::int64_t> flags = {});

  // As programs hold them: arrays `sizes` and `masks`. Throws Error as above.
  static Lanes of(const Attributes& held);

  // "3:10;4:11": for each level its extent and its mask, a digit per operand, which are all 0 for a
  // numbered one. Streams hold this.
  std::string text() const;

  // Calls visit(index) for each level with the index of the lane at a position.
  template <typename Visit>
  void each_index(std::int64_t lane, Visit&& visit) const {
    std::int64_t inside = total_;  // lanes in one index of the level
    for (std::int64_t size : sizes_) {
      inside /= size;
      visit(lane / inside % size);
    }
  }

  // These indices for messages: "lane 3", "lane (1, 2)"; "" without levels.
  std::string name(std::int64_t lane) const;

  // The position of the lane `index` of a call whose own number is `number`.
  std::int64_t position(std::int64_t index, std::int64_t number) const noexcept {
    if (numbered_.empty()) return index;
    std::int64_t position = 0, stride = 1;
    for (std::size_t level = sizes_.size(); level-- > 0; stride *= sizes_[level]) {
      std::int64_t& rest = numbered(level) ? number : index;
      position += rest % sizes_[level] * stride;
      rest /= sizes_[level];
    }
    return position;
  }

  bool empty() const noexcept { return sizes_.empty(); }
  bool open() const noexcept { return open_; }  // some extent is kOpen: count() is none
  bool has_numbered() const noexcept { return !numbered_.empty(); }
  // The extent of each level, outermost first.
  std::span<const std::int64_t> sizes() const noexcept { return sizes_; }
  // The leading axes of a result.
  std::int32_t axes() const noexcept {
    return static_cast<std::int32_t>(sizes_.size() - std::ranges::count(numbered_, 1));
  }
  // The lanes of one call; 1 without levels.
  std::int64_t count() const noexcept { return count_; }
  // The lanes of all calls that the program makes for one call of the user's.
  std::int64_t total() const noexcept { return total_; }

  // The same with the extents that a call's operands have. Throws Error as above.
  Lanes of_call(std::span<const ArrayView> operands) const;

  // The views of one lane, of the same number; their extents are those of `whole`.
  void select_operands(std::int64_t lane_index, std::span<const ArrayView> whole,
                       std::span<ArrayView> lane) const noexcept {
    for (std::size_t i = 0; i < whole.size(); ++i) {
      // From the innermost level: `rest` is the outer levels' index, `position` this operand's.
      std::int64_t rest = lane_index, position = 0, stride = 1;
      std::int32_t levels = 0;
      for (std::size_t level = sizes_.size(); level-- > 0;) {
        if (numbered(level)) continue;
        std::int64_t index = rest % sizes_[level];
        rest /= sizes_[level];
        if (!batched(level, i)) continue;
        position += index * stride;
        stride *= sizes_[level];
        ++levels;
      }
      lane[i] = slab(whole[i], levels, position);
    }
  }
  void select_results(std::int64_t lane_index, std::span<const ArrayView> whole,
                      std::span<ArrayView> lane) const noexcept {
    for (std::size_t i = 0; i < whole.size(); ++i) lane[i] = slab(whole[i], axes(), lane_index);
  }

  // Throws Error without the leading axes that the levels imply, or lanes that start at a byte.
  void check(std::span<const ArrayView> operands, std::span<const ArrayView> results) const;

 private:
  // `whole` without its first `levels` axes, at the `position`-th of the slabs these axes make.
  static ArrayView slab(const ArrayView& whole, std::int32_t levels,
                        std::int64_t position) noexcept {
    ArrayView view{whole.data, whole.dims + levels, whole.rank - levels, whole.dtype};
    view.data = static_cast<char*>(whole.data) + static_cast<std::size_t>(position) * view.nbytes();
    return view;
  }

  template <typename Has>
  void check_axes(const char* what, std::size_t index, const ArrayView& view, Has&& has) const {
    auto fail = [&](const char* expected) {
      throw Error(std::string(what) + " " + std::to_string(index), expected, to_string(view));
    };
    std::int32_t axis = 0;
    for (std::size_t level = 0; level < sizes_.size(); ++level) {
      if (!has(level)) continue;
      if (axis >= view.rank || view.dims[axis] != sizes_[level])
        fail("leading axes for the batch levels");
      ++axis;
    }
    // A lane of a packed type must not start within a byte.
    ArrayView lane{view.data, view.dims + axis, view.rank - axis, view.dtype};
    if (axis > 0 && lane.size() * static_cast<std::size_t>(bits(lane.dtype)) % 8 != 0)
      fail("lanes of whole bytes");
  }

  std::size_t operand_count() const noexcept {
    return sizes_.empty() ? 0 : masks_.size() / sizes_.size();
  }
  bool batched(std::size_t level, std::size_t operand) const noexcept {
    return masks_[level * operand_count() + operand] != 0;
  }
  bool numbered(std::size_t level) const noexcept {
    return !numbered_.empty() && numbered_[level] != 0;
  }

  std::vector<std::int64_t> sizes_;
  std::vector<std::uint8_t> masks_, numbered_;
  std::int64_t count_ = 1, total_ = 1;
  bool open_ = false;
};

// The lanes of one call, whose own number is `number`, without a copy where the program tells them.
// Borrows `held`. Throws Error where the arrays don't have the levels' axes.
class LanesOfCall : Immovable {
 public:
  LanesOfCall(const Lanes& held, std::span<const ArrayView> operands,
              std::span<const ArrayView> results, std::int64_t number = 0)
      : read_(held.open() ? held.of_call(operands) : Lanes()),
        lanes_(held.open() ? read_ : held),
        number_(number) {
    lanes_.check(operands, results);
  }

  // The position, and the name, of the lane `index` of the call.
  std::int64_t position(std::int64_t index) const noexcept {
    return lanes_.position(index, number_);
  }
  std::string name(std::int64_t index) const { return lanes_.name(position(index)); }

  const Lanes* operator->() const noexcept { return &lanes_; }
  const Lanes& operator*() const noexcept { return lanes_; }

 private:
  Lanes read_;
  const Lanes& lanes_;
  std::int64_t number_;
};

}  // namespace callgate
