"""What each codec promises."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.codec_cases import SETTINGS, Ranks, flat_parts, gradients_of, parts_of, sends_gradients
from syncline.codecs.codec import ReduceContext
from syncline.codecs.composed import innermost
from syncline.codecs.kernels import reference
from syncline.codecs.registry import codec_of
from syncline.codecs.topk import select_sampled
from syncline.core.parts import Part
from syncline.errors import ConfigError


def test_half_precision_sums_in_fp32_and_divides_before_it_rounds() -> None:
    ranks = Ranks(codec_of("fp16"), 8, flat_parts(3))
    assert torch.equal(ranks.reduce([torch.full((3,), 20000.0)] * 8)[0], torch.full((3,), 20000.0))
    tiny = ranks.reduce([torch.full((3,), 6e-8)] * 8)[0]
    assert torch.equal(tiny, torch.full((3,), 6e-8).half().float())


@pytest.mark.parametrize("text", ["fp16:feedback=true", "topk:0.5,values=fp16", "dgc:0.5,values=fp16,momentum=0"])
def test_what_is_too_large_for_half_precision_is_sent_bit_by_bit(text: str) -> None:
    gradients = [torch.tensor([100_000.0, -300_000.0, 1.0, 0.0]), torch.tensor([70_000.0, 30_000.0, -1.0, 0.0])]
    ranks = Ranks(codec_of(text), 2, flat_parts(4))
    total = ranks.reduce(gradients)[0]
    for _ in range(20):
        mean = ranks.reduce([torch.zeros(4)] * 2)[0]
        assert mean.abs().max() <= 65504.0
        total += mean
    torch.testing.assert_close(total, torch.stack(gradients).mean(0), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("text", ["int8:feedback=false", "int4:feedback=false"])
def test_the_error_of_integers_does_not_grow_with_the_number_of_ranks(text: str) -> None:
    errors = []
    for world in (2, 16):
        gradients = gradients_of(world, 50_000, 0)
        exact = torch.stack(gradients).mean(0)
        found = Ranks(codec_of(text), world, flat_parts(50_000)).reduce(gradients)[0]
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] < 1.3 * errors[0]


def test_stochastic_rounding_is_right_on_average_and_differs_by_rank() -> None:
    value = torch.full((80_000,), 0.3)
    value[::8] = 1.0
    ranks = Ranks(codec_of("int8:rounding=stochastic,feedback=false,block=8"), 2, flat_parts(80_000))
    mean = ranks.reduce([value, value])[0]
    assert float(mean[value == 0.3].mean()) == pytest.approx(0.3, abs=2e-4)
    nearest = Ranks(codec_of("int8:feedback=false,block=8"), 2, flat_parts(80_000)).reduce([value, value])[0]
    assert abs(float(nearest[value == 0.3].mean()) - 0.3) > 5e-4
    codec = codec_of("int8:rounding=stochastic,feedback=false,block=8")
    drawn = [codec.take(value.clone(), 0, ReduceContext(rank, 2, 0, 0, flat_parts(80_000))) for rank in range(2)]
    assert not torch.equal(*drawn)


def test_a_vote_is_the_sign_of_the_majority_and_ties_go_up() -> None:
    votes = [torch.tensor([1.0, -2.0, 0.0, -1.0]), torch.tensor([3.0, -1.0, 5.0, 1.0])]
    ranks = Ranks(codec_of("onebit:vote=true,feedback=false"), 2, flat_parts(4))
    assert torch.equal(ranks.reduce(votes)[0], torch.tensor([1.0, -1.0, 1.0, 1.0]))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_vote_counts_the_same_whatever_else_its_rank_says(world: int) -> None:
    codec = codec_of("onebit:vote=true,feedback=false")
    votes = [torch.zeros(1000) if rank <= world // 2 else torch.full((1000,), 10.0**rank) for rank in range(world)]
    for vote in votes[: world // 2 + 1]:
        vote[::32] = -1.0  # the only thing that these ranks say of a block
    nays = torch.stack([vote < 0 for vote in votes]).sum(0)
    wanted = torch.where(2 * nays > world, -1.0, 1.0)
    assert torch.equal(Ranks(codec, world, flat_parts(1000)).reduce(votes)[0], wanted)


def test_a_vote_is_one_bit_an_entry() -> None:
    conversation = codec_of("onebit:vote=true,feedback=false").reduce(
        torch.ones(32_000), {}, ReduceContext(0, 2, 0, 0, flat_parts(32_000))
    )
    assert sum(len(part) for part in next(conversation).parts) == 32_000 / 8


def test_random_entries_are_the_same_on_all_ranks_and_others_in_every_step() -> None:
    ranks = Ranks(codec_of("randomk:0.1"), 3, flat_parts(1000))
    first = ranks.reduce(gradients_of(3, 1000, 0))[0]
    second = ranks.reduce(gradients_of(3, 1000, 1))[0]
    assert int((first != 0).sum()) == int((second != 0).sum()) == 100
    assert not torch.equal(first != 0, second != 0)


def test_scaled_random_entries_are_right_on_average() -> None:
    ranks = Ranks(codec_of("randomk:0.1,scaled=true,feedback=false"), 2, flat_parts(203))
    gradients = gradients_of(2, 203, 0)
    mean = torch.stack([ranks.reduce(gradients)[0] for _ in range(3000)]).mean(0)
    expected = torch.stack(gradients).mean(0)
    for part in (slice(0, 200), slice(200, 203)):  # the last block is short
        assert float((mean - expected)[part].norm() / expected[part].norm()) < 0.1


def test_a_sampled_selection_has_about_the_right_size_and_no_preferred_place() -> None:
    counts = torch.zeros(10)
    for seed in range(20):
        values = torch.randn(100_000, generator=torch.Generator().manual_seed(seed))
        chosen = select_sampled(values, 1000, torch.Generator().manual_seed(seed))
        assert 700 <= len(chosen) <= 1300
        assert float(values[chosen].abs().min()) > 2.3
        counts += torch.histc(chosen.float(), 10, 0, 100_000)
    assert float(counts.max() / counts.min()) < 1.15


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_a_selection_by_blocks_takes_the_largest_of_every_block(numel: int) -> None:
    codec = codec_of("topk:0.05,block=64")
    values = gradients_of(1, numel, 0)[0] * torch.arange(numel).add(1).float() ** 2
    chosen = codec.choose(values, ReduceContext(0, 1, 0, 0, flat_parts(numel)))
    expected = [
        start + reference.select_largest(block, max(1, round(0.05 * len(block))))
        for start, block in zip(range(0, numel, 64), values.split(64), strict=False)
        if numel
    ]
    assert torch.equal(chosen, torch.cat(expected) if expected else torch.zeros(0, dtype=torch.int64))


def test_a_sampled_selection_by_blocks_has_about_the_right_size_in_every_block() -> None:
    codec = codec_of("topk:0.01,block=10000,select=sampled")
    values = gradients_of(1, 205_000, 0)[0] * torch.logspace(-6, 6, 205_000)
    values[30_000:40_000] = 0.0
    values[50_000:60_000] = 1.0
    chosen = codec.choose(values, ReduceContext(0, 1, 0, 0, flat_parts(205_000)))
    counts = torch.bincount(chosen // 10_000, minlength=21)
    assert (counts[:-1] >= 70).all()
    assert (counts[:-1] <= 130).all()
    assert 35 <= int(counts[-1]) <= 65
    assert (chosen.diff() > 0).all()


def test_powersgd_is_exact_for_matrices_of_low_rank_also_for_two_of_one_shape() -> None:
    parts = parts_of(((40, 30), (40, 30), (7,)))
    matrices = [torch.outer(torch.randn(40), torch.randn(30)) * scale for scale in (1.0, 100.0)]
    gradient = torch.cat([*(matrix.flatten() for matrix in matrices), torch.arange(7.0)])
    ranks = Ranks(codec_of("powersgd:1"), 3, parts)
    for _ in range(3):
        ranks.kept = [torch.zeros(ranks.numel) for _ in range(3)]
        found = ranks.reduce([gradient] * 3)[0]
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("few", [0.0, 1.0, 1e-30])
def test_powersgd_goes_on_after_a_gradient_with_too_few_directions(few: float) -> None:
    ranks = Ranks(codec_of("powersgd:3,min_compression_rate=1"), 2, parts_of(((40, 30),)))
    outer = few * torch.outer(torch.arange(40.0), torch.arange(30.0)).flatten()
    first = ranks.reduce([outer] * 2)[0]
    torch.testing.assert_close(first, outer, rtol=1e-4, atol=1e-6)
    assert bool(first.any()) == bool(few)
    states = [state["layer.0/factor"] for state in ranks.states]
    assert torch.equal(*states)
    for step in range(2):
        mean = ranks.reduce(gradients_of(2, 1200, step))[0]
        assert int(torch.linalg.matrix_rank(mean.view(40, 30))) == 3


def test_powersgd_draws_other_directions_in_every_step_and_for_every_parameter() -> None:
    ranks = Ranks(codec_of("powersgd:2"), 2, parts_of(((40, 30), (40, 30))))
    found = []
    for _ in range(3):
        ranks.reduce([torch.zeros(2400)] * 2)
        found += list(ranks.states[0].values())
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def test_dgc_with_everything_sent_and_no_masking_is_momentum_sgd() -> None:
    ranks = Ranks(codec_of("dgc:1.0,masking=false,momentum=0.9"), 3, flat_parts(50))
    momentum = torch.zeros(50)
    for step in range(6):
        gradients = gradients_of(3, 50, step)
        momentum = 0.9 * momentum + torch.stack(gradients).mean(0)
        torch.testing.assert_close(ranks.reduce(gradients)[0], momentum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", ["1.0", "0.1,nesterov=true,masking=true", "0.1,values=fp16", "0.5,clip=3.0"])
def test_dgc_is_the_same_under_a_loss_scale_that_changes(settings: str) -> None:
    scaled, plain = (Ranks(codec_of(f"dgc:{settings},warmup=2"), 3, flat_parts(50)) for _ in range(2))
    for step in range(6):
        scaled.loss_scale = 2.0 ** (step % 3)
        gradients = gradients_of(3, 50, step)
        found = scaled.reduce([gradient * scaled.loss_scale for gradient in gradients])[0] / scaled.loss_scale
        assert torch.equal(found, plain.reduce(gradients)[0])


def test_dgc_sends_less_and_less() -> None:
    codec = codec_of("dgc:0.001,warmup=10")
    fractions = [codec.fraction(step) for step in range(12)]
    assert fractions[0] == 0.25
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[10] == fractions[11] == 0.001


def test_a_warm_up_sends_everything_then_less_and_less() -> None:
    codec = codec_of("warmup:codec=(topk:0.01),steps=10")
    assert codec.at(1).name == codec.at(10).name == "none"
    kept = [codec.at(step).keep for step in range(11, 25)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0.15
    assert kept[-1] == 0.01


@pytest.mark.parametrize(
    "inner", ["dgc:0.01", "rules:codec=(dgc:0.01)", "rules:below=3,codec=(rules:codec=(dgc:0.01))"]
)
def test_a_warm_up_of_what_has_momentum_is_refused(inner: str) -> None:
    with pytest.raises(ConfigError, match="warm-up of its own"):
        codec_of(f"warmup:codec=({inner})")


@pytest.mark.parametrize("around", ["rules:codec=({}),below=10", "rules:names=*x*,codec=(rules:codec=({}),below=10)"])
def test_a_warm_up_has_its_ramp_also_around_rules(around: str) -> None:
    plain, ruled = (codec_of(f"warmup:steps=10,codec=({text.format('topk:0.01')})") for text in ("{}", around))
    assert ruled.at(10).name == "none"
    assert ruled.at(20) == ruled.inner()
    for step in range(11, 20):
        assert type(ruled.at(step)) is type(ruled.inner())
        assert innermost(ruled.at(step)) == plain.at(step)


@pytest.mark.parametrize("text", [text for text in SETTINGS if sends_gradients(text)])
def test_rules_may_leave_a_codec_nothing_of_a_bucket(text: str) -> None:
    ranks = Ranks(codec_of(f"rules:below=1000,codec=({text})"), 3, parts_of(((30,), (5, 5))))
    for step in range(2):
        gradients = gradients_of(3, ranks.numel, step)
        torch.testing.assert_close(ranks.reduce(gradients)[0], torch.stack(gradients).mean(0))


def test_rules_send_what_they_name_as_it_is() -> None:
    codec = codec_of("rules:codec=(topk:0.01),below=10,names=*embed*|head")
    parts = [Part("a.embed.weight", 0, 100, torch.Size([10, 10])), Part("head", 0, 100, torch.Size([10, 10]))]
    parts += [Part("bias", 0, 100, torch.Size([100])), Part("tiny", 0, 4, torch.Size([2, 2]))]
    assert all(codec.is_plain(part) for part in parts)
    assert not codec.is_plain(Part("body", 0, 100, torch.Size([10, 10])))
