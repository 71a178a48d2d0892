// How long objects live.
#pragma once

namespace callgate {

// The process's one object of a type that is made for this; never destroyed, since programs and
// threads that use it may outlast static objects.
template <typename T>
T& immortal() {
  static auto* object = new T();
  return *object;
}

// Base of what is neither copied nor moved.
class Immovable {
 public:
  Immovable(const Immovable&) = delete;
  Immovable& operator=(const Immovable&) = delete;

 protected:
  Immovable() = default;
  ~Immovable() = default;
};

}  // namespace callgate
