"""Can this libnccl run on this GPU? Answered from the file itself, before any CUDA call; standard library only."""
