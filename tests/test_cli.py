"""The command, as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from inspect import signature
from pathlib import Path

import pytest
from typer.testing import CliRunner

import syncline
from support.patience import within
from syncline.bench.side_by_side import METHODS
from syncline.cli.demo import demo
from syncline.cli.main import app
from syncline.collectives.named import by_name, names
from syncline.errors import ConfigError, UnknownName
from syncline.workloads.gpt import SHAPES, make_gpt


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "syncline", *arguments],
        capture_output=True,
        text=True,
        timeout=within(50, most=110),
        check=False,
    )


def test_version_is_the_packages():
    assert call("--version").strip() == f"syncline {syncline.__version__}"


def test_help_teaches_by_example():
    assert "syncline show ring --world 6" in call("--help")
    assert "--cost" in call("show", "--help")


@pytest.mark.parametrize("name", names())
def test_json_has_the_transfers_of_the_schedule(name):
    data = json.loads(call("show", name, "--world", "6", "--json"))
    schedule = by_name(name, 6)
    assert list(data) == ["algorithm", "world", "chunks", "transfers"]
    assert (data["world"], data["chunks"]) == (6, schedule.chunks)
    assert [(t["round"], t["src"], t["dst"], t["lo"], t["hi"], t["op"]) for t in data["transfers"]] == [
        (number, *transfer) for number, transfer in schedule.transfers()
    ]


def test_json_transfers_give_everyone_the_sum():
    """What a reader of the JSON would do: replay it on numbers."""
    data = json.loads(call("show", "halving-doubling", "--world", "7", "--json"))
    values = [[10**rank] * data["chunks"] for rank in range(7)]
    for number in range(1 + max(t["round"] for t in data["transfers"])):
        now = [t for t in data["transfers"] if t["round"] == number]
        payloads = [values[t["src"]][t["lo"] : t["hi"]] for t in now]
        for t, payload in zip(now, payloads, strict=True):
            for chunk, value in zip(range(t["lo"], t["hi"]), payload, strict=True):
                values[t["dst"]][chunk] = value + (values[t["dst"]][chunk] if t["op"] == "add" else 0)
    assert values == [[1111111] * data["chunks"]] * 7


def test_cost_compares_all_algorithms():
    rows = json.loads(call("show", "--world", "8", "--cost", "100MB", "--json"))["cost"]
    by_algorithm = {row["algorithm"]: row for row in rows}
    assert by_algorithm["ring"]["rounds"] == 14
    assert by_algorithm["ring"]["bytes_sent_per_rank"] == 175_000_000
    assert by_algorithm["direct"]["rounds"] == 2
    assert by_algorithm["halving-doubling"]["rounds"] == 6
    assert "double-tree" in call("show", "--world", "8", "--cost", "100MB")


@pytest.mark.parametrize("name", names())
def test_svg_has_an_arrow_for_every_transfer(name, tmp_path):
    file = tmp_path / "drawing.svg"
    call("show", name, "--world", "5", "--svg", str(file))
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    arrows = root.findall(".//{http://www.w3.org/2000/svg}line")
    assert len(arrows) == sum(1 for _ in by_name(name, 5).transfers())


def test_picture_ends_with_everything_complete():
    lines = call("show", "ring", "--world", "3").strip().splitlines()
    assert lines[-1].split() == ["0", "███", "1", "███", "2", "███"]


def test_hosts_of_unequal_size_are_drawn():
    assert "round 0" in call("show", "hierarchical:inner=ring,outer=tree", "--world", "6", "--hosts", "2+4")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["show", "rnig"], UnknownName, "ring"),
        (["show", "tree:arty=3"], UnknownName, "arity"),
        (["show", "tree:arity=0"], ConfigError, "arity=0 is less than 1"),
        (["show", "tree:arity=two"], ConfigError, "not a int"),
        (["show", "ring", "--world", "0"], ConfigError, "--world 0"),
        (["show"], ConfigError, "name an algorithm"),
        (["show", "ring", "--cost", "lots"], ConfigError, "100MB"),
        (["show", "hierarchical", "--world", "4", "--hosts", "2+3"], ConfigError, "adds up to 5"),
        (["show", "broadcast", "--root", "9"], ConfigError, "0..3"),
        (["show", "ring", "--svg", "/nowhere/x.svg"], ConfigError, "cannot write"),
    ],
)
def test_bad_requests_are_answered(arguments, error, says):
    with pytest.raises(error, match=says.replace("+", r"\+")):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_an_error_is_one_line_and_no_traceback():
    result = command("show", "dobule-tree")
    assert result.returncode == 2
    assert "did you mean double-tree" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_is_printed_as_it_is():
    """Gloo's errors begin with a path in brackets, which is no markup."""
    result = command("show", "[/gloo/pair.cc]")
    assert result.returncode == 2
    assert "unknown algorithm '[/gloo/pair.cc]'" in result.stderr


def test_unknown_commands_are_answered_with_the_nearest():
    result = command("shwo")
    assert result.returncode == 2
    assert "show" in result.stderr


def test_doctor_reports_what_is_here():
    findings = {finding["what"]: finding for finding in json.loads(call("doctor", "--json"))}
    assert findings["syncline"]["found"] == syncline.__version__
    assert {"torch", "native module", "cores", "memory", "/dev/shm", "torch gloo"} <= set(findings)
    assert findings["torch gloo"]["found"] == "available"
    for finding in findings.values():
        missing = any(word in finding["found"] for word in ("missing", "not available", "not built"))
        assert bool(finding["advice"]) or not missing, finding
    assert "native module" in call("doctor")


@pytest.mark.timeout(120)
def test_bench_prints_every_contender():
    data = json.loads(call("bench", "algorithms", "--ranks", "2", "--size", "100KB", "--repeats", "2", "--json"))
    measured = {row["name"]: row for row in data["measured"]}
    assert {"ring", "tree", "engine"} <= set(measured)
    assert measured["engine"]["ratio"] == 1
    assert all(row["fastest_s"] > 0 for row in measured.values())


class Fetched(HTMLParser):
    """What a page asks others for."""

    def __init__(self):
        super().__init__()
        self.addresses = []
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_demo_trains_about_ten_million_parameters():
    chosen = signature(demo).parameters["size"].default
    assert 8e6 < sum(parameter.numel() for parameter in make_gpt(SHAPES[chosen]).parameters()) < 12e6


@pytest.mark.timeout(120)
def test_demo_trains_the_same_with_both_and_writes_a_report(tmp_path):
    page = tmp_path / "report.html"
    result = command("demo", "--steps", "5", "--size", "5M", "--batch", "2", "--html", str(page))
    assert result.returncode == 0, result.stderr
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    table = {title: figures for title, *figures in rows if len(figures) == 2}
    assert set(table) >= {"step, median", "exposed communication", "gradients per step", "said per rank and step"}
    assert all(re.fullmatch(r"[\d.]+ [mµ]?s", figure) for figure in table["step, median"])
    assert all(re.fullmatch(r"[\d.]+ [mµ]?s \([\d.]+ %\)", figure) for figure in table["exposed communication"])
    assert all(re.fullmatch(r"[\d.]+ MB", figure) for figure in table["gradients per step"])
    assert table["said per rank and step"] == table["gradients per step"]
    assert table["speed-up"][0] == "1.00 x"
    ddp, ours = (float(figure) for figure in table["final loss"])
    assert ddp == pytest.approx(ours, rel=1e-4)
    assert ddp < 5.5
    for method in METHODS.values():
        assert re.search(rf"{method} .*5/5 loss [\d.]+ [\d.]+ steps/s, \d+ % exposed", result.stderr), result.stderr
    assert str(page) in result.stdout.replace("\n", "")
    fetched = Fetched()
    fetched.feed(page.read_text(encoding="utf-8"))
    assert fetched.scripts
    assert not fetched.addresses


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_demo_prints_figures_for_programs():
    result = command("demo", "--steps", "4", "--size", "5M", "--batch", "1", "--accumulate", "2", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert list(figures) == ["ddp", "syncline"]
    for record in figures.values():
        assert len(record["losses"]) == len(record["step_s"]) == len(record["exposed_s"]) == 4
    assert figures["ddp"]["losses"] == pytest.approx(figures["syncline"]["losses"], rel=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [("--workers", "1"), ("--steps", "0"), ("--size", "7M"), ("--collective", "rign")])
def test_demo_refuses_what_it_cannot_do(options):
    result = command("demo", "--steps", "4", "--size", "5M", *options)
    assert result.returncode == 2
    assert options[1] in result.stderr


def test_algorithms_page_is_current():
    from syncline.collectives.table import page

    written = Path(__file__).parent.parent / "docs" / "algorithms.md"
    assert written.read_text(encoding="utf-8") == page(), "run make docs"
