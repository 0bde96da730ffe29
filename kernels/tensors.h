// Reads torch tensors in C without torch's headers: sizes, strides, addresses.
#pragma once

#include "attention.h"

namespace clearhead {

// A tensor of 2 to 4 dimensions as (b, h, t, x); missing ones in front have size 1.
struct Layout {
  int64_t dtype, dims;  // a Dtype; the tensor's own number of dimensions
  int64_t sizes[4], strides[4];

  bool contiguous_rows() const { return sizes[3] == 1 || strides[3] == 1; }
  // The view that the core reads: a dimension of size 1 broadcasts.
  TensorView at(void* data) const;
};

// Stores torch's functions from the `DLPackExchangeAPI` at this address, if its ABI is known.
void take_exchange(const void* api);

// Reads a `torch.Tensor`, a PyObject. Returns false, without an error in Python, if it has no such
// layout, or no memory on the CPU.
bool read_tensor(void* tensor, Layout* layout, void** data);

}  // namespace clearhead
