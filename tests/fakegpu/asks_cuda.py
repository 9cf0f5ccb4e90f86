"""A user's module that asks for CUDA when it is imported, as many do; it travels in train_loop_config."""

import torch

AVAILABLE = torch.cuda.is_available()


class Setting:
    """Something of this module that a job needs."""
