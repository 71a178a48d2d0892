// SPDX-License-Identifier: Apache-2.0
// Recordings: the tape learns of each call of a gate before it is made, and answers it or lets it
// run.
//
// The tape is one Python function of the process (python/callgate/_replay), while a block of
// callgate.record or callgate.replay is open. It gets each lane's call by values: the code of an
// array's dtype, its extents and its bytes. Without a tape, a call costs a relaxed load. All
// functions except is_taping() run under the GIL.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/gil.h"
#include "core/call.h"
#include "core/lanes.h"

namespace callgate::bindings {

struct Tape {
  // Relaxed: a call that runs while a block begins may or may not be reported.
  std::atomic<bool> on{false}, replays{false};
  nb::ft_mutex mutex;            // guards the function
  PyObject* function = nullptr;  // null without a block
};
inline Tape tape;

inline bool is_taping() noexcept { return tape.on.load(std::memory_order_relaxed); }  // see Tape
inline bool is_replaying() noexcept {
  return tape.replays.load(std::memory_order_relaxed);  // see Tape
}

// Raises for a gate whose calls a replayed CUDA graph leaves out.
[[noreturn]] inline void refuse_in_graphs(const std::string& gate) {
  raise(PyExc_NotImplementedError, "gate '" + gate +
                                       "': callgate.record and callgate.replay can't see calls in "
                                       "CUDA graphs; pass command_buffer=False");
}

// One lane's call. The caller owns the results' memory, which outlives this.
class TapedCall : Immovable {
 public:
  // Asks the tape; throws the Python exception of its answer.
  TapedCall(const std::string& gate, const SiteSpec& site, std::int64_t lane,
            std::span<const ArrayView> operands, std::span<ArrayView> results,
            const CallContext& context);

  // True if the tape has filled the results, so the call must not run.
  bool answered() const noexcept { return answered_; }

  // Reports the call's results or exception to the tape. Throws the tape's exception.
  void made(std::span<const ArrayView> results, const std::optional<nb::python_error>& raised);

 private:
  nb::object finish_;  // called after the call; empty if the tape ignores it
  bool answered_ = false;
};

// Makes one lane's call by `make()`, unless the tape answers it.
template <typename Make>
void on_tape(const std::string& gate, const SiteSpec& site, std::int64_t lane,
             std::span<const ArrayView> operands, std::span<ArrayView> results,
             const CallContext& context, Make&& make) {
  TapedCall taped(gate, site, lane, operands, results, context);
  if (taped.answered()) return;
  auto raised = raised_by(make);
  taped.made(results, raised);
  if (raised) throw *std::move(raised);
}

// The same for a call whose lanes (null for none) run together by `make(call, lanes, 0)`. If the
// tape answers some lanes, `make(call, null, lane)` makes each of the others.
template <typename Make>
void lanes_on_tape(const std::string& gate, const SiteSpec& site, const Call& call,
                   const LanesOfCall* lanes, Make&& make) {
  struct Lane : Immovable {
    Lane(const std::string& of, const SiteSpec& at, std::int64_t lane, const Call& call,
         const LanesOfCall* levels)
        : index(lane),
          operands(call.operands.begin(), call.operands.end()),
          results(call.results.begin(), call.results.end()) {
      if (levels != nullptr) {
        (*levels)->select_operands(index, call.operands, operands);
        (*levels)->select_results(index, call.results, results);
      }
      const std::int64_t position = levels == nullptr ? 0 : levels->position(index);
      taped = std::make_unique<TapedCall>(of, at, position, operands, results, call.context);
    }
    const std::int64_t index;
    std::vector<ArrayView> operands, results;
    std::unique_ptr<TapedCall> taped;
  };
  const std::int64_t count = lanes == nullptr ? 1 : (*lanes)->count();
  std::vector<std::unique_ptr<Lane>> left;
  for (std::int64_t index = 0; index < count; ++index) {
    auto lane = std::make_unique<Lane>(gate, site, index, call, lanes);
    if (!lane->taped->answered()) left.push_back(std::move(lane));
  }
  if (static_cast<std::int64_t>(left.size()) == count && count != 0) {
    auto raised = raised_by([&] { make(call, lanes, std::int64_t{0}); });
    for (const auto& lane : left) lane->taped->made(lane->results, raised);
    if (raised) throw *std::move(raised);
    return;
  }
  for (const auto& lane : left) {
    auto raised = raised_by([&] {
      make(Call{lane->operands, lane->results, call.context},
           static_cast<const LanesOfCall*>(nullptr), lane->index);
    });
    lane->taped->made(lane->results, raised);
    if (raised) throw *std::move(raised);
  }
}

}  // namespace callgate::bindings
