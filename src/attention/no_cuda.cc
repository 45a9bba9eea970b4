// A build without CUDA.
#include "attention/cuda/backend.h"
#include "base/errors.h"

namespace phsa::cuda {
namespace {

[[noreturn]] void Refuse() {
  Throw(PHSA_UNSUPPORTED, "plan: device is 1 (CUDA), but this build has no CUDA; build with -DPHSA_CUDA=ON");
}

}  // namespace

bool Compiled() { return false; }
void Prepare(PlanImpl*) { Refuse(); }
void Represent(const PlanImpl&, const phsa::ForwardParams&) { Refuse(); }
void Select(const PlanImpl&, const phsa::ForwardParams&) { Refuse(); }
void Attend(const PlanImpl&, const phsa::ForwardParams&) { Refuse(); }
void Forward(const PlanImpl&, const phsa::ForwardParams&) { Refuse(); }
void Backward(const PlanImpl&, const phsa::BackwardParams&) { Refuse(); }

}  // namespace phsa::cuda
