// SPDX-License-Identifier: Apache-2.0
// See the header.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>

#include "core/array_view.h"
#include "kernels/kernel_debug.h"

namespace callgate {
namespace {

// The bytes of an element; 1 for packed types.
std::size_t element_bytes(DType dtype) noexcept {
  return static_cast<std::size_t>(std::max(bits(dtype) / 8, 1));
}

// The byte patterns of a memory check. Computations hardly ever produce them. Each array of a call
// has a number and a pattern; 0 is the initial content of all results. The patterns of two numbers
// differ in every distinguishing byte. So the common loop that goes one element too far,
// y[i] = x[i], puts another array's pattern in the wrong place, at any distance. Types of one and
// two bytes have 252 such patterns; beyond, only every second element differs.
//
// In floating-point types of two bytes or more, the rare pattern is a signaling NaN with a payload
// (for bfloat16 a quiet one from the 64th on), so reads outside an array show. Types of one byte
// have too few NaNs: the first numbers have them, the others have other values.
struct GuardPattern {
  // A kernel without effects runs with both, which have no distinguishing byte in common.
  enum class Fill { kRare, kOther };

  GuardPattern(DType dtype, Fill fill, std::size_t number) noexcept
      : width(element_bytes(dtype)),
        period(width <= 2 ? 2 * width : width),  // small types: two elements encode more
        rare(fill == Fill::kRare && (width >= 4 || (width == 2 && is_inexact(dtype)))) {
    bool small = width <= 2;
    Alphabet letters = alphabet(dtype);
    // Two digits; if the first ones differ, so do the second ones.
    std::size_t low = number % kLetters;
    std::size_t high = (number / kLetters + (small ? 1 : 5) * low) % kLetters;
    auto put = [&](std::size_t place, int byte) { bytes[place] = static_cast<std::byte>(byte); };
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bool second = (small ? i / width : i) % 2 != 0;
      std::size_t letter = (second ? high : low) + (fill == Fill::kRare ? 0 : kLetters / 2);
      put(i, letters[letter % kLetters]);
    }
    if (!is_inexact(dtype) || width == 1) return;
    // The last bytes of each number make it a NaN, or keep it from being one.
    std::size_t real = dtype == DType::kC64 ? 4 : dtype == DType::kC128 ? 8 : width;
    for (std::size_t end = real; end <= bytes.size(); end += real) {
      if (fill == Fill::kOther) {
        put(end - 1, 0x5c);
      } else if (dtype == DType::kBF16) {
        // The low bytes of its NaNs, and their sign; signaling ones come first.
        std::size_t digit = end % 4 == 0 ? high : low, nan = digit % (kLetters / 2);
        put(end - 2, static_cast<int>(nan < 63 ? 0x81 + (36 + nan) % 63 : 0xc1 + (nan - 63)));
        put(end - 1, digit < kLetters / 2 ? 0x7f : 0xff);
      } else if (dtype == DType::kF16) {
        put(end - 1, 0x7d);
      } else {
        put(end - 2, real == 4 ? 0xa5 : 0xf5);
        put(end - 1, 0x7f);
      }
    }
  }

  // The byte for a place, counted from a multiple of `period`.
  std::byte at(std::size_t place) const noexcept { return bytes[place % period]; }
  std::array<std::byte, 16> bytes{};
  std::size_t width;   // of an element
  std::size_t period;  // of the pattern
  bool rare;           // a value that hardly any computation produces

 private:
  // The usable byte values: not 0, 1 and 255, which kernels write most.
  static constexpr std::size_t kLetters = 252;
  using Alphabet = std::array<std::uint8_t, kLetters>;

  // Each appears once. The NaNs of a one-byte type come first.
  static Alphabet alphabet(DType dtype) noexcept {
    Alphabet letters{};
    // Neighbors differ in many bits; 0xa5 comes first. 37 and 252 have no common factor.
    for (std::size_t i = 0; i < kLetters; ++i)
      letters[i] = static_cast<std::uint8_t>(2 + (163 + 37 * i) % kLetters);
    std::string_view first = nans(dtype);
    for (std::size_t i = 0; i < first.size(); ++i) {
      auto letter = static_cast<std::uint8_t>(first[i]);
      auto* there = std::ranges::find(letters, letter);
      if (there != letters.end()) *there = letters[i];
      letters[i] = letter;
    }
    return letters;
  }

  static std::string_view nans(DType dtype) noexcept {
    switch (dtype) {
      case DType::kF8E5M2: return "\x7d\xfd\x7e\xfe\x7f\xff";
      case DType::kF8E4M3:
      case DType::kF8E3M4: return "\x7d\xfd\x7e\xfe\x7f\xff\x79\xf9\x7a\xfa\x7b\xfb";
      case DType::kF8E4M3FN: return "\x7f\xff";
      case DType::kF8E4M3B11FNUZ:
      case DType::kF8E4M3FNUZ:
      case DType::kF8E5M2FNUZ: return "\x80";
      case DType::kF8E8M0FNU: return "\xff";
      default: return {};
    }
  }
};

using Fill = GuardPattern::Fill;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kAlignment = 64;  // as XLA's own buffers
constexpr std::size_t kLeastGuard = std::size_t{4} << 10, kMostGuard = std::size_t{1} << 20;
constexpr std::size_t kMostFindings = 8;
// The pattern of results. No guard has it, so a result computed from values outside an array always
// changes.
constexpr std::size_t kResults = 0;

// Fills `memory` with a repeated pattern; `bytes` need not be a multiple of its period.
void repeat(std::byte* memory, std::size_t bytes, const GuardPattern& pattern) {
  std::size_t done = std::min(pattern.period, bytes);
  std::memcpy(memory, pattern.bytes.data(), done);
  for (; done < bytes; done += std::min(done, bytes - done))
    std::memcpy(memory + done, memory, std::min(done, bytes - done));
}

// "[1,2]": the position of an element.
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

// An array's memory, or scratch memory, between two guards. All of it has the pattern `number`,
// except that a result's inside has kResults.
struct Guarded {
  Guarded(std::string subject, const ArrayView& array, std::size_t size, std::size_t alignment,
          std::size_t own)
      : name(std::move(subject)),
        original(array),
        width(element_bytes(array.dtype)),
        number(own),
        memory(nullptr, &std::free),
        bytes(size),
        // As large as the array, within limits, because a loop with a wrong extent may overrun by a
        // row.
        guard((std::clamp(size, kLeastGuard, kMostGuard) / alignment + 1) * alignment),
        after(guard + (alignment - size % alignment) % alignment) {
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, guard + bytes + after)));
    if (memory == nullptr) throw std::bad_alloc();
    data = memory.get() + guard;
  }

  GuardPattern pattern(Fill fill) const noexcept { return {original.dtype, fill, number}; }
  GuardPattern inside(Fill fill) const noexcept { return {original.dtype, fill, kResults}; }
  void fill(Fill fill) noexcept {
    repeat(memory.get(), guard + bytes + after, pattern(fill));
    if (result) repeat(data, bytes, inside(fill));
  }

  std::string name;    // the beginning of findings
  ArrayView original;  // XLA's array; scratch memory only has the type
  std::size_t width;   // of an element, for findings
  std::size_t number;
  bool result = false, filled = true;  // starts with the original's values
  std::unique_ptr<std::byte, void (*)(void*)> memory;
  std::byte* data = nullptr;
  std::size_t bytes, guard, after;  // of the array, before it, and after it
};

// The distance of the first write outside, in bytes, its side, and the number of changed bytes.
// `others`: the patterns of the call's arrays. An element from another array counts as changed as a
// whole, although patterns may have some bytes in common.
std::string damage(const Guarded& block, Fill fill, std::span<const GuardPattern> others) {
  const GuardPattern with = block.pattern(fill);
  const std::size_t width = block.width;
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
    return "wrote outside it: " + std::to_string(count) + " bytes, the first of them " +
           std::to_string(distance) + " bytes " + side + ", where element " +
           std::to_string(element) + " would be";
  };
  // The write nearest to the array is reported first, so the guard before it is read backwards.
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
  MemoryCheck(const KernelLabels& labels, bool repeatable, const Call& call)
      : repeatable_(repeatable),
        context_(call.context),
        operand_views_(call.operands.begin(), call.operands.end()),
        result_views_(call.results.begin(), call.results.end()) {
    auto add = [&](std::list<Guarded>::iterator place, const char* side, std::size_t index,
                   const std::string& label, const ArrayView& array) {
      return blocks_.emplace(place,
                             "memory check: " + label + " (" + side + " " + std::to_string(index) +
                                 ", " + to_string(array) + ") ",
                             array, array.nbytes(), kAlignment, ++arrays_);
    };
    for (std::size_t r = 0; r < result_views_.size(); ++r) {
      Guarded& result = *add(blocks_.end(), "result", r, labels.results[r], call.results[r]);
      result.result = true;
      result.filled = labels.updated[r] != 0;
      result_views_[r].data = result.data;
      results_.push_back(&result);
    }
    const auto first_result = blocks_.begin();
    for (std::size_t i = 0; i < operand_views_.size(); ++i) {
      ArrayView& operand = operand_views_[i];
      Guarded* own = nullptr;
      for (Guarded* result : results_)
        if (operand.nbytes() != 0 && operand.data == result->original.data)
          (own = result)->filled = true;
      if (own == nullptr) own = &*add(first_result, "operand", i, labels.operands[i], operand);
      operand.data = own->data;
    }
    first_scratch_ = blocks_.size();
  }

  std::string run(const std::function<void(const Call&, ScratchSource*)>& run) {
    auto once = [&](Fill fill) {
      prepare(fill);
      run(Call{operand_views_, result_views_, context_}, this);
      inspect(fill);
      return findings_.empty();
    };
    auto passed = [&] {
      if (!once(Fill::kRare)) return false;
      if (repeatable_) {
        first_ = snapshot();
        if (!once(Fill::kOther)) return false;
      }
      find_unwritten();
      if (!findings_.empty()) return false;
      if (!repeatable_ || snapshot() == first_) return true;
      // Another pattern gives other results, or the results differ each time.
      std::vector<Bytes> second = snapshot();
      if (!once(Fill::kRare)) return false;
      if (snapshot() == first_) {
        for (std::size_t r = 0; r < results_.size(); ++r)
          copy_to(result_views_[r], second[r].data());
        find_dependence();
      }
      return findings_.empty();
    };
    if (passed())
      for (const Guarded* result : results_) copy_to(result->original, result->data);
    std::string text;
    for (std::size_t i = 0; i < std::min(findings_.size(), kMostFindings); ++i)
      text += (i == 0 ? "" : "\n") + findings_[i];
    if (findings_.size() > kMostFindings)
      text += "\nand " + std::to_string(findings_.size() - kMostFindings) + " more";
    return text;
  }

  void* take(std::size_t bytes, std::size_t alignment) noexcept override try {
    std::scoped_lock lock(mutex_);
    // A float's pattern: most scratch memory holds floats, and NaN propagates into their results.
    constexpr ArrayView kFloats{nullptr, nullptr, 0, DType::kF32};
    Guarded& block = blocks_.emplace_back(
        "memory check: scratch memory of " + std::to_string(bytes) + " bytes: ", kFloats, bytes,
        std::max(alignment, kAlignment), arrays_ + blocks_.size() - first_scratch_ + 1);
    block.width = 1;
    block.fill(fill_);
    return block.data;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }

 private:
  void prepare(Fill fill) {
    fill_ = fill;
    while (blocks_.size() > first_scratch_) blocks_.pop_back();
    for (Guarded& block : blocks_) {
      block.fill(fill);
      if (block.filled && block.bytes != 0)
        std::memcpy(block.data, block.original.data, block.bytes);
    }
  }

  // After a run: checks guards and operands.
  void inspect(Fill fill) {
    std::vector<GuardPattern> patterns;  // of the call's arrays
    for (const Guarded& block : blocks_) {
      patterns.push_back(block.pattern(fill));
      if (block.result) patterns.push_back(block.inside(fill));
    }
    for (const Guarded& block : blocks_) {
      std::string found = damage(block, fill, patterns);
      if (!found.empty()) findings_.push_back(block.name + found);
      if (block.result || block.original.data == nullptr) continue;
      const auto* was = static_cast<const std::byte*>(block.original.data);
      std::size_t at = first_difference(was, block.bytes, block.data);
      if (at == block.bytes) continue;
      findings_.push_back(block.name +
                          "is an input and was written to, the first time at element " +
                          index_text(block.original, at / block.width));
    }
  }

  // After the last necessary run: finds elements that still have their initial pattern.
  void find_unwritten() {
    for (std::size_t r = 0; r < results_.size(); ++r) {
      const Guarded& result = *results_[r];
      const ArrayView& view = result.original;
      GuardPattern first = result.inside(Fill::kRare), last = result.inside(Fill::kOther);
      if (result.filled || is_packed(view.dtype) || (!repeatable_ && !first.rare)) continue;
      auto left = [](const std::byte* memory, std::size_t element, const GuardPattern& as) {
        return std::memcmp(memory + element * as.width, as.bytes.data(), as.width) == 0;
      };
      const std::byte* now = result.data;
      std::size_t count = 0, found = 0;
      for (std::size_t i = 0; i < view.size(); ++i) {
        if (!left(repeatable_ ? first_[r].data() : now, i, first)) continue;
        if (repeatable_ && !left(now, i, last)) continue;
        if (count++ == 0) found = i;
      }
      if (count == 0) continue;
      findings_.push_back(result.name + "was not written completely: " + std::to_string(count) +
                          " of " + std::to_string(view.size()) +
                          " elements were not written, the first is " + index_text(view, found));
    }
  }

  // Checks whether the results differ from the first run's because of the pattern.
  void find_dependence() {
    for (std::size_t r = 0; r < results_.size(); ++r) {
      const Guarded& result = *results_[r];
      std::size_t at = first_difference(first_[r].data(), result.bytes, result.data);
      if (at == result.bytes) continue;
      findings_.push_back(result.name +
                          "depends on memory that was never written: in the results, in scratch "
                          "memory, or outside the arrays; the first such element is " +
                          index_text(result.original, at / result.width));
    }
  }

  std::vector<Bytes> snapshot() const {
    std::vector<Bytes> copies(results_.size());
    for (std::size_t r = 0; r < results_.size(); ++r)
      copies[r].assign(results_[r]->data, results_[r]->data + results_[r]->bytes);
    return copies;
  }

  const bool repeatable_;  // the kernel has no effects
  CallContext context_;
  Fill fill_ = Fill::kRare;
  std::mutex mutex_;           // guards blocks_, to which a kernel's threads add
  std::list<Guarded> blocks_;  // operands that aren't results, results, scratch memory
  std::vector<Guarded*> results_;
  std::vector<ArrayView> operand_views_, result_views_;  // of the blocks
  std::vector<Bytes> first_;                             // the results of the first run
  std::size_t arrays_ = 0, first_scratch_ = 0;           // numbers in use; index in blocks_
  std::vector<std::string> findings_;
};

}  // namespace

std::string check_memory(const KernelLabels& labels, bool repeatable, const Call& call,
                         const std::function<void(const Call&, ScratchSource*)>& run) {
  return MemoryCheck(labels, repeatable, call).run(run);
}

}  // namespace callgate
