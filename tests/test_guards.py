"""What keeps a run safe: bad gradients, replicas that drift, ranks that differ, hang, die or are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path

import guarded
import pytest
import torch
from catalogue import FABRICS, PROCESS_FABRICS, one_now_others_slow
from guarded import LAYOUTS, ONE_EACH, Net, Spoils, SpoilsTable, Strikes, Tampers, Trained, Words, batch, train, words
from processes import in_session, session_ends
from references import same_bits
from torch import Tensor, nn

import syncline
from syncline import Deadlines
from syncline.errors import ConfigError, FabricClosed, PeerAborted, PeerLost, RankFailed, UnknownName
from syncline.fabric.base import Fabric
from syncline.fabric.threads import Threads
from syncline.guards.divergence import digest_of
from syncline.guards.finite import is_finite

WORLD, VICTIM = 3, 1
SOON_S = 3.0  # within which a fault is noticed, from when it could be
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def train_threads(steps: int, world: int = WORLD, **settings: object) -> list[Trained]:
    """The ranks of a training in this process."""
    return syncline.run(partial(train, steps=steps, **settings), world, "threads", Deadlines(20.0))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists hold the same bits."""
    return len(one) == len(other) and all(map(same_bits, one, other))


def assert_replicas(ranks: list[Trained]) -> None:
    """After every step all ranks had the same parameters and optimizer state."""
    for rank in ranks[1:]:
        for mine, theirs in zip(ranks[0].parameters, rank.parameters, strict=True):
            assert same(mine, theirs)
        for mine, theirs in zip(ranks[0].states, rank.states, strict=True):
            assert same(mine, theirs)


# Gradients that are not finite


def without_steps(rank: int, step: int) -> Tensor:
    """The batches of `batch` without those of steps 2 and 4."""
    return batch(rank, (1, 3, 5)[step - 1])


@cache
def without_bad_steps(fabric: str) -> Trained:
    """What becomes of the parameters when those batches are left out."""
    return syncline.run(partial(train, steps=3, data=without_steps), WORLD, fabric, Deadlines(20.0))[0]


@pytest.mark.parametrize(
    ("fabric", "factor"),
    [
        ("threads", torch.nan),
        ("threads", torch.inf),
        ("shm", torch.nan),
        pytest.param("shm", torch.inf, marks=pytest.mark.slow),
        pytest.param("torch", torch.inf, marks=pytest.mark.slow),
        pytest.param("torch", torch.nan, marks=pytest.mark.slow),
    ],
)
def test_a_bad_gradient_on_one_rank_lets_every_rank_skip_as_if_the_step_had_never_been(
    fabric: str, factor: float
) -> None:
    work = partial(train, steps=5, poison=Spoils(1, (2, 4), factor))
    ranks = syncline.run(work, WORLD, fabric, Deadlines(20.0))
    assert_replicas(ranks)
    for step in range(1, 6):
        before, after = ranks[0].parameters[step - 1 : step + 1]
        assert same(before, after) == (step in (2, 4))
    assert same(ranks[0].states[0], ranks[0].states[1])
    expected = without_bad_steps(fabric)
    assert same(ranks[0].at_the_end, expected.at_the_end)
    assert same(ranks[0].states[-1], expected.states[-1])
    assert [rank.totals.skipped for rank in ranks] == [2] * WORLD


def test_gradients_are_given_back_after_a_skipped_step() -> None:
    for rank in train_threads(3, poison=Spoils(1, (2,), torch.nan)):
        assert all(gradient is not None for gradients in rank.gradients for gradient in gradients)
        finite = [all(map(is_finite, gradients)) for gradients in rank.gradients]
        assert finite == [True, False, True]


def test_a_bad_gradient_raises_on_every_rank_where_that_was_asked_for() -> None:
    for rank in train_threads(4, poison=Spoils(2, (3,), torch.inf), nonfinite="raise"):
        assert rank.error == "NonFiniteGradient"
        assert "the gradient of third.bias is not finite" in rank.message
        assert len(rank.parameters) == 3
        assert same(rank.at_the_end, rank.parameters[-1])


@pytest.mark.parametrize("most_skips", [0, 1, 3])
def test_more_bad_steps_in_a_row_than_allowed_raise_on_every_rank(most_skips: int) -> None:
    ranks = train_threads(9, poison=Spoils(0, tuple(range(2, 10)), torch.nan), most_skips=most_skips)
    for rank in ranks:
        assert rank.error == "NonFiniteGradient"
        assert f"{most_skips + 1} steps in a row" in rank.message
        assert len(rank.parameters) == 2 + most_skips
        assert same(rank.at_the_end, rank.parameters[1])
    assert_replicas(ranks)


def test_a_good_step_between_bad_ones_starts_the_count_again() -> None:
    for rank in train_threads(7, poison=Spoils(0, (2, 3, 5, 6), torch.nan), most_skips=2):
        assert (rank.error, rank.totals.skipped) == ("", 4)


def test_bad_gradients_are_used_where_that_was_asked_for() -> None:
    ranks = train_threads(3, poison=Spoils(1, (2,), torch.nan), nonfinite="ignore")
    assert_replicas(ranks)
    for rank in ranks:
        assert rank.totals.skipped == 0
        assert all(is_finite(parameter) for parameter in rank.parameters[1])
        assert all(parameter.isnan().all() for parameter in rank.at_the_end)


@pytest.mark.parametrize("factor", [torch.nan, torch.inf])
def test_a_bad_sparse_gradient_on_one_rank_lets_every_rank_skip(factor: float) -> None:
    ranks = train_threads(
        4,
        build=Words,
        data=words,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        before_step=SpoilsTable(rank=2, step=3, factor=factor),
    )
    assert_replicas(ranks)
    for rank in ranks:
        assert (rank.error, rank.totals.skipped) == ("", 1)
        for step in range(1, 5):
            assert same(rank.parameters[step - 1], rank.parameters[step]) == (step == 3)
        table = rank.gradients[2][0]
        assert table.is_sparse
        assert not is_finite(table.coalesce().values())


def test_a_bad_sparse_gradient_is_named() -> None:
    spoils = SpoilsTable(rank=0, step=2, factor=torch.nan)
    sgd = partial(torch.optim.SGD, lr=0.1)
    for rank in train_threads(3, build=Words, data=words, optimizer=sgd, before_step=spoils, nonfinite="raise"):
        assert rank.error == "NonFiniteGradient"
        assert "the gradient of table.weight is not finite" in rank.message


def test_every_optimizer_skips_a_bad_step_and_it_counts_once() -> None:
    work = partial(guarded.train_with_two_optimizers, steps=3, poison=Spoils(1, (2,), torch.nan), most_skips=1)
    ranks = syncline.run(work, WORLD, "threads", Deadlines(20.0))
    assert_replicas(ranks)
    for rank in ranks:
        assert rank.error == "", rank.message
        assert same(rank.parameters[1], rank.parameters[2])
        assert not any(map(same_bits, rank.parameters[2], rank.parameters[3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_overflows_is_finite_where_its_elements_are(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert is_finite(torch.full((1000,), most, dtype=dtype))
    assert is_finite(torch.full((1000,), -most, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [[torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf]])
@pytest.mark.parametrize("fill", [0.0, 1.0, "most"])
def test_one_element_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, bad: list[float], fill: object) -> None:
    usual = torch.finfo(dtype).max if fill == "most" else fill
    for place in (0, 7, 100, 999 - len(bad)):
        values = torch.full((1000,), usual, dtype=dtype)
        values[place : place + len(bad)] = torch.tensor(bad, dtype=dtype)
        assert not is_finite(values)


def test_nothing_is_finite() -> None:
    assert is_finite(torch.zeros(0))


# Replicas that drift apart


CHANGES = {
    "a bit": (guarded.flip_a_bit, "second.weight"),
    "the sign of a zero": (guarded.change_a_sign_of_zero, "second.weight"),
    "two elements swapped": (guarded.swap_two, "second.weight"),
    "optimizer state": (guarded.change_optimizer_state, "optimizer state exp_avg of second.weight"),
    "lost optimizer state": (guarded.lose_optimizer_state, "of second.weight"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_replica_that_differs_is_named_on_every_rank_with_what_differs(change: str) -> None:
    tamper, name = CHANGES[change]
    for rank in train_threads(5, before_step=Tampers(3, tamper), check_every=1):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "replicas differ before step 3: " in rank.message
        assert name in rank.message
        assert "on rank 1 it is not what the others have" in rank.message
        assert len(rank.parameters) == 3


@pytest.mark.slow
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_flipped_bit_is_found_on_every_fabric(fabric: str) -> None:
    work = partial(train, steps=4, before_step=Tampers(2, guarded.flip_a_bit), check_every=1)
    for rank in syncline.run(work, WORLD, fabric, Deadlines(20.0)):
        assert rank.error == "ReplicasDiverged", rank.message
        assert "second.weight is the first of 1 tensors of 24 that do; on rank 1 it is not" in rank.message


def test_of_two_ranks_nobody_says_which_one_is_wrong() -> None:
    for rank in train_threads(5, world=2, before_step=Tampers(3, guarded.flip_a_bit), check_every=1):
        assert rank.error == "ReplicasDiverged"
        assert "second.weight" in rank.message
        assert "there is no majority to say which rank is wrong" in rank.message


@pytest.mark.parametrize(("every", "noticed"), [(1, 3), (2, 4), (5, 5)])
def test_replicas_are_compared_every_so_many_steps(every: int, noticed: int) -> None:
    for rank in train_threads(6, before_step=Tampers(3, guarded.flip_a_bit), check_every=every):
        assert rank.error == "ReplicasDiverged"
        assert f"before step {noticed}:" in rank.message
        assert len(rank.parameters) == noticed


def test_replicas_are_not_compared_unasked() -> None:
    ranks = train_threads(4, before_step=Tampers(2, guarded.flip_a_bit))
    assert [rank.error for rank in ranks] == [""] * WORLD
    assert not same(ranks[0].at_the_end, ranks[1].at_the_end)


@pytest.mark.parametrize(
    ("fabric", "kind"),
    [
        ("threads", "foreach"),
        ("threads", "fused"),
        ("torch", "foreach"),
        pytest.param("shm", "fused", marks=pytest.mark.slow),
    ],
)
def test_ordinary_training_raises_no_alarm(fabric: str, kind: str) -> None:
    adamw = partial(torch.optim.AdamW, lr=0.05, **{kind: True})
    ranks = syncline.run(partial(train, steps=10, optimizer=adamw, check_every=1), WORLD, fabric, Deadlines(20.0))
    assert [rank.error for rank in ranks] == [""] * WORLD
    assert_replicas(ranks)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
def test_every_bit_and_its_place_is_in_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).remainder(2).to(dtype)
    digests = {digest_of(tensor), digest_of(tensor.flip(0)), digest_of(torch.zeros_like(tensor))}
    for place in range(len(tensor)):
        changed = tensor.clone()
        changed.view(torch.uint8)[place * dtype.itemsize] ^= 1
        digests.add(digest_of(changed))
    assert len(digests) == 3 + len(tensor)


def test_a_digest_is_of_values_and_not_of_strides() -> None:
    square = torch.arange(9.0).view(3, 3)
    assert digest_of(square.t()) == digest_of(square.t().contiguous()) != digest_of(square)
    assert digest_of(torch.zeros(0)) == digest_of(torch.zeros(0, 3))


# Ranks that differ from the start


@cache
def layouts(fabric: str, odd: int) -> list[dict[str, tuple[str, str, bool, float]]]:
    """One life of three ranks, of which one is odd in every way, one after the other."""
    return syncline.run(partial(guarded.differ_in_layout, odd=odd), WORLD, fabric, Deadlines(20.0))


LINES = {
    "names": ("parameter third.weight float32[4, 8]", "parameter fourth.weight float32[4, 8]"),
    "shapes": ("parameter third.bias float32[4]", "parameter third.bias float32[5]"),
    "dtypes": ("parameter third.weight float32[4, 8]", "parameter third.weight float64[4, 8]"),
    "order": ("parameter first.bias float32[8]", "parameter first.bias float32[8]"),
    "requires_grad": ("parameter first.bias float32[8]", "parameter first.bias float32[8] frozen"),
    "buffers": ("", "buffer mask float32[3]"),
    "settings": ("bucket_bytes=26214400", "bucket_bytes=1234"),
}


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("difference", LAYOUTS)
def test_ranks_with_different_layouts_are_shown_the_line_and_nothing_changes(fabric: str, difference: str) -> None:
    for found in layouts(fabric, odd=1):
        error, message, is_unchanged, afterwards = found[difference]
        assert error == "LayoutMismatch", message
        assert "ranks [1] differ from rank 0" in message
        shown = message.splitlines()
        for sign, line in zip("-+", LINES[difference], strict=True):
            assert any(one.startswith(sign) and line in one for one in shown), message
        assert is_unchanged
        assert afterwards == 6.0


@pytest.mark.parametrize("difference", LAYOUTS)
def test_all_others_differ_where_rank_0_is_the_odd_one(difference: str) -> None:
    for found in layouts("threads", odd=0):
        assert "ranks [1, 2] differ from rank 0" in found[difference][1]


# Requests that make no sense


@pytest.fixture
def alone() -> Iterator[Fabric]:
    """A world of one."""
    with Threads().group(1).fabric(0) as fabric:
        yield fabric


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"bucket_bytes": -5}, ConfigError, "bucket_bytes=-5 is less than 1"),
        ({"first_bucket_bytes": 0}, ConfigError, "first_bucket_bytes=0 is less than 1"),
        ({"accumulate": 0}, ConfigError, "accumulate=0 is less than 1"),
        ({"check_every": -1}, ConfigError, "check_every=-1 is less than 0"),
        ({"most_skips": -1}, ConfigError, "most_skips=-1 is less than 0"),
        ({"buffers": "mean"}, UnknownName, "unknown buffers 'mean'"),
        ({"nonfinite": "x"}, UnknownName, "unknown nonfinite 'x'; known: ignore, raise, skip"),
        ({"collective": "rign"}, UnknownName, "unknown collective 'rign'; did you mean ring"),
        ({"fabric": "shmm"}, UnknownName, "unknown fabric 'shmm'; did you mean shm"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_its_value_and_the_rule(
    alone: Fabric, settings: dict, error: type[ConfigError], text: str
) -> None:
    model = Net()
    with pytest.raises(error) as caught:
        syncline.Sync(model, torch.optim.SGD(model.parameters()), **{"fabric": alone, **settings})
    assert text in str(caught.value)


def schedule_of(model: nn.Module) -> object:
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: model.parameters(), "Parameter"),
        (lambda model: "sgd", "str"),
        (lambda model: None, "NoneType"),
        (lambda model: torch.optim.SGD, "type"),
        (schedule_of, "ConstantLR"),
        (lambda model: [torch.optim.SGD(model.parameters()), None], "NoneType"),
    ],
)
def test_what_is_no_optimizer_is_refused(alone: Fabric, make: Callable, name: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=rf"{name} is not a torch\.optim\.Optimizer"):
        syncline.Sync(model, make(model), fabric=alone)


def test_a_model_without_trainable_parameters_is_refused(alone: Fabric) -> None:
    model = Net().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model needs a gradient"):
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)


def test_complex_parameters_are_refused_by_name(alone: Fabric) -> None:
    model = Net()
    model.second = nn.Linear(8, 8, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"second\.weight is complex64; gradients can be of float32, float64"):
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)


def test_a_refused_request_leaves_no_hooks(alone: Fabric) -> None:
    model = Net().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError):
        syncline.Sync(model, optimizer, fabric=alone)
    assert guarded.hooks_of(model, optimizer) == 0
    assert alone.siblings == []


# Ranks that hang


def assert_report(rank: Trained, kind: str, *parts: str) -> None:
    """A survivor names the victim, and its report has all its parts."""
    assert (rank.error, rank.culprit) == (kind, VICTIM), rank.message
    for part in (f"rank {VICTIM} never produced bucket", "likely: ", *parts):
        assert part in rank.message, rank.message


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_rank_that_never_comes_to_its_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    work = partial(guarded.train_with_an_absent_rank, absent=VICTIM, step=3, folder=str(tmp_path))
    ranks = syncline.run(work, WORLD, fabric, Deadlines(2.0))
    for rank in (ranks[0], ranks[2]):
        assert_report(
            rank,
            "PeerStalled",
            "never produced bucket 0 of step 3 (third.",
            "the last it produced is bucket 5 of step 2 (first.",
            "it never began this backward pass",
        )
        assert 1.8 < rank.seconds < 2.0 + SOON_S
        assert same(rank.at_the_end, rank.parameters[2])


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS[::-1]))
def test_a_rank_that_never_comes_to_its_first_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    """There are no buckets yet: what is reported is how they are planned."""
    work = partial(guarded.train_with_an_absent_rank, absent=VICTIM, step=1, folder=str(tmp_path))
    ranks = syncline.run(work, WORLD, fabric, Deadlines(1.5))
    for rank in (ranks[0], ranks[2]):
        assert (rank.error, rank.culprit) == ("PeerStalled", VICTIM)
        assert same(rank.at_the_end, rank.parameters[0])
        assert_report(
            rank, "PeerStalled", "of step 1 (third.", "rank 1 has produced nothing yet", "it never began this"
        )


def faulty(fault: Strikes, fabric: str, folder: Path, deadline_s: float) -> dict[int, Trained]:
    """What the survivors of a fault have to say."""
    work = partial(guarded.train_with_a_victim, fault=fault, steps=5, folder=str(folder))
    with pytest.raises(RankFailed) as caught:
        syncline.run(work, WORLD, fabric, Deadlines(deadline_s))
    assert list(caught.value.failures) == [VICTIM]
    assert sorted(caught.value.results) == [0, 2]
    return caught.value.results


SENT_THIRD = ("never produced bucket 2 of step 3 (second.", "the last it produced is bucket 1 of step 3 (third.")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_a_rank_that_is_stopped_in_its_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    fault = Strikes(VICTIM, 3, "between buckets", guarded.stopped_later)
    for rank in faulty(fault, fabric, tmp_path, deadline_s=2.0).values():
        assert_report(rank, "PeerStalled", *SENT_THIRD, "it is stuck or stopped in its backward pass before second.")
        assert 1.8 < rank.seconds < 2.0 + SOON_S
        assert same(rank.at_the_end, rank.parameters[2])


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS))
def test_a_rank_that_died_in_its_backward_pass_is_reported(fabric: str, tmp_path: Path) -> None:
    fault = Strikes(VICTIM, 3, "between buckets", guarded.killed_later)
    for rank in faulty(fault, fabric, tmp_path, deadline_s=20.0).values():
        assert_report(rank, "PeerLost", *SENT_THIRD, "its process died")
        assert rank.seconds < guarded.NOTE_S + SOON_S


@pytest.mark.parametrize("fabric", one_now_others_slow(PROCESS_FABRICS))
def test_a_report_never_says_that_a_rank_produced_nothing_when_it_did(fabric: str, tmp_path: Path) -> None:
    """The rank dies soon after its first steps, when a slow board may not have heard of them."""
    fault = Strikes(VICTIM, 3, "between buckets", guarded.killed)
    for rank in faulty(fault, fabric, tmp_path, deadline_s=20.0).values():
        assert_report(rank, "PeerLost", "of step 3", "its process died")
        assert "has produced nothing yet" not in rank.message


# Ranks that are killed


@cache
def undisturbed(fabric: str) -> Trained:
    """What becomes of the parameters when nobody is killed."""
    return syncline.run(partial(train, steps=5, **ONE_EACH), WORLD, fabric, Deadlines(20.0))[0]


def kills() -> list:
    """Where and when, on which fabric; of the combinations that are alike one is tried at once."""
    now = {
        ("shm", "forward", 3),
        ("shm", "between buckets", 3),
        ("torch", "start of backward", 3),
        ("torch", "optimizer", 3),
    }
    every = product(PROCESS_FABRICS, guarded.PLACES, (1, 2, 3))
    return [kill if kill in now else pytest.param(*kill, marks=pytest.mark.slow) for kill in every]


@pytest.mark.parametrize(("fabric", "place", "step"), kills())
def test_survivors_of_a_kill_have_the_parameters_of_their_last_whole_step(
    fabric: str, place: str, step: int, tmp_path: Path
) -> None:
    survivors = faulty(Strikes(VICTIM, step, place, guarded.killed), fabric, tmp_path, deadline_s=20.0)
    expected = undisturbed(fabric)
    completed = [len(rank.parameters) - 1 for rank in survivors.values()]
    assert set(completed) <= ({step - 1, step} if place == "optimizer" else {step - 1})
    for rank in survivors.values():
        assert (rank.error, rank.culprit) == ("PeerLost", VICTIM), rank.message
        assert f"rank {VICTIM} " in rank.message
        assert rank.seconds < SOON_S
        assert same(rank.at_the_end, rank.parameters[-1])
        for mine, theirs in zip(rank.parameters, expected.parameters, strict=False):
            assert same(mine, theirs)


# Endings


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_exception_in_one_backward_pass_ends_every_rank(fabric: str) -> None:
    work = partial(guarded.fail_in_backward, rank=VICTIM, error=ValueError)
    with pytest.raises(RankFailed, match="rank 1 failed first") as caught:
        syncline.run(work, WORLD, fabric, Deadlines(20.0))
    errors = caught.value.failures
    assert isinstance(errors.pop(VICTIM), ValueError)
    assert sorted(errors) == [0, 2]
    assert {type(error) for error in errors.values()} <= {PeerLost, PeerAborted}
    assert {error.rank for error in errors.values()} == {VICTIM}


def test_an_interrupted_thread_ends_every_rank() -> None:
    work = partial(guarded.fail_in_backward, rank=VICTIM, error=KeyboardInterrupt)
    with pytest.raises(RankFailed, match="rank 1 failed first") as caught:
        syncline.run(work, WORLD, "threads", Deadlines(20.0))
    assert isinstance(caught.value.failures[VICTIM], KeyboardInterrupt)


SCRIPT = """
    import signal
    import sys
    from functools import partial
    import guarded
    import syncline

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to it
        folder, fabric = sys.argv[1:]
        work = partial(guarded.train_until_interrupted, folder=folder)
        syncline.run(work, ranks=3, fabric=fabric, deadlines=syncline.Deadlines(40.0))
"""


def start_training(folder: Path, fabric: str) -> subprocess.Popen:
    """Three ranks that train for ever, in a session of their own, when all of them have made some steps."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    (folder / "ranks").mkdir()
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    arguments = [sys.executable, str(script), str(folder / "ranks"), fabric]
    child = subprocess.Popen(arguments, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 40.0
    while len(os.listdir(folder / "ranks")) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(os.listdir(folder / "ranks")) == 3
    return child


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", PROCESS_FABRICS)
def test_ctrl_c_ends_a_training_and_leaves_nothing_behind(tmp_path: Path, fabric: str) -> None:
    with start_training(tmp_path, fabric) as child:
        os.killpg(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=30.0)
    assert child.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert session_ends(child.pid, within_s=5.0), in_session(child.pid)


@pytest.mark.parametrize("fabric", FABRICS)
def test_after_close_every_rank_trains_alone(fabric: str) -> None:
    ranks = syncline.run(guarded.train_and_go_on_alone, 2, fabric, Deadlines(20.0))
    (zero, alone_zero, hooks), (one, alone_one, _) = ranks
    assert [same(mine, theirs) for mine, theirs in zip(zero, one, strict=True)] == [True, True, False, False]
    assert same(zero[-1], alone_zero)
    assert same(one[-1], alone_one)
    assert hooks == 0


def test_closing_the_fabric_closes_what_was_made_on_it() -> None:
    def work(fabric: Fabric) -> str:
        model = guarded.filled(Net())
        sync = syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=fabric)
        fabric.close()
        with pytest.raises(FabricClosed) as caught:
            model(batch(fabric.rank, 1)).sum().backward()
        sync.close()
        return str(caught.value)

    assert all("closed" in message for message in syncline.run(work, 2, "threads", Deadlines(5.0)))
