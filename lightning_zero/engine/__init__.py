"""DeepSpeed's side of a run: ops, engine, accumulation, optimizers, partitions. Knows nothing of Lightning."""
