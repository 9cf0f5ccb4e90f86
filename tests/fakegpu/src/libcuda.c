/* The little of the driver API (libcuda.so.1) that torch asks for; it answers from the fake runtime. */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdio.h>
#include <string.h>

typedef uintptr_t CUcontext; /* CONTEXT + ordinal */
#define CONTEXT 0x1000

int cuInit(unsigned flags) {
  int count;
  (void)flags;
  return cudaGetDeviceCount(&count);
}
int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuDeviceGetCount(int *count) {
  *count = runtime_visible_count();
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= runtime_visible_count()) return cudaErrorInvalidDevice;
  *device = ordinal;
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = runtime_attribute(attribute, device);
  return 0;
}

int cuDeviceGetName(char *name, int bytes, int device) {
  (void)device;
  snprintf(name, (size_t)bytes, "%s", node_gpu_name());
  return 0;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  node_uuid(runtime_device(device), uuid);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  (void)device;
  *bytes = node_memory_bytes();
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return 0;
}
int cuDevicePrimaryCtxRetain(CUcontext *context, int device) {
  *context = CONTEXT + (CUcontext)device;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  return 0;
}
int cuCtxGetCurrent(CUcontext *context) {
  *context = CONTEXT + (CUcontext)runtime_current();
  return 0;
}
int cuCtxSetCurrent(CUcontext context) { return context ? cudaSetDevice((int)(context - CONTEXT)) : 0; }
int cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
int cuCtxPopCurrent_v2(CUcontext *context) { return context ? cuCtxGetCurrent(context) : 0; }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuGetErrorString(int error, const char **text) {
  *text = cudaGetErrorString(error);
  return 0;
}
int cuGetErrorName(int error, const char **text) {
  *text = cudaGetErrorName(error);
  return 0;
}

int cuMemGetAddressRange_v2(uintptr_t *base, size_t *bytes, uintptr_t pointer) {
  void *start;
  size_t size;
  int ordinal;
  if (!runtime_range((void *)pointer, &start, &size, &ordinal)) return cudaErrorInvalidValue;
  if (base) *base = (uintptr_t)start;
  if (bytes) *bytes = size;
  return 0;
}

int cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer) {
  void *start;
  size_t size;
  int ordinal;
  if (!runtime_range((void *)pointer, &start, &size, &ordinal)) return cudaErrorInvalidValue;
  switch (attribute) {
    case 1: *(CUcontext *)value = CONTEXT + (CUcontext)ordinal; break; /* the context */
    case 2: *(unsigned *)value = 2; break;                             /* the memory type: device */
    case 9: *(int *)value = ordinal; break;                            /* the device */
    default: memset(value, 0, 4);
  }
  return 0;
}
