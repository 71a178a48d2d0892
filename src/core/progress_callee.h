// What programs call to feed a progress bar: one callee, by name, for all bars of a process.
//
// Runs on any XLA thread, without the GIL; the board is borrowed and outlives every site.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/call.h"
#include "core/progress.h"

namespace callgate {

// What programs call. A call holds a dictionary `progress` of kind, every and total, and as its
// spec the text that the board keeps. Kinds are
//   begin (anchors...) -> handle       begin_of (total, anchors...) -> handle
//   update (handle, count) -> steps until the next update
//   end (handle, count, anchors...) -> 0      step (anchors...) -> 0
// all s32 scalars. Anchors are whatever the call has to wait for; nobody looks at them.
class ProgressCallee final : public Callee {
 public:
  static constexpr std::string_view kName = "callgate.progress";

  explicit ProgressCallee(ProgressBoard& board) : board_(board) {}

  // Throws Error(kInvalidArgument) for any other kind.
  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }

 private:
  ProgressBoard& board_;
  std::string name_{kName};
};

}  // namespace callgate
