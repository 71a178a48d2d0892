// SPDX-License-Identifier: Apache-2.0
// See the header.
#include "bindings/gate/tape.h"

#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "bindings/arrays/views.h"

namespace callgate::bindings {
namespace {

nb::tuple type_of(const ArrayView& view) {
  return nb::make_tuple(static_cast<int>(view.dtype), tuple_of(view.shape()));
}

nb::tuple values_of(std::span<const ArrayView> views) {
  nb::list values;
  for (const ArrayView& view : views) {
    nb::tuple type = type_of(view);
    values.append(nb::make_tuple(nb::object(type[0]), nb::object(type[1]),
                                 nb::bytes(static_cast<const char*>(view.data), view.nbytes())));
  }
  return nb::tuple(values);
}

nb::object text_of(const std::string& text) { return nb::str(text.data(), text.size()); }

// The tape's function; no object without a block.
nb::object function_of_tape() {
  nb::ft_lock_guard lock(tape.mutex);
  return nb::borrow(tape.function);
}

}  // namespace

TapedCall::TapedCall(const std::string& gate, const SiteSpec& site, std::int64_t lane,
                     std::span<const ArrayView> operands, std::span<ArrayView> results,
                     const CallContext& context) {
  nb::object function = function_of_tape();
  if (!function.is_valid()) return;  // its block has just ended
  nb::list types;
  for (const ArrayView& view : results) types.append(type_of(view));
  nb::object name = text_of(gate), place = text_of(site.site), spec = text_of(site.spec);
  nb::tuple values = values_of(operands), expected = nb::tuple(types);
  nb::object answer =
      call_python(function.ptr(), "OOOLiLLOO", name.ptr(), place.ptr(), spec.ptr(),
                  static_cast<long long>(lane), static_cast<int>(context.shard),
                  static_cast<long long>(context.device), static_cast<long long>(context.run),
                  values.ptr(), expected.ptr());
  if (!answer.is_valid()) nb::raise_python_error();
  if (answer.is_none()) return;
  if (!PyTuple_Check(answer.ptr())) {
    finish_ = std::move(answer);
    return;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto bytes = nb::cast<nb::bytes>(nb::object(answer[i]));
    if (bytes.size() != results[i].nbytes())
      raise(PyExc_RuntimeError, "a recorded result has another size than " +
                                    to_string(static_cast<const ArrayView&>(results[i])));
    if (bytes.size() != 0) std::memcpy(results[i].data, bytes.c_str(), bytes.size());
  }
  answered_ = true;
}

void TapedCall::made(std::span<const ArrayView> results,
                     const std::optional<nb::python_error>& raised) {
  if (!finish_.is_valid()) return;
  nb::object given = raised ? nb::object(nb::none()) : nb::object(values_of(results));
  nb::object error = raised ? nb::borrow(raised->value()) : nb::object(nb::none());
  nb::object done = call_python(finish_.ptr(), "OO", given.ptr(), error.ptr());
  if (!done.is_valid()) nb::raise_python_error();
}

void bind_tape(nb::module_& module) {
  module.def(
      "set_tape",
      [](nb::object function, bool replays) {
        const bool on = !function.is_none();
        PyObject* before = on ? function.release().ptr() : nullptr;
        {
          nb::ft_lock_guard lock(tape.mutex);
          std::swap(before, tape.function);
          tape.on.store(on, std::memory_order_relaxed);                  // see Tape
          contexts_wanted.store(on, std::memory_order_relaxed);          // see there
          tape.replays.store(replays && on, std::memory_order_relaxed);  // see Tape
        }
        Py_XDECREF(before);
      },
      nb::arg("function").none(), nb::arg("replays") = false,
      "Reports each call of a gate to function(gate, site, spec, lane, shard, device, run,\n"
      "operands, types). It returns the results' bytes, None, or a function to call with the "
      "call's\n"
      "results or exception. None ends the reports.");
  module.def(
      "tape",
      [] {
        nb::object function = function_of_tape();
        return function.is_valid() ? function : nb::object(nb::none());
      },
      "The function that receives calls, or None.");
  module.def("is_replaying", &is_replaying, "True if this function answers the calls.");
}

}  // namespace callgate::bindings
