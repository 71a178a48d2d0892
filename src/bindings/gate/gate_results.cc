// See the header.
#include "bindings/gate/gate_results.h"

#include <optional>

#include "bindings/arrays/buffer.h"
#include "bindings/python/hooks.h"

namespace callgate::bindings {

bool GateResults::take(std::span<ArrayView> results, const nb::object& value,
                       const DeviceCall* gpu) const {
  std::optional<CopySources> held;
  CopySources* sources = gpu == nullptr ? nullptr : &held.emplace(*gpu);
  if (!tuple_) return take_one(results[0], value.ptr(), 0, gpu, sources);
  if (results.empty() && value.is_none()) return true;
  bool sequence =
      PyTuple_Check(value.ptr()) || (callee_.options().flat_results && PyList_Check(value.ptr()));
  if (!sequence || nb::len(value) != results.size()) {
    std::string got = nb::type_name(value.type()).c_str();
    if (sequence) got += " of " + std::to_string(nb::len(value));
    return mismatch(-1, "a tuple of " + std::to_string(results.size()) + " arrays", got);
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    nb::object item = value[i];
    if (!take_one(results[i], item.ptr(), i, gpu, sources)) return false;
  }
  return true;
}

bool GateResults::write_back(std::span<ArrayView> results, Arguments& outputs) const {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    PyObject* value = outputs.data()[i];
    if (callee_.options().arrays != Arrays::kBuffer) {
      if (!take_one(results[i], value, i, /*gpu=*/nullptr, /*sources=*/nullptr)) return false;
    } else {
      copy_to(results[i], nb::cast<const Buffer&>(nb::handle(value)).view().data);
    }
  }
  return true;
}

bool GateResults::returned_none(const nb::object& value) const {
  if (value.is_none()) return true;
  return mismatch(-1, "None (results are written into `out`)",
                  std::string("a value of type ") + nb::type_name(value.type()).c_str());
}

bool GateResults::take_one(const ArrayView& target, PyObject* value, std::size_t index,
                           const DeviceCall* gpu, CopySources* sources) const {
  auto number = static_cast<int>(index);
  if (value == Py_None) return mismatch(number, to_string(target), "None");
  bool cast = callee_.options().cast;
  std::string got;
  Stored stored = gpu == nullptr ? store(target, value, cast)
                                 : store_on_device(target, value, cast, *gpu, *sources, got);
  if (stored != Stored::kMismatch) return stored == Stored::kYes;
  if (gpu == nullptr && !describe(value, got)) return false;
  return mismatch(number, to_string(target), got);
}

bool GateResults::mismatch(int index, const std::string& expected, const std::string& got) const {
  nb::object made =
      nb::steal(call_python(Hooks::instance().result_error, "ssiss", callee_.name().c_str(),
                            spec_.c_str(), index, expected.c_str(), got.c_str()));
  return false;  // the hook raises
}

}  // namespace callgate::bindings
