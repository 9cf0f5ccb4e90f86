"""A user's module that computes with torch's CPU thread pool when it is imported; it travels in train_loop_config."""

import torch

torch.set_num_threads(4)
TOTAL = float(torch.arange(1 << 22, dtype=torch.float32).sum())


class Setting:
    """Something of this module that a job needs."""
