"""Pipeline parallelism with torch.distributed.pipelining: stages of the built-in model, and their execution."""
