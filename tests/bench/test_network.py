"""The network benchmark: who pays is judged by speed, what is wrong is refused, and figures come from real links."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from syncline.lab.hosts import OnHosts, hosts, locked_within, why_not
from syncline.lab.links import sent_by
from syncline.bench.network import RATES, rows_of, verdict
from syncline.bench.network_rank import Figures
from syncline.cli.bench_network import network_table
from syncline.cli.main import app
from syncline.errors import ConfigError, SynclineError, UnknownName
from syncline.launch.processes import run_processes


def seen(**step_s: float) -> dict[str, Figures]:
    """Methods whose names have `_` for a space, and the seconds of their steps."""
    return {name.replace("_", " "): Figures(seconds, 0.1234, 2e6, 12.345e6, 4.5) for name, seconds in step_s.items()}


MIXED = rows_of(
    "1gbit",
    seen(ddp=1.0, ddp_fp16=0.5, ddp_powersgd=1.0, syncline_none=2.0, syncline_int8=1.92, syncline_onebit=1.0),
)


# What is made of what was seen


def test_compression_is_judged_by_the_same_trainer_without_it():
    rows = {row.method: row for row in MIXED}
    assert {name: row.pays for name, row in rows.items()} == {
        "ddp": None,
        "ddp fp16": True,
        "ddp powersgd": False,
        "syncline none": None,
        "syncline int8": False,  # 4 % is noise
        "syncline onebit": True,  # no faster than DDP, and twice as fast as none
    }
    assert (rows["syncline onebit"].times_ddp, rows["syncline onebit"].times_dense) == (1.0, 2.0)
    assert rows["syncline none"].times_ddp == 0.5
    assert rows["ddp fp16"].as_data()["steps_per_s"] == 2.0


def test_without_a_peer_nothing_is_judged():
    (row,) = rows_of("1gbit", seen(syncline_int8=1.0))
    assert (row.times_ddp, row.times_dense, row.pays) == (None, None, None)
    assert "nothing to compare" in verdict([row])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (MIXED, "1gbit: compression does not pay with ddp powersgd, syncline int8"),
        (rows_of("10gbit", seen(ddp=1.0, ddp_fp16=1.0, ddp_powersgd=1.3)), "10gbit: no compression pays"),
        (rows_of("100mbit", seen(ddp=1.0, ddp_fp16=0.5)), "100mbit: all compression pays"),
    ],
)
def test_a_line_says_where_compression_does_not_pay(rows, words):
    assert verdict(rows) == words


def test_the_table_has_all_that_is_asked_for_on_a_terminal():
    console = Console(width=80, file=StringIO())
    console.print(network_table(MIXED, "any"))
    shown = console.file.getvalue()
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    cells = {line[0]: line[1:] for line in lines if line}
    assert cells["int8"] == ["0.521", "123 ms", "12.35 MB", "4.500", "0.52", "does not pay"]
    assert cells["onebit"][-1] == "pays"
    assert cells["ddp powersgd"][-2:] == ["1.00", "does not pay"]
    assert cells["ddp"][-1] == ""


def test_links_at_and_around_1_gbit_are_measured_by_default():
    assert {"100mbit", "1gbit", "10gbit"} == set(RATES)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--methods", "ddp fp17"], UnknownName),
        (["--methods", "syncline tpok"], UnknownName),
        (["--methods", "horovod"], UnknownName),
        (["--size", "7M"], UnknownName),
        (["--hosts", "1"], ConfigError),
        (["--steps", "0"], ConfigError),
    ],
)
def test_what_cannot_be_measured_is_refused_before_hosts_are_made(options, error):
    with pytest.raises(error):
        CliRunner().invoke(app, ["bench", "network", *options], catch_exceptions=False)


# Real links


def needs_hosts() -> None:
    if (reason := why_not()) and not os.environ.get("SYNCLINE_REQUIRE_ALL"):
        pytest.skip(reason)


@pytest.mark.needs_net
@pytest.mark.timeout(120)
def test_methods_learn_the_same_over_real_links_and_a_codec_sends_less():
    needs_hosts()
    methods = "ddp,syncline none,syncline topk:0.01"
    arguments = ["--rates", "1gbit", "--hosts", "2", "--steps", "2", "--size", "1M", "--methods", methods]
    shown = CliRunner().invoke(app, ["bench", "network", *arguments, "--json"], catch_exceptions=False)
    ddp, none, topk = json.loads(shown.stdout)
    assert none["loss"] == pytest.approx(ddp["loss"], rel=1e-5)
    assert topk["loss"] != none["loss"]
    gradients = ddp["said_bytes"]
    for dense in (ddp, none):
        assert dense["sent_bytes"] == pytest.approx(gradients, rel=0.1)  # two hosts: half to the owner, half to all
        assert dense["step_s"] > dense["exposed_s"] > 0
        assert dense["step_s"] > 0.9 * gradients * 8 / 1e9  # the link is limited
    assert topk["sent_bytes"] < 0.05 * gradients


def sent_here(fabric) -> tuple[int, int]:
    before = sent_by("eth0")
    fabric.barrier()
    return fabric.rank, sent_by("eth0") - before


def failing(fabric) -> None:
    raise SynclineError(f"rank {fabric.rank} is on a host that is broken")


@pytest.mark.needs_net
@pytest.mark.timeout(120)
def test_ranks_run_on_hosts_and_their_errors_come_back(monkeypatch):
    needs_hosts()
    with hosts(2, "1gbit"):
        monkeypatch.setattr("syncline.lab.hosts.PATIENCE_S", 0.0)
        with pytest.raises(ConfigError, match="in use by another run"), hosts(2, "1gbit"):
            pass
        assert all(0 < sent < 100_000 for _, sent in run_processes(sent_here, 2, OnHosts()))
        with pytest.raises(SynclineError, match="on a host that is broken"):
            run_processes(failing, 2, OnHosts())
    with pytest.raises(SynclineError, match="slhost0"):
        run_processes(sent_here, 2, OnHosts())


def test_a_lock_of_another_run_is_waited_for_so_long(tmp_path):
    with (tmp_path / "lock").open("w") as theirs, (tmp_path / "lock").open("w") as mine:
        assert locked_within(theirs, 0.0)
        assert not locked_within(mine, 0.2)
        threading.Timer(0.3, lambda: fcntl.flock(theirs, fcntl.LOCK_UN)).start()
        assert locked_within(mine, 20.0)
