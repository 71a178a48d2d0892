// SPDX-License-Identifier: Apache-2.0
// Recordings: who is told of each call of a gate before it is made, and answers it or has it made.
//
// The tape is one Python function of the process (python/callgate/_replay), while a block of
// callgate.record or callgate.replay is open. It is told of each lane's call, by values: the code
// of an array's dtype, its extents and its bytes. While there is none, a call costs a relaxed load.
// All but is_taping() is under the GIL.
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
  // Relaxed: calls that run while a block begins may be told of or not.
  std::atomic<bool> on{false}, replays{false};
  PyObject* function = nullptr;  // null while there is none
};
inline constinit Tape tape;

inline bool is_taping() noexcept { return tape.on.load(std::memory_order_relaxed); }  // see Tape
inline bool is_replaying() noexcept {
  return tape.replays.load(std::memory_order_relaxed);  // see Tape
}

// Raises, for a gate whose calls replays of CUDA graphs leave out.
[[noreturn]] inline void refuse_in_graphs(const std::string& gate) {
  raise(PyExc_NotImplementedError, "gate '" + gate +
                                       "': callgate.record and callgate.replay can't see calls in "
                                       "CUDA graphs; pass command_buffer=False");
}

// One lane's call. The results' memory is the caller's, and outlives this.
class TapedCall : Immovable {
 public:
  // Asks the tape; throws the Python exception that it answers with.
  TapedCall(const std::string& gate, const SiteSpec& site, std::int64_t lane,
            std::span<const ArrayView> operands, std::span<ArrayView> results,
            const CallContext& context);

  // True if the results are there: the call is not to be made.
  bool answered() const noexcept { return answered_; }

  // Tells the tape what the call gave, or raised. Throws what the tape raises.
  void made(std::span<const ArrayView> results, const std::optional<nb::python_error>& raised);

 private:
  nb::object finish_;  // called when the call has been made; none where the tape doesn't care
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

// The same of a call whose lanes, null for one without, are made together by `make(call, lanes,
// 0)`. Where the tape has answered some of them, `make(call, null, lane)` makes each of the others.
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
