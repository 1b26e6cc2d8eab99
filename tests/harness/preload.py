"""What the forkserver imports before the first fork, so that a rank starts in hundredths of a second."""

import functools

import cpuinfo
import deepspeed
import deepspeed.ops.adam
import deepspeed.runtime.zero.muon.muon_optimizer  # torch.compile at its top level: two seconds of imports
import lightning.fabric
import lightning.pytorch
import pytest
import safetensors.torch
import torch
import transformers
import transformers.models.llama.modeling_llama  # transformers imports its models lazily

# pytest rewrites asserts only in the process that collects; without this a rank reports a bare "AssertionError".
from _pytest.assertion import install_importhook
from _pytest.config import get_config

install_importhook(get_config())

# DeepSpeed's op builders and CPU Adam ask for the processor's name three times a rank, for more than a second each.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()

__all__ = ["deepspeed", "lightning", "pytest", "safetensors", "torch", "transformers"]
