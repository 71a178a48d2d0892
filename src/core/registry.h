// The names that programs call by.
//
// A program holds names, never pointers. The registry maps a name to its live callee for as long as
// somebody else keeps the callee alive (the gate in Python, or an executable that calls it); it
// owns none of them. Two live callees never share a name. Any thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/call.h"
#include "core/lifetime.h"

namespace callgate {

class Registry {
 public:
  // The registry of this process; never destroyed, since handlers may look up names at exit.
  static Registry& instance() { return immortal<Registry>(); }

  // Throws Error(kAlreadyExists) when another live callee has the name.
  void add(const std::shared_ptr<Callee>& callee);

  // Frees the name if `callee` still has it. Executables that hold the callee go on calling it.
  void remove(const Callee& callee) noexcept;

  // The live callee of the name. One that is not there yet is asked of the resolver. Throws
  // Error(kNotFound), with names that are defined, when there is none.
  std::shared_ptr<Callee> find(std::string_view name) const;

  // Called without a lock for names that are not defined; returns true once it has defined the
  // name: a variant of a kernel, say, that nothing in this process has asked for yet.
  using Resolver = std::function<bool(const std::string& name)>;
  void set_resolver(Resolver resolver);

  // The live names, sorted.
  std::vector<std::string> names() const;

 private:
  std::shared_ptr<Callee> lookup(std::string_view name) const;

  mutable std::mutex mutex_;
  Resolver resolver_;
  std::unordered_map<std::string, std::weak_ptr<Callee>> callees_;
};

}  // namespace callgate
