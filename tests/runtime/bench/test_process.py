"""The benchmark of an engine in a process of its own: it runs, and what it counts is right."""

from __future__ import annotations

import json

import pytest

from umbel.cli import main


def test_both_ways_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--programs", "4", "--tokens", "8", "--reads", "3", "--repeats", "1", "--json"]
    assert main(["bench", "process", *options]) == 0
    out, _ = capsys.readouterr()
    thread, process = json.loads(out)
    assert (thread["way"], process["way"]) == ("thread", "process")
    for figures in (thread, process):
        assert figures["tokens_per_s"] > 0
        assert 0 < figures["least_read_us"] <= figures["read_us"]
    assert thread["all_cpu_us"] == thread["own_cpu_us"]
    assert process["all_cpu_us"] >= process["own_cpu_us"]


def test_the_table_names_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--programs", "2", "--tokens", "4", "--reads", "2", "--repeats", "1"]
    assert main(["bench", "process", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["engine", "thread", "process"]
