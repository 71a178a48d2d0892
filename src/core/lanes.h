// Lanes: the batch levels that vmap put around a call, outermost first.
//
// Every result carries all levels as leading axes; an operand carries those levels in which it is
// batched, in the same order, and is shared by the lanes of the others. A call with lanes runs once
// per lane, in row-major order, on views without the leading axes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/array_view.h"
#include "core/attributes.h"

namespace callgate {

class Lanes {
 public:
  Lanes() = default;

  // `sizes`: the extent of each level. `masks`: for each level, one 0 or 1 per operand, level after
  // level; its length is sizes.size() times the number of operands. Throws Error otherwise.
  Lanes(std::vector<std::int64_t> sizes, std::span<const std::int64_t> masks);

  // As programs hold them: arrays `sizes` and `masks`. Throws Error as above.
  static Lanes of(const Attributes& held);

  // "3:10;4:11": for each level its extent and its mask, a digit per operand. Streams hold this.
  std::string text() const;

  bool empty() const noexcept { return sizes_.empty(); }

  // The extent of each level, outermost first.
  std::span<const std::int64_t> sizes() const noexcept { return sizes_; }

  // Number of lanes: the product of the levels' extents, 1 without levels.
  std::int64_t count() const noexcept { return count_; }

  // The views of one lane. `lane` and `whole` have the same length; the extents that the lanes'
  // views point to are those of `whole`.
  void select_operands(std::int64_t lane_index, std::span<const ArrayView> whole,
                       std::span<ArrayView> lane) const noexcept;
  void select_results(std::int64_t lane_index, std::span<const ArrayView> whole,
                      std::span<ArrayView> lane) const noexcept;

  // Throws Error unless every operand and result has the leading axes that the levels imply, and
  // lanes that start at a byte.
  void check(std::span<const ArrayView> operands, std::span<const ArrayView> results) const;

 private:
  std::size_t operand_count() const noexcept {
    return sizes_.empty() ? 0 : masks_.size() / sizes_.size();
  }
  bool batched(std::size_t level, std::size_t operand) const noexcept {
    return masks_[level * operand_count() + operand] != 0;
  }

  std::vector<std::int64_t> sizes_;
  std::vector<std::uint8_t> masks_;
  std::int64_t count_ = 1;
};

}  // namespace callgate
