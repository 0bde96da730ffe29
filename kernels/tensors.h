// A call's tensors as torch shows them to C, without torch's headers: sizes, strides, addresses.
#pragma once

#include "attention.h"

namespace clearhead {

// A tensor of 2 to 4 dimensions as (b, h, t, x); missing ones in front have size 1.
struct Layout {
  int64_t dtype, dims;  // a Dtype; as many dimensions as were given
  int64_t sizes[4], strides[4];

  bool contiguous_rows() const { return sizes[3] == 1 || strides[3] == 1; }
  // Where the core finds it: a dimension of size 1 broadcasts.
  TensorView at(void* data) const;
};

// Takes torch's functions from the `DLPackExchangeAPI` at this address, if it has the ABI read here.
void take_exchange(const void* api);

// Reads a `torch.Tensor`, a PyObject. False, and no error in Python, if it has no such layout, or
// no memory on the CPU.
bool read_tensor(void* tensor, Layout* layout, void** data);

}  // namespace clearhead
