// SPDX-License-Identifier: Apache-2.0
// Which image a device gets, and how long modules live, against a driver without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/launch.h"
#include "fake_launch.h"

namespace callgate::cuda {
namespace {

using ::testing::HasSubstr;

class Modules : public fake::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    fake::register_scale();
  }

  static std::string message_of(const std::vector<Image>& images) {
    try {
      ModuleSet("k", images).choose(Device::at(0));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  static std::string chosen(const std::vector<Image>& images) {
    return ModuleSet("k", images).choose(Device::at(0)).code;
  }
  static std::size_t live() {
    fakecuda_live live{};
    fakecuda_count_live(&live);
    return live.modules;
  }
};

TEST_F(Modules, TakeTheDevicesOwnImageRatherThanPtx) {
  EXPECT_EQ(chosen({{"ptx", 0}, {"eighty", 80}, {"ninety", 90}}), "ninety");
}

TEST_F(Modules, TakePtxWhereNoImageIsOfTheDevicesMajorVersion) {
  EXPECT_EQ(chosen({{"eighty", 80}, {"ptx", 0}, {"hundred", 100}}), "ptx");
}

TEST_F(Modules, NameWhatTheyHaveAndWhatIsNeeded) {
  std::string message = message_of({{"", 75}, {"", 80}});
  EXPECT_THAT(message, HasSubstr("kernel 'k' on "));
  EXPECT_THAT(message, HasSubstr("expected an image for compute capability 9.0, or PTX, got images "
                                 "for 7.5, 8.0"));
  EXPECT_THAT(message_of({}), HasSubstr("got none"));
}

TEST_F(Modules, AreLoadedOnceADeviceAndUnloadedWithTheirSet) {
  std::size_t before = live();
  {
    ModuleSet modules("k", {{"image", 90}});
    for (int ordinal : {0, 1, 0, 1}) {
      Device& device = Device::at(ordinal);
      ContextScope current(device);
      EXPECT_NE(modules.function(device, "scale", {}), nullptr);
    }
    EXPECT_EQ(fakecuda_calls("cuModuleLoadData"), 2U);
    EXPECT_EQ(live(), before + 2);
  }
  EXPECT_EQ(fakecuda_calls("cuModuleUnload"), 2U);
  EXPECT_EQ(live(), before);
}

TEST_F(Modules, ThatTheDriverRefusesSayOfWhichImage) {
  ModuleSet modules("k", {{"image", 90}});
  fakecuda_fail("cuModuleLoadData", 209, 0, 1);
  Device& device = Device::at(0);
  ContextScope current(device);
  try {
    modules.function(device, "scale", {});
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("kernel 'k': cuModuleLoadData on "));
    EXPECT_THAT(error.what(), HasSubstr("image for 9.0: CUDA_ERROR_NO_BINARY_FOR_GPU"));
  }
  EXPECT_NE(modules.function(device, "scale", {}), nullptr);  // the next call tries again
}

}  // namespace
}  // namespace callgate::cuda
