// SPDX-License-Identifier: Apache-2.0
// A tap's call site: how many results it has, and its attributes; called on a few arrays.
#include "channel/tap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "built_attributes.h"
#include "core/error.h"
#include "targets.h"

namespace callgate::fuzz {

void tap(std::string_view bytes) {
  Bytes in(bytes);
  const std::size_t results = in.number();
  try {
    SiteSpec spec;
    spec.held = read_attributes(in);
    spec.lanes = Lanes::of(spec.held.dictionary("batch"));
    const TapSpec tap = TapSpec::of(spec.held, "");
    require(tap.paths.size() == tap.value_leaves, "a tap has a path for each value");
    static TapCallee callee("fuzz", "fuzz", nullptr);
    const std::shared_ptr<Site> site = callee.specialise(std::move(spec));
    // Operands that match lanes of two and three, and memory that holds no more than they.
    static constexpr std::array<std::int64_t, 2> kDims{2, 3};
    std::array<float, 6> matrix{1, 2, 3, 4, 5, 6}, results_memory{};
    std::array<bool, 6> mask{true, false, true, false, true, false};
    const std::array<ArrayView, 4> operands{ArrayView{matrix.data(), kDims.data(), 2, DType::kF32},
                                            ArrayView{mask.data(), kDims.data(), 2, DType::kPred},
                                            ArrayView{matrix.data(), kDims.data(), 1, DType::kF32},
                                            ArrayView{mask.data(), kDims.data(), 0, DType::kPred}};
    std::array<ArrayView, 3> out{ArrayView{results_memory.data(), kDims.data(), 2, DType::kF32},
                                 ArrayView{results_memory.data(), kDims.data(), 2, DType::kPred},
                                 ArrayView{results_memory.data(), kDims.data(), 1, DType::kF32}};
    const Call call{operands, std::span(out).first(std::min(results, out.size())), {}};
    if (tap.on_device) return site->run(call);  // reads() would ask for arrays to keep
    static_cast<void>(site->reads(call));
    auto runs = [&] {
      try {
        site->run(call);
        return true;
      } catch (const Error&) {
        return false;
      }
    };
    for (int i = 0; i < 3; ++i) require(runs(), "a tap that is described runs");
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

}  // namespace callgate::fuzz
