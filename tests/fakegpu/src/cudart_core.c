/* The fake CUDA runtime: entering a call, errors that pass and errors that stay, and the table of visible devices. */
#define _GNU_SOURCE
#include "runtime.h"
#include <pthread.h>
#include <unistd.h>

static __thread int last_error, current;
static volatile int sticky;
static struct visible_device visible[MAX_DEVICES];
static int visible_count = -1;
static volatile int initialised, forked_after_init;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void look(void) { /* as the driver: CUDA_VISIBLE_DEVICES counts as it is at the first call, not later */
  pthread_mutex_lock(&lock);
  if (visible_count < 0) visible_count = node_visible(visible);
  pthread_mutex_unlock(&lock);
}

int runtime_visible_count(void) {
  look();
  return visible_count;
}
struct visible_device runtime_device(int ordinal) {
  look();
  return visible[ordinal];
}
int runtime_current(void) { return current; }
void runtime_set_current(int ordinal) { current = ordinal; }
int runtime_poisoned(void) { return sticky; }
int runtime_fail(int error) { return error ? last_error = error : 0; }

void runtime_poison(int error) {
  if (!sticky) sticky = error;
  runtime_wake_waiters();
}

void fakegpu_clear_sticky(void) { sticky = 0; }

/* The driver serves its own CUDA major version and older ones; within a major version any driver will do. */
static int driver_error(void) {
  return node_driver_version() / 1000 < node_runtime_version() / 1000 ? 35 /* cudaErrorInsufficientDriver */ : 0;
}

int runtime_enter(const char *point) {
  if (sticky) return last_error = sticky;
  if (forked_after_init) return last_error = 3; /* cudaErrorInitializationError, as CUDA does in such a child */
  look();
  initialised = 1;
  RETURN_IF(runtime_fail(driver_error()));
  struct fault fault;
  struct fault_site site = fault_site_at(point);
  site.gpu = current < visible_count ? visible[current].gpu : -1;
  if (!fault_strikes(&site, &fault)) return 0;
  switch (fault.action) {
    case FAULT_ERROR: return last_error = (int)fault.number;
    case FAULT_OOM: return last_error = cudaErrorMemoryAllocation;
    case FAULT_CUDA: runtime_poison((int)fault.number); return last_error = sticky;
    default: fault_act(&fault); return 0;
  }
}

int runtime_unsupported(const char *name) {
  node_trace("not supported: %s", name);
  return last_error = sticky ? sticky : cudaErrorNotSupported;
}

static const struct {
  int code;
  const char *name, *text;
} ERRORS[] = {
#include "cuda_errors.inc"
};

const char *cudaGetErrorString(cudaError_t error) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].code == error) return ERRORS[i].text;
  return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].code == error) return ERRORS[i].name;
  return "unrecognized error code";
}

cudaError_t cudaGetLastError(void) {
  int error = sticky ? sticky : last_error;
  last_error = 0;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return sticky ? sticky : last_error; }

static void in_the_child(void) {
  if (initialised) forked_after_init = 1;
  visible_count = -1;
  current = 0;
  pthread_mutex_init(&lock, NULL);
}
__attribute__((constructor)) static void watch_for_forks(void) { pthread_atfork(NULL, NULL, in_the_child); }
