"""Whole weights from a live engine: the engine's own, the same for any number of ranks, whole or not there."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import CheckpointError, ConfigError, ZeroStrategy, consolidate
from lightning_zero.strategies.gathered import choose
from tests.harness import ranks, run_ranks
from tests.models import Regression, body, loader, trainer, whole_weights
from tests.strategies.gathering import Everything, contents, known_weights, read_folder, tokens
from tests.strategies.test_checkpoints import masters

RUNS: dict[str, tuple[dict[str, Any], str]] = {
    **{f"stage{stage}-fp32": ({"stage": stage}, "32-true") for stage in range(4)},
    **{f"stage{stage}-bf16": ({"stage": stage}, "bf16-mixed") for stage in range(4)},
    "offloaded": ({"preset": "zero3_offload"}, "bf16-mixed"),
    "fp32-gradients": ({"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}, "bf16-mixed"),
}
WITHOUT_MASTERS = ("net.middle.weight", "net.middle.bias", "net.stats.running_mean", "net.stats.running_var")


def save_all(folder: Path, source: Path) -> None:
    """Each run's weights, set to known ones after fit: gathered in two types, and consolidated from a checkpoint."""
    world = int(os.environ["WORLD_SIZE"])
    for name, (arguments, precision) in RUNS.items():
        module = Everything()
        runner = trainer(ZeroStrategy(**arguments), devices=world, epochs=1, precision=precision)
        runner.fit(module, tokens(world))
        runner.strategy.load_weights(source)
        checkpoint = folder / name / "run.ckpt"
        runner.save_checkpoint(checkpoint)
        types = {key: value.dtype for key, value in module.state_dict().items()}
        if runner.is_global_zero:
            torch.save(types, folder / name / "types.pt")
        for dtype, asked in (("auto", "bfloat16"), (None, None)):
            target = folder / name / str(dtype)
            runner.strategy.save_gathered_weights(target / "gathered", dtype=dtype, max_shard_size=100)
            if runner.is_global_zero:
                output = target / "consolidated"
                consolidate(checkpoint, output, format="safetensors", dtype=asked, max_shard_size=100)
        runner.strategy.barrier()


def test_known_weights_come_back(tmp_path: Path) -> None:
    """W1-W5, W7, W11: at every stage and on 1, 2, 3 ranks the files hold the fp32 weights, or those rounded once; they
    are byte for byte those of the offline road and of other numbers of ranks.
    """
    expected = known_weights(tmp_path / "known.pt")
    for world in (1, 2, 3):
        run_ranks(save_all, world, tmp_path / str(world), tmp_path / "known.pt", timeout=240)
    for name in RUNS:
        types = torch.load(tmp_path / "1" / name / "types.pt")
        for dtype in ("auto", "None"):
            folders = [tmp_path / str(world) / name / dtype for world in (1, 2, 3)]
            gathered = contents(folders[0] / "gathered")
            assert len(gathered) > 3, name
            for folder in folders:
                assert contents(folder / "gathered") == gathered, (name, folder)
                assert contents(folder / "consolidated") == gathered, (name, folder)
            tensors, others = read_folder(folders[0] / "gathered")
            assert tensors.keys() | others.keys() == expected.keys(), name
            assert others["net.head.weight"] == "net.embed.weight"
            assert others["net.other_counts"] == "net.counts"
            for key, tensor in tensors.items():
                wanted = expected[key]
                if wanted.is_floating_point():
                    if key in WITHOUT_MASTERS:
                        wanted = wanted.to(types[key])
                    wanted = wanted.to(torch.bfloat16 if dtype == "auto" else torch.float32)
                assert tensor.dtype == wanted.dtype, (name, key)
                assert torch.equal(tensor, wanted), (name, dtype, key)


@ranks(2)
def test_trained_and_partly_frozen(tmp_path: Path) -> None:
    """W4, W9: after training, the files hold the optimizer's masters; without frozen weights, the adapters alone."""

    class Adapted(Regression):
        def configure_model(self) -> None:
            if self.net is None:
                self.net = nn.ModuleDict({"base": body(), "lora_A": nn.Linear(7, 2), "lora_B": nn.Linear(2, 3)})
                self.net["base"].requires_grad_(False)

        def forward(self, rows: Tensor) -> Tensor:
            result: Tensor = self.net["base"](rows) + self.net["lora_B"](self.net["lora_A"](rows))
            return result

    for stage in (2, 3):
        module = Adapted("adamw")
        runner = trainer(ZeroStrategy(stage=stage), precision="bf16-mixed")
        runner.fit(module, loader())
        folder = tmp_path / str(stage)
        runner.strategy.save_gathered_weights(folder / "adapters", exclude_frozen=True)
        runner.strategy.save_gathered_weights(folder / "part", module="net.lora_B", dtype=torch.float16)
        adapters, _ = read_folder(folder / "adapters")
        module.net["base"].requires_grad_(True)  # type: ignore[index]
        expected = {name: value for name, value in masters_of(module).items() if "lora" in name}
        assert adapters.keys() == expected.keys()
        assert all(torch.equal(adapters[name], value) for name, value in expected.items())
        part, _ = read_folder(folder / "part")
        assert part.keys() == {"weight", "bias"}
        assert torch.equal(part["weight"], expected["net.lora_B.weight"].half())


def masters_of(module: nn.Module) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    trained = [(n, p) for n, p in module.named_parameters() if "lora" in n]
    return {n: safe_get_full_fp32_param(p).reshape(getattr(p, "ds_shape", p.shape)).clone() for n, p in trained}


@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks(2)
def test_without_a_training_engine(stage: int, tmp_path: Path) -> None:
    """W3: after validation alone, and after the engine is released, the weights are those in the module."""
    module = Regression("adamw")
    runner = trainer(ZeroStrategy(stage=stage))
    runner.validate(module, loader(), verbose=False)
    runner.strategy.save_gathered_weights(tmp_path / "validated")
    runner.fit(module, loader())
    trained = masters(module) if stage else whole_weights(module)
    runner.strategy.release()
    runner.strategy.save_gathered_weights(tmp_path / "released")
    runner.save_checkpoint(tmp_path / "released.ckpt", weights_only=True)
    initial, _ = read_folder(tmp_path / "validated")
    released, _ = read_folder(tmp_path / "released")
    assert all(torch.equal(initial[f"net.{name}"], value) for name, value in body().state_dict().items())
    assert all(torch.equal(released[name], value) for name, value in trained.items())
    single = torch.load(tmp_path / "released.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(single[name], value) for name, value in trained.items())


@ranks(2)
def test_reordered_parameters(tmp_path: Path) -> None:
    """W4: where DeepSpeed lays parameters out in another order, each still gets its own values."""
    module = Everything()
    config = {"zero_optimization": {"round_robin_gradients": True}}
    runner = trainer(ZeroStrategy(stage=2, config=config), epochs=1)
    runner.fit(module, tokens(2))
    runner.strategy.save_gathered_weights(tmp_path / "out")
    tensors, others = read_folder(tmp_path / "out")
    expected = module.state_dict()
    assert tensors.keys() | others.keys() == expected.keys()
    same = {name: torch.equal(tensor, expected[name]) for name, tensor in tensors.items() if "stats" not in name}
    assert all(same.values()), same  # the statistics are rank 0's


@ranks(2)
def test_swapped_out_weights(nvme_ops: None, tmp_path: Path) -> None:
    """Parameters and masters that are on NVMe are read back, a frozen one included."""

    class Partly(Regression):
        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(1)
                self.net = nn.Sequential(nn.Linear(7, 512), nn.Linear(512, 512), nn.Linear(512, 3))
                self.net[0].requires_grad_(False)

    module = Partly("adamw")
    runner = trainer(ZeroStrategy(preset="zero3_nvme", nvme_path=tmp_path / "swap"), epochs=1)
    runner.fit(module, loader())
    runner.strategy.save_gathered_weights(tmp_path / "out")
    tensors, _ = read_folder(tmp_path / "out")
    expected = whole_weights(module)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


class Broken:
    """A tokenizer that cannot be saved."""

    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("no vocabulary")


@ranks(2)
def test_a_failure_on_one_rank(tmp_path: Path) -> None:
    """A rank that cannot write, or a part that cannot be published, is told on all ranks; an earlier folder stays."""
    runner = trainer(ZeroStrategy(stage=3))
    module = Regression("adamw")
    runner.fit(module, loader())
    save = runner.strategy.save_gathered_weights
    save(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"out failed on rank 0: no vocabulary"):
        save(tmp_path / "out", tokenizer=Broken())
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))  # as on a full disk
    with pytest.raises(CheckpointError, match=r"new failed on rank 1: .*File too large.*Nothing of it is left"):
        save(tmp_path / "new")
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match="is a file"):
        save(tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match="remote URL"):
        save("s3://bucket/out")
    assert contents(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@ranks(2)
def test_called_on_one_rank_only(tmp_path: Path) -> None:
    """A save that the other rank does not make ends in an error that says so, and leaves nothing."""
    runner = trainer(ZeroStrategy(stage=2, timeout=timedelta(seconds=12)))
    runner.fit(Regression("adamw"), loader())
    (tmp_path / "home").mkdir(exist_ok=True)
    if os.environ["RANK"] == "0":
        with pytest.raises(CheckpointError, match=r"not all ranks took part.*on every rank"):
            runner.strategy.save_gathered_weights(tmp_path / "home" / "out")
        (tmp_path / "done").touch()
    while not (tmp_path / "done").exists():
        time.sleep(0.2)
    assert list((tmp_path / "home").iterdir()) == []


class Wide(L.LightningModule):
    """48 MB of parameters, in three equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(*(nn.Linear(2000, 2000, bias=False) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).pow(2).mean()  # type: ignore[misc]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_memory_stays_below_one_parameter(stage: int, tmp_path: Path) -> None:
    """W6: while 48 MB are saved, no rank takes as much as one parameter of 16 MB: nothing is made whole."""
    runner = trainer(ZeroStrategy(stage=stage), epochs=1)
    runner.fit(Wide(), DataLoader(torch.randn(4, 2000), batch_size=2))  # type: ignore[arg-type]
    for dtype in (None, "auto"):
        ctypes.CDLL(None).malloc_trim(0)  # else freed memory is used again, and nothing is seen to grow
        done, samples = threading.Event(), [anonymous()]
        watcher = threading.Thread(target=watch, args=(samples, done))
        watcher.start()
        runner.strategy.save_gathered_weights(tmp_path / "out", dtype=dtype)
        done.set()
        watcher.join()
        assert max(samples) - samples[0] < 14_000, dtype


def anonymous() -> int:
    """This process's anonymous memory in kB, which does not count mapped files."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def watch(samples: list[int], done: threading.Event) -> None:
    while not done.wait(0.001):
        samples.append(anonymous())


class Llama(L.LightningModule):
    """A tiny Llama with tied embeddings, built in ``configure_model``."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.net: Any = None
        self.frozen = frozen

    def configure_model(self) -> None:
        if self.net is None:
            self.net = tiny_llama()
            if self.frozen:
                self.net.model.layers.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, tie_word_embeddings=True, **sizes))


def sentences() -> DataLoader[Any]:
    return DataLoader(torch.arange(48).view(8, 6) % 31, batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_transformers_folder(stage: int, tmp_path: Path) -> None:
    """W1: the folder has the files, config and keys of `save_pretrained`, and loads with the trained model's logits."""
    from transformers import AutoModelForCausalLM

    module = Llama()
    runner = trainer(ZeroStrategy(stage=stage), precision="bf16-mixed")
    runner.fit(module, sentences())
    runner.strategy.save_gathered_weights(tmp_path / "ours", dtype="auto")
    reference = tiny_llama()
    with torch.no_grad():
        for (_, parameter), trained in zip(reference.named_parameters(), masters(module).values(), strict=True):
            parameter.copy_(trained)
    reference = reference.bfloat16()
    if runner.is_global_zero:
        reference.save_pretrained(tmp_path / "theirs")
        ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
        assert ours.keys() == theirs.keys()
        assert ours["config.json"].split() == theirs["config.json"].split()
        assert read_folder(tmp_path / "ours")[0].keys() == read_folder(tmp_path / "theirs")[0].keys()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
        assert loaded.dtype == torch.bfloat16
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        batch = torch.arange(6)[None]
        assert torch.equal(loaded.eval()(batch).logits, reference.eval()(batch).logits)
    runner.strategy.barrier()


@ranks(2)
def test_save_pretrained_at_stage_3(tmp_path: Path) -> None:
    """W8, W9: called on the sharded model it refuses, on whole parameters it works; half a model has no config."""
    import deepspeed

    module = Llama(frozen=True)
    sharding_all = {"zero_optimization.stage3_param_persistence_threshold": 0}
    runner = trainer(ZeroStrategy(stage=3, overrides=sharding_all), epochs=1)
    runner.fit(module, sentences())
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM\.state_dict\(\) would hold empty tensors.*gathered"):
        module.net.save_pretrained(tmp_path / "direct")
    assert not list(tmp_path.glob("direct/*.safetensors"))
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        assert all(value.numel() for value in module.net.state_dict().values())
    runner.save_checkpoint(tmp_path / "run.ckpt")
    runner.strategy.save_gathered_weights(tmp_path / "half", exclude_frozen=True)
    assert [path.name for path in (tmp_path / "half").iterdir()] == ["model.safetensors"]
    assert set(read_folder(tmp_path / "half")[0]) == {"model.embed_tokens.weight", "model.norm.weight"}


def test_which_part_is_meant() -> None:
    """W9: one transformers model is chosen by itself, several must be named, and any part can be named."""
    module = L.LightningModule()
    assert choose(module, None).part is module
    module.student = tiny_llama()
    assert choose(module, None).part is module.student
    assert choose(module, None).pretrained
    module.teacher = tiny_llama()
    with pytest.raises(ConfigError, match=r"2 transformers models: 'student', 'teacher'\. Name one with module="):
        choose(module, None)
    assert choose(module, "teacher").part is module.teacher
    assert not choose(module, "teacher.model.layers").pretrained
    assert choose(module, "").part is module
    with pytest.raises(ConfigError, match=r"'tutor' is not a part of LightningModule.*student, teacher"):
        choose(module, "tutor")
    module.compiled = torch.compile(nn.Linear(2, 2))
    assert type(choose(module, "compiled").part) is nn.Linear


@ranks(1)
def test_other_weights_are_told(tmp_path: Path) -> None:
    """Weights beside the transformers model, which its folder cannot hold, are named; `module=""` writes them too."""

    class WithHead(Llama):
        def configure_model(self) -> None:
            super().configure_model()
            self.head = nn.Linear(2, 2)

    module = WithHead()
    runner = trainer(ZeroStrategy(stage=2), devices=1)
    runner.fit(module, sentences())
    with pytest.warns(UserWarning, match=r"other weights: head\.weight, head\.bias\. Write all of it with module=''"):
        runner.strategy.save_gathered_weights(tmp_path / "model")
    runner.strategy.save_gathered_weights(tmp_path / "all", module="")
    assert "head.weight" in read_folder(tmp_path / "all")[0]


@ranks(1)
def test_a_compiled_model(tmp_path: Path) -> None:
    """A model inside `torch.compile` is found, and its names are its own, on both roads."""

    class Compiled(Llama):
        def configure_model(self) -> None:
            if self.net is None:
                self.net = torch.compile(tiny_llama(), backend="eager")

    module = Compiled()
    runner = trainer(ZeroStrategy(stage=2), devices=1, epochs=1)
    runner.fit(module, sentences())
    runner.save_checkpoint(tmp_path / "run.ckpt")
    consolidate(tmp_path / "run.ckpt", tmp_path / "consolidated")
    for name in (None, "net"):
        folder = tmp_path / str(name)
        runner.strategy.save_gathered_weights(folder, module=name)
        assert contents(folder) == contents(tmp_path / "consolidated")
        assert "model.norm.weight" in read_folder(folder)[0]
