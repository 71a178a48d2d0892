// SPDX-License-Identifier: Apache-2.0
// The arguments of a callable for one lane's arrays. The GIL is held in all of these.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "core/array_view.h"

namespace callgate::bindings {

// New references to one lane's arrays, as arguments; small calls stay on the stack.
class Arguments : Immovable {
 public:
  explicit Arguments(std::size_t capacity) : room_(capacity) {}
  ~Arguments() {
    for (PyObject* object : all()) Py_XDECREF(object);
  }

  void push(nb::object object) { data()[count_++] = object.release().ptr(); }
  std::span<PyObject*> all() { return {data(), count_}; }
  PyObject** data() { return room_.data(); }
  std::size_t size() const { return count_; }

 private:
  SmallBuffer<PyObject*, 24> room_;
  std::size_t count_ = 0;
};

// The views of one kind in a call, and their memory.
struct Views : Arguments {
  Views(const char* of_kind, std::span<const ArrayView> shown, bool is_own)
      : Arguments(shown.size()), kind(of_kind), memory(shown), own(is_own) {}

  bool escaped() {
    return !own && std::ranges::any_of(all(), [](PyObject* view) { return count_of(view) != 1; });
  }
  // The number of references. Since Python 3.14 the upper half of the word that the stable ABI of
  // Python 3.12 reads has flags.
  static std::uint32_t count_of(PyObject* view) {
    return static_cast<std::uint32_t>(Py_REFCNT(view));
  }
  void add_to(nb::list& suspects) {
    for (std::size_t i = 0; !own && i < size(); ++i)
      suspects.append(nb::make_tuple(kind, i, nb::borrow(data()[i]), number_of(memory[i].data),
                                     memory[i].nbytes()));
  }

  const char* kind;
  std::span<const ArrayView> memory;
  bool own;               // private copies, which may outlive the call
  bool reusable = false;  // by the site's next call
};

}  // namespace callgate::bindings
