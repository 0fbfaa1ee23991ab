"""The end of a script is enough, in modes with servers: no rank disturbs another that still trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.scripts import run_script

SCRIPT = """
    import sys
    import time
    import torch
    import torch.distributed as dist
    import syncline
    from support.guarded import Net, batch, filled

    mode, fabric, slow, how = sys.argv[1:]
    rank = syncline.init(fabric=fabric, deadlines=syncline.Deadlines(20.0, join=60.0)).rank
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = syncline.Sync(model, optimizer, mode=mode)
    if not sync.serve():
        for step in range(6):
            time.sleep(0.1 if rank == int(slow) else 0.0)
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            if how == "raise" and step == 2 and rank != int(slow):
                raise ValueError("this rank fails")
    if how == "close":
        sync.close()
    if how == "destroy":
        dist.destroy_process_group()
    if how == "exit":
        sys.exit()
    print("end", rank)
"""


@pytest.mark.sampled(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["nothing", "close", "destroy", "exit"])
@pytest.mark.parametrize("slow", ["1", "0"])
@pytest.mark.parametrize("mode", ["async", "bounded:ahead=2", "async:apart=true"])
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_ranks_that_end_at_different_times_disturb_nobody(
    tmp_path: Path, fabric: str, mode: str, slow: str, how: str
) -> None:
    for rank, done in enumerate(run_script(tmp_path, SCRIPT, 3, mode, fabric, slow, how)):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == ("" if how == "exit" else f"end {rank}")
        assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fabric", ["shm", "torch"])
def test_a_server_that_fails_does_not_serve_to_the_end(tmp_path: Path, fabric: str) -> None:
    failed, left = run_script(tmp_path, SCRIPT, 2, "async", fabric, "1", "raise")
    assert failed.returncode == left.returncode == 1
    assert failed.stderr.rstrip().endswith("ValueError: this rank fails")
    assert "the server on rank 0 does not answer" in left.stderr
