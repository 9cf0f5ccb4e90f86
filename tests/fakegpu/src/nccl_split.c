/* Communicators made from a communicator: split by colour, shrunk by excluding ranks. */
#define _GNU_SOURCE
#include "nccl_internal.h"
#include <stdio.h>
#include <stdlib.h>

struct split {
  ncclComm_t parent, child;
  int color, key, slot;
};

static ncclResult_t agree_on_split(struct split *s) { /* all of the parent tell theirs; who belongs together follows */
  ncclComm_t parent = s->parent, child = s->child;
  struct split_slot *slot = &parent->segment->split[s->slot % SPLIT_SLOTS];
  int result = nccl_strike(parent, "split", -1, -1, NULL);
  if (result >= 0) return (ncclResult_t)result;
  slot->member[parent->rank].color = s->color;
  slot->member[parent->rank].key = s->key;
  atomic_store(&slot->member[parent->rank].set, 1);
  for (int looks = 0, n = 0; n < parent->size; pause_between_looks(&looks)) {
    n = 0;
    for (int i = 0; i < parent->size; i++) n += atomic_load(&slot->member[i].set);
    if (segment_lost(parent) || (child && child->aborted)) return ncclInternalError;
  }
  int size = 0, rank = 0;
  for (int i = 0; i < parent->size; i++) {
    if (slot->member[i].color != s->color) continue;
    size++;
    rank += slot->member[i].key < s->key || (slot->member[i].key == s->key && i < parent->rank);
  }
  if (atomic_fetch_add(&slot->left, 1) ==
      parent->size - 1) { /* the last to read frees the slot for the split after next */
    for (int i = 0; i < parent->size; i++) atomic_store(&slot->member[i].set, 0);
    atomic_store(&slot->left, 0);
  }
  if (!child) return ncclSuccess;
  child->size = size;
  child->rank = rank;
  snprintf(child->name, sizeof child->name, "%.40s-s%d-%d", parent->name, s->slot, s->color);
  return comm_form(child);
}

static void *split_thread(void *argument) {
  struct split *s = argument;
  runtime_set_current(s->parent->device);
  ncclResult_t result = agree_on_split(s);
  if (s->child && result) s->child->state = result;
  free(s);
  return NULL;
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
  CHECK_COMM(parent);
  if (parent->state) return (ncclResult_t)parent->state;
  struct split s = {parent, NULL, color, key, parent->splits++};
  if (color != NCCL_SPLIT_NOCOLOR) {
    s.child = comm_make(parent->name, parent->size, parent->rank, comm_blocking(config, parent->blocking));
    s.child->device = parent->device;
    s.child->gpu = parent->gpu;
    s.child->world_rank = parent->world_rank;
  }
  *out = s.child;
  if (!s.child || s.child->blocking) {
    ncclResult_t result = agree_on_split(&s);
    if (s.child && result) s.child->state = result;
    return result;
  }
  struct split *kept = malloc(sizeof s);
  *kept = s;
  comm_start_thread(split_thread, kept);
  return ncclInProgress;
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int *excluded, int count, ncclComm_t *out, ncclConfig_t *config,
                            int flags) {
  CHECK_COMM(parent);
  int size = 0, rank = 0;
  unsigned hash = 7; /* all members exclude the same ranks, so all find the same name */
  char name[64];
  if (flags & NCCL_SHRINK_ABORT) parent->aborted = 1;
  for (int i = 0; i < count; i++) hash = hash * 131 + (unsigned)excluded[i];
  for (int i = 0; i < parent->size; i++) {
    int out_of_it = 0;
    for (int j = 0; j < count; j++) out_of_it |= excluded[j] == i;
    size += !out_of_it;
    rank += !out_of_it && i < parent->rank;
  }
  snprintf(name, sizeof name, "%.40s-k%u", parent->name, hash);
  ncclComm_t c = comm_make(name, size, rank, comm_blocking(config, parent->blocking));
  c->device = parent->device;
  c->gpu = parent->gpu;
  c->world_rank = parent->world_rank;
  return comm_begin(c, out);
}
