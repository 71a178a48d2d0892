// SPDX-License-Identifier: Apache-2.0
// The lanes of a call for Python functions that send them elsewhere. Threads may use them at once;
// a thread that is late finds that the call has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/results.h"
#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/call.h"
#include "core/lanes.h"

namespace callgate::bindings {

// The lanes of one running call.
class CallLanes : Immovable {
 public:
  Shared<std::int64_t> failed{-1};  // the lane whose exception the call raises; -1 if unknown

  CallLanes(const Call& call, const Lanes* lanes, std::string gate, std::string spec, bool cast)
      : call_(&call), lanes_(lanes), gate_(std::move(gate)), spec_(std::move(spec)), cast_(cast) {}

  void end() {
    nb::ft_lock_guard lock(mutex_);
    call_ = nullptr;
  }
  const Call& call() const {
    check_runs();
    return *call_;
  }
  const Lanes* lanes() const { return lanes_; }
  bool cast() const { return cast_; }
  std::int64_t count() const { return lanes_ == nullptr ? 1 : lanes_->count(); }

  // Copies of a lane's operands.
  nb::tuple take(std::int64_t lane) const {
    nb::ft_lock_guard lock(mutex_);
    check(lane);
    std::vector<ArrayView> views(call_->operands.begin(), call_->operands.end());
    if (lanes_ != nullptr) lanes_->select_operands(lane, call_->operands, views);
    nb::list arrays;
    for (const ArrayView& view : views) arrays.append(make_copy(view));
    return nb::tuple(arrays);
  }

  // A copy of one operand.
  nb::object take_one(std::int64_t lane, std::size_t operand) const {
    nb::ft_lock_guard lock(mutex_);
    check(lane);
    if (operand >= call_->operands.size()) raise(PyExc_IndexError, "CallLanes: no such operand");
    std::vector<ArrayView> views(call_->operands.begin(), call_->operands.end());
    if (lanes_ != nullptr) lanes_->select_operands(lane, call_->operands, views);
    return make_copy(views[operand]);
  }

  // Uninitialized arrays for a lane's results.
  nb::tuple empty() const {
    nb::ft_lock_guard lock(mutex_);
    check(0);
    std::vector<ArrayView> views(call_->results.begin(), call_->results.end());
    if (lanes_ != nullptr) lanes_->select_results(0, call_->results, views);
    nb::list arrays;
    for (const ArrayView& view : views) arrays.append(new_array(view, /*data=*/nullptr, 0));
    return nb::tuple(arrays);
  }

  // Stores a lane's results, flat.
  void give(std::int64_t lane, const nb::object& values) const {
    nb::ft_lock_guard lock(mutex_);
    check(lane);
    std::vector<ArrayView> views(call_->results.begin(), call_->results.end());
    if (lanes_ != nullptr) lanes_->select_results(lane, call_->results, views);
    if (!PyTuple_Check(values.ptr()) || nb::len(values) != views.size())
      mismatch(-1, "a tuple of " + std::to_string(views.size()) + " arrays",
               nb::type_name(values.type()).c_str());
    for (std::size_t i = 0; i < views.size(); ++i) {
      nb::object value = values[i];
      auto came = value.is_none() ? std::optional<std::string>("None")
                                  : store(views[i], value.ptr(), cast_);
      if (came) mismatch(static_cast<int>(i), to_string(views[i]), *came);
    }
  }

 private:
  void check(std::int64_t lane) const {
    check_runs();
    if (lane < 0 || lane >= count()) raise(PyExc_IndexError, "CallLanes: no such lane");
  }
  void check_runs() const {
    if (call_ == nullptr) raise(PyExc_RuntimeError, "CallLanes: the call has ended");
  }
  [[noreturn]] void mismatch(int index, const std::string& expected, const std::string& got) const {
    raise_mismatch(gate_, spec_, index, expected, got);
  }

  mutable nb::ft_mutex mutex_;  // guards the call's arrays against its end
  const Call* call_;
  const Lanes* lanes_;
  std::string gate_, spec_;
  bool cast_;
};

}  // namespace callgate::bindings
