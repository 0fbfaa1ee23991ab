"""Training loops as users write them. A loop is given a `Run`, which knows who is training."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from support.batches import ROWS, STEPS, Batch
from support.losses import squared
from support.runs import Run


def plain(run: Run) -> None:
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        run.step()
        run.note_absent_gradients()


def train_steps(run: Run, steps: Sequence[int]) -> None:
    for step in steps:
        run.zero_grad()
        run.backward(step)
        run.step()


def zeroed_in_place(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(step)
        run.optimizer.step()


def zeroed_now_and_then(run: Run) -> None:
    """Gradients are kept over a step, dropped, and zeroed in place, by turns."""
    for step in range(6):
        if step % 3:
            run.optimizer.zero_grad(set_to_none=step % 3 == 1)
        run.backward(step)
        run.optimizer.step()


def several_backwards(run: Run) -> None:
    """Every step has another number of them, and nobody was told."""
    number = iter(range(100))
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(1 + step % 3):
            run.backward(next(number))
        run.optimizer.step()


def pairs_of_backwards(run: Run) -> None:
    """For `accumulate=2`."""
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        run.backward(2 * step)
        run.backward(2 * step + 1)
        run.optimizer.step()


def pairs_with_no_sync(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        with run.no_sync():
            run.backward(2 * step)
        run.backward(2 * step + 1)
        run.optimizer.step()


def no_sync_at_the_end(run: Run) -> None:
    """The last backward before a step, or the only one, is not synchronized; the step sees means all the same."""
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=step % 3 == 0)
        if step % 2:
            run.backward(2 * step)
        with run.no_sync():
            run.backward(2 * step + 1)
        run.optimizer.step()


def clipped(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.noted.append(norm > 0.1)
        run.optimizer.step()


def clipped_after_no_sync(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(step)
        wait_clip_and_step(run)


def wait_clip_and_step(run: Run) -> None:
    run.wait()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.optimizer.step()


def clipped_after_waiting(run: Run) -> None:
    """`wait` sees to it that everybody clips means, whatever this rank had in its backward pass."""
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        wait_clip_and_step(run)


def scaled(run: Run) -> None:
    """With a GradScaler, which skips a step that is not finite and changes its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS + 1):
        run.optimizer.zero_grad()
        scaler.scale(run.loss(step)).backward()
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        scaler.step(run.optimizer)
        scaler.update()
        run.noted.append(scaler.get_scale())


def with_gradients_moved(run: Run) -> None:
    """`grad.data = ...` moves the tensor that a gradient is; so does a change of layout, or of type and back."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        if step == 1:
            for parameter in run.model.parameters():
                parameter.grad.data = parameter.grad.data * 0.5
        if step == 2:
            run.model.float().double()
        run.step()


def laid_out_anew(run: Run) -> None:
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        run.step()
        if step == 1:
            run.model.to(memory_format=torch.channels_last)


def scheduled(run: Run) -> None:
    scheduler = StepLR(run.optimizer, step_size=2, gamma=0.3)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()
        scheduler.step()
        run.noted.append(scheduler.get_last_lr())


def twice_through_the_graph(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        run.optimizer.step()


def unfrozen_later(run: Run) -> None:
    """The second layer learns from the third step on, the first from the fifth, and then the second no more."""
    first, second = run.model[0], run.model[2]
    for step in range(STEPS + 2):
        run.let_learn(second, 2 <= step < 5)
        run.let_learn(first, step >= 4)
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()
        run.note_absent_gradients()


def swapped(run: Run) -> None:
    """From one step to the next all that learned is frozen, and what was frozen learns; gradients are clipped."""
    for step in range(STEPS):
        run.let_learn(run.model[0], step >= 2)
        run.let_learn(run.model[2:], step < 2)
        run.optimizer.zero_grad()
        run.backward(step)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def noting_strides(run: Run) -> None:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step)
        run.noted += [p.grad.stride() == p.stride() for p in run.model.parameters()]
        run.optimizer.step()


def adversaries(run: Run) -> None:
    """The critic learns, then the generator through the critic."""
    generator, critic = run.model.generator, run.model.critic
    for_generator, for_critic = run.optimizers

    def critics_loss(_: nn.Module, batch: Batch) -> Tensor:
        scores = critic(torch.cat([batch.y, generator(batch.x).detach()]))
        return (scores[:ROWS] - 1).square().mean() + scores[ROWS:].square().mean()

    for step in range(STEPS):
        for_critic.zero_grad()
        run.loss(step, critics_loss).backward()
        for_critic.step()
        for_generator.zero_grad()
        run.loss(step, lambda _, batch: (critic(generator(batch.x)) - 1).square().mean()).backward()
        for_generator.step()


def one_after_the_other(model: nn.Module, batch: Batch) -> Tensor:
    """Both models in one backward pass; in the last step the second one alone."""
    passed_on = model.generator(batch.x)
    return (model.critic(passed_on if batch.step < STEPS - 1 else batch.y) - 1).square().mean()


def with_eval_between(run: Run) -> None:
    for step in range(STEPS):
        run.model.eval()
        with torch.no_grad():
            run.loss(step)
        run.model.train()
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()
        run.model.eval()
        run.loss(step)


def with_closures(run: Run) -> None:
    """LBFGS evaluates the loss as often as it likes."""
    number = iter(range(STEPS))

    def closure(step: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return run.mean(loss)

    for step in number:
        run.optimizer.step(partial(closure, step))


def copied_and_saved(run: Run) -> None:
    """A copy trains on its own, on one rank only, and what was saved is loaded again after a detour."""
    for step in range(STEPS):
        run.zero_grad()
        run.backward(step)
        run.step()
        if step != 2:
            continue
        if 0 in run.ranks:
            train_a_copy(run)
        saved = io.BytesIO()
        torch.save([run.model, run.optimizer, run.model.state_dict(), run.optimizer.state_dict()], saved)
        detour(run)
        saved.seek(0)
        model, _, model_state, optimizer_state = torch.load(saved, weights_only=False)
        run.noted.append(not hooks_of(model))
        run.model.load_state_dict(model_state)
        run.optimizer.load_state_dict(optimizer_state)


def train_a_copy(run: Run) -> None:
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    for step in range(2):
        optimizer.zero_grad()
        squared(model, Batch(0, step)).backward()
        optimizer.step()
    assert not hooks_of(model)
    assert not torch.equal(model[0].weight, run.model[0].weight)


def detour(run: Run) -> None:
    for step in range(10, 12):
        run.zero_grad()
        run.backward(step)
        run.step()


def hooks_of(model: nn.Module) -> list[object]:
    return [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]
