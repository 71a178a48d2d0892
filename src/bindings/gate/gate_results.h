// What a gate's callable gives back, and its way into XLA's memory. The GIL is held.
#pragma once

#include <span>
#include <string>

#include "bindings/arrays/device_results.h"
#include "bindings/gate/gate.h"
#include "bindings/python/arguments.h"
#include "core/array_view.h"

namespace callgate::bindings {

// Of one call site. All that it refers to lives as long as the site. False with a Python error.
class GateResults {
 public:
  GateResults(const PyCallee& callee, const std::string& spec, bool tuple)
      : callee_(callee), spec_(spec), tuple_(tuple) {}

  // Copies a return-style callable's results. `gpu` is null on the host.
  bool take(std::span<ArrayView> results, const nb::object& value, const DeviceCall* gpu) const;

  // Copies what the callable wrote into private results.
  bool write_back(std::span<ArrayView> results, Arguments& outputs) const;

  bool returned_none(const nb::object& value) const;

 private:
  // `sources` are null on the host.
  bool take_one(const ArrayView& target, PyObject* value, std::size_t index, const DeviceCall* gpu,
                CopySources* sources) const;
  bool mismatch(int index, const std::string& expected, const std::string& got) const;

  const PyCallee& callee_;
  const std::string& spec_;
  bool tuple_;
};

}  // namespace callgate::bindings
