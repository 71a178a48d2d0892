// See the header.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>

#include "core/guard_pattern.h"
#include "core/kernel_debug.h"

namespace callgate {
namespace {

using Fill = GuardPattern::Fill;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kAlignment = 64;  // as XLA's own buffers
constexpr std::size_t kLeastGuard = std::size_t{4} << 10, kMostGuard = std::size_t{1} << 20;
constexpr std::size_t kMostFindings = 8;
// What results start with. No guard's: a result made of what lies outside isn't left as it was.
constexpr std::size_t kResults = 0;

// Fills `memory` with a pattern, again and again; `bytes` need be no multiple of its period.
void repeat(std::byte* memory, std::size_t bytes, const GuardPattern& pattern) {
  std::size_t done = std::min(pattern.period, bytes);
  std::memcpy(memory, pattern.bytes.data(), done);
  for (; done < bytes; done += std::min(done, bytes - done))
    std::memcpy(memory + done, memory, std::min(done, bytes - done));
}

// "[1,2]": where an element lies.
std::string index_text(const ArrayView& view, std::size_t element) {
  std::string text;
  for (std::int32_t axis = view.rank; axis-- > 0;) {
    auto extent = static_cast<std::size_t>(view.dims[axis]);
    text.insert(0, std::to_string(element % extent) + (text.empty() ? "" : ","));
    element /= extent;
  }
  return "[" + text + "]";
}

std::size_t first_difference(const std::byte* a, std::size_t bytes, const std::byte* b) {
  return static_cast<std::size_t>(std::mismatch(a, a + bytes, b).first - a);
}

// Memory between two guards, all of the pattern `number`; a result's inside is of kResults.
struct Guarded {
  Guarded(std::size_t size, std::size_t alignment, DType type, std::size_t own, bool is_result)
      : memory(nullptr, &std::free),
        bytes(size),
        // As large as the array, within limits: a loop with a wrong extent may run over by a row.
        guard((std::clamp(size, kLeastGuard, kMostGuard) / alignment + 1) * alignment),
        after(guard + (alignment - size % alignment) % alignment),
        dtype(type),
        number(own),
        result(is_result) {
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, guard + bytes + after)));
    if (memory == nullptr) throw std::bad_alloc();
    data = memory.get() + guard;
  }

  void fill(Fill fill) noexcept {
    repeat(memory.get(), guard + bytes + after, GuardPattern(dtype, fill, number));
    if (result) repeat(data, bytes, GuardPattern(dtype, fill, kResults));
  }

  std::unique_ptr<std::byte, void (*)(void*)> memory;
  std::byte* data = nullptr;
  std::size_t bytes, guard, after;  // of the array, before it, and after it
  DType dtype;
  std::size_t number;
  bool result;
};

// How far outside, in bytes, the first write was; the side; how many bytes have changed. `width`:
// of an element. `others`: the patterns of the call's arrays. An element that is another's has
// changed as a whole, though patterns may have some bytes in common.
std::string damage(const Guarded& block, Fill fill, std::size_t width,
                   std::span<const GuardPattern> others) {
  GuardPattern with(block.dtype, fill, block.number);
  const std::byte* all = block.memory.get();
  auto changed = [&](std::size_t i) {
    if (all[i] != with.at(i)) return true;
    if (with.width == 1) return false;
    std::size_t first = i / with.width * with.width;
    auto is_of = [&](const GuardPattern& pattern) {
      for (std::size_t k = first; k < first + with.width; ++k)
        if (all[k] != pattern.at(k)) return false;
      return true;
    };
    return !is_of(with) && std::ranges::any_of(others, is_of);
  };
  auto text = [](std::size_t count, std::size_t distance, const char* side,
                 std::ptrdiff_t element) {
    return "wrote outside of it: " + std::to_string(count) + " bytes, the first of them " +
           std::to_string(distance) + " bytes " + side + ", where element " +
           std::to_string(element) + " would be";
  };
  // The write that is nearest to the array comes first, so the guard before it is read backwards.
  std::size_t count = 0, nearest = 0, end = block.guard + block.bytes;
  for (std::size_t i = block.guard; i-- > 0;)
    if (changed(i) && count++ == 0) nearest = block.guard - i;
  if (count != 0) {
    auto element = static_cast<std::ptrdiff_t>((nearest + width - 1) / width);
    return text(count, nearest, "before its start", -element);
  }
  for (std::size_t i = end; i < end + block.after; ++i)
    if (changed(i) && count++ == 0) nearest = i - end;
  auto element = static_cast<std::ptrdiff_t>((block.bytes + nearest) / width);
  return count == 0 ? "" : text(count, nearest, "after its end", element);
}

class MemoryCheck final : public ScratchSource {
 public:
  MemoryCheck(const CheckedSite& site, const Call& call)
      : site_(site),
        original_(call),
        operands_(call.operands.begin(), call.operands.end()),
        results_(call.results.begin(), call.results.end()) {
    for (ArrayView& result : results_) {
      std::size_t r = starts_filled_.size();
      result_copies_.emplace_back(result.nbytes(), kAlignment, result.dtype, ++arrays_,
                                  /*result=*/true);
      result.data = result_copies_.back().data;
      starts_filled_.push_back(r < site.updated.size() && site.updated[r] != 0);
    }
    for (ArrayView& operand : operands_) {
      alias_.push_back(-1);
      for (std::size_t r = 0; r < results_.size() && operand.nbytes() != 0; ++r) {
        if (operand.data != call.results[r].data) continue;
        alias_.back() = static_cast<std::ptrdiff_t>(r);
        starts_filled_[r] = true;
      }
      bool own = alias_.back() < 0;
      operand_copies_.emplace_back(own ? operand.nbytes() : 0, kAlignment, operand.dtype, ++arrays_,
                                   /*result=*/false);
      operand.data = own ? operand_copies_.back().data
                         : results_[static_cast<std::size_t>(alias_.back())].data;
    }
  }

  std::string run(const std::function<void(const Call&, ScratchSource*)>& run) {
    auto once = [&](Fill fill) {
      prepare(fill);
      run(Call{operands_, results_, original_.context}, this);
      inspect(fill);
      return findings_.empty();
    };
    auto passed = [&] {
      if (!once(Fill::kRare)) return false;
      if (site_.repeatable) {
        first_ = snapshot();
        if (!once(Fill::kOther)) return false;
      }
      find_unwritten();
      if (!findings_.empty()) return false;
      if (!site_.repeatable || snapshot() == first_) return true;
      // Another pattern, other results; or results that are other ones each time.
      std::vector<Bytes> second = snapshot();
      if (!once(Fill::kRare)) return false;
      if (snapshot() == first_) {
        for (std::size_t r = 0; r < results_.size(); ++r) copy_to(results_[r], second[r].data());
        find_dependence();
      }
      return findings_.empty();
    };
    if (passed())
      for (std::size_t r = 0; r < results_.size(); ++r)
        copy_to(original_.results[r], results_[r].data);
    std::string text;
    for (std::size_t i = 0; i < std::min(findings_.size(), kMostFindings); ++i)
      text += (i == 0 ? "" : "\n") + findings_[i];
    if (findings_.size() > kMostFindings)
      text += "\nand " + std::to_string(findings_.size() - kMostFindings) + " more";
    return text;
  }

  void* take(std::size_t bytes, std::size_t alignment) noexcept override try {
    std::scoped_lock lock(mutex_);
    // A float's pattern: most scratch memory holds floats, and NaN shows in what is made of it.
    Guarded& block = scratch_.emplace_back(bytes, std::max(alignment, kAlignment), DType::kF32,
                                           arrays_ + scratch_.size() + 1, /*result=*/false);
    block.fill(fill_);
    return block.data;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }

 private:
  void prepare(Fill fill) {
    fill_ = fill;
    scratch_.clear();
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      operand_copies_[i].fill(fill);
      if (alias_[i] < 0) copy_to(operands_[i], original_.operands[i].data);
    }
    for (std::size_t r = 0; r < results_.size(); ++r) {
      result_copies_[r].fill(fill);
      if (starts_filled_[r]) copy_to(results_[r], original_.results[r].data);
    }
  }

  std::string subject(const char* side, std::size_t index, const ArrayView& view) const {
    const auto& labels = *side == 'o' ? site_.labels.operands : site_.labels.results;
    return "memory check: " + (index < labels.size() ? labels[index] + " (" : "(") + side + " " +
           std::to_string(index) + ", " + to_string(view) + ") ";
  }

  std::vector<GuardPattern> patterns(Fill fill) const {
    std::vector<GuardPattern> all;
    auto add = [&](const auto& blocks) {
      for (const Guarded& block : blocks) all.emplace_back(block.dtype, fill, block.number);
    };
    for (const Guarded& result : result_copies_) all.emplace_back(result.dtype, fill, kResults);
    add(result_copies_);
    add(operand_copies_);
    add(scratch_);
    return all;
  }

  // After a run: guards and operands.
  void inspect(Fill fill) {
    std::vector<GuardPattern> others = patterns(fill);
    auto look = [&](const Guarded& block, std::size_t width, auto&& name) {
      std::string found = damage(block, fill, width, others);
      if (!found.empty()) findings_.push_back(name() + found);
    };
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      if (alias_[i] >= 0) continue;
      const ArrayView& was = original_.operands[i];
      std::size_t width = element_bytes(was.dtype), bytes = was.nbytes();
      auto name = [&] { return subject("operand", i, was); };
      look(operand_copies_[i], width, name);
      auto at =
          first_difference(static_cast<const std::byte*>(was.data), bytes, operand_copies_[i].data);
      if (at == bytes) continue;
      findings_.push_back(name() + "is an input and was written to, the first time at element " +
                          index_text(was, at / width));
    }
    for (std::size_t r = 0; r < results_.size(); ++r)
      look(result_copies_[r], element_bytes(results_[r].dtype),
           [&] { return subject("result", r, results_[r]); });
    for (const Guarded& block : scratch_)
      look(block, 1, [&] {
        return "memory check: scratch memory of " + std::to_string(block.bytes) + " bytes: ";
      });
  }

  // After the last run that is needed to tell: elements that have what they were filled with.
  void find_unwritten() {
    const bool repeated = site_.repeatable;
    for (std::size_t r = 0; r < results_.size(); ++r) {
      const ArrayView& view = results_[r];
      GuardPattern first(view.dtype, Fill::kRare, kResults);
      GuardPattern last(view.dtype, Fill::kOther, kResults);
      if (starts_filled_[r] || is_packed(view.dtype) || (!repeated && !first.rare)) continue;
      auto left = [](const std::byte* memory, std::size_t element, const GuardPattern& as) {
        return std::memcmp(memory + element * as.width, as.bytes.data(), as.width) == 0;
      };
      const std::byte* now = result_copies_[r].data;
      std::size_t count = 0, found = 0;
      for (std::size_t i = 0; i < view.size(); ++i) {
        if (!left(repeated ? first_[r].data() : now, i, first)) continue;
        if (repeated && !left(now, i, last)) continue;
        if (count++ == 0) found = i;
      }
      if (count == 0) continue;
      findings_.push_back(subject("result", r, view) + "was not written completely: " +
                          std::to_string(count) + " of " + std::to_string(view.size()) +
                          " elements were left as they were, the first " + index_text(view, found));
    }
  }

  // The results as they are now differ from the first run's, and that is the pattern's doing.
  void find_dependence() {
    for (std::size_t r = 0; r < results_.size(); ++r) {
      std::size_t at = first_difference(first_[r].data(), first_[r].size(), result_copies_[r].data);
      if (at == first_[r].size()) continue;
      findings_.push_back(
          subject("result", r, results_[r]) +
          "depends on memory that was never written: in the results, in scratch memory, or outside "
          "of the arrays; the first such element is " +
          index_text(results_[r], at / element_bytes(results_[r].dtype)));
    }
  }

  std::vector<Bytes> snapshot() const {
    std::vector<Bytes> copies;
    copies.reserve(result_copies_.size());
    for (const Guarded& copy : result_copies_)
      copies.emplace_back(copy.data, copy.data + copy.bytes);
    return copies;
  }

  CheckedSite site_;
  Call original_;
  Fill fill_ = Fill::kRare;
  std::vector<Guarded> operand_copies_, result_copies_;  // an operand that is a result has none
  std::vector<std::ptrdiff_t> alias_;                    // of each operand: its result, or -1
  std::vector<bool> starts_filled_;                      // of each result
  std::vector<ArrayView> operands_, results_;
  std::vector<Bytes> first_;  // the results of the first run
  std::size_t arrays_ = 0;    // that have guards of their own, but for scratch_
  std::mutex mutex_;          // guards scratch_, which a kernel's threads take
  std::list<Guarded> scratch_;
  std::vector<std::string> findings_;
};

}  // namespace

std::string check_memory(const CheckedSite& site, const Call& call,
                         const std::function<void(const Call&, ScratchSource*)>& run) {
  return MemoryCheck(site, call).run(run);
}

}  // namespace callgate
