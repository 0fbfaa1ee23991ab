"""Training loops of the parity suite, as users write them: each for every mode. Light: ranks import it.

A loop is given a `Run`, which knows who is training, and is the same where there is no `Sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel

from support.batches import ROWS, Batch, fill, generator_of
from support.losses import squared
from support.models import mlp
from support.runs import Run
from support.scenarios import MOMENTUM, Optimizers

STEPS = 7  # two periods of three steps, and one step


def one_step(run: Run, step: int) -> None:
    run.zero_grad()
    run.backward(step)
    run.step()


def plain(run: Run) -> None:
    for step in range(STEPS):
        one_step(run, step)


def kept_by_turns(run: Run, to_none: Sequence[bool]) -> None:
    """Gradients are zeroed in place or set to None, by turns."""
    for step in range(STEPS):
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=to_none[step % len(to_none)])
        run.backward(step)
        run.step()


def changed(run: Run, change: Callable[[Run, int], None]) -> None:
    """Gradients are changed between backward and step."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        change(run, step)
        run.step()


def clip_norm(run: Run, step: int) -> None:
    run.noted.append(bool(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1) > 0.1))


def clip_value(run: Run, step: int) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.02)


def add_noise(run: Run, step: int) -> None:
    """The same on all ranks."""
    generator = generator_of(step, 5)
    for parameter in run.model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if parameter.grad is not None:
            parameter.grad += 0.1 * drawn


def through_data(run: Run, step: int, change: Callable[[Tensor], Tensor | None]) -> None:
    """As older code does it, past autograd."""
    for parameter in run.model.parameters():
        if parameter.grad is not None and (found := change(parameter.grad.data)) is not None:
            parameter.grad.data = found


def replaced(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad = 0.5 * parameter.grad.detach()


def drop_first(run: Run, step: int) -> None:
    """A layer that is not to learn in some steps."""
    if step % 2:
        next(run.model.parameters()).grad = None


def pairs(run: Run, pause: bool = False, clip: bool = False) -> None:
    """Two backward passes a step."""
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        with run.no_sync() if pause else run.more_to_come():
            run.backward(2 * step)
        run.backward(2 * step + 1)
        if clip:
            clip_norm(run, step)
        run.optimizer.step()


def uneven_epochs(run: Run, last: str) -> None:
    """For `accumulate=2`: epochs of five batches, whose last one is stepped with, carried over or thrown away.

    To be stepped with and clipped it is waited for, because it may be this rank's own.
    """
    number = count()
    run.zero_grad()
    for epoch in range(3):
        if last == "thrown away":
            run.zero_grad()
        for place in range(5):
            is_complete = place % 2 == 1 or (place == 4 and last in ("stepped with", "waited for"))
            with nullcontext() if is_complete else run.more_to_come():
                run.backward(next(number))
            if is_complete:
                if last == "waited for":
                    run.wait()
                clip_norm(run, epoch)
                run.step()
                run.zero_grad()


def real_from_fake(run: Run) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The losses of the critic and of the generator."""
    generator, critic = run.model.generator, run.model.critic

    def of_critic(_: nn.Module, batch: Batch) -> Tensor:
        scores = critic(torch.cat([batch.y, generator(batch.x).detach()]))
        return (scores[:ROWS] - 1).square().mean() + scores[ROWS:].square().mean()

    def of_generator(_: nn.Module, batch: Batch) -> Tensor:
        return (critic(generator(batch.x)) - 1).square().mean()

    return of_critic, of_generator


def adversaries(run: Run, to_none: bool = True, critic_steps: int = 1) -> None:
    """The usual loop of a GAN: the critic learns, then the generator through the critic."""
    for_generator, for_critic = run.optimizers
    of_critic, of_generator = real_from_fake(run)
    for step in range(STEPS):
        for optimizer, loss in [*[(for_critic, of_critic)] * critic_steps, (for_generator, of_generator)]:
            optimizer.zero_grad(set_to_none=to_none)
            run.backward(step, loss)
            optimizer.step()


def adversaries_zeroed_together(run: Run) -> None:
    """What the generator has got before its own backward pass is part of it."""
    for_generator, for_critic = run.optimizers
    for step in range(STEPS):
        run.zero_grad()
        for optimizer, loss in zip((for_critic, for_generator), real_from_fake(run), strict=True):
            run.backward(step, loss)
            optimizer.step()


def seldom(run: Run) -> None:
    """The second optimizer steps every third time."""
    first, second = run.optimizers
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        first.step()
        if step % 3 == 2:
            second.step()


def by_turns(run: Run, clip: bool = False, evaluates: bool = False) -> None:
    """In each step one optimizer of two."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        if clip:
            clip_norm(run, step)  # gradients of both
        run.optimizers[step % 2].step()
        if evaluates and step % 3 == 1:
            evaluate(run, step)


def first_alone(run: Run) -> None:
    """The second optimizer waits for a phase that does not come."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        run.optimizer.step()


def clipped_one_by_one(run: Run) -> None:
    """The gradients of an optimizer are clipped right before its step."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        for optimizer in run.optimizers:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
            optimizer.step()


def moving_average(run: Run, averaged: Callable[[nn.Module], nn.Module]) -> None:
    """Of the weights after every step."""
    average = averaged(run.model)
    for step in range(STEPS):
        one_step(run, step)
        if isinstance(average, AveragedModel):
            average.update_parameters(run.model)
        else:
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), run.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.3)
    run.note(average)


def copied_by_hand(model: nn.Module) -> nn.Module:
    other = mlp()
    other.load_state_dict(model.state_dict())
    return other


def sharpness_aware(run: Run) -> None:
    """SAM: up to where the loss is worst, its gradient there, back again, and a step with it."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        with torch.no_grad():
            gradients = [(p, p.grad.clone()) for p in run.model.parameters() if p.grad is not None]
            norm = sum(gradient.square().sum() for _, gradient in gradients) ** 0.5 + 1e-12
            for parameter, gradient in gradients:
                parameter.add_(0.05 * gradient / norm)
        run.zero_grad()
        run.backward(step)
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.sub_(0.05 * gradient / norm)
        run.step()


def with_closures(run: Run) -> None:
    """LBFGS evaluates the loss as often as it likes."""

    def closure(step: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        run.backward_of(loss)
        return run.mean(loss) if run.is_in_step else loss.detach()

    for step in range(STEPS):
        run.optimizer.step(partial(closure, step))


def surgery(run: Run) -> None:
    """Gradients of two tasks are kept over zero_grad(), by reference, and put together."""

    def other_task(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch.x) + 2 * batch.y).abs().mean()

    for step in range(STEPS):
        kept = []
        for task in (squared, other_task):
            run.zero_grad()
            run.backward(step, task)
            kept.append([p.grad for p in run.model.parameters()])
        for parameter, first, second in zip(run.model.parameters(), *kept, strict=True):
            if first is not None and second is not None:
                parameter.grad = first + 0.5 * second
        run.step()


def scheduled(run: Run, make: Callable[[Optimizer], Any]) -> None:
    schedule = make(run.optimizer)
    for step in range(STEPS):
        one_step(run, step)
        schedule.step()
        run.noted.append(schedule.get_last_lr())


def by_plateau(run: Run) -> None:
    """On the mean loss of all ranks, which all of them have."""
    schedule = ReduceLROnPlateau(run.optimizer, factor=0.5, patience=0, threshold=0.05)
    for step in range(STEPS):
        one_step(run, step)
        with torch.no_grad():
            schedule.step(run.mean(run.loss(0)).item())
        run.noted.append(schedule.get_last_lr())


def sequential(optimizer: Optimizer) -> SequentialLR:
    first = LinearLR(optimizer, 0.2, total_iters=2)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, STEPS)], [2])


def reloaded(run: Run, weights: bool, state: bool, at: int) -> None:
    """All ranks load weights and momenta that come from elsewhere."""
    other = copied_by_hand(run.model)
    optimizer = run.scenario.optimizers(other)[0]
    squared(other, Batch(0, 100)).backward()
    optimizer.step()
    for step in range(STEPS):
        if step == at and weights:
            run.model.load_state_dict(other.state_dict())
            run.loaded()
        if step == at and state:
            run.optimizer.load_state_dict(optimizer.state_dict())
        one_step(run, step)


def forgetful(run: Run) -> None:
    """Momenta begin anew."""
    for step in range(STEPS):
        if step == 4:
            for state in run.optimizer.state.values():
                state["momentum_buffer"].zero_()
        one_step(run, step)


def by_hand(run: Run) -> None:
    """Without a scheduler."""
    for step in range(STEPS):
        for group in run.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.2 / (1 + step), 0.01 * step
        one_step(run, step)


def twice(run: Run) -> None:
    """Two steps with the gradients of one backward pass."""
    for step in range(STEPS):
        one_step(run, step)
        run.step()


def zeroed_seldom(run: Run) -> None:
    """Gradients add up over steps."""
    for step in range(STEPS):
        if step % 3 == 0:
            run.zero_grad()
        run.backward(step)
        run.step()


def left_out(run: Run, zero: Callable[[Run], None] = Run.zero_grad) -> None:
    """All ranks leave out a step."""
    for step in range(STEPS):
        zero(run)
        run.backward(step)
        if step != 3:
            run.step()


def zero_in_place(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def zero_data(run: Run) -> None:
    """As older code does it, past autograd."""
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def after_each_step(run: Run, change: Callable[[nn.Module], None]) -> None:
    for step in range(STEPS):
        one_step(run, step)
        change(run.model)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def with_hooks(run: Run, put: Callable[[nn.Module, Sequence[Optimizer]], None]) -> None:
    """Set after Sync was made."""
    put(run.model, run.optimizers)
    plain(run)


def evaluated(run: Run) -> None:
    for step in range(STEPS):
        one_step(run, step)
        if step % 2:
            evaluate(run, step)


def evaluate(run: Run, step: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.noted.append(bool(run.loss(step).isfinite()))
    run.model.train()


def frozen_later(run: Run) -> None:
    for step in range(STEPS):
        run.let_learn(run.model[0], step < 3)
        one_step(run, step)


def unfrozen_later(run: Run) -> None:
    for step in range(STEPS):
        run.let_learn(run.model[2], step >= 3)
        one_step(run, step)


def scaled(run: Run) -> None:
    for step in range(STEPS):
        run.zero_grad()
        run.backward_of(run.scaler.scale(run.loss(step)))
        run.scaler.unscale_(run.optimizer)
        clip_norm(run, step)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.noted.append(run.scaler.get_scale())


def scaled_optimizers(run: Run) -> None:
    """Several optimizers and one scaler, which unscales the gradients of each in its step."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward_of(run.scaler.scale(run.loss(step)))
        for optimizer in run.optimizers:
            run.scaler.step(optimizer)
        run.scaler.update()


def scaled_adversaries(run: Run) -> None:
    for_generator, for_critic = run.optimizers
    for step in range(STEPS):
        for optimizer, loss in zip((for_critic, for_generator), real_from_fake(run), strict=True):
            optimizer.zero_grad()
            run.backward_of(run.scaler.scale(run.loss(step, loss)))
            run.scaler.step(optimizer)
        run.scaler.update()


def infinite_once(model: nn.Module, batch: Batch) -> Tensor:
    return squared(model, batch) * (torch.inf if batch.rank and batch.step == 2 else 1.0)


def nan_once(model: nn.Module, batch: Batch) -> Tensor:
    return squared(model, batch) * (torch.nan if (batch.rank, batch.step) == (0, 2) else 1.0)


def momenta_at_the_start(model: nn.Module) -> list[Optimizer]:
    """An optimizer that has loaded a checkpoint before Sync is made."""
    (optimizer,), other = MOMENTUM(model), fill(mlp(), seed=3)
    (trained,) = MOMENTUM(other)
    squared(other, Batch(0, 100)).backward()
    trained.step()
    optimizer.load_state_dict(trained.state_dict())
    return [optimizer]


# Hooks; linear ones, so that ranks may set them on gradients of their own


def halve(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


def halve_another(parameter: Tensor) -> None:
    """Not in place, where a bucket that has left may or may not see it in time."""
    parameter.grad = 0.5 * parameter.grad


def put_tensor_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    for parameter in model.parameters():
        parameter.register_hook(halve)


def put_accumulate_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve_another)


def put_step_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """That change gradients before the step."""

    def halve_all(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    halve_another(parameter)

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(halve_all)


def put_clamping_hooks(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """That change weights after the step."""
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: clamp(model))


def hooked(put: Callable[[nn.Module, Sequence[Optimizer]], None], made: Optimizers = MOMENTUM) -> Optimizers:
    """Hooks that were set before Sync is made."""

    def make(model: nn.Module) -> list[Optimizer]:
        optimizers = made(model)
        put(model, optimizers)
        return optimizers

    return make
