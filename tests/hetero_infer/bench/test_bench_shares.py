"""Who takes the processors, what a neighbour costs, what a row weighs: from samples to tables."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hetero_infer.bench import link, neighbour, processors, start
from hetero_infer.bench.link_rows import blocks_for, bytes_of_a_row
from planes.errors import ExecutionError


def test_a_share_is_of_the_time_in_which_the_threads_of_the_engine_compute():
    before = processors.Usage(seconds=100, control_plane=5, compute_plane=50, client=1)
    after = processors.Usage(seconds=104, control_plane=6, compute_plane=57, client=1.5)
    used = after.since(before)
    assert used == processors.Usage(seconds=4, control_plane=1, compute_plane=7, client=0.5)
    told = used.to_object(num_threads=2, num_tokens=500)
    assert told["shares"] == {
        "control_plane": 1 / 8, "compute_plane": 7 / 8, "client": 0.5 / 8
    }  # fmt: skip
    assert told["control_plane_us_per_token"] == 2000


def test_the_table_of_processor_time_has_the_medians_of_each_level():
    usages = [processors.Usage(2.0, seconds, 1.0, 0.5) for seconds in (0.1, 0.2, 0.9)]
    samples = [usage.to_object(num_threads=2, num_tokens=1000) for usage in usages]
    figures = processors.median_usage(samples, 2)
    table = processors.usage_table([{"concurrency": 32, "processors": figures}])
    assert table.rows == [["32", "5.0 %", "25.0 %", "12.5 %", "200"]]
    assert table.title.endswith("2 engine threads:")


def test_processor_time_of_a_process_counts_its_ended_threads():
    code = (
        "import sys, threading, time\n"
        "def burn():\n"
        "    while time.thread_time() < 0.05: pass\n"
        "thread = threading.Thread(target=burn); thread.start(); thread.join()\n"
        "print('done', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"done\n"
        assert 0.05 <= processors.seconds_of_process(process.pid) < 5
        process.stdin.close()
        process.wait()
        with pytest.raises(ExecutionError, match=f"processor time of process {process.pid}"):
            processors.seconds_of_process(process.pid)
    own = time.process_time()
    assert own <= processors.seconds_of_process(os.getpid()) <= time.process_time()


def test_neighbours_are_at_work_while_they_are_wanted_and_gone_afterwards():
    with neighbour.busy_neighbours(2) as pids:
        began = [processors.seconds_of_process(pid) for pid in pids]
        while any(
            processors.seconds_of_process(pid) <= before
            for pid, before in zip(pids, began, strict=True)
        ):
            os.sched_yield()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_neighbour_ends_when_whoever_started_it_is_killed():
    code = (
        "import os, subprocess, sys\n"
        "from hetero_infer.bench.neighbour import NEVER_RESTS\n"
        "child = subprocess.Popen([sys.executable, '-c', NEVER_RESTS], stdout=sys.stdout)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        assert process.stdout.read() == b""  # the neighbour held the pipe open until it ended


def test_what_a_neighbour_costs_is_the_median_of_the_pairs_own_ratios():
    pairs = [neighbour.Pair(200, 100, 0.6), neighbour.Pair(90, 60, 0.5), neighbour.Pair(100, 80, 1)]
    figures = neighbour.figures_of(pairs)
    assert figures["slower_by"] == 1.5
    table = neighbour.table_of({"neighbours": 1, **figures})
    assert table.rows[0] == ["alone", "100.0", "", ""]
    assert table.rows[1] == ["beside 1 busy neighbour", "80.0", "1.50 ×", "0.60"]


def test_starts_are_told_as_median_least_and_most():
    results = [{"what": "command", "samples_s": [1.5, 1.25, 4.0]}]
    table = start.table_of({"tokens": 16, "results": results, "cold": None})
    assert table.rows == [["the same to its end, 16 tokens", "1.50", "1.25", "4.00"]]
    cold = start.table_of(
        {"tokens": 16, "results": [], "cold": {"first_text_s": 61.25, "ended_s": 62.0}}
    )
    assert cold.rows[0][1] == "61.25"


def test_a_decode_row_weighs_little_more_after_a_long_context_than_after_a_short_one():
    num_blocks = blocks_for(4096, 32, 16)
    short, long = (bytes_of_a_row(context, 32, 16, num_blocks) for context in (64, 4096))
    assert 3 < short < long <= 1.2 * short


def test_a_row_is_weighed_only_if_all_rows_decode_together():
    with pytest.raises(ExecutionError, match="4 rows of 64 tokens decoded together in"):
        bytes_of_a_row(64, 4, 16, num_blocks=blocks_for(64, 2, 16))


def test_idle_time_is_told_of_the_step_and_not_of_both_together():
    assert link.idle_of_step(0.2) == pytest.approx(0.25)
    figures = {
        "median_s": 2.0, "output_tokens_per_second": 100.0, "plane_idle_share": 0.2,
        "plane_step_s": 0.04, "scheduling_delay_p99_s": 0.001,
    }  # fmt: skip
    ahead = {**figures, "depth": 2, "median_s": 1.6}
    tables = link.tables_of(
        {
            "prompt_tokens": 8, "output_tokens": 4, "streams": 32, "many_streams": 256,
            "depths": [{**figures, "depth": 1}, ahead], "many": figures,
            "rows": [{"context": 64, "bytes": 5.0}, {"context": 4096, "bytes": 6.0}],
        }
    )  # fmt: skip
    assert "takes 1.25 × as long" in tables[0].title
    assert tables[0].rows[0] == ["1", "2.00", "100.0", "40.00", "25.0 %"]
    assert [row[0] for row in tables[1].rows] == ["32", "256"]
    assert tables[2].rows[1] == ["4096", "6.00", "1.20"]
