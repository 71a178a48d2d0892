// What a step that throws leaves behind: the steps that follow are taken all the same, and no half
// of what it wrote stays.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace callgate {

// Keeps the first exception of several steps.
class FirstError {
 public:
  // Whether the step threw nothing.
  template <typename Step>
  bool survives(Step&& step) noexcept {
    try {
      step();
      return true;
    } catch (...) {
      if (first_ == nullptr) first_ = std::current_exception();
      return false;
    }
  }

  // Throws what it keeps, if anything, and forgets it.
  void rethrow() {
    if (first_ != nullptr) std::rethrow_exception(std::exchange(first_, nullptr));
  }

 private:
  std::exception_ptr first_;
};

// Takes a step that appends to `text`. Where it throws, `text` is as it was before.
template <typename Step>
void append_whole(std::string& text, Step&& step) {
  const std::size_t before = text.size();
  try {
    step();
  } catch (...) {
    text.resize(before);
    throw;
  }
}

}  // namespace callgate
