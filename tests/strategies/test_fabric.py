"""A Fabric's life: set-up, inference, optimizers from the config, and one clear error for each mistake."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import nn
from torchmetrics import SumMetric

import lightning_zero
from lightning_zero import CheckpointError, ConfigError, FabricZeroStrategy
from tests.harness import ranks
from tests.models import WIDTH, body, largest_difference, loader, whole_weights
from tests.pretrained import llama_config
from tests.strategies.fabric_loops import launched, optimizer_for, train

STAGES = [0, 1, 2, 3]
NAMES = ["zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]


def test_registered_names() -> None:
    """Each of the seven names stands for the preset of that name in Fabric's registry."""
    found = {name: STRATEGY_REGISTRY[name] for name in STRATEGY_REGISTRY if name.startswith("zero")}
    assert sorted(found) == NAMES
    for name, entry in found.items():
        assert entry["strategy"] is FabricZeroStrategy
        assert entry["init_params"] == {"preset": name}
    assert Fabric(strategy="zero3_offload", accelerator="cpu", devices=2).strategy.stage == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "stage"),
        ({"gradient_clipping": -1.0}, r"gradient_clipping=-1\.0"),
        ({"gradient_clipping": math.nan}, "gradient_clipping=nan"),
        ({"gradient_clipping": True}, "gradient_clipping=True"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    """A wrong argument is refused when the strategy is made, by name."""
    with pytest.raises(ConfigError, match=message):
        FabricZeroStrategy(**arguments)


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
def test_precision_that_deepspeed_cannot_do(precision: Any) -> None:
    """A precision outside the five is refused when the Fabric is made."""
    with pytest.raises(ValueError, match="precision"):
        Fabric(strategy="zero2", accelerator="cpu", devices=1, precision=precision)


def test_resolved_needs_a_launch() -> None:
    """Asking for the resolved config before the launch names the call that resolves it."""
    with pytest.raises(ConfigError, match=r"fabric\.launch"):
        _ = FabricZeroStrategy().resolved


@ranks(2)
def test_clipping() -> None:
    """A7: updates are not clipped unless asked; argument, config and call clip alike, and places must agree."""

    def resolved(**arguments: Any) -> Any:
        fabric = launched(FabricZeroStrategy(stage=1, **arguments))
        return train(fabric, "sgd", epochs=1), fabric.strategy.resolved

    unclipped, config = resolved()
    assert config.config["gradient_clipping"] == 0.0
    expected = train(launched("ddp"), "sgd", epochs=1)
    assert largest_difference(unclipped.weights, expected.weights) < 1e-6
    expected = train(launched("ddp"), "sgd", epochs=1, clip=0.1)
    for arguments in ({"gradient_clipping": 0.1}, {"config": {"gradient_clipping": 0.1}}):
        clipped, config = resolved(**arguments)
        assert config.config["gradient_clipping"] == 0.1
        assert largest_difference(clipped.weights, expected.weights) < 1e-6
    with pytest.raises(ConfigError, match=r"config says 1\.0, gradient_clipping=0\.1 says 0\.1"):
        launched(FabricZeroStrategy(config={"gradient_clipping": 1.0}, gradient_clipping=0.1))
    with pytest.raises(ConfigError, match=r"(?s)accumulation_steps.*no_backward_sync"):
        launched(FabricZeroStrategy(config={"gradient_accumulation_steps": 4}))
    with pytest.raises(ConfigError, match=r"bf16\.enabled.*Fabric\(precision='32-true'\)"):
        launched(FabricZeroStrategy(config={"bf16": {"enabled": True}}))


@ranks(2)
def test_a_config_of_autos() -> None:
    """A JSON full of "auto" resolves without a Trainer; what only a loader or a length would tell can be passed."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    fabric = launched(FabricZeroStrategy(config=config, micro_batch_size=3, auto={"hidden_size": 100}))
    network = body()
    model, _ = fabric.setup(network, optimizer_for("sgd", network))
    resolved = fabric.strategy.resolved
    assert resolved.config["train_batch_size"] == 6
    assert resolved.config["zero_optimization"]["reduce_bucket_size"] == 10000
    assert resolved.origins["train_micro_batch_size_per_gpu"] == "micro_batch_size=3"
    assert "micro_batch_size=3" in fabric.strategy.explain(model)
    assert "auto" not in str(resolved.config)
    fabric = launched(FabricZeroStrategy(config=config, auto={"hidden_size": 100}))
    other = body()
    fabric.setup(other, optimizer_for("sgd", other))
    assert fabric.strategy.resolved.config["train_batch_size"] == 2


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_optimizer_and_scheduler_of_the_config(stage: int) -> None:
    """The config's optimizer and scheduler are given back, and train as the same ones from code under ddp."""
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }
    fabric = launched(FabricZeroStrategy(config=config))
    with fabric.init_module():
        network = body()
    model = fabric.setup(network)
    optimizer, scheduler = fabric.strategy.optimizer_and_scheduler(model)
    reference = launched("ddp")
    plain = body()
    copy, copied_optimizer = reference.setup(plain, optimizer_for("adamw", plain))
    rates = []
    for update, (rows, targets) in enumerate(fabric.setup_dataloaders(loader())):
        for group in copied_optimizer.param_groups:
            group["lr"] = optimizer.param_groups[0]["lr"]
        rates.append(group["lr"])
        for loop, net, step in ((fabric, model, optimizer), (reference, copy, copied_optimizer)):
            loop.backward(nn.functional.mse_loss(net(rows), targets))
            step.step()
            step.zero_grad()
        scheduler.step()
        assert scheduler.last_batch_iteration == update
    assert rates == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.015, 0.02])  # DeepSpeed's first step is number 0
    assert largest_difference(whole_weights(network), whole_weights(plain)) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@ranks(2)
def test_inference(stage: int, precision: Any) -> None:
    """`setup(model)` computes what the plain model computes, with rank 0's weights, also behind a model that trains."""
    fabric = launched(FabricZeroStrategy(stage=stage), precision=precision)
    torch.manual_seed(fabric.global_rank)  # ddp, too, takes rank 0's weights
    with fabric.init_module():
        network = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)).requires_grad_(False)
        student = body()
    model = fabric.setup(network)
    plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
    plain.load_state_dict(whole_weights(network))
    [*everyones] = fabric.all_gather(torch.cat([weight.flatten() for weight in whole_weights(network).values()]))
    assert torch.equal(*everyones)
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    tolerance = 1e-6 if precision == "32-true" else 0.03
    with torch.no_grad():
        assert torch.allclose(model(rows), plain(rows), atol=tolerance)
    with pytest.raises(ConfigError, match="set up without an optimizer"):
        fabric.backward(model(rows.requires_grad_()).sum(), model=model)
    trained, optimizer = fabric.setup(student, optimizer_for("sgd", student))
    for _ in range(2):
        loss = (trained(rows.detach()) - model(rows.detach())).pow(2).mean()
        fabric.backward(loss, model=trained)
        optimizer.step()
    assert float((trained(rows.detach()) - model(rows.detach())).pow(2).mean()) < float(loss)


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_bf16_loop(stage: int) -> None:
    """In bf16 a loop trains at every stage, its weights near those of fp32, and a norm comes with each update."""
    fabric = launched(FabricZeroStrategy(stage=stage), precision="bf16-mixed")
    actual = train(fabric, "sgd", epochs=1, clip=1.0)
    expected = train(launched("ddp"), "sgd", epochs=1, clip=1.0)
    assert largest_difference(actual.weights, expected.weights) < 0.02
    assert actual.norms == pytest.approx(expected.norms, rel=0.05)


@ranks(1)
def test_metrics_keep_fp32() -> None:
    """P5: the state of a metric inside a model under ``bf16-true`` counts 300 ones, where bf16 stops at 256."""
    for stage in (2, 3):
        fabric = launched(FabricZeroStrategy(stage=stage), devices=1, precision="bf16-true")
        with fabric.init_module():
            network = nn.ModuleDict({"net": body(), "ones": SumMetric()})
        fabric.setup(network, optimizer_for("sgd", network))
        for _ in range(300):
            network["ones"].update(torch.ones(1))
        assert network["ones"].compute().item() == 300
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
        fabric.strategy.release()


@ranks(1)
def test_mistakes_in_a_loop() -> None:
    """Each mistake in a loop is one error that says what to write."""
    fabric = launched(FabricZeroStrategy(stage=2), devices=1)

    def refused(match: str, call: Any, *args: Any, error: type[Exception] = ConfigError, **more: Any) -> None:
        with pytest.raises(error, match=match):
            call(*args, **more)

    network = body()
    raw = optimizer_for("sgd", network)
    refused("jointly", fabric.setup_optimizers, raw, error=RuntimeError)
    refused("2 optimizers", fabric.setup, network, raw, optimizer_for("adamw", network))
    refused("LBFGS does not work", fabric.setup, network, torch.optim.LBFGS(network.parameters()))
    refused("No model has been set up", fabric.strategy.optimizer_and_scheduler)
    model, optimizer = fabric.setup(network, raw)
    refused(r"optimizer\.step\(\) was called with no backward", optimizer.step)
    rows = torch.ones(2, WIDTH)
    refused("one number", fabric.backward, model(rows))
    refused("depends on no parameter", fabric.backward, torch.ones(()))
    refused("create_graph", fabric.backward, model(rows).sum(), create_graph=True)
    refused(r"call `fabric\.backward", model(rows).sum().backward, error=RuntimeError)
    refused(r"norm_type=1\.0", fabric.clip_gradients, model, optimizer, max_norm=1.0, norm_type=1.0)
    refused(r"clip_val=1\.0.*max_norm", fabric.clip_gradients, model, optimizer, clip_val=1.0)
    fabric.backward(model(rows).sum(), retain_graph=True)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.zero_grad()
    refused("no backward", optimizer.step)
    fabric.backward(model(rows).sum())
    optimizer.step()
    refused("no backward", optimizer.step)

    other = body()
    second, _ = fabric.setup(other, optimizer_for("sgd", other))
    refused(r"model=model", fabric.backward, model(rows).sum(), error=ValueError)
    refused("does not depend on Sequential", fabric.backward, model(rows).sum(), model=second)
    refused(r"2 models have been set up", fabric.strategy.optimizer_and_scheduler)
    fabric.strategy.release(second)
    assert fabric.strategy.optimizer_and_scheduler()[0] is optimizer.optimizer
    assert all(parameter.numel() for parameter in other.parameters())


@ranks(1)
def test_gradients_that_are_not_finite() -> None:
    """A norm that is not finite is an error by default, as in ddp, and is told when the error is turned off."""
    for stage in (0, 2):
        fabric = launched(FabricZeroStrategy(stage=stage), devices=1)
        network = body()
        model, optimizer = fabric.setup(network, optimizer_for("sgd", network))
        fabric.backward(model(torch.full((1, WIDTH), math.inf)).sum())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
            optimizer.step()
        fabric.backward(model(torch.ones(1, WIDTH)).sum())
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        assert math.isfinite(norm) is (stage > 0), "above stage 0 DeepSpeed has skipped the update"
        fabric.strategy.release()


@ranks(2)
def test_a_closure_and_callbacks() -> None:
    """A closure runs before the step and its value comes back, Fabric's callback is called, the scheduler returned."""
    called = []

    class Counts:
        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            called.append(type(optimizer).__name__)

    fabric = launched(FabricZeroStrategy(stage=3), callbacks=[Counts()])
    with fabric.init_module():
        network = body()
    assert all(parameter.numel() == 0 for parameter in network.parameters())
    raw = optimizer_for("sgd", network)
    given = torch.optim.lr_scheduler.StepLR(raw, 1)
    model, optimizer, scheduler = fabric.setup(network, raw, scheduler=given)
    assert scheduler is given
    before = whole_weights(network)

    def closure() -> float:
        loss = model(torch.ones(2, WIDTH)).pow(2).mean()
        fabric.backward(loss)
        return loss.item()

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    assert called == ["EngineOptimizer"] * 2
    assert largest_difference(whole_weights(network), before) > 0


@ranks(2)
def test_pretrained_inside_init_module(tmp_path: Path) -> None:
    """At stage 3 `from_pretrained` fills shards, `empty_init` spares initial weights, and the model can be exported."""
    from transformers import LlamaForCausalLM

    fabric = launched("zero3")
    torch.manual_seed(4)
    whole = LlamaForCausalLM(llama_config())
    if fabric.is_global_zero:
        whole.save_pretrained(tmp_path / "given")
    fabric.barrier()
    for empty_init in (None, True, False):
        with fabric.init_module(empty_init=empty_init):
            model = LlamaForCausalLM.from_pretrained(tmp_path / "given")
        assert all(parameter.numel() == 0 for parameter in model.parameters())
        assert largest_difference(whole_weights(model), whole_weights(whole)) == 0
    with fabric.init_module():
        model = LlamaForCausalLM(llama_config())
    assert largest_difference(whole_weights(model), whole_weights(whole)) > 0
    fabric.load_raw(tmp_path / "given", model)
    assert largest_difference(whole_weights(model), whole_weights(whole)) == 0
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    ids = torch.arange(8).reshape(1, 8)
    fabric.backward(wrapped(input_ids=ids, labels=ids).loss)
    optimizer.step()
    with fabric.strategy.generation_context():
        wrapped.mark_forward_method("generate")
        length = 3 + 2 * fabric.global_rank
        written = wrapped.generate(input_ids=ids, max_new_tokens=length, min_new_tokens=length)
    assert written.shape[1] == 8 + length
    for save in (wrapped.state_dict, lambda: model.save_pretrained(tmp_path / "empty")):
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM\.state_dict\(\) would hold empty tensors.*fabric"):
            save()
    fabric.load(tmp_path / "given", {"model": wrapped})
    fabric.save(tmp_path / "last.ckpt", {"model": wrapped})
    assert (tmp_path / "last.ckpt" / "transformers" / "config.json").is_file()
    fabric.strategy.save_gathered_weights(tmp_path / "exported", dtype="auto")
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    expected = {name: weight.bfloat16().float() for name, weight in whole_weights(whole).items()}
    assert largest_difference(whole_weights(exported), expected) == 0
    fabric.strategy.release()


def test_the_two_strategies_share_no_lines() -> None:
    """What both strategies need is a function that both call: methods have no four lines in a row in common."""
    package = Path(lightning_zero.__file__).parent / "strategies"
    first, second = (_runs(package / name) for name in ("trainer.py", "fabric.py"))
    assert first and second
    assert first & second == set()


def _runs(path: Path, length: int = 4) -> set[tuple[str, ...]]:
    """Every run of lines inside a method's body, without docstrings, and without the constructor's arguments."""
    source = path.read_text()
    lines = source.splitlines()
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name == "__init__":
            continue
        start = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        code = [line.strip() for line in lines[start.lineno - 1 : node.end_lineno] if line.strip(" )]}")]
        found |= {tuple(code[at : at + length]) for at in range(len(code) - length + 1)}
    return found
