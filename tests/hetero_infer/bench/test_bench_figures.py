from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_infer.bench.figures import median, percentile, ratio, summary
from hetero_infer.bench.latency import gaps_beside, waits_of
from hetero_infer.bench.load import StreamRecord
from hetero_infer.bench.report import Result, Table, finite, to_text
from hetero_infer.bench.resident import Peaks, figures_of, parse_smaps
from hetero_infer.bench.throughput import figures_of as throughput_of
from hetero_infer.bench.throughput import median_run

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def record(sent: float, arrivals: list[float], counts: list[int], prompt: int = 5) -> StreamRecord:
    return StreamRecord(prompt, sent, tuple(arrivals), tuple(counts), arrivals[-1])


@given(SAMPLES, st.floats(0, 100))
def test_a_percentile_is_that_of_numpy(samples, share):
    assert percentile(samples, share) == pytest.approx(np.percentile(samples, share), abs=1e-6)


def test_figures_of_nothing_are_not_numbers_and_json_says_null():
    assert math.isnan(median([]))
    assert math.isnan(percentile([], 50))
    assert math.isnan(ratio(1, 0))
    assert (
        json.dumps(finite({"a": [math.nan, 1.5], "b": math.inf})) == '{"a": [null, 1.5], "b": null}'
    )


def test_a_summary_has_the_percentiles_and_the_largest():
    assert summary([float(i) for i in range(101)]) == {"p50": 50, "p90": 90, "p99": 99, "max": 100}


def test_rates_are_of_all_streams_from_the_first_sent_to_the_last_ended():
    run = throughput_of([record(10, [11, 12], [1, 3]), record(10.5, [12, 14], [1, 3])])
    assert run.seconds == 4
    assert run.output_tokens_per_second == 8 / 4
    assert run.total_tokens_per_second == 18 / 4
    assert run.decode_tokens_per_second == median([3 / 1, 3 / 2])
    assert run.time_to_first_token_ms == 1250


def test_the_median_run_is_the_median_of_each_figure():
    runs = [throughput_of([record(0, [1, end], [1, 1])]) for end in (2.0, 4.0, 10.0)]
    assert median_run(runs)["seconds"] == 4


def test_waits_are_between_messages_whatever_they_bring():
    waits = waits_of([record(0, [1, 1.5, 3.5], [1, 2, 1])])
    assert waits["time_to_first_token_ms"]["p50"] == 1000
    assert waits["inter_token_ms"]["max"] == 2000
    assert waits["tokens_per_message"] == pytest.approx(4 / 3)


def test_the_longest_gap_counts_if_it_touches_the_time_of_the_long_prompt():
    arrivals = [0.0, 1.0, 2.0, 5.0, 6.0, 16.0]
    assert gaps_beside(arrivals, 2.5, 5.5) == (1.0, 3.0)
    assert gaps_beside(arrivals, 2.5, 6.5) == (1.0, 10.0)


def test_memory_beyond_the_pool_leaves_off_only_blocks_that_were_in_use():
    peaks = Peaks()
    peaks.add({"rss": 100, "pss": 80}, {"rss": 1000, "pss": 900}, 5)
    peaks.add({"rss": 90, "pss": 85}, {"rss": 1100, "pss": 850}, 3)
    figures = figures_of(peaks, kv_pool_bytes=400, num_blocks=20, weights_bytes=300)
    assert figures["touched_pool_bytes"] == 100
    assert figures["beyond_pool_rss_bytes"] == 1100
    assert figures["beyond_pool_pss_bytes"] == 885
    assert figures["beyond_pool_and_weights_rss_bytes"] == 800


def test_a_rollup_is_read_in_bytes():
    text = (
        "00-ff ---p 0 00:00 0 [rollup]\nRss:  12 kB\nPss: 7 kB\nPss_Anon: 3 kB\nAnonymous: 4 kB\n"
    )
    assert parse_smaps(text) == {"rss": 12 << 10, "pss": 7 << 10, "anonymous": 4 << 10}


def test_tables_stand_in_columns():
    text = to_text(Result("what", {}, [Table(["a", "b"], [["long name", "1"], ["x", "222"]])]))
    assert text == "what\n\na            b\n---------  ---\nlong name    1\nx          222\n"
