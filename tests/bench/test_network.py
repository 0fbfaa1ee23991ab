"""The network benchmark: lists are read, who pays is judged by speed, and figures come from real links."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.emulated_hosts import needs_hosts
from syncline.bench.contenders import DEFAULT_BUCKET_BYTES, Contender
from syncline.bench.network import BUCKETS, METHODS, RATES, NetworkRow, best_of, cells_of, pays, turn_length, verdict
from syncline.cli import bench_network, tables
from syncline.cli.lists import list_buckets, list_rates, split_list
from syncline.cli.main import app
from syncline.cli.tables import data_of
from syncline.errors import ConfigError
from syncline.units import MIB


def row(method: str, step_ms: float, bucket_mb: int = 25, busy_elsewhere: float = 0.0, rate="1gbit") -> NetworkRow:
    return NetworkRow(rate, method, bucket_mb * MIB, step_ms, 1000 / step_ms, 123.4, 12.345e6, 2e6, 4.5, busy_elsewhere)


MIXED = [
    row("ddp", 1000),
    row("ddp", 800, 2),
    row("ddp fp16", 500),
    row("hook topk:0.01", 790, 4),
    row("syncline none", 2000),
    row("syncline int8", 1920, busy_elsewhere=0.5),
    row("syncline onebit", 1000),
]


# What is made of what was seen


def test_compression_is_judged_by_the_same_trainer_without_it_each_at_its_best():
    best = best_of(MIXED)
    assert best["ddp"].bucket_bytes == 2 * MIB
    assert {name: pays(one, best) for name, one in best.items()} == {
        "ddp": None,
        "ddp fp16": True,
        "hook topk:0.01": False,  # faster than DDP at its default, and not than DDP at its best
        "syncline none": None,
        "syncline int8": False,  # 4 % is noise
        "syncline onebit": True,  # no faster than DDP, and twice as fast as none
    }
    assert pays(row("alone", 1), best) is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (MIXED, "1gbit: compression does not pay with hook topk:0.01, syncline int8"),
        ([row("ddp", 1000), row("ddp fp16", 1000), row("hook topk:0.01", 1300)], "1gbit: no compression pays"),
        ([row("ddp", 1000), row("ddp fp16", 500)], "1gbit: all compression pays"),
        ([row("syncline int8", 1)], "1gbit: there is no compression to judge, or nothing to compare it with"),
    ],
)
def test_a_line_says_where_compression_does_not_pay(rows, words):
    assert verdict(rows) == words


def test_a_cell_for_programs_has_all_that_was_measured():
    cell = data_of(MIXED[5])
    assert list(cell) == [
        "rate",
        "method",
        "bucket_bytes",
        "step_ms",
        "ratio_to_ddp",
        "exposed_ms",
        "bytes_out_per_host",
        "message_bytes",
        "loss",
        "busy_elsewhere",
        "clean",
    ]
    assert (cell["bucket_bytes"], cell["busy_elsewhere"], cell["clean"]) == (25 * MIB, 0.5, False)
    assert data_of(MIXED[0])["clean"]


def test_the_table_has_default_and_best_on_a_terminal_and_marks_what_was_disturbed(monkeypatch):
    console = Console(width=80, file=StringIO())
    monkeypatch.setattr(tables, "Console", lambda **_: console)
    bench_network.show_rate(MIXED, "any")
    shown = console.file.getvalue()
    lines = {line.split("  ")[0].strip(): line.split() for line in shown.splitlines() if " MB " in line}
    assert lines["ddp"] == ["ddp", "1000", "1.00", "2", "MB", "800", "1.25", "12.35", "MB", "4.500"]
    assert lines["hook topk:0.01"] == ["hook", "topk:0.01", "4", "MB", "790", "1.27", "12.35", "MB", "4.500", "no"]
    assert lines["int8 *"][-1] == "no"
    assert max(map(len, shown.splitlines())) <= 80
    assert "at the best. Compression pays" in " ".join(shown.split())
    assert "* other processes took more than 0.1 of a core" in shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("step_s", "steps", "expected"),
    [(0.1, 8, (1, 3)), (0.9, 8, (1, 2)), (2.5, 8, (0, 1)), (60.0, 8, (0, 1)), (0.1, 2, (1, 1)), (0.01, 300, (1, 100))],
)
def test_turns_have_fewer_steps_where_they_are_long(step_s, steps, expected):
    assert turn_length(step_s, steps) == expected


# What is asked for


def test_every_method_is_measured_at_every_bucket_size_and_ddp_at_its_default_first():
    cells = cells_of(["alone", "ddp powersgd", "ddp fp16", "ddp"], [MIB, 4 * MIB])
    assert [(cell.name, cell.bucket_bytes) for cell in cells] == [
        ("ddp", DEFAULT_BUCKET_BYTES),
        ("alone", DEFAULT_BUCKET_BYTES),
        ("ddp powersgd", DEFAULT_BUCKET_BYTES),
        ("ddp fp16", MIB),
        ("ddp fp16", 4 * MIB),
        ("ddp", MIB),
        ("ddp", 4 * MIB),
    ]


def test_what_is_measured_by_default():
    assert set(RATES) == {"100mbit", "1gbit", "10gbit"}
    assert [size / MIB for size in BUCKETS] == [25, 4, 2, 1]
    assert len(cells_of(METHODS, BUCKETS)) == 4 * (len(METHODS) - 2) + 2


def test_lists_are_read():
    assert list_buckets("25mb, 4MB,1MiB,512kb") == [25 * MIB, 4 * MIB, MIB, MIB // 2]
    assert list_rates("10gbit,1.5gbit,100mbit") == ["10gbit", "1.5gbit", "100mbit"]
    assert split_list("ddp, hook topk:0.01 ,ddp", "--methods") == ["ddp", "hook topk:0.01"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--methods", "ddp fp17"], "did you mean ddp fp16"),
        (["--methods", "syncline tpok"], "topk"),
        (["--methods", "horovod"], "unknown method 'horovod'"),
        (["--methods", "hook onebit"], "unknown small hook 'onebit'"),
        (["--methods", "hook topk:2"], "unknown small hook 'topk:2'"),
        (["--methods", "ddp,,alone"], "--methods 'ddp,,alone' has an empty entry"),
        (["--buckets", "25mb,lots"], "'lots' is not a size"),
        (["--buckets", "1kb"], "less than 64 KiB"),
        (["--rates", "1gbit,fast"], "'fast' is not a rate as tc writes it; try"),
        (["--rates", "0gbit"], "not a rate"),
        (["--size", "7M"], "7M"),
        (["--hosts", "1"], "two hosts"),
        (["--steps", "0"], "one step"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_hosts_are_made(options, says):
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(app, ["bench", "network", *options], catch_exceptions=False)


def test_buckets_follow_the_rule_of_ddp():
    usual = Contender("syncline none").sync_buckets()
    assert usual == {"bucket_bytes": 25 * MIB, "first_bucket_bytes": MIB}
    assert set(Contender("syncline none", 4 * MIB).sync_buckets().values()) == {4 * MIB}


# Real links


@pytest.mark.needs_net
@pytest.mark.timeout(150)
def test_methods_learn_the_same_over_real_links_and_a_codec_sends_less():
    needs_hosts()
    methods = "alone,syncline none,syncline topk:0.01,hook topk:0.01"
    arguments = ["--rates", "1gbit", "--hosts", "2", "--steps", "1", "--size", "1M", "--methods", methods]
    shown = CliRunner().invoke(
        app, ["bench", "network", *arguments, "--buckets", "25mb,1mb", "--json"], catch_exceptions=False
    )
    cells = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(cells) == 8
    assert (cells[0]["method"], cells[0]["ratio_to_ddp"]) == ("ddp", 1.0)
    gradients = cells[0]["message_bytes"]
    for cell in cells:
        if cell["method"] in ("ddp", "syncline none"):
            assert cell["loss"] == pytest.approx(cells[0]["loss"], rel=1e-5)
            # two hosts: half to the owner, half to all
            assert cell["bytes_out_per_host"] == pytest.approx(gradients, rel=0.1)
            assert cell["step_ms"] > cell["exposed_ms"] > 0
            assert cell["step_ms"] > 0.9e3 * gradients * 8 / 1e9  # the link is limited
        else:
            assert cell["loss"] != cells[0]["loss"]
            assert cell["bytes_out_per_host"] < 0.05 * gradients
