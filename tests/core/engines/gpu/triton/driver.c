/* libcuda for a machine without a GPU: it loads anything, and stores what a start of a kernel gets. */
#include "cuda.h"
#include <stdint.h>
#include <string.h>

int sizes[64];          /* of the parameters, in bytes; 0 ends the list */
uint8_t parameters[512];
uint64_t launch[5];     /* programs, threads, shared memory, stream, function */

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **from, void **extra) {
  size_t at = 0;
  for (int i = 0; sizes[i]; at += sizes[i++]) memcpy(parameters + at, from[i], sizes[i]);
  launch[0] = c->gridDimX, launch[1] = c->blockDimX, launch[2] = c->sharedMemBytes;
  launch[3] = (uint64_t)c->hStream, launch[4] = (uint64_t)f;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *p, CUpointer_attribute a, CUdeviceptr x) {
  memcpy(p, &x, sizeof x);
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType t, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave i, CUtensorMapSwizzle s, CUtensorMapL2promotion l,
    CUtensorMapFloatOOBfill o) {
  memset(map, 0, sizeof *map);
  memcpy(map, &address, sizeof address);
  return CUDA_SUCCESS;
}

#define ANSWER(name, type, value, ...) \
  CUresult name(type *answer, ##__VA_ARGS__) { *answer = (type)value; return CUDA_SUCCESS; }
#define NOTHING(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
ANSWER(cuCtxGetCurrent, CUcontext, 1)
ANSWER(cuCtxGetLimit, size_t, 0, CUlimit l)
ANSWER(cuDeviceGet, CUdevice, 0, int i)
ANSWER(cuDeviceGetAttribute, int, 1 << 20, CUdevice_attribute a, CUdevice d)
ANSWER(cuDevicePrimaryCtxRetain, CUcontext, 1, CUdevice d)
ANSWER(cuDriverGetVersion, int, 13020)
ANSWER(cuFuncGetAttribute, int, 1024, CUfunction_attribute a, CUfunction f)
ANSWER(cuModuleGetFunction, CUfunction, 5, CUmodule m, const char *name)
ANSWER(cuModuleLoadData, CUmodule, 3, const void *image)
ANSWER(cuOccupancyMaxActiveClusters, int, 1, CUfunction f, const CUlaunchConfig *c)
NOTHING(cuCtxSetCurrent, CUcontext c)
NOTHING(cuCtxSetLimit, CUlimit l, size_t n)
NOTHING(cuFuncSetAttribute, CUfunction f, CUfunction_attribute a, int n)
NOTHING(cuFuncSetCacheConfig, CUfunction f, CUfunc_cache c)
CUresult cuGetErrorString(CUresult r, const char **text) { *text = "an error"; return CUDA_SUCCESS; }
