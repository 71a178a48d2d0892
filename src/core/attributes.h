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
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/array_view.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// Owns named values, sorted by name. A move keeps pointers to the values valid.
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
  void add_dictionary(std::string_view name, Attributes entries);

  // Returns null if there is no such value. Valid until the next value is added.
  const callgate_attribute* find(std::string_view name) const noexcept;

  std::size_t size() const noexcept { return values_.size(); }

  // True if both have the same values, compared bytewise.
  bool operator==(const Attributes& other) const noexcept {
    return std::ranges::equal(values_, other.values_, &Attributes::same);
  }

  // The value of the given kind. Throws Error for another kind. A missing value gives "",
  // `missing`, or nothing.
  std::string_view text(std::string_view name) const;
  bool flag(std::string_view name) const;
  std::int64_t integer(std::string_view name, std::int64_t missing = 0) const;
  std::span<const std::int64_t> integers(std::string_view name) const {
    return numbers<std::int64_t>(name, DType::kS64, "an array of int64");
  }
  std::span<const std::byte> bytes(std::string_view name) const {
    return numbers<std::byte>(name, DType::kU8, "an array of uint8");
  }
  const Attributes& dictionary(std::string_view name) const;

  // The names "0", "1", ... of a dictionary that stands for a list, up to the first missing one.
  std::vector<std::string> places() const;

  // Removes a dictionary and returns it.
  Attributes take_dictionary(std::string_view name);

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

  static bool same(const callgate_attribute& a, const callgate_attribute& b) noexcept;

  callgate_attribute& add(std::string_view name, int kind, DType dtype, const void* bytes,
                          std::size_t size, std::size_t count);

  // Throws Error for a value of another kind or type.
  const callgate_attribute* find(std::string_view name, int kind, DType dtype,
                                 const char* expected) const;

  // A nonempty dictionary, found by its address, because names may contain zeros or repeat.
  Attributes& nested(const callgate_attribute& value) const;

  // The memory of names, elements and nested values; it never moves.
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<Attributes>> nested_;
  std::vector<callgate_attribute> values_;
};

}  // namespace callgate
