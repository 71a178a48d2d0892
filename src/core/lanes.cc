// SPDX-License-Identifier: Apache-2.0
// Batch levels: their form in programs, their texts, and their checks.
#include "core/lanes.h"

#include <utility>

namespace callgate {

Lanes::Lanes(std::vector<std::int64_t> sizes, std::span<const std::int64_t> masks,
             std::span<const std::int64_t> flags)
    : sizes_(std::move(sizes)),
      masks_(masks.begin(), masks.end()),
      numbered_(flags.begin(), flags.end()) {
  if (!numbered_.empty() && numbered_.size() != sizes_.size())
    throw Error("batch levels", "for each whether it is numbered",
                std::to_string(numbered_.size()) + " entries for " + std::to_string(sizes_.size()) +
                    " levels");
  if (sizes_.empty() ? !masks_.empty() : masks_.size() % sizes_.size() != 0)
    throw Error("batch levels", "a mask of one entry per level and operand",
                std::to_string(masks_.size()) + " entries for " + std::to_string(sizes_.size()) +
                    " levels");
  for (std::int64_t mask : masks)
    if (mask != 0 && mask != 1)
      throw Error("batch levels", "masks of 0 and 1", std::to_string(mask));
  for (std::int64_t size : sizes_) {
    if (size < kOpen) throw Error("batch levels", "extents", std::to_string(size));
    if (size == kOpen) open_ = true;
  }
  for (std::size_t level = 0; !open_ && level < sizes_.size(); ++level) {
    if (__builtin_mul_overflow(total_, sizes_[level], &total_))
      throw Error("batch levels", "fewer than 2^63 lanes", "more");
    if (!numbered(level)) count_ *= sizes_[level];
  }
}

Lanes Lanes::of(const Attributes& held) {
  std::span<const std::int64_t> sizes = held.integers("sizes");
  return Lanes({sizes.begin(), sizes.end()}, held.integers("masks"), held.integers("numbered"));
}

std::string Lanes::text() const {
  std::string text;
  for (std::size_t level = 0; level < sizes_.size(); ++level) {
    text.append(level == 0 ? "" : ";").append(std::to_string(sizes_[level])).append(":");
    for (std::size_t i = 0; i < operand_count(); ++i) text += batched(level, i) ? '1' : '0';
  }
  return text;
}

std::string Lanes::name(std::int64_t lane) const {
  std::string text;
  each_index(lane, [&](std::int64_t index) {
    text.append(text.empty() ? "" : ", ").append(std::to_string(index));
  });
  if (sizes_.size() < 2) return text.empty() ? "" : "lane " + text;
  return "lane (" + text + ")";
}

Lanes Lanes::of_call(std::span<const ArrayView> operands) const {
  std::vector<std::int64_t> sizes = sizes_;
  for (std::size_t i = 0; i < std::min(operands.size(), operand_count()); ++i) {
    std::int32_t axis = 0;
    for (std::size_t level = 0; level < sizes.size(); ++level) {
      if (!batched(level, i)) continue;
      if (sizes[level] == kOpen && axis < operands[i].rank) sizes[level] = operands[i].dims[axis];
      ++axis;
    }
  }
  return Lanes(std::move(sizes), std::vector<std::int64_t>(masks_.begin(), masks_.end()),
               std::vector<std::int64_t>(numbered_.begin(), numbered_.end()));
}

void Lanes::check(std::span<const ArrayView> operands, std::span<const ArrayView> results) const {
  if (empty()) return;
  if (open_) throw Error("batched call", "operands with the axes of all batch levels", text());
  if (operands.size() != operand_count())
    throw Error("batched call", std::to_string(operand_count()) + " operands",
                std::to_string(operands.size()));
  for (std::size_t i = 0; i < operands.size(); ++i)
    check_axes("operand", i, operands[i], [&](std::size_t level) { return batched(level, i); });
  for (std::size_t i = 0; i < results.size(); ++i)
    check_axes("result", i, results[i], [&](std::size_t level) { return !numbered(level); });
}

}  // namespace callgate
