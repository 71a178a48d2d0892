// The names that programs call by.
//
// A program holds names, never pointers. The registry maps a name to its live callee for as long as
// somebody else keeps the callee alive (the gate in Python, or an executable that calls it); it
// owns none of them. Two live callees never share a name. Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/call.h"

namespace callgate {

class Registry {
 public:
  // The registry of this process; never destroyed, since handlers may look up names at exit.
  static Registry& instance();

  // Throws Error(kAlreadyExists) when another live callee has the name.
  void add(const std::shared_ptr<Callee>& callee);

  // Frees the name if `callee` still has it. Executables that hold the callee go on calling it.
  void remove(const Callee& callee) noexcept;

  // Throws Error(kNotFound), with names that are defined, when no live callee has the name.
  std::shared_ptr<Callee> find(std::string_view name) const;

  // The live names, sorted.
  std::vector<std::string> names() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<Callee>> callees_;
};

}  // namespace callgate
