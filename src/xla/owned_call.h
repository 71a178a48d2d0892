// Calls that outlive their handler.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
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
  OwnedCall(const Call& call, bool private_memory) : context_(call.context) {
    keep(call.operands, operands_);
    keep(call.results, results_);
    keep(call.results, targets_);
    if (!private_memory) return;
    for (ArrayView& view : operands_) copy_in(view);
    for (ArrayView& view : results_) place(view, call.operands);
  }

  Call call() { return Call{operands_, results_, context_}; }

  // Copies private results to XLA's memory.
  void publish() const {
    for (std::size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].data == targets_[i].data || results_[i].nbytes() == 0) continue;
      std::memcpy(targets_[i].data, results_[i].data, results_[i].nbytes());
    }
  }

  // What a call that was given up leaves in XLA's memory.
  void poison_results() const noexcept {
    for (const ArrayView& view : targets_) poison(view);
  }

  const CallContext& context() const noexcept { return context_; }

  std::string describe() const {
    std::string text;
    for (const ArrayView& view : operands_) text += (text.empty() ? "" : ", ") + to_string(view);
    return "(" + text + ")";
  }

 private:
  void keep(std::span<const ArrayView> views, std::vector<ArrayView>& copies) {
    copies.assign(views.begin(), views.end());
    for (ArrayView& view : copies) {
      dims_.emplace_back(view.dims, view.dims + view.rank);
      view.dims = dims_.back().data();
    }
  }
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
  void copy_in(ArrayView& view) {
    const void* source = view.data;
    allocate(view);
    if (view.nbytes() != 0) std::memcpy(view.data, source, view.nbytes());
  }

  std::vector<std::vector<std::int64_t>> dims_;  // outer growth moves vectors, not their memory
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
  std::vector<ArrayView> operands_, results_, targets_;
  CallContext context_;
};

}  // namespace callgate::xla_ffi
