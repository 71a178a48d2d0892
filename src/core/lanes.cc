// Lane arithmetic. Immutable after construction; any thread.
#include "core/lanes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace callgate {
namespace {

// `whole` without its first `levels` axes, at the `position`-th of the slabs these axes make.
ArrayView slab(const ArrayView& whole, std::int32_t levels, std::int64_t position) noexcept {
  ArrayView view{whole.data, whole.dims + levels, whole.rank - levels, whole.dtype};
  view.data = static_cast<char*>(whole.data) + static_cast<std::size_t>(position) * view.nbytes();
  return view;
}

// True when lanes without the first `levels` axes would start within a byte of a packed type.
bool cuts_bytes(const ArrayView& whole, std::int32_t levels) noexcept {
  ArrayView lane{whole.data, whole.dims + levels, whole.rank - levels, whole.dtype};
  return lane.size() * static_cast<std::size_t>(bits(lane.dtype)) % 8 != 0;
}

}  // namespace

Lanes::Lanes(std::vector<std::int64_t> sizes, std::span<const std::int64_t> masks)
    : sizes_(std::move(sizes)), masks_(masks.begin(), masks.end()) {
  if (sizes_.empty() ? !masks_.empty() : masks_.size() % sizes_.size() != 0) {
    throw Error(ErrorCode::kInvalidArgument, "batch levels",
                "a mask of one entry per level and operand",
                std::to_string(masks_.size()) + " entries for " + std::to_string(sizes_.size()) +
                    " levels");
  }
  for (std::int64_t mask : masks) {
    if (mask != 0 && mask != 1)
      throw Error(ErrorCode::kInvalidArgument, "batch levels", "masks of 0 and 1",
                  std::to_string(mask));
  }
  for (std::int64_t size : sizes_) {
    if (size < 0)
      throw Error(ErrorCode::kInvalidArgument, "batch levels", "extents", std::to_string(size));
    if (__builtin_mul_overflow(count_, size, &count_)) {
      throw Error(ErrorCode::kInvalidArgument, "batch levels", "fewer than 2^63 lanes", "more");
    }
  }
}

Lanes Lanes::of(const Attributes& held) {
  std::span<const std::int64_t> sizes = held.integers("sizes");
  return Lanes({sizes.begin(), sizes.end()}, held.integers("masks"));
}

std::string Lanes::text() const {
  std::string text;
  for (std::size_t level = 0; level < sizes_.size(); ++level) {
    if (level != 0) text += ';';
    text += std::to_string(sizes_[level]) + ':';
    for (std::size_t i = 0; i < operand_count(); ++i) text += batched(level, i) ? '1' : '0';
  }
  return text;
}

void Lanes::select_operands(std::int64_t lane_index, std::span<const ArrayView> whole,
                            std::span<ArrayView> lane) const noexcept {
  for (std::size_t i = 0; i < whole.size(); ++i) {
    // Walk the levels from the innermost: `rest` holds the outer levels' index, `position` grows
    // by the levels that this operand has.
    std::int64_t rest = lane_index, position = 0, stride = 1;
    std::int32_t levels = 0;
    for (std::size_t level = sizes_.size(); level-- > 0;) {
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

void Lanes::select_results(std::int64_t lane_index, std::span<const ArrayView> whole,
                           std::span<ArrayView> lane) const noexcept {
  auto levels = static_cast<std::int32_t>(sizes_.size());
  for (std::size_t i = 0; i < whole.size(); ++i) lane[i] = slab(whole[i], levels, lane_index);
}

void Lanes::check(std::span<const ArrayView> operands, std::span<const ArrayView> results) const {
  if (empty()) return;
  auto fail = [](const char* what, std::size_t index, const ArrayView& view,
                 const char* expected = "leading axes for the batch levels") {
    throw Error(ErrorCode::kInvalidArgument, std::string(what) + " " + std::to_string(index),
                expected, to_string(view));
  };
  constexpr const char* kWholeBytes = "lanes of whole bytes";
  if (operands.size() != operand_count()) {
    throw Error(ErrorCode::kInvalidArgument, "batched call",
                std::to_string(operand_count()) + " operands", std::to_string(operands.size()));
  }
  for (std::size_t i = 0; i < operands.size(); ++i) {
    std::int32_t axis = 0;
    for (std::size_t level = 0; level < sizes_.size(); ++level) {
      if (!batched(level, i)) continue;
      if (axis >= operands[i].rank || operands[i].dims[axis] != sizes_[level])
        fail("operand", i, operands[i]);
      ++axis;
    }
    if (axis > 0 && cuts_bytes(operands[i], axis)) fail("operand", i, operands[i], kWholeBytes);
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    for (std::size_t level = 0; level < sizes_.size(); ++level) {
      if (static_cast<std::int32_t>(level) >= results[i].rank ||
          results[i].dims[level] != sizes_[level])
        fail("result", i, results[i]);
    }
    if (cuts_bytes(results[i], static_cast<std::int32_t>(sizes_.size())))
      fail("result", i, results[i], kWholeBytes);
  }
}

}  // namespace callgate
