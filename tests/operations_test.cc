// Every row of the table of operations, on every SIMD target of this machine.
#include "operations.h"

#include <gtest/gtest.h>

namespace phsa::operations {
namespace {

Doubles AsDoubles(const Arrays& arrays) {
  Doubles out;
  for (const auto& array : arrays) out.emplace_back(array.begin(), array.end());
  return out;
}

class OperationTest : public testing::Test {
 protected:
  void SetUp() override { first_target_ = Name(ActiveSimd()); }
  void TearDown() override { SetSimd(first_target_); }

  // Runs the body for each target, and each operation that it has.
  template <class Body>
  void ForEach(const Body& body) {
    std::vector<Operation> all = Operations(Size::kTest);
    for (const Simd target : SimdTargets()) {
      SetSimd(Name(target));
      SCOPED_TRACE(std::string("target ") + Name(target));
      for (const Operation& op : all) {
        if (op.name.starts_with("linear int6") && !FastProducts().int6) continue;
        SCOPED_TRACE(op.name);
        body(op);
        if (HasFatalFailure()) return;
      }
    }
  }

  std::string first_target_;
};

TEST_F(OperationTest, IsWhatItsDefinitionSaysAlsoInPlaceAndWithThreads) {
  ThreadPool pool(2);
  size_t checked = 0;
  ForEach([&](const Operation& op) {
    const Expected expected = op.reference(AsDoubles(op.inputs));
    std::vector<float> out(op.outputs, std::numeric_limits<float>::quiet_NaN()), threaded = out;
    op.run(op.inputs, out.data(), Init<Executor>());
    ASSERT_EQ(expected.value.size(), out.size());
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.value[i], expected.bound[i]) << i;
    op.run(op.inputs, threaded.data(), pool.executor());
    ASSERT_EQ(threaded, out) << "two threads";
    if (op.in_place) {
      Arrays moved = op.inputs;
      op.run(moved, moved[0].data(), Init<Executor>());
      ASSERT_EQ(moved[0], out) << "in place";
    }
    ++checked;
  });
  EXPECT_GT(checked, 300 * SimdTargets().size());
}

TEST_F(OperationTest, ItsGradientsAreTheSlopesOfItsDefinition) {
  std::mt19937 random(22);
  size_t checked = 0;
  ForEach([&](const Operation& op) {
    if (!op.gradients) return;
    const auto normal = [&](size_t n) { return matrices::RandomFloats(n, static_cast<uint32_t>(random())); };
    const std::vector<float> d_out = normal(op.outputs);
    const Arrays gradients = op.gradients(op.inputs, d_out);
    // Along a random direction in all inputs. The definition is in double precision: the slope is exact to the square
    // of the step.
    Arrays direction;
    for (const auto& input : op.inputs) direction.push_back(normal(input.size()));
    const auto loss = [&](double step) {
      Doubles moved = AsDoubles(op.inputs);
      for (size_t a = 0; a < moved.size(); ++a) {
        for (size_t i = 0; i < moved[a].size(); ++i) moved[a][i] += step * direction[a][i];
      }
      const std::vector<double> value = op.reference(moved).value;
      double sum = 0;
      for (size_t i = 0; i < value.size(); ++i) sum += value[i] * d_out[i];
      return sum;
    };
    constexpr double kStep = 1e-5;
    const double slope = (loss(kStep) - loss(-kStep)) / (2 * kStep);
    double along = 0, size = 0;
    for (size_t a = 0; a < gradients.size(); ++a) {
      ASSERT_EQ(gradients[a].size(), direction[a].size());
      for (size_t i = 0; i < gradients[a].size(); ++i) {
        along += double{direction[a][i]} * gradients[a][i];
        size += std::fabs(gradients[a][i]);
      }
    }
    EXPECT_NEAR(along, slope, 1e-5 * size + 1e-4);
    ++checked;
  });
  EXPECT_GE(checked, PoliciesThat(Runs).size() * SimdTargets().size());
}

}  // namespace
}  // namespace phsa::operations
