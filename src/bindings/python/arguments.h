// The Python arguments of one call of a gate's callable. The GIL is held.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "bindings/python/python.h"
#include "core/lifetime.h"

namespace callgate::bindings {

// New references to the arrays of one lane; small calls stay on the stack.
class Arguments : Immovable {
 public:
  explicit Arguments(std::size_t capacity) {
    if (capacity > inline_.size()) overflow_.resize(capacity);
  }
  ~Arguments() {
    for (PyObject* object : all()) Py_XDECREF(object);
  }

  // Takes a new reference; false when it is null.
  bool push(PyObject* object) {
    if (object == nullptr) return false;
    data()[count_++] = object;
    return true;
  }
  std::span<PyObject*> all() { return {data(), count_}; }
  PyObject** data() { return overflow_.empty() ? inline_.data() : overflow_.data(); }
  std::size_t size() const { return count_; }

 private:
  std::array<PyObject*, 24> inline_;
  std::vector<PyObject*> overflow_;
  std::size_t count_ = 0;
};

}  // namespace callgate::bindings
