// SPDX-License-Identifier: Apache-2.0
// The batch levels of a call: attributes, then the rank and the extents of its operands.
#include "core/lanes.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "built_attributes.h"
#include "core/error.h"
#include "targets.h"

namespace callgate::fuzz {
namespace {

constexpr std::int64_t kElements = 4096;

// Arrays that own their extents and share memory.
struct Arrays {
  std::vector<std::vector<std::int64_t>> dims;
  std::vector<ArrayView> views;
};

Arrays read_arrays(Bytes& in, char* memory) {
  Arrays arrays;
  for (int count = in.number() % 4; count > 0; --count) {
    std::vector<std::int64_t> dims;
    std::int64_t elements = 1;
    for (int rank = in.number() % 5; rank > 0; --rank) {
      const std::int64_t extent = in.number() % 9;
      if (elements * extent > kElements) break;
      elements *= extent;
      dims.push_back(extent);
    }
    arrays.dims.push_back(std::move(dims));
  }
  for (const std::vector<std::int64_t>& dims : arrays.dims)
    arrays.views.emplace_back(
        ArrayView{memory, dims.data(), static_cast<std::int32_t>(dims.size()), DType::kS16});
  return arrays;
}

void require_inside(const ArrayView& lane, const ArrayView& whole) {
  const auto offset = static_cast<const char*>(lane.data) - static_cast<const char*>(whole.data);
  require(offset >= 0 && static_cast<std::size_t>(offset) + lane.nbytes() <= whole.nbytes(),
          "a lane is inside its array");
}

}  // namespace

void lanes(std::string_view bytes) {
  Bytes in(bytes);
  try {
    const Lanes lanes = Lanes::of(read_attributes(in));
    char memory[2 * kElements];
    Arrays operands = read_arrays(in, memory), results = read_arrays(in, memory);
    require(lanes.empty() == lanes.text().empty(), "lanes say which they are");
    require(lanes.count() >= 0, "there are no negative lanes");
    lanes.check(operands.views, results.views);
    if (lanes.empty()) return;
    std::vector<ArrayView> lane(operands.views), result(results.views);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(lanes.count(), kElements); ++i) {
      lanes.select_operands(i, operands.views, lane);
      lanes.select_results(i, results.views, result);
      for (std::size_t j = 0; j < lane.size(); ++j) require_inside(lane[j], operands.views[j]);
      for (std::size_t j = 0; j < result.size(); ++j) require_inside(result[j], results.views[j]);
    }
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

}  // namespace callgate::fuzz
