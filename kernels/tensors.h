// Reads torch tensors in C without torch's headers: sizes, strides, addresses.
#pragma once

#include <initializer_list>

#include "attention.h"

namespace clearhead {

// The element types of tensors: those of `Dtype`, and others that the core reads or writes.
enum Element : int64_t { FLOAT64 = DTYPES, INT64, BYTE, ELEMENTS };

// A tensor of up to 4 dimensions.
struct Tensor {
  void* data;
  int64_t element, dims;  // an Element
  bool on_cpu;
  int64_t sizes[4], strides[4];

  int64_t count() const;
  // Moves the dimensions to the end of (b, h, t, x); missing ones in front have size 1.
  Tensor as_4d() const;
};

// Stores torch's functions from the `DLPackExchangeAPI` at this address. Returns false if its ABI
// is unknown.
bool take_exchange(const void* api);

// Reads a `torch.Tensor`, a PyObject. Returns false, without an error in Python, if it has no
// strides (sparse, nested), more dimensions, or another element type.
bool read_tensor(void* tensor, Tensor* into);

// Returns a new contiguous `torch.Tensor`, a PyObject, of float32 or INT64, and the address of its
// numbers. That takes 0.4 us, and Tensor.new_empty 0.9, but torch cannot resize its memory. Throws
// a Code.
void* make_tensor(Element element, std::initializer_list<int64_t> sizes, void** data);

}  // namespace clearhead
