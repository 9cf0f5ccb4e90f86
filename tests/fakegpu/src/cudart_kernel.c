/* Kernels register and launch, and do nothing. Driver entry points come from the fake libcuda. */
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void **__cudaRegisterFatBinary(void *image) {
  (void)image;
  return calloc(1, 64);
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { free(handle); }
char __cudaInitModule(void **handle) {
  (void)handle;
  return 1;
}
void __cudaRegisterVar(void) {} /* the arguments say where the image keeps it: there is no image */
void __cudaRegisterFunction(void) {}

struct configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void *stream;
};
static __thread struct configuration
    pushed[16]; /* <<<...>>> within the arguments of another <<<...>>>: 16 deep is plenty */
static __thread int depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
  if (depth == 16) return 1;
  pushed[depth++] = (struct configuration){grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  if (!depth) return runtime_fail(9); /* cudaErrorInvalidConfiguration */
  struct configuration c = pushed[--depth];
  *grid = c.grid;
  *block = c.block;
  *shared_bytes = c.shared_bytes;
  *(void **)stream = c.stream;
  return 0;
}

static cudaError_t launch(void) {
  RETURN_IF(runtime_enter("launch"));
  return runtime_context();
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
  *kernel = (void *)function;
  return 0;
}
cudaError_t __cudaLaunchKernel(void) { return launch(); }
cudaError_t cudaLaunchKernel(void) { return launch(); }
cudaError_t cudaLaunchKernelExC(void) { return launch(); }
cudaError_t cudaLaunchCooperativeKernel(void) { return launch(); }
cudaError_t cudaFuncSetAttribute(void) { return 0; }
cudaError_t cudaProfilerStart(void) { return 0; }
cudaError_t cudaProfilerStop(void) { return 0; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
  (void)function;
  RETURN_IF(runtime_fail(runtime_poisoned()));
  int major = runtime_attribute(75, runtime_current()), minor = runtime_attribute(76, runtime_current());
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = 10 * major + minor;
  return 0;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block,
                                                          size_t shared_bytes) {
  (void)function, (void)block, (void)shared_bytes;
  *blocks = 2;
  return 0;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int block, size_t bytes,
                                                                   unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, block, bytes);
}

static int not_supported(void) { return cudaErrorNotSupported; }

/* Must never fail: torch treats a missing entry point as a broken installation, and only calls a few. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, int *status) {
  static void *libcuda;
  char versioned[128];
  (void)version, (void)flags;
  if (!libcuda) libcuda = dlopen("libcuda.so.1", RTLD_NOW);
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *function = libcuda ? dlsym(libcuda, versioned) : NULL;
  if (!*function && libcuda) *function = dlsym(libcuda, name);
  if (!*function) {
    node_trace("driver entry point %s: not supported", name);
    *function = (void *)not_supported;
  }
  if (status) *status = 0;
  return 0;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, status);
}
