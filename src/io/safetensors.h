// The container safetensors: a length, a JSON header, the data.
#ifndef PHSA_IO_SAFETENSORS_H_
#define PHSA_IO_SAFETENSORS_H_

#include <vector>

#include "base/mapped_file.h"
#include "io/tensor.h"

namespace phsa {

// The tensors in the order of the data. Checks the header and that each tensor has the size that its shape says and
// lies in the file, alone. They point into `file`. bytes: tensors of type U8 may be there.
std::vector<Tensor> ReadSafetensors(const MappedFile& file, bool bytes = false);

}  // namespace phsa

#endif  // PHSA_IO_SAFETENSORS_H_
