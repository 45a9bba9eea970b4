// Every row of the table of operations (tests/operations.h) in a model's sizes: checked once, then timed, on one SIMD
// target or on all.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "operations.h"

namespace {

using phsa::operations::Operation;

constexpr const char* kOptions =
    "  --threads N     (1)\n"
    "  --target NAME   of phsa_targets(), or all (the one in use)\n"
    "  --only TEXT     rows whose name has it\n"
    "  --repeat N      runs of which the fastest counts (5)\n"
    "  --check 0|1     compare the results with the definition first (1)\n";

// The largest error of a result, in units of what it may be.
double Error(const Operation& op, const std::vector<float>& out) {
  phsa::operations::Doubles in;
  for (const auto& array : op.inputs) in.emplace_back(array.begin(), array.end());
  const phsa::operations::Expected expected = op.reference(in);
  double worst = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const double error = std::fabs(out[i] - expected.value[i]) / expected.bound[i];
    worst = error > worst || std::isnan(error) ? error : worst;
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) try {
  int threads = 1, repeat = 5;
  bool check = true;
  std::string target, only;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--threads")
      threads = std::max(1, std::atoi(value.c_str()));
    else if (flag == "--repeat")
      repeat = std::max(1, std::atoi(value.c_str()));
    else if (flag == "--check")
      check = value != "0";
    else if (flag == "--target")
      target = value;
    else if (flag == "--only")
      only = value;
    else
      return std::fputs(kOptions, flag == "--help" ? stdout : stderr), flag == "--help" ? 0 : 2;
  }
  phsa::ThreadPool pool(threads);
  std::vector<phsa::Simd> targets = {phsa::ActiveSimd()};
  if (target == "all") {
    targets = phsa::SimdTargets();
    targets.pop_back();  // the reference is what the others are compared with
  } else if (!target.empty()) {
    phsa::SetSimd(target);
    targets = {phsa::ActiveSimd()};
  }
  bool right = true;
  std::printf("| operation | target | ms | GFLOP/s | error of what it may be |\n|---|---|---|---|---|\n");
  for (const Operation& op : phsa::operations::Operations(phsa::operations::Size::kModel)) {
    if (op.name.find(only) == std::string::npos) continue;
    for (const phsa::Simd simd : targets) {
      phsa::SetSimd(phsa::Name(simd));
      if (op.name.starts_with("linear int6") && !phsa::FastProducts().int6) continue;
      std::vector<float> out(op.outputs);
      double best = 1e30;
      for (int n = 0; n < repeat; ++n) {
        const auto start = std::chrono::steady_clock::now();
        op.run(op.inputs, out.data(), pool.executor());
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
      const double error = check ? Error(op, out) : 0;
      right = right && error <= 1;
      std::printf("| %s | %s | %.3f | %.1f | %s |\n", op.name.c_str(), phsa::Name(simd), best * 1e3,
                  op.flops / best * 1e-9, check ? fmt::format("{:.2f}", error).c_str() : "-");
    }
  }
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_operations: %s\n", error.what());
  return 2;
}
