/* What an injected fault does inside NCCL, with the words of the failure that it stands for. */
#define _GNU_SOURCE
#include "nccl_internal.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct line {
  const char *where, *text;
};
/* Texts from public bug reports; `result` is what NCCL returned there, `sticky` a CUDA error that stays. */
static const struct preset {
  const char *name;
  int result, sticky;
  struct line line[3];
} PRESETS[] = {
    {"p2p",
     1,
     0,
     {{"transport/p2p.cc:275", "Cuda failure 217 'peer access is not supported between these two devices'"}}},
    {"p2p-ipc",
     1,
     0,
     {{"transport/p2p.cc:238",
       "failed to open CUDA IPC handle : 217 peer access is not supported between these two devices"}}},
    {"nvls",
     1,
     0,
     {{"transport/nvls.cc:254",
       "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be "
       "performed in "
       "the present state'"}}},
    {"fabric", 1, 802, {{"init.cc:204", "Cuda failure 802 'system not yet initialized'"}}},
    {"ib", 2, 0, {{"misc/ibvwrap.cc:278", "Call to ibv_modify_qp failed with error Connection timed out"}}},
    {"ib-reg", 2, 0, {{"misc/ibvwrap.cc:278", "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"}}},
    {"ib-completion",
     6,
     0,
     {{"transport/net_ib.cc:1295",
       "NET/IB: Got completion from peer 10.0.0.2<38560> with status=12 opcode=0 len=0 vendor err 129 (Send)"}}},
    {"shm",
     2,
     0,
     {{"misc/shmutils.cc:88",
       "Error: failed to extend /dev/shm/nccl-XXXXXX to 9637892 bytes, error: No space left on device (28)"},
      {"misc/shmutils.cc:132",
       "Error while creating shared memory segment /dev/shm/nccl-XXXXXX (size 9637888), error: No space left on device "
       "(28)"}}},
    {"cumem", 1, 0, {{"transport/p2p.cc:275", "Cuda failure 101 'invalid device ordinal'"}}},
    {"cumem-host",
     1,
     0,
     {{"transport/shm.cc:590", "Cuda failure 217 'peer access is not supported between these two devices'"}}},
    {"dup", 5, 0, {{"init.cc:497", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"}}},
    {"oom",
     1,
     0,
     {{"include/alloc.h:178", "Cuda failure 2 'out of memory'"},
      {"include/alloc.h:185", "Failed to CUDA calloc 6291456 bytes"}}},
    {"bootstrap", 3, 0, {{"bootstrap.cc:110", "Bootstrap : no socket interface found"}}},
    {"connect",
     2,
     0,
     {{"misc/socket.cc:484",
       "socketStartConnect: Connect to 169.254.4.6<53241> failed : Software caused connection abort"}}},
    {"refused",
     2,
     0,
     {{"misc/socket.cc:484", "socketStartConnect: Connect to 10.0.0.112<21724> failed : Connection refused"}}},
    {"remote", 6, 0, {{"misc/socket.cc:49", "socketProgress: Connection closed by remote peer host-1<51159>"}}},
    {"kernel", 1, 0, {{"enqueue.cc:58", "Cuda failure 'named symbol not found'"}}},
    {"no-image",
     1,
     209,
     {{"enqueue.cc:58", "Cuda failure 209 'no kernel image is available for execution on the device'"}}},
    {"driver",
     1,
     0,
     {{"misc/cudawrap.cc:188", "Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'"}}},
    {"busy", 1, 0, {{"init.cc:1762", "Cuda failure 46 'CUDA-capable device(s) is/are busy or unavailable'"}}},
    {"illegal", 1, 700, {{"enqueue.cc:1556", "Cuda failure 700 'an illegal memory access was encountered'"}}},
    {"ecc", 1, 214, {{"enqueue.cc:1556", "Cuda failure 214 'uncorrectable ECC error encountered'"}}},
    {"topology",
     2,
     0,
     {{"graph/xml.cc:332", "Could not find real path of /sys/class/pci_bus/0000:01/../../0000:01:00.0"}}},
    {"version", 3, 0, {{"bootstrap.cc:120", "Message truncated : received 1024 bytes instead of 256"}}},
    {"files", 2, 0, {{"misc/socket.cc:552", "Call to socket failed: Too many open files"}}},
};

ncclResult_t nccl_cuda_failure(ncclComm_t comm, const char *where, int error) {
  nccl_warn(comm, where, "Cuda failure %d '%s'", error, cudaGetErrorString(error));
  return ncclUnhandledCudaError;
}

static int play(ncclComm_t comm, const char *name) {
  for (size_t i = 0; i < sizeof PRESETS / sizeof *PRESETS; i++) {
    const struct preset *p = &PRESETS[i];
    if (strcmp(p->name, name)) continue;
    for (const struct line *l = p->line; l < p->line + 3 && l->text; l++) nccl_warn(comm, l->where, "%s", l->text);
    if (p->sticky) runtime_poison(p->sticky);
    nccl_info(comm, "INIT", "init.cc:1538 -> %d", p->result);
    return p->result;
  }
  fprintf(stderr, "fakegpu: FAKE_FAULT names no known preset: %s\n", name);
  _exit(97);
}

static void hang(ncclComm_t comm) { /* until ncclCommAbort; without a communicator nothing can end it */
  while (!comm || !comm->aborted) usleep(1000);
}

static void delay(ncclComm_t comm, const struct fault *fault) {
  if (!fault->chatty) {
    fault_act(fault);
    return;
  }
  for (long left_ms = fault->number, step = 0; left_ms > 0; left_ms -= 500, step++) { /* often enough for any watcher */
    nccl_info(comm, "INIT", "Channel %02ld/16 : 0 1", step % 16);
    usleep((useconds_t)(left_ms < 500 ? left_ms : 500) * 1000);
  }
}

static int has_rank(const void *comm, int rank) { return rank < ((const struct ncclComm *)comm)->size; }

static int has_gpu(const void *comm, const char *node, int gpu) {
  const struct ncclComm *c = comm;
  for (int i = 0; i < c->size; i++)
    if (c->segment->member[i].gpu == gpu && (!node || !strcmp(node, c->segment->member[i].node))) return 1;
  return 0;
}

static struct fault_site site_of(ncclComm_t comm, const char *point, long long bytes, int peer) {
  struct fault_site site = fault_site_at(point);
  site.bytes = bytes;
  site.peer = peer;
  if (!comm) return site;
  site.rank = comm->world_rank;
  site.world = comm->size;
  site.gpu = comm->gpu;
  site.comm = comm;
  if (comm->attached) {
    site.has_rank = has_rank;
    site.has_gpu = has_gpu;
  }
  return site;
}

static int answer(ncclComm_t comm, const struct fault_site *site, int *wrong) {
  struct fault fault;
  if (!fault_strikes(site, &fault)) return -1;
  switch (fault.action) {
    case FAULT_ERROR:
      nccl_warn(comm, "init.cc:1538", "fault injected at %s: result %ld", site->point, fault.number);
      return (int)fault.number;
    case FAULT_CUDA:
      runtime_poison((int)fault.number);
      return nccl_cuda_failure(comm, "init.cc:1762", (int)fault.number);
    case FAULT_ASYNC:
      if (comm) comm->state = (int)fault.number;
      return -1;
    case FAULT_PRESET: return play(comm, fault.preset);
    case FAULT_OOM: return play(comm, "oom");
    case FAULT_WRONG:
      if (wrong) *wrong = 1;
      return -1;
    case FAULT_HANG: hang(comm); return ncclInternalError;
    case FAULT_DELAY: delay(comm, &fault); return -1;
    default: fault_act(&fault); return -1;
  }
}

int nccl_strike(ncclComm_t comm, const char *point, long long bytes, int peer, int *wrong) {
  struct fault_site site = site_of(comm, point, bytes, peer);
  return answer(comm, &site, wrong);
}

int nccl_strike_pairs(ncclComm_t comm, const char *point) {
  struct fault_site site = site_of(comm, point, -1, -1);
  site.only_pairs = 1;
  return answer(comm, &site, NULL);
}

int nccl_strike_running(ncclComm_t comm, const char *point, long long bytes, int peer, int *wrong) {
  struct fault_site site = site_of(comm, point, bytes, peer);
  struct fault fault;
  if (!fault_strikes(&site, &fault)) return 0;
  int result = 0;
  switch (fault.action) {
    case FAULT_WRONG: *wrong = 1; return 0;
    case FAULT_DELAY: delay(comm, &fault); return 0;
    case FAULT_HANG: hang(comm); return 1;
    case FAULT_CUDA: /* a kernel that faults says nothing: the next CUDA call does */
      runtime_poison((int)fault.number);
      return 1;
    case FAULT_PRESET: result = play(comm, fault.preset); break;
    case FAULT_OOM: result = play(comm, "oom"); break;
    case FAULT_ERROR:
    case FAULT_ASYNC:
      result = (int)fault.number;
      nccl_warn(comm, "proxy.cc:1143", "fault injected at %s: asynchronous result %d", point, result);
      break;
    default: fault_act(&fault); return 0;
  }
  comm->state = result;
  while (!comm->aborted && !runtime_poisoned()) usleep(500); /* the kernel spins until somebody aborts */
  return 1;
}
