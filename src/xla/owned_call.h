// Calls that outlive their handler.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/call.h"

namespace callgate::xla_ffi {

// A call that outlives its handler: the frame's descriptors die with it, so they are copied. Where
// the watchdog may fail the program the memory is private, too: XLA frees its own then, while user
// code may still be reading and writing.
class OwnedCall {
 public:
  OwnedCall(const Call& call, bool private_memory)
      : operands_(call.operands), results_(call.results), context_(call.context) {
    if (!private_memory) return;
    targets_.emplace(call.results);
    for (ArrayView& view : operands_.all()) {
      const void* source = view.data;
      allocate(view);
      copy_to(view, source);
    }
    for (ArrayView& view : results_.all()) place(view, call.operands);
  }

  Call call() { return Call{operands_.all(), results_.all(), context_}; }

  // Copies private results to XLA's memory.
  void publish() const {
    for (std::size_t i = 0; targets_ && i < targets_->size(); ++i)
      copy_to((*targets_)[i], results_[i].data);
  }

  // What a call that was given up leaves in XLA's memory.
  void poison_results() const noexcept { poison((targets_ ? *targets_ : results_).all()); }

  const CallContext& context() const noexcept { return context_; }

  std::string describe() const { return to_string(operands_.all()); }

 private:
  void allocate(ArrayView& view) {
    constexpr std::size_t kAlignment = 64;  // as XLA's own buffers
    std::size_t bytes = (view.nbytes() / kAlignment + 1) * kAlignment;
    memory_.emplace_back(static_cast<char*>(std::aligned_alloc(kAlignment, bytes)), &std::free);
    if (memory_.back() == nullptr) throw std::bad_alloc();
    view.data = memory_.back().get();
  }
  // A result in the memory of an operand (an alias) goes to that operand's private copy.
  void place(ArrayView& result, std::span<const ArrayView> operands) {
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (result.data != operands[i].data || result.nbytes() != operands[i].nbytes()) continue;
      result.data = operands_[i].data;
      return;
    }
    allocate(result);
  }

  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
  OwnedViews operands_, results_;
  std::optional<OwnedViews> targets_;  // XLA's results, where ours are private
  CallContext context_;
};

}  // namespace callgate::xla_ffi
