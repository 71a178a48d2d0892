// SPDX-License-Identifier: Apache-2.0
// Lanes: the batch levels that vmap puts around a call, outermost first.
//
// Every result has all levels as leading axes. An operand has the levels in which it is batched, in
// the same order; the lanes of the other levels share it. A call with lanes runs once per lane, in
// row-major order, on views without the leading axes.
//
// Some levels may be numbered. The program then runs their lanes one after the other, in separate
// calls, and passes each call the number of its lane among them, in row-major order. No array has
// an axis of a numbered level. The position of a lane counts all levels, including numbered ones.
//
// A program that was exported with symbolic shapes leaves extents open; the arrays of a call give
// them (`LanesOfCall`).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
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

  // `sizes`: the extent of each level, or kOpen. `masks`: one 0 or 1 per operand for each level,
  // level after level; its length is sizes.size() times the number of operands. `flags`: 1 for each
  // numbered level; empty for none. Throws Error for other forms.
  Lanes(std::vector<std::int64_t> sizes, std::span<const std::int64_t> masks,
        std::span<const std::int64_t> flags = {});

  // From the program's attributes: arrays `sizes` and `masks`. Throws Error as above.
  static Lanes of(const Attributes& held);

  // "3:10;4:11": the extent and the mask of each level, with a digit per operand; a numbered level
  // has only zeros. Streams contain this text.
  std::string text() const;

  // Calls visit(index) for each level with the index of the lane at a position.
  template <typename Visit>
  void each_index(std::int64_t lane, Visit&& visit) const {
    std::int64_t inside = total_;  // lanes within one index of the level
    for (std::int64_t size : sizes_) {
      inside /= size;
      visit(lane / inside % size);
    }
  }

  // The lane's indices for messages: "lane 3", "lane (1, 2)"; "" without levels.
  std::string name(std::int64_t lane) const;

  // The position of the lane `index` of the call number `number`.
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
  bool open() const noexcept { return open_; }  // an extent is kOpen, so there is no count()
  bool has_numbered() const noexcept { return !numbered_.empty(); }
  // The extent of each level, outermost first.
  std::span<const std::int64_t> sizes() const noexcept { return sizes_; }
  // The number of leading axes of a result.
  std::int32_t axes() const noexcept {
    return static_cast<std::int32_t>(std::ssize(sizes_) - std::ranges::count(numbered_, 1));
  }
  // The number of lanes of one call; 1 without levels.
  std::int64_t count() const noexcept { return count_; }
  // The number of lanes of all calls that the program makes for one call of the user.
  std::int64_t total() const noexcept { return total_; }

  // The same lanes with the extents of a call's operands. Throws Error as above.
  Lanes of_call(std::span<const ArrayView> operands) const;

  // The views of one lane, as many as in `whole`, whose extents they share.
  void select_operands(std::int64_t lane_index, std::span<const ArrayView> whole,
                       std::span<ArrayView> lane) const noexcept {
    for (std::size_t i = 0; i < whole.size(); ++i) {
      // From the innermost level: `rest` is the index in the outer levels, `position` this
      // operand's position.
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

  // Throws Error for missing leading axes of the levels, and for lanes that start within a byte.
  void check(std::span<const ArrayView> operands, std::span<const ArrayView> results) const;

 private:
  // `whole` without its first `levels` axes, at the `position`-th slab of these axes.
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

// The lanes of the call number `number`, without a copy if the program states them. Borrows `held`.
// Throws Error if the arrays lack the levels' axes.
class LanesOfCall : Immovable {
 public:
  LanesOfCall(const Lanes& held, std::span<const ArrayView> operands,
              std::span<const ArrayView> results, std::int64_t number = 0)
      : read_(held.open() ? held.of_call(operands) : Lanes()),
        lanes_(held.open() ? read_ : held),
        number_(number) {
    lanes_.check(operands, results);
  }

  // The position and the name of the call's lane `index`.
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
