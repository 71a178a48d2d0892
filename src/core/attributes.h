// SPDX-License-Identifier: Apache-2.0
// Values that are fixed when a program is traced: numbers, strings, arrays of numbers, and
// dictionaries of these, in the form that kernels see (include/callgate/kernel_abi.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/array_view.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// Owns named values, sorted by name. Moving keeps what views point to.
class Attributes {
 public:
  Attributes() = default;
  Attributes(Attributes&&) = default;
  Attributes& operator=(Attributes&&) = default;

  void add_number(std::string_view name, DType dtype, const void* element) {
    add(name, CALLGATE_NUMBER, dtype, element, storage_bytes(dtype, 1), 1);
  }
  void add_numbers(std::string_view name, DType dtype, const void* elements, std::size_t count) {
    add(name, CALLGATE_NUMBERS, dtype, elements, storage_bytes(dtype, count), count);
  }
  void add_string(std::string_view name, std::string_view text) {
    add(name, CALLGATE_STRING, DType::kInvalid, text.data(), text.size(), text.size());
  }
  void add_dictionary(std::string_view name, Attributes entries) {
    Attributes& kept = *nested_.emplace_back(std::make_unique<Attributes>(std::move(entries)));
    auto& added = add(name, CALLGATE_DICTIONARY, DType::kInvalid, nullptr, 0, kept.size());
    added.data = kept.values_.data();
  }

  // Null where there is no such value. Valid until the next value is added.
  const callgate_attribute* find(std::string_view name) const noexcept {
    auto found = std::ranges::find(values_, name, &callgate_attribute::name);
    return found == values_.end() ? nullptr : &*found;
  }

  std::size_t size() const noexcept { return values_.size(); }

  // True if both hold the same, to the byte.
  bool operator==(const Attributes& other) const noexcept {
    return std::ranges::equal(values_, other.values_, &Attributes::same);
  }

  // A value of its kind; Error for another. Where there is none: "", `missing`, nothing.
  std::string_view text(std::string_view name) const {
    const auto* found = find(name, CALLGATE_STRING, DType::kInvalid, "a string");
    return found == nullptr ? "" : std::string_view(elements<char>(*found), found->count);
  }
  bool flag(std::string_view name) const {
    const callgate_attribute* found = find(name, CALLGATE_NUMBER, DType::kPred, "one bool");
    return found != nullptr && *elements<std::uint8_t>(*found) != 0;  // not every byte is a bool
  }
  std::int64_t integer(std::string_view name, std::int64_t missing = 0) const {
    const callgate_attribute* found = find(name, CALLGATE_NUMBER, DType::kS64, "one int64");
    return found == nullptr ? missing : *elements<std::int64_t>(*found);
  }
  std::span<const std::int64_t> integers(std::string_view name) const {
    return numbers<std::int64_t>(name, DType::kS64, "an array of int64");
  }
  std::span<const std::byte> bytes(std::string_view name) const {
    return numbers<std::byte>(name, DType::kU8, "an array of uint8");
  }
  const Attributes& dictionary(std::string_view name) const {
    static const auto& none = immortal<Attributes>();
    const auto* found = find(name, CALLGATE_DICTIONARY, DType::kInvalid, "a dictionary");
    return found == nullptr || found->count == 0 ? none : nested(*found);
  }

  // The names "0", "1", ... of a dictionary that stands for a list, as far as they go.
  std::vector<std::string> places() const {
    std::vector<std::string> places;
    for (std::string next = "0"; find(next) != nullptr; next = std::to_string(places.size()))
      places.push_back(next);
    return places;
  }

  // Takes a dictionary out.
  Attributes take_dictionary(std::string_view name) {
    const auto* found = find(name, CALLGATE_DICTIONARY, DType::kInvalid, "a dictionary");
    Attributes taken;
    if (found == nullptr) return taken;
    if (found->count != 0) taken = std::move(nested(*found));
    values_.erase(values_.begin() + (found - values_.data()));
    return taken;
  }

 private:
  template <typename T>
  static const T* elements(const callgate_attribute& value) noexcept {
    return static_cast<const T*>(value.data);
  }
  template <typename T>
  std::span<const T> numbers(std::string_view name, DType dtype, const char* expected) const {
    const auto* found = find(name, CALLGATE_NUMBERS, dtype, expected);
    return found == nullptr ? std::span<const T>() : std::span(elements<T>(*found), found->count);
  }

  static bool same(const callgate_attribute& a, const callgate_attribute& b) noexcept {
    if (a.kind != b.kind || a.dtype != b.dtype || a.count != b.count) return false;
    if (std::string_view(a.name) != b.name) return false;
    if (a.kind == CALLGATE_DICTIONARY) {
      auto entries = [](const auto& of) {
        return std::span(elements<callgate_attribute>(of), of.count);
      };
      return std::ranges::equal(entries(a), entries(b), &Attributes::same);
    }
    auto dtype = a.kind == CALLGATE_STRING ? DType::kU8 : static_cast<DType>(a.dtype);
    return a.count == 0 || std::memcmp(a.data, b.data, storage_bytes(dtype, a.count)) == 0;
  }

  callgate_attribute& add(std::string_view name, int kind, DType dtype, const void* bytes,
                          std::size_t size, std::size_t count) {
    // One block: the elements, aligned as new[] aligns, then the name with its final zero.
    auto block = std::make_unique<std::byte[]>(size + name.size() + 1);
    if (size != 0) std::memcpy(block.get(), bytes, size);
    auto* text = reinterpret_cast<char*>(block.get() + size);
    std::ranges::copy(name, text);
    callgate_attribute value{text, block.get(), count, kind, static_cast<std::uint8_t>(dtype)};
    memory_.push_back(std::move(block));
    auto place = std::ranges::lower_bound(values_, name, {}, &callgate_attribute::name);
    return *values_.insert(place, value);
  }

  // Throws Error for one of another kind or type.
  const callgate_attribute* find(std::string_view name, int kind, DType dtype,
                                 const char* expected) const {
    const callgate_attribute* found = find(name);
    if (found == nullptr) return nullptr;
    if (found->kind == kind && found->dtype == static_cast<int>(dtype)) return found;
    std::string got(callgate::name(static_cast<DType>(found->dtype)));
    if (found->kind == CALLGATE_STRING) got = "a string";
    if (found->kind == CALLGATE_DICTIONARY) got = "a dictionary";
    if (found->kind == CALLGATE_NUMBER) got.insert(0, "one ");
    if (found->kind == CALLGATE_NUMBERS) got.insert(0, "an array of ");
    throw Error("attribute '" + std::string(found->name) + "'", expected, got);
  }

  // Of one entry or more. By what the value points to: names may hold zeros, or come twice.
  Attributes& nested(const callgate_attribute& value) const {
    auto entries = [](const auto& each) -> const void* { return each->values_.data(); };
    return **std::ranges::find(nested_, value.data, entries);
  }

  // Memory of the names, the elements and the nested values; none of it moves.
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<Attributes>> nested_;
  std::vector<callgate_attribute> values_;
};

}  // namespace callgate
