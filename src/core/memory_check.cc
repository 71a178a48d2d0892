// See the header.
#include "core/memory_check.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace callgate {
namespace {

constexpr std::size_t kAlignment = 64;  // as XLA's own buffers
constexpr std::size_t kLeastGuard = std::size_t{4} << 10;
constexpr std::size_t kMostGuard = std::size_t{1} << 20;
constexpr std::size_t kMostFindings = 8;

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
    std::string digits = std::to_string(element % extent);
    element /= extent;
    text.insert(0, text.empty() ? digits : digits + ",");
  }
  return "[" + text + "]";
}

}  // namespace

// --- Guards --------------------------------------------------------------------------------------

MemoryCheck::Guarded::Guarded(std::size_t size, std::size_t alignment, DType type, std::size_t own,
                              bool is_result)
    : memory(nullptr, &std::free),
      bytes(size),
      // As large as the array, within limits: a loop with a wrong extent runs over by a row or
      // more.
      guard((std::clamp(size, kLeastGuard, kMostGuard) / alignment + 1) * alignment),
      after(guard + (alignment - size % alignment) % alignment),
      dtype(type),
      number(own),
      result(is_result) {
  memory.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, guard + bytes + after)));
  if (memory == nullptr) throw std::bad_alloc();
  data = memory.get() + guard;
}

void MemoryCheck::Guarded::fill(Fill fill) noexcept {
  repeat(memory.get(), guard + bytes + after, GuardPattern(dtype, fill, number));
  if (result) repeat(data, bytes, GuardPattern(dtype, fill, kResults));
}

std::string MemoryCheck::Guarded::damage(Fill fill, std::size_t width,
                                         std::span<const GuardPattern> others) const {
  GuardPattern with(dtype, fill, number);
  const std::byte* bytes_here = memory.get();
  auto differs = [&](std::size_t i) { return bytes_here[i] != with.at(i); };
  // Whether the byte is of an element that has become another array's pattern.
  auto copied = [&](std::size_t i) {
    std::size_t first = i / with.width * with.width;
    auto is_of = [&](const GuardPattern& pattern) {
      for (std::size_t k = first; k < first + with.width; ++k) {
        if (bytes_here[k] != pattern.at(k)) return false;
      }
      return true;
    };
    return !is_of(with) && std::ranges::any_of(others, is_of);
  };
  auto changed = [&](std::size_t i) { return differs(i) || (with.width > 1 && copied(i)); };
  auto text = [&](std::size_t count, std::size_t distance, const char* side,
                  const std::string& element) {
    return "wrote outside of it: " + std::to_string(count) + " bytes, the first of them " +
           std::to_string(distance) + " bytes " + side + ", where element " + element + " would be";
  };
  // The write that is nearest to the array comes first, so the guard before it is read backwards.
  std::size_t count = 0, nearest = 0;
  for (std::size_t i = guard; i-- > 0;)
    if (changed(i) && count++ == 0) nearest = guard - i;
  if (count != 0) {
    auto element = static_cast<std::ptrdiff_t>((nearest + width - 1) / width);
    return text(count, nearest, "before its start", std::to_string(-element));
  }
  std::size_t end = guard + bytes;
  for (std::size_t i = end; i < end + after; ++i)
    if (changed(i) && count++ == 0) nearest = i - end;
  if (count == 0) return {};
  return text(count, nearest, "after its end", std::to_string((bytes + nearest) / width));
}

// --- The check -----------------------------------------------------------------------------------

MemoryCheck::MemoryCheck(const CheckedSite& site, const Call& call)
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
    operand.data =
        own ? operand_copies_.back().data : results_[static_cast<std::size_t>(alias_.back())].data;
  }
}

void MemoryCheck::prepare(Fill fill) {
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

void* MemoryCheck::take(std::size_t bytes, std::size_t alignment) noexcept try {
  std::scoped_lock lock(mutex_);
  // A float's pattern: most scratch memory holds floats, and NaN shows in what is made of it.
  Guarded& block = scratch_.emplace_back(bytes, std::max(alignment, kAlignment), DType::kF32,
                                         arrays_ + scratch_.size() + 1, /*result=*/false);
  block.fill(fill_);
  return block.data;
} catch (const std::bad_alloc&) {
  return nullptr;
}

std::string MemoryCheck::run(const std::function<void(const Call&, ScratchSource*)>& run) {
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
    find_unwritten(site_.repeatable);
    if (!findings_.empty()) return false;
    if (!site_.repeatable || same_results()) return true;
    // Another pattern, other results; or results that are other ones each time.
    std::vector<std::vector<std::byte>> second = snapshot();
    if (!once(Fill::kRare)) return false;
    if (same_results()) {
      for (std::size_t r = 0; r < results_.size(); ++r) copy_to(results_[r], second[r].data());
      find_dependence();
    }
    return findings_.empty();
  };
  if (passed()) publish();
  std::string text;
  for (std::size_t i = 0; i < std::min(findings_.size(), kMostFindings); ++i)
    text += (i == 0 ? "" : "\n") + findings_[i];
  if (findings_.size() > kMostFindings)
    text += "\nand " + std::to_string(findings_.size() - kMostFindings) + " more";
  return text;
}

std::string MemoryCheck::subject(const char* side, std::size_t index, const ArrayView& view,
                                 std::span<const std::string> labels) const {
  std::string label = index < labels.size() ? labels[index] + " (" : std::string("(");
  return "memory check: " + label + side + " " + std::to_string(index) + ", " + to_string(view) +
         ") ";
}

std::vector<GuardPattern> MemoryCheck::patterns(Fill fill) const {
  std::vector<GuardPattern> all;
  for (const Guarded& result : result_copies_) {
    all.emplace_back(result.dtype, fill, kResults);
    all.emplace_back(result.dtype, fill, result.number);
  }
  for (const Guarded& operand : operand_copies_)
    all.emplace_back(operand.dtype, fill, operand.number);
  for (const Guarded& block : scratch_) all.emplace_back(block.dtype, fill, block.number);
  return all;
}

// After a run: guards and operands.
void MemoryCheck::inspect(Fill fill) {
  std::vector<GuardPattern> others = patterns(fill);
  for (std::size_t i = 0; i < operands_.size(); ++i) {
    if (alias_[i] >= 0) continue;
    const ArrayView& was = original_.operands[i];
    auto name = [&] { return subject("operand", i, was, site_.operand_labels); };
    std::string damage = operand_copies_[i].damage(fill, element_bytes(was.dtype), others);
    if (!damage.empty()) findings_.push_back(name() + damage);
    if (was.nbytes() == 0 || std::memcmp(was.data, operands_[i].data, was.nbytes()) == 0) continue;
    const auto *old = static_cast<const std::byte*>(was.data), *now = operand_copies_[i].data;
    auto at = static_cast<std::size_t>(std::mismatch(old, old + was.nbytes(), now).first - old);
    findings_.push_back(name() + "is an input and was written to, the first time at element " +
                        index_text(was, at / element_bytes(was.dtype)));
  }
  for (std::size_t r = 0; r < results_.size(); ++r) {
    std::string damage = result_copies_[r].damage(fill, element_bytes(results_[r].dtype), others);
    if (!damage.empty())
      findings_.push_back(subject("result", r, results_[r], site_.result_labels) + damage);
  }
  for (const Guarded& block : scratch_) {
    std::string damage = block.damage(fill, 1, others);
    if (damage.empty()) continue;
    findings_.push_back("memory check: scratch memory of " + std::to_string(block.bytes) +
                        " bytes: " + damage);
  }
}

// After the last run that is needed to tell: elements that have what they were filled with.
void MemoryCheck::find_unwritten(bool repeated) {
  for (std::size_t r = 0; r < results_.size(); ++r) {
    const ArrayView& view = results_[r];
    GuardPattern first(view.dtype, Fill::kRare, kResults);
    GuardPattern last(view.dtype, Fill::kOther, kResults);
    if (starts_filled_[r] || is_packed(view.dtype) || (!repeated && !first.rare)) continue;
    const std::byte* now = result_copies_[r].data;
    const std::byte* then = repeated ? first_[r].data() : now;
    std::size_t count = 0, found = 0;
    for (std::size_t i = 0; i < view.size(); ++i) {
      if (std::memcmp(then + i * first.width, first.bytes.data(), first.width) != 0) continue;
      if (repeated && std::memcmp(now + i * last.width, last.bytes.data(), last.width) != 0)
        continue;
      if (count++ == 0) found = i;
    }
    if (count == 0) continue;
    findings_.push_back(subject("result", r, view, site_.result_labels) +
                        "was not written completely: " + std::to_string(count) + " of " +
                        std::to_string(view.size()) +
                        " elements were left as they were, the first " + index_text(view, found));
  }
}

// The results as they are now against those of the first run.
bool MemoryCheck::same_results() const {
  for (std::size_t r = 0; r < results_.size(); ++r) {
    if (!first_[r].empty() &&
        std::memcmp(first_[r].data(), results_[r].data, first_[r].size()) != 0)
      return false;
  }
  return true;
}

// The results as they are now differ from the first run's, and that is the pattern's doing.
void MemoryCheck::find_dependence() {
  for (std::size_t r = 0; r < results_.size(); ++r) {
    const std::byte *then = first_[r].data(), *now = result_copies_[r].data;
    auto at =
        static_cast<std::size_t>(std::mismatch(then, then + first_[r].size(), now).first - then);
    if (at == first_[r].size()) continue;
    findings_.push_back(
        subject("result", r, results_[r], site_.result_labels) +
        "depends on memory that was never written: in the results, in scratch memory, or outside "
        "of the arrays; the first such element is " +
        index_text(results_[r], at / element_bytes(results_[r].dtype)));
  }
}

std::vector<std::vector<std::byte>> MemoryCheck::snapshot() const {
  std::vector<std::vector<std::byte>> copies;
  copies.reserve(result_copies_.size());
  for (const Guarded& copy : result_copies_) copies.emplace_back(copy.data, copy.data + copy.bytes);
  return copies;
}

void MemoryCheck::publish() const {
  for (std::size_t r = 0; r < results_.size(); ++r) copy_to(original_.results[r], results_[r].data);
}

}  // namespace callgate
