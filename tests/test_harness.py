"""The harness itself: what happens on a rank must be told, and nothing of a rank may stay."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.harness import RankError, collect_outcomes, ranks, run_ranks


def _own_rank(offset: int) -> int:
    return int(os.environ["RANK"]) + offset


def _raise_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("lost on one")


def _compare_on_rank_one() -> None:
    left = int(os.environ["RANK"])
    assert left == 0


def _hang_on_rank_one() -> None:
    print("still here", flush=True)
    if os.environ["RANK"] == "1":
        time.sleep(600)


def _die_on_rank_zero() -> str:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _leave_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def _return_before_the_other() -> None:
    port, first = int(os.environ["MASTER_PORT"]), os.environ["RANK"] == "0"
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=first)
    if not first:
        time.sleep(1)
        store.set("late", "word")


def _all_reduce(start: torch.Tensor) -> torch.Tensor:
    torch.distributed.init_process_group("gloo")
    total = start * (torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(total)
    return total


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _train(stage: int) -> list[float]:
    """Three AdamW updates under DeepSpeed; the loss before each."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    inputs = torch.linspace(-1, 1, 32).reshape(8, 4)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.005}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(3):
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_results_come_back_by_rank() -> None:
    """Results are ordered by rank, and arguments arrive."""
    assert run_ranks(_own_rank, 3, 10) == [10, 11, 12]


def test_an_exception_comes_back_with_its_rank_and_traceback() -> None:
    """A rank's exception names the rank, the type, the message and the line."""
    with pytest.raises(RankError, match=r"(?s)1 of 2 ranks failed.rank 1 raised:.*_raise_on_rank_one.*lost on one"):
        run_ranks(_raise_on_rank_one, 2)


def test_a_plain_assert_shows_its_values() -> None:
    """Asserts on ranks are rewritten as pytest does it in its own process."""
    with pytest.raises(RankError, match="assert 1 == 0"):
        run_ranks(_compare_on_rank_one, 2)


def test_a_hang_is_killed_and_reported() -> None:
    """A hang ends at the timeout and the message says where the rank was."""
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 did not end.*_hang_on_rank_one.*still here"):
        run_ranks(_hang_on_rank_one, 2, timeout=2)
    assert time.monotonic() - start < 10


def test_a_killed_rank_is_an_outcome() -> None:
    """A rank that dies by SIGKILL is reported by its exit code, next to what the other returned."""
    killed, alive = collect_outcomes(_die_on_rank_zero, 2)
    assert (killed.exitcode, killed.error, killed.hung) == (-signal.SIGKILL, None, False)
    assert (alive.exitcode, alive.value) == (0, "alive")


def test_no_child_of_a_rank_survives() -> None:
    """A process that a rank started and forgot is gone when the call returns."""
    children = run_ranks(_leave_a_child, 2)
    deadline = time.monotonic() + 5  # SIGKILL has been sent; the kernel may take a moment
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_runs, children))


def _runs(pid: int) -> bool:
    """Whether the process lives; one that only waits to be reaped does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_first_rank_to_return_waits_for_the_others() -> None:
    """Rank 0 holds the store: it stays until the last rank has returned."""
    run_ranks(_return_before_the_other, 2)


def test_a_rank_starts_with_one_thread() -> None:
    """The warm server holds no thread whose locks a fork could inherit."""
    assert run_ranks(_threads, 1) == [1]


def test_tensors_travel_by_value() -> None:
    """Tensors go to the ranks and come back, and gloo works between the ranks."""
    first, second = run_ranks(_all_reduce, 2, torch.tensor([1.0, 2.0]))
    assert first.tolist() == second.tolist() == [3.0, 6.0]


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_in_forked_ranks(stage: int) -> None:
    """Backward, gloo and CPU Adam work in a fork of the warm server: the ranks agree and the loss falls."""
    first, second = run_ranks(_train, 2, stage)
    assert first == second
    assert first[0] > first[1] > first[2]


def test_a_function_inside_another_is_refused() -> None:
    """A function that ranks could not import is refused before any process starts."""

    def inner() -> None: ...

    with pytest.raises(TypeError, match="top level"):
        run_ranks(inner, 1)


@ranks(1, 2, 3)
def test_the_body_runs_on_every_rank(tmp_path: Path, world_size: int) -> None:
    """`@ranks` runs the body on each rank, with fixtures, in the test's own working directory."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    assert TorchElasticEnvironment.detect()
    environment = TorchElasticEnvironment()
    assert environment.world_size() == world_size
    assert Path.cwd() == tmp_path
    assert torch.get_num_threads() == 1
    torch.distributed.init_process_group("gloo")
    seen: list[str | None] = [None] * world_size
    torch.distributed.all_gather_object(seen, str(tmp_path))
    assert seen == [str(tmp_path)] * world_size
    assert environment.global_rank() == torch.distributed.get_rank()


@ranks(2)
@pytest.mark.parametrize("value", ["a", "b"])
def test_the_body_takes_parameters(value: str) -> None:
    """`@ranks` and `parametrize` stack in either order."""
    assert value in "ab"


_TEST_THAT_LEAKS = """
import os
import torch

def test_variable():
    os.environ["LEFT"] = "1"

def test_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_innocent():
    assert "LEFT" not in os.environ
    assert not torch.distributed.is_initialized()
"""


def test_leaks_fail_the_test_that_left_them(pytester: pytest.Pytester) -> None:
    """A changed variable and a live process group fail their own test and do not reach the next."""
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(_TEST_THAT_LEAKS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines(["*left os.environ changed: LEFT*", "*left a process group behind*"])
