"""`from_pretrained` in `configure_model` at stage 3, as if nothing were sharded."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lightning_zero import ZeroStrategy
from tests import pretrained
from tests.harness import ranks
from tests.models import largest_difference, trainer, whole_weights

NAMES = ("llama", "bert", "t5", "vit", "resnet", "mixtral")


@ranks(1, 2, 3)
def test_values_and_losses_are_those_of_stage_0(world_size: int) -> None:
    """M1, W1: models read from sharded safetensors are partitioned, hold what was saved, and learn as at stage 0."""
    whole = pretrained.whole_models()
    pretrained.save(whole, max_shard_size="4KB")
    losses = {}
    for stage in (3, 0):
        module = pretrained.Pretrained(*NAMES)
        held: dict[str, int] = {}
        initial: dict[str, Tensor] = {}

        def look(module: Any = module, held: Any = held, initial: Any = initial) -> None:
            held.update({name: parameter.numel() for name, parameter in module.named_parameters()})
            initial.update(whole_weights(module.nets))
            initial.update({name: buffer.clone() for name, buffer in module.nets.named_buffers()})

        module.on_fit_start = look  # type: ignore[method-assign]
        run = trainer(ZeroStrategy(stage=stage), epochs=1, devices=world_size)
        run.fit(module, pretrained.tokens(10, ranks=world_size))
        losses[stage] = module.losses
        everything = torch.nn.ModuleDict(whole)
        expected: dict[str, Tensor] = {**dict(everything.named_parameters()), **dict(everything.named_buffers())}
        assert initial.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(initial[name], value), (stage, name)
        trained = whole_weights(module.nets)
        assert largest_difference({name: initial[name] for name in trained}, trained) > 0.01  # it did train
        assert (set(held.values()) == {0}) == (stage == 3)
    assert len(losses[3]) == 10
    for ours, theirs in zip(losses[3], losses[0], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


MEGABYTE = 1 << 20
_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD


class AnonymousMemory(threading.Thread):
    """Follows this process's anonymous memory, in which mapped files do not count.

    Every rank waits for the others after each tensor, so a look every millisecond misses nothing.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = self.now()
        self.done = threading.Event()

    @staticmethod
    def now() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) << 10

    def run(self) -> None:
        while not self.done.wait(0.001):
            self.peak = max(self.peak, self.now())


class Measured(pretrained.Pretrained):
    """Notes how much memory ``from_pretrained`` takes."""

    def configure_model(self) -> None:
        if self.nets is None:
            # What is freed goes back at once, as it does by itself from 32 MB on: held memory is measured, not glibc's.
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
            LlamaForCausalLM(pretrained.llama_config())  # whatever is imported first is imported now
            gc.collect()
            memory = AnonymousMemory()
            memory.start()
            super().configure_model()
            memory.done.set()
            memory.join()
            self.taken = memory.peak - memory.first

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        """Nothing: the model has been built by then."""


@pytest.fixture
def saved_in_bf16(tmp_path: Path) -> Path:
    """A Llama of 42 million parameters in files of 10 MB, saved where nothing is measured."""
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
    model = LlamaForCausalLM(pretrained.llama_config(**sizes, num_attention_heads=8)).to(torch.bfloat16)
    pretrained.save({"llama": model}, tmp_path, max_shard_size="10MB")
    return tmp_path


@ranks(2)
def test_no_rank_holds_more_than_its_shard_and_a_file(saved_in_bf16: Path) -> None:
    """Loading 85 MB of bf16 into 170 MB of fp32 parameters on two ranks takes each rank 85 MB of anonymous memory, and
    less than what the tensors of one file, of 10 MB, are in fp32, with 20 MB to spare. A whole model would take 170.
    """
    module = Measured("llama", folder=str(saved_in_bf16))
    run = trainer(ZeroStrategy(stage=3))
    run.predict(module, pretrained.tokens(1, ranks=2))
    size = 4 * sum(parameter.ds_numel for parameter in module.parameters())
    assert size > 160 * MEGABYTE
    assert module.taken < size // 2 + 20 * MEGABYTE + 20 * MEGABYTE, module.taken / MEGABYTE
