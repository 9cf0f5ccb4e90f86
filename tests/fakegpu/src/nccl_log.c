/* Lines as NCCL writes them, to where NCCL_DEBUG and NCCL_DEBUG_FILE say, and the text of ncclGetLastError. */
#define _GNU_SOURCE
#include "nccl_internal.h"
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum level { LEVEL_NONE, LEVEL_VERSION, LEVEL_WARN, LEVEL_INFO };

static FILE *out;
static enum level level;
static const char *subsystems;
static char last_error[1024]; /* one per process, as in NCCL */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void host_name(char *text, size_t bytes) { /* NCCL cuts at the first dot */
  snprintf(text, bytes, "%s", node_name());
  text[strcspn(text, ".")] = 0;
}

static void open_file(const char *pattern) { /* %h host, %p pid */
  char path[1024] = "", host[256];
  host_name(host, sizeof host);
  for (size_t n = 0; *pattern && n < sizeof path - 260; n = strlen(path)) {
    if (!strncmp(pattern, "%h", 2))
      strcat(path, host);
    else if (!strncmp(pattern, "%p", 2))
      sprintf(path + n, "%d", (int)getpid());
    else {
      path[n] = *pattern++;
      continue;
    }
    pattern += 2;
  }
  FILE *file = fopen(path, "w");
  if (!file) return;
  setvbuf(file, NULL, _IOLBF, BUFSIZ);
  out = file;
}

static void start(void) { /* once per process, as in NCCL: a later change of NCCL_DEBUG changes nothing */
  const char *text = getenv("NCCL_DEBUG"), *file = getenv("NCCL_DEBUG_FILE");
  out = stdout;
  level = !text                                                     ? LEVEL_NONE
          : !strcasecmp(text, "VERSION")                            ? LEVEL_VERSION
          : !strcasecmp(text, "WARN")                               ? LEVEL_WARN
          : !strcasecmp(text, "INFO") || !strcasecmp(text, "TRACE") ? LEVEL_INFO
                                                                    : LEVEL_NONE;
  subsystems = getenv("NCCL_DEBUG_SUBSYS");
  if (!subsystems) subsystems = "INIT,BOOTSTRAP,ENV";
  if (file && level > LEVEL_VERSION) open_file(file);
}

static int wanted(const char *subsystem) {
  return level == LEVEL_INFO && (strcasestr(subsystems, subsystem) || strcasestr(subsystems, "ALL"));
}

static void prefix(char *text, size_t bytes, const ncclComm_t comm) {
  char host[256];
  int device = comm ? comm->device : runtime_current();
  host_name(host, sizeof host);
  snprintf(text, bytes, "%s:%d:%d [%d]", host, (int)getpid(), (int)syscall(SYS_gettid), device);
}

void nccl_info(const ncclComm_t comm, const char *subsystem, const char *format, ...) {
  pthread_once(&once, start);
  if (!wanted(subsystem)) return;
  char head[300], body[1024];
  va_list arguments;
  prefix(head, sizeof head, comm);
  va_start(arguments, format);
  vsnprintf(body, sizeof body, format, arguments);
  va_end(arguments);
  fprintf(out, "%s NCCL INFO %s\n", head, body);
  fflush(out);
}

void nccl_warn(const ncclComm_t comm, const char *where, const char *format, ...) {
  pthread_once(&once, start);
  char head[300], stamp[64];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  if (level < LEVEL_WARN) return;
  time_t now = time(NULL);
  struct tm parts;
  strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", localtime_r(&now, &parts));
  prefix(head, sizeof head, comm);
  fprintf(out, "\n[%s] %s %s NCCL WARN %s\n", stamp, head, where, last_error);
  fflush(out);
}

const char *ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return last_error;
}

int nccl_version(void) {
  const char *text = getenv("FAKE_NCCL_VERSION");
  return text && *text ? atoi(text) : 23007; /* 2.30.7, which torch 2.15.0 pins */
}

void nccl_version_banner(int rank) {
  char text[128];
  int v = nccl_version(), cuda = node_runtime_version();
  pthread_once(&once, start);
  snprintf(text, sizeof text, "NCCL version %d.%d.%d+cuda%d.%d", v / 10000, v % 10000 / 100, v % 100, cuda / 1000,
           cuda % 1000 / 10);
  if (level == LEVEL_INFO)
    nccl_info(NULL, "INIT", "%s", text);
  else if (level >= LEVEL_VERSION && rank == 0) {
    fprintf(out, "%s\n", text);
    fflush(out);
  }
}

static int interface_allowed(const char *name, unsigned flags) {
  const char *filter = getenv("NCCL_SOCKET_IFNAME");
  if (!filter || !*filter) return !(flags & IFF_LOOPBACK) && strncmp(name, "docker", 6);
  int exclude = *filter == '^', exact, match = 0;
  filter += exclude;
  exact = *filter == '=';
  filter += exact;
  for (const char *entry = filter; entry && *entry; entry = strchr(entry, ',') ? strchr(entry, ',') + 1 : NULL) {
    size_t length = strcspn(entry, ",");
    match |= exact ? strlen(name) == length && !strncmp(name, entry, length) : !strncmp(name, entry, length);
  }
  return match != exclude;
}

static int choose_interface(char *text,
                            size_t bytes) { /* "eth0:10.0.0.1<0>"; loopback only when nothing else is there */
  struct ifaddrs *all, *i;
  if (getifaddrs(&all)) return -1;
  int found = 0;
  for (int loopback = 0; loopback < 2 && !found; loopback++)
    for (i = all; i && !found; i = i->ifa_next) {
      char address[INET_ADDRSTRLEN];
      if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP)) continue;
      const char *filter = getenv("NCCL_SOCKET_IFNAME");
      int last_resort = loopback && !(filter && *filter) && (i->ifa_flags & IFF_LOOPBACK);
      if (!interface_allowed(i->ifa_name, i->ifa_flags) && !last_resort) continue;
      inet_ntop(AF_INET, &((struct sockaddr_in *)i->ifa_addr)->sin_addr, address, sizeof address);
      snprintf(text, bytes, "%s:%s<0>", i->ifa_name, address);
      found = 1;
    }
  freeifaddrs(all);
  return found ? 0 : -1;
}

static void init_line(const ncclComm_t c, const char *end) {
  unsigned long long id = 14695981039346656037ull; /* FNV-1a: the same on all ranks, and looks like NCCL's */
  for (const char *letter = c->name; *letter; letter++) id = (id ^ (unsigned char)*letter) * 1099511628211ull;
  nccl_info(
      c, "INIT",
      "ncclCommInitRankConfig comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %x000 commId 0x%llx - Init %s",
      (void *)c, c->rank, c->size, c->device, c->gpu, c->gpu + 1, id, end);
}

void nccl_log_start(const ncclComm_t c) { init_line(c, "START"); }
void nccl_log_complete(const ncclComm_t c) { init_line(c, "COMPLETE"); }

/* Like the real ones: who comes last to the meeting waits in it for nobody, and all the others wait for it. */
void nccl_log_bootstrap(const ncclComm_t c, const struct init_timings *t) {
  nccl_info(c, "BOOTSTRAP",
            "Bootstrap timings total %f (create %f, send %f, recv %f, ring %f, delay %f)", t->met_s - t->ready_s, 0.0, 0.0,
            t->met_s - t->ready_s, 0.0, 0.0);
}

void nccl_log_timings(const ncclComm_t c, const struct init_timings *t) {
  nccl_info(c, "INIT",
            "Init timings - ncclCommInitRankConfig: rank %d nranks %d total %.2f (kernels %.2f, alloc %.2f, bootstrap %.2f, "
            "allgathers 0.00, topo 0.00, graphs 0.00, connections %.2f, rest 0.00)",
            c->rank, c->size, t->done_s - t->began_s, t->loaded_s - t->began_s, t->ready_s - t->loaded_s,
            t->met_s - t->ready_s, t->done_s - t->met_s);
}

int nccl_log_network(const ncclComm_t c) {
  static const char *const REPORTED[] = {"NCCL_SOCKET_IFNAME",     "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
                                         "NCCL_IB_DISABLE",        "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE",
                                         "NCCL_CUMEM_HOST_ENABLE", "NCCL_NET"};
  char interface[128];
  for (size_t i = 0; i < sizeof REPORTED / sizeof *REPORTED; i++)
    if (getenv(REPORTED[i])) nccl_info(c, "ENV", "%s set by environment to %s.", REPORTED[i], getenv(REPORTED[i]));
  if (choose_interface(interface, sizeof interface)) {
    nccl_warn(c, "bootstrap.cc:110", "Bootstrap : no socket interface found");
    return -1;
  }
  nccl_info(c, "BOOTSTRAP", "Bootstrap: Using %s", interface);
  nccl_info(c, "INIT", "cudaDriverVersion %d", node_driver_version());
  nccl_version_banner(c->rank);
  nccl_info(c, "INIT", "NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.");
  nccl_info(c, "INIT", "NET/IB : No device found.");
  nccl_info(c, "INIT", "NET/Socket : Using [0]%s", interface);
  nccl_info(c, "INIT", "Using network Socket");
  return 0;
}

void nccl_log_connected(const ncclComm_t c) {
  struct segment *s = c->segment;
  int nodes = 0, next = (c->rank + 1) % c->size;
  for (int i = 0; i < c->size; i++) {
    int known = 0;
    for (int j = 0; j < i; j++) known |= !strcmp(s->member[i].node, s->member[j].node);
    nodes += !known;
  }
  const char *p2p = getenv("NCCL_P2P_DISABLE");
  const char *path = strcmp(s->member[c->rank].node, s->member[next].node) ? "[send] via NET/Socket/0"
                     : p2p && *p2p == '1'                                  ? "via SHM/direct/direct"
                                                                           : "via P2P/CUMEM";
  nccl_info(c, "INIT", "comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL 0", (void *)c, c->rank,
            c->size, nodes, c->size / (nodes ? nodes : 1), c->gpu);
  if (c->size > 1)
    nccl_info(c, "INIT", "Channel 00/0 : %d[%d] -> %d[%d] %s", c->rank, c->gpu, next, s->member[next].gpu, path);
  nccl_info(c, "INIT", "Connected all rings, use ring PXN 0 GDR 1");
}
