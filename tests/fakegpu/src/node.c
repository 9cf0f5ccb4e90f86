/* Reads from the environment which GPUs this node has and which of them this process may see. */
#define _GNU_SOURCE
#include "node.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtol(text, NULL, 0) : otherwise;
}

const char *node_name(void) {
  static __thread char host[256];
  const char *name = getenv("FAKE_CUDA_NODE");
  if (name && *name) return name;
  if (!host[0] && gethostname(host, sizeof host - 1)) strcpy(host, "localhost");
  return host;
}

int node_gpu_count(void) {
  long n = number("FAKE_CUDA_DEVICES", 8);
  return n < 0 ? 0 : n > MAX_DEVICES ? MAX_DEVICES : (int)n;
}

int node_mig_count(void) { return (int)number("FAKE_CUDA_MIG", 0); }
size_t node_memory_bytes(void) { return (size_t)number("FAKE_CUDA_MEM", 8L << 30); }
int node_driver_version(void) { return (int)number("FAKE_CUDA_DRIVER", 13020); }
int node_runtime_version(void) { return (int)number("FAKE_CUDA_RUNTIME", 13020); }

int node_exclusive(void) {
  const char *mode = getenv("FAKE_CUDA_COMPUTE_MODE");
  return mode && !strcmp(mode, "exclusive");
}

const char *node_gpu_name(void) {
  const char *name = getenv("FAKE_CUDA_NAME");
  return name && *name ? name : "NVIDIA H100 80GB HBM3"; /* a name that Ray maps to an accelerator type */
}

void node_capability(int gpu, int *major, int *minor) { /* "9.0" or "9.0,12.0": the last one serves the rest */
  const char *text = getenv("FAKE_CUDA_CC");
  *major = 9, *minor = 0;
  for (int i = 0; text && *text; i++) {
    sscanf(text, "%d.%d", major, minor);
    text = strchr(text, ',');
    if (i == gpu || !text) return;
    text++;
  }
}

void node_uuid(struct visible_device device, unsigned char uuid[16]) {
  uint64_t hash = 14695981039346656037ull; /* FNV-1a */
  for (const char *c = node_name(); *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
  memcpy(uuid, &hash, 8);
  memcpy(uuid + 8, "fakegpu", 6);
  uuid[14] = (unsigned char)(device.mig + 1);
  uuid[15] = (unsigned char)device.gpu;
}

void node_uuid_text(struct visible_device device, char *text, size_t bytes) {
  unsigned char u[16];
  node_uuid(device, u);
  snprintf(text, bytes, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
           device.mig < 0 ? "GPU" : "MIG", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11],
           u[12], u[13], u[14], u[15]);
}

static struct visible_device by_index(int gpu) { /* a GPU in MIG mode shows its first instance only */
  struct visible_device device = {gpu, node_mig_count() > 0 ? 0 : -1};
  return device;
}

static int find(const char *entry, size_t length, struct visible_device *out) {
  if (!strncmp(entry, "GPU-", 4) || !strncmp(entry, "MIG-", 4)) {
    for (int gpu = 0; gpu < node_gpu_count(); gpu++)
      for (int mig = -1; mig < node_mig_count(); mig++) {
        struct visible_device device = {gpu, mig};
        char uuid[64];
        node_uuid_text(device, uuid, sizeof uuid);
        if (strncmp(uuid, entry, length)) continue; /* the driver accepts a prefix of a UUID */
        *out = mig < 0 ? by_index(gpu) : device;
        return 1;
      }
    return 0;
  }
  char *end;
  long gpu = strtol(entry, &end, 10);
  if (end != entry + length || gpu < 0 || gpu >= node_gpu_count()) return 0;
  *out = by_index((int)gpu);
  return 1;
}

static int named(struct visible_device devices[MAX_DEVICES]) {
  const char *entry = getenv("CUDA_VISIBLE_DEVICES");
  int n = 0;
  if (!entry) {
    for (; n < node_gpu_count(); n++) devices[n] = by_index(n);
    return n;
  }
  while (*entry && n < MAX_DEVICES) { /* as the driver: stop at the first entry that names no device ... */
    while (*entry == ' ') entry++;
    size_t length = strcspn(entry, ", ");
    if (!length || !find(entry, length, &devices[n])) break;
    for (int i = 0; i < n; i++) /* ... and show nothing when one is named twice */
      if (devices[i].gpu == devices[n].gpu && devices[i].mig == devices[n].mig) return 0;
    n++;
    entry = strchr(entry, ',');
    if (!entry) break;
    entry++;
  }
  return n;
}

int node_visible(struct visible_device devices[MAX_DEVICES]) {
  int n = named(devices), most = (int)number("FAKE_CUDA_MIG_SEEN", MAX_DEVICES);
  return node_mig_count() > 0 && n > most ? most : n;
}

void node_trace(const char *format, ...) {
  if (!getenv("FAKE_CUDA_LOG")) return;
  char line[1024];
  va_list arguments;
  int n = snprintf(line, 64, "[fakegpu %d] ", (int)getpid());
  va_start(arguments, format);
  vsnprintf(line + n, sizeof line - (size_t)n, format, arguments);
  va_end(arguments);
  fprintf(stderr, "%s\n", line);
}
