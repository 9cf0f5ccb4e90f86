/* Devices: counting, choosing and describing them. */
#define _GNU_SOURCE
#include "runtime.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* cudaDeviceAttr numbers that torch reads; what is not listed is 0. The values are an H100's (CUDA programming guide). */
int runtime_attribute(int attribute, int ordinal) {
  int major, minor;
  node_capability(runtime_device(ordinal).gpu, &major, &minor);
  switch (attribute) {
    case 1:
    case 2:
    case 3: return 1024; /* threads per block; block dimensions x, y */
    case 4: return 64;   /* block dimension z */
    case 5:
    case 11: return 2147483647; /* grid dimension x; memory pitch */
    case 6:
    case 7: return 65535; /* grid dimensions y, z */
    case 8: return 49152; /* shared memory per block */
    case 9:
    case 12:
    case 82: return 65536;   /* constant memory; registers per block, per multiprocessor */
    case 10: return 32;      /* warp size */
    case 13: return 1980000; /* clock, kHz */
    case 14: return 512;     /* texture alignment */
    case 16: return 132;     /* multiprocessors */
    case 19:
    case 31:
    case 32:
    case 41:
    case 78:
    case 83:
    case 95: return 1; /* host map, concurrency, ECC, UVA, priorities, managed, cooperative */
    case 33: return runtime_device(ordinal).gpu + 1; /* PCI bus */
    case 36: return 2619000;                         /* memory clock, kHz */
    case 37: return 5120;                            /* memory bus, bits */
    case 38: return 50 << 20;                        /* L2 cache */
    case 39: return 2048;                            /* threads per multiprocessor */
    case 40: return 3;                               /* copy engines */
    case 75: return major;
    case 76: return minor;
    case 81: return 233472; /* shared memory per multiprocessor */
    case 97: return 232448; /* shared memory per block, opted in */
    case 106: return 32;    /* blocks per multiprocessor */
    case 111: return 1024;  /* reserved shared memory per block */
    default: return 0;
  }
}

int runtime_context(void) {
  static int made[MAX_DEVICES], owner; /* a forked child makes its own */
  int ordinal = runtime_current();
  if (owner != getpid()) {
    memset(made, 0, sizeof made);
    owner = getpid();
  }
  if (!runtime_visible_count()) return runtime_fail(cudaErrorNoDevice);
  if (made[ordinal]) return 0;
  int gpu = runtime_device(ordinal).gpu;
  struct holder other;
  if (node_exclusive() && node_holders(gpu, &other, 1) && other.pid != getpid())
    return runtime_fail(cudaErrorDevicesUnavailable);
  node_hold(gpu, 0);
  made[ordinal] = 1;
  return 0;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  RETURN_IF(runtime_enter("getdevicecount"));
  *count = runtime_visible_count();
  return runtime_fail(*count ? 0 : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = runtime_current();
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaSetDevice(int device) {
  RETURN_IF(runtime_enter("setdevice"));
  if (device < 0 || device >= runtime_visible_count()) return runtime_fail(cudaErrorInvalidDevice);
  runtime_set_current(device);
  return runtime_context(); /* since CUDA 12 this makes the context */
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = node_driver_version();
  return 0;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = node_runtime_version();
  return 0;
}
cudaError_t cudaDeviceReset(void) { return 0; }

cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) {
  (void)from, (void)to;
  *can = 1;
  return 0;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  (void)peer, (void)flags;
  return runtime_fail(runtime_poisoned());
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
  RETURN_IF(runtime_fail(runtime_poisoned()));
  if (device < 0 || device >= runtime_visible_count()) return runtime_fail(cudaErrorInvalidDevice);
  snprintf(text, (size_t)bytes, "0000:%02X:00.0", runtime_device(device).gpu + 1);
  return 0;
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2) return runtime_fail(cudaErrorInvalidValue);
  for (int i = 0; i < runtime_visible_count(); i++)
    if (runtime_device(i).gpu == (int)bus - 1) {
      *device = i;
      return 0;
    }
  return runtime_fail(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
  RETURN_IF(runtime_enter("getattribute"));
  if (device < 0 || device >= runtime_visible_count()) return runtime_fail(cudaErrorInvalidDevice);
  *value = runtime_attribute(attribute, device);
  return 0;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  RETURN_IF(runtime_enter("getdeviceproperties"));
  if (device < 0 || device >= runtime_visible_count()) return runtime_fail(cudaErrorInvalidDevice);
  struct visible_device which = runtime_device(device);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", node_gpu_name());
  node_uuid(which, (unsigned char *)p->uuid.bytes);
  node_capability(which.gpu, &p->major, &p->minor);
  p->totalGlobalMem = node_memory_bytes();
  p->pciBusID = which.gpu + 1;
  p->warpSize = runtime_attribute(10, device);
  p->memPitch = (size_t)runtime_attribute(11, device);
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = (size_t)runtime_attribute(9, device);
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = (size_t)runtime_attribute(8, device);
  p->sharedMemPerMultiprocessor = (size_t)runtime_attribute(81, device);
  p->sharedMemPerBlockOptin = (size_t)runtime_attribute(97, device);
  p->reservedSharedMemPerBlock = (size_t)runtime_attribute(111, device);
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = runtime_attribute(16, device);
  p->maxThreadsPerMultiProcessor = runtime_attribute(39, device);
  p->maxBlocksPerMultiProcessor = runtime_attribute(106, device);
  p->memoryBusWidth = runtime_attribute(37, device);
  p->l2CacheSize = runtime_attribute(38, device);
  p->asyncEngineCount = runtime_attribute(40, device);
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = p->managedMemory = p->cooperativeLaunch = 1;
  return 0;
}
