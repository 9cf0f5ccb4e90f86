/* The fake libnvidia-ml.so.1: what nvidia-ml-py, torch and Ray ask of it, from the same environment and ledger. */
#define _GNU_SOURCE
#include "fault.h"
#include "node.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 }; /* nvmlReturn_t */

/* A handle is 1 + gpu, plus (1 + mig) * 256 for a MIG instance, so that it is never NULL. */
typedef uintptr_t handle;
static struct visible_device device_of(handle h) {
  return (struct visible_device){(int)(h & 255) - 1, (int)(h >> 8) - 1};
}
static handle handle_of(int gpu, int mig) { return (handle)(gpu + 1) + ((handle)(mig + 1) << 8); }

static long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtol(text, NULL, 0) : otherwise;
}

static int visit(const char *point) { /* 0 or the nvmlReturn_t that a fault wants */
  struct fault fault;
  struct fault_site site = fault_site_at(point);
  if (!fault_strikes(&site, &fault)) return OK;
  if (fault.action == FAULT_ERROR) return (int)fault.number;
  fault_act(&fault);
  return OK;
}

int nvmlInit_v2(void) { return visit("nvmlinit"); }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return nvmlInit_v2();
}
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int result) {
  switch (result) {
    case OK: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}

/* The Linux driver that CUDA's release notes name for each toolkit. */
static const char *driver_text(void) {
  int version = node_driver_version();
  if (version >= 13020) return "595.45.04";
  if (version >= 13000) return "580.65.06";
  if (version >= 12080) return "570.26";
  if (version >= 12040) return "550.54.14";
  return version >= 12020 ? "535.54.03" : "525.60.13";
}

int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
  snprintf(text, bytes, "%s", driver_text());
  return OK;
}
int nvmlSystemGetNVMLVersion(char *text, unsigned bytes) {
  snprintf(text, bytes, "%d.%s", node_driver_version() / 1000, driver_text());
  return OK;
}
int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = node_driver_version();
  return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)node_gpu_count();
  return OK;
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned gpu, handle *out) {
  int result = visit("nvmlhandle");
  if (result) return result;
  if ((int)gpu >= node_gpu_count()) return INVALID_ARGUMENT;
  *out = handle_of((int)gpu, -1);
  return OK;
}
int nvmlDeviceGetHandleByIndex(unsigned gpu, handle *out) { return nvmlDeviceGetHandleByIndex_v2(gpu, out); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, handle *out) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < 1 || (int)bus > node_gpu_count()) return NOT_FOUND;
  *out = handle_of((int)bus - 1, -1);
  return OK;
}

int nvmlDeviceGetHandleByUUID(const char *text, handle *out) {
  for (int gpu = 0; gpu < node_gpu_count(); gpu++)
    for (int mig = -1; mig < node_mig_count(); mig++) {
      char uuid[64];
      node_uuid_text((struct visible_device){gpu, mig}, uuid, sizeof uuid);
      if (!strcmp(uuid, text)) {
        *out = handle_of(gpu, mig);
        return OK;
      }
    }
  return NOT_FOUND;
}

int nvmlDeviceGetUUID(handle h, char *text, unsigned bytes) {
  node_uuid_text(device_of(h), text, bytes);
  return OK;
}
int nvmlDeviceGetName(handle h, char *text, unsigned bytes) {
  (void)h;
  snprintf(text, bytes, "%s", node_gpu_name());
  return OK;
}
int nvmlDeviceGetIndex(handle h, unsigned *index) {
  *index = (unsigned)device_of(h).gpu;
  return OK;
}
int nvmlDeviceGetMinorNumber(handle h, unsigned *minor) { return nvmlDeviceGetIndex(h, minor); }
int nvmlDeviceGetCudaComputeCapability(handle h, int *major, int *minor) {
  node_capability(device_of(h).gpu, major, minor);
  return OK;
}

struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char text[32];
};
int nvmlDeviceGetPciInfo_v3(handle h, struct pci *out) {
  memset(out, 0, sizeof *out);
  out->bus = (unsigned)device_of(h).gpu + 1;
  snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
  snprintf(out->text, sizeof out->text, "00000000:%02X:00.0", out->bus);
  return OK;
}

static uint64_t used_bytes(handle h) {
  uint64_t used = node_used_bytes(device_of(h).gpu);
  return used > node_memory_bytes() ? node_memory_bytes() : used;
}
struct memory {
  unsigned long long total, free, used;
};
int nvmlDeviceGetMemoryInfo(handle h, struct memory *out) {
  out->total = node_memory_bytes();
  out->used = used_bytes(h);
  out->free = out->total - out->used;
  return OK;
}
struct memory_v2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
int nvmlDeviceGetMemoryInfo_v2(handle h, struct memory_v2 *out) {
  out->total = node_memory_bytes();
  out->reserved = 0;
  out->used = used_bytes(h);
  out->free = out->total - out->used;
  return OK;
}

struct process_v1 {
  unsigned pid;
  unsigned long long bytes;
}; /* torch asks for this one, to explain an out-of-memory error */
int nvmlDeviceGetComputeRunningProcesses(handle h, unsigned *count, struct process_v1 *out) {
  struct holder holders[512];
  unsigned n = (unsigned)node_holders(device_of(h).gpu, holders, 512), room = *count;
  *count = n;
  if (n > room) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < n; i++) out[i] = (struct process_v1){(unsigned)holders[i].pid, holders[i].bytes};
  return OK;
}
struct process_v2 {
  unsigned pid;
  unsigned long long bytes;
  unsigned instance, compute_instance;
};
int nvmlDeviceGetComputeRunningProcesses_v3(handle h, unsigned *count, struct process_v2 *out) {
  struct holder holders[512];
  unsigned n = (unsigned)node_holders(device_of(h).gpu, holders, 512), room = *count;
  *count = n;
  if (n > room) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < n; i++)
    out[i] = (struct process_v2){(unsigned)holders[i].pid, holders[i].bytes, 0xffffffffu,
                                 0xffffffffu}; /* not a MIG instance */
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v2(handle h, unsigned *count, struct process_v2 *out) {
  return nvmlDeviceGetComputeRunningProcesses_v3(h, count, out);
}

int nvmlDeviceGetComputeMode(handle h, int *mode) {
  (void)h;
  *mode = node_exclusive() ? 3 : 0;
  return OK;
} /* exclusive process, default */
int nvmlDeviceGetPersistenceMode(handle h, int *mode) {
  (void)h;
  *mode = 1;
  return OK;
}
int nvmlDeviceGetMigMode(handle h, unsigned *current, unsigned *pending) {
  (void)h;
  *current = *pending = node_mig_count() > 0;
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(handle h, unsigned *count) {
  (void)h;
  *count = (unsigned)node_mig_count();
  return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(handle h, unsigned index, handle *out) {
  if ((int)index >= node_mig_count()) return NOT_FOUND;
  *out = handle_of(device_of(h).gpu, (int)index);
  return OK;
}
int nvmlDeviceIsMigDeviceHandle(handle h, unsigned *is) {
  *is = device_of(h).mig >= 0;
  return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle h, handle *out) {
  *out = handle_of(device_of(h).gpu, -1);
  return OK;
}

int nvmlDeviceGetUtilizationRates(handle h, unsigned rates[2]) {
  (void)h;
  rates[0] = rates[1] = 0;
  return OK;
}
int nvmlDeviceGetTemperature(handle h, int sensor, unsigned *celsius) {
  (void)h, (void)sensor;
  *celsius = 40;
  return OK;
}
int nvmlDeviceGetPowerUsage(handle h, unsigned *milliwatts) {
  (void)h;
  *milliwatts = 100000;
  return OK;
}

int nvmlDeviceGetTotalEccErrors(handle h, int kind, int counter, unsigned long long *errors) {
  (void)h, (void)counter;
  *errors = kind == 1 ? (unsigned long long)number("FAKE_NVML_ECC", 0) : 0; /* 1: uncorrected */
  return OK;
}
int nvmlDeviceGetRemappedRows(handle h, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
  (void)h;
  *corrected = *uncorrected = *pending = *failed = 0;
  return OK;
}
int nvmlDeviceGetP2PStatus(handle a, handle b, int index, int *status) {
  (void)a, (void)b, (void)index;
  *status = (int)number("FAKE_NVML_P2P", 0); /* nvmlGpuP2PStatus_t */
  return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(handle a, handle b, int *level) {
  (void)a, (void)b;
  *level = 30;
  return OK;
} /* host bridge */
int nvmlDeviceGetNvLinkState(handle h, unsigned link, unsigned *active) {
  (void)h;
  *active = link < 18; /* an H100 has 18 links */
  return link < 18 ? OK : INVALID_ARGUMENT;
}
struct fabric {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};
int nvmlDeviceGetGpuFabricInfoV(handle h, struct fabric *out) {
  (void)h;
  out->status = 0;
  out->state = (unsigned char)number("FAKE_NVML_FABRIC", 3); /* nvmlGpuFabricState_t: 3 is completed */
  return OK;
}
