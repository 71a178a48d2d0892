// Runs a kernel on guarded copies of its arrays, and says what it does to memory that isn't its
// own. For debugging: a checked call copies all of its arrays and runs its kernel up to three
// times.
//
// Each copy lies between two guards. Results, scratch memory and guards are filled with patterns
// that kernels hardly ever write, guards with one of their own for each array (guard_pattern.h).
// What is found:
//
//   - a byte of a guard has changed: a write before or after an array;
//   - an operand has changed that is no result as well;
//   - an element of a result still has the pattern. In one run that may be its value by chance, so
//     a kernel without effects runs again with another pattern. One with effects runs once, and its
//     results of types without room for a rare value (small integers, bool) are not looked at;
//   - the results differ with the pattern, and not from run to run: the kernel has read what nobody
//     wrote, in its results, in scratch memory or beyond its arrays.
//
// XLA's own memory is written once, when all is well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/call.h"
#include "core/guard_pattern.h"
#include "core/kernel_frame.h"

namespace callgate {

// What a check knows of a call site's kernel.
struct CheckedSite {
  std::span<const std::string> operand_labels, result_labels;  // as messages name them
  std::span<const std::uint8_t>
      updated;              // for each result, 1 where it starts as an operand's value
  bool repeatable = false;  // the kernel has no effects
};

class MemoryCheck final : public ScratchSource {
 public:
  MemoryCheck(const CheckedSite& site, const Call& call);

  // Runs the kernel by `run`, which gets the copies and this as the source of scratch memory. The
  // message of what was found, "" when nothing was. What `run` throws comes out of it, and nothing
  // is looked at.
  std::string run(const std::function<void(const Call&, ScratchSource*)>& run);

  void* take(std::size_t bytes, std::size_t alignment) noexcept override;

 private:
  using Fill = GuardPattern::Fill;
  // The pattern that all results start with. It is no guard's: a result made of what lies outside
  // is not one that was left as it was.
  static constexpr std::size_t kResults = 0;

  // Memory between two guards, all of the pattern `number`; a result's inside is of kResults.
  struct Guarded {
    Guarded(std::size_t bytes, std::size_t alignment, DType dtype, std::size_t number, bool result);
    void fill(Fill fill) noexcept;
    // How far outside, in bytes, the first write was; the side; how many bytes have changed.
    // `others`: the patterns of the call's arrays. An element that is another's has changed as a
    // whole, though patterns may have some bytes in common.
    std::string damage(Fill fill, std::size_t element_bytes,
                       std::span<const GuardPattern> others) const;

    std::unique_ptr<std::byte, void (*)(void*)> memory;
    std::byte* data = nullptr;
    std::size_t bytes, guard, after;  // of the array, before it, and after it
    DType dtype;
    std::size_t number;
    bool result;
  };

  void prepare(Fill fill);
  std::vector<GuardPattern> patterns(Fill fill) const;
  void inspect(Fill fill);
  void find_unwritten(bool repeated);
  bool same_results() const;
  void find_dependence();
  void publish() const;
  std::vector<std::vector<std::byte>> snapshot() const;
  std::string subject(const char* side, std::size_t index, const ArrayView& view,
                      std::span<const std::string> labels) const;

  CheckedSite site_;
  Call original_;
  Fill fill_ = Fill::kRare;
  std::vector<Guarded> operand_copies_, result_copies_;  // an operand that is a result has none
  std::vector<std::ptrdiff_t> alias_;                    // of each operand: its result, or -1
  std::vector<bool> starts_filled_;                      // of each result
  std::vector<ArrayView> operands_, results_;
  std::vector<std::vector<std::byte>> first_;  // the results of the first run
  std::size_t arrays_ = 0;                     // that have guards of their own, but for scratch_
  std::mutex mutex_;                           // guards scratch_, which a kernel's threads take
  std::list<Guarded> scratch_;
  std::vector<std::string> findings_;
};

}  // namespace callgate
