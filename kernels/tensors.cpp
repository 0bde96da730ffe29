// DLPack's C exchange API (dmlc/dlpack, include/dlpack/dlpack.h, version 1.2), which torch.Tensor
// has as `__dlpack_c_exchange_api__`. It reads a tensor in about 0.1 us; Python takes 2 us to read
// its shape, strides, dtype, device and address.
#include "tensors.h"

#include <Python.h>

namespace clearhead {
namespace {

struct DLDevice { int32_t type, id; };
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLPackExchangeAPI {
  uint32_t major, minor;
  const DLPackExchangeAPI* previous;  // of an older version
  void *allocate, *from_object, *to_object;
  // Fills `into`, whose pointers belong to the tensor. The function may be null.
  int (*read)(void* object, DLTensor* into);
};
enum : int { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

const DLPackExchangeAPI* exchange;  // set while the package is imported, before any call

Dtype dtype_of(DLDataType type) {
  if (type.lanes == 1 && type.code == DL_FLOAT && type.bits == 32) return FLOAT32;
  if (type.lanes == 1 && type.code == DL_FLOAT && type.bits == 16) return FLOAT16;
  if (type.lanes == 1 && type.code == DL_BFLOAT && type.bits == 16) return BFLOAT16;
  return DTYPES;
}

}  // namespace

TensorView Layout::at(void* data) const {
  auto stride = [&](int i) { return sizes[i] == 1 ? 0 : strides[i]; };
  return {data, stride(0), stride(1), stride(2)};
}

void take_exchange(const void* api) {
  auto* x = (const DLPackExchangeAPI*)api;
  while (x && !(x->major == 1 && x->read)) x = x->previous;
  exchange = x;
}

bool read_tensor(void* tensor, Layout* layout, void** data) {
  DLTensor x;
  if (!exchange) return false;
  if (exchange->read(tensor, &x) != 0) {  // sparse, or without memory
    PyErr_Clear();
    return false;
  }
  layout->dtype = dtype_of(x.dtype);
  layout->dims = x.ndim;
  if (x.device.type != DL_CPU || !x.data || layout->dtype == DTYPES) return false;
  if (x.ndim < 2 || x.ndim > 4) return false;
  for (int i = 0; i < 4; i++) {
    int given = i - (4 - x.ndim);
    layout->sizes[i] = given < 0 ? 1 : x.shape[given];
    layout->strides[i] = given < 0 ? 0 : x.strides[given];
  }
  *data = (char*)x.data + x.byte_offset;
  return true;
}

}  // namespace clearhead
