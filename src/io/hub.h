// What lies in the Hugging Face cache of this machine.
#ifndef PHSA_IO_HUB_H_
#define PHSA_IO_HUB_H_

#include <vector>

#include "io/model_store.h"

namespace phsa {

// Models by their files alone: whether they open is not tried.
std::vector<HubModel> HubCandidates();

}  // namespace phsa

#endif  // PHSA_IO_HUB_H_
