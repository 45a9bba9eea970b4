// Gradients of attend on the CPU.
#ifndef PHSA_ATTENTION_CPU_BACKWARD_H_
#define PHSA_ATTENTION_CPU_BACKWARD_H_

#include "attention/plan.h"

namespace phsa::cpu {

void Backward(const PlanImpl& plan, const BackwardParams& params);

}  // namespace phsa::cpu

#endif  // PHSA_ATTENTION_CPU_BACKWARD_H_
