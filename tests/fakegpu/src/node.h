/* What this node's GPUs are (from the environment), and what its processes hold of them (from a file they share). */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MAX_DEVICES 64 /* per node; the largest machines today have 16 */

struct visible_device {
  int gpu, mig;
}; /* mig -1: the whole GPU */

const char *node_name(void); /* FAKE_CUDA_NODE, else the host's name */
int node_gpu_count(void);    /* FAKE_CUDA_DEVICES, default 8 */
int node_mig_count(void);    /* FAKE_CUDA_MIG: instances per GPU, default 0 */
void node_capability(int gpu, int *major, int *minor);
size_t node_memory_bytes(void); /* per GPU */
const char *node_gpu_name(void);
int node_driver_version(void); /* 13020 means CUDA 13.2 */
int node_runtime_version(void);
int node_exclusive(void); /* FAKE_CUDA_COMPUTE_MODE=exclusive */
void node_uuid(struct visible_device device, unsigned char uuid[16]);
void node_uuid_text(struct visible_device device, char *text, size_t bytes); /* GPU-... or MIG-... */
/* What CUDA_VISIBLE_DEVICES leaves, in its order; the count is returned. */
int node_visible(struct visible_device devices[MAX_DEVICES]);

void node_trace(const char *format, ...) __attribute__((format(printf, 1, 2))); /* FAKE_CUDA_LOG=1: to stderr */

/* The ledger: bytes per process and GPU. A process that died, however, holds nothing. */
struct holder {
  int pid;
  uint64_t bytes;
};
int node_hold(int gpu, long long change_bytes);         /* -1: the ledger is full */
int node_holders(int gpu, struct holder *out, int max); /* live processes with a context on this GPU */
uint64_t node_used_bytes(int gpu);
/* Adds one to the counter `key`, which all processes with this FAKE_CUDA_STATE share; the new value. */
long node_count(uint64_t key);
