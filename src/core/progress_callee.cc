// See the header. A call reads one or two scalars and writes one.
#include "core/progress_callee.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

namespace callgate {
namespace {

enum class Kind { kBegin, kBeginOf, kUpdate, kEnd, kStep };

constexpr std::array<std::pair<std::string_view, Kind>, 5> kKinds{{{"begin", Kind::kBegin},
                                                                   {"begin_of", Kind::kBeginOf},
                                                                   {"update", Kind::kUpdate},
                                                                   {"end", Kind::kEnd},
                                                                   {"step", Kind::kStep}}};

std::int32_t scalar(const ArrayView& view) noexcept {
  return *static_cast<const std::int32_t*>(view.data);
}

class ProgressSite final : public Site {
 public:
  ProgressSite(ProgressBoard& board, Kind kind, ProgressStart start, std::string text)
      : board_(board), kind_(kind), start_(start), text_(std::move(text)) {}

  void run(const Call& call) override {
    if (!has_scalars(call))
      throw Error(ErrorCode::kInvalidArgument, "progress: expected s32 scalars");
    std::int32_t result = answer(call);
    if (!call.results.empty()) *static_cast<std::int32_t*>(call.results[0].data) = result;
  }

 private:
  // Operands that are read; what follows are anchors.
  std::size_t scalars() const noexcept {
    if (kind_ == Kind::kBeginOf) return 1;
    return kind_ == Kind::kUpdate || kind_ == Kind::kEnd ? 2 : 0;
  }

  bool has_scalars(const Call& call) const noexcept {
    auto is_scalar = [](const ArrayView& view) {
      return view.dtype == DType::kS32 && view.rank == 0;
    };
    return call.operands.size() >= scalars() &&
           std::ranges::all_of(call.operands.first(scalars()), is_scalar) &&
           std::ranges::all_of(call.results, is_scalar);
  }

  std::int32_t answer(const Call& call) {
    switch (kind_) {
      case Kind::kBegin: return board_.begin(text_, start_, call.context);
      case Kind::kBeginOf: {
        ProgressStart start = start_;
        start.total = std::max(scalar(call.operands[0]), 0);
        return board_.begin(text_, start, call.context);
      }
      case Kind::kUpdate: return board_.update(scalar(call.operands[0]), count(call));
      case Kind::kEnd: board_.end(scalar(call.operands[0]), count(call)); return 0;
      case Kind::kStep: board_.step(text_, start_, call.context); return 0;
    }
    return 0;
  }

  static std::uint32_t count(const Call& call) noexcept {
    return static_cast<std::uint32_t>(scalar(call.operands[1]));
  }

  ProgressBoard& board_;
  Kind kind_;
  ProgressStart start_;
  std::string text_;
};

}  // namespace

std::shared_ptr<Site> ProgressCallee::specialise(SiteSpec spec) {
  static std::atomic<std::int64_t> sites{0};
  const Attributes& held = spec.held.dictionary("progress");
  const std::string_view kind = held.text("kind");
  const auto* known = std::ranges::find(kKinds, kind, &decltype(kKinds)::value_type::first);
  if (known == kKinds.end()) {
    throw Error(ErrorCode::kInvalidArgument, "a progress bar's call",
                "begin, begin_of, update, end or step", "'" + std::string(kind) + "'");
  }
  // Relaxed: any distinct numbers will do.
  const std::int64_t site = sites.fetch_add(1, std::memory_order_relaxed) + 1;
  return std::make_shared<ProgressSite>(
      board_, known->second, ProgressStart{site, held.integer("every"), held.integer("total", -1)},
      std::move(spec.spec));
}

}  // namespace callgate
