"""The fifteen properties of the first design, and the tests that hold the engine to each.

Most are held by the state machines, which check all invariants after every event: `scheduler_world`
(what must be true of requests, steps and numbers), `model_plane` (what a batch may ask of a compute
plane) and `test_kv_cache_conserves_blocks` (every block accounted for). The others have tests of
their own. This module keeps the list true: a test that is renamed or gone is missed here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "tests"

WORLD = (
    "properties/test_scheduler_keeps_every_promise.py::"
    "test_any_mix_of_events_leaves_every_output_as_if_alone"
)
ARRIVALS = (
    "properties/test_scheduler_keeps_every_promise.py::"
    "test_requests_that_arrive_at_any_time_in_a_small_pool_get_what_they_get_alone"
)
BLOCKS = (
    "properties/test_kv_cache_conserves_blocks.py::"
    "test_blocks_are_conserved_under_any_sequence_of_calls"
)
BOTH_PLANES = (
    "properties/test_both_planes_give_each_request_its_own_text.py::"
    "test_any_mix_of_requests_gives_each_its_own_text_and_leaks_no_block"
)
IDS = "properties/test_ids_and_parameters.py::"
CONFIG = "hetero_infer/test_engine_config.py::"
TOKENIZERS = "control_plane/text/test_tokenizers.py::"

PROPERTIES = {
    "1 ids are unique, also across restarts": (
        IDS + "test_no_two_requests_have_the_same_id_whichever_threads_they_come_in_on",
        "hetero_infer/test_serve_runs.py::"
        "test_serve_starts_its_control_plane_again_where_clients_found_it",
    ),
    "2 parameters are validated": (
        IDS + "test_parameters_are_accepted_exactly_if_each_is_in_its_range",
        IDS + "test_a_request_is_taken_in_exactly_if_it_fits_alone",
    ),
    "3 a sequence gets its blocks when it starts": (
        BLOCKS,
        "control_plane/core/test_kv_cache.py::test_a_sequence_gets_the_blocks_its_tokens_fill",
    ),
    "4 a sequence gets one more block when it grows into it": (
        BLOCKS,
        "control_plane/core/test_kv_cache.py::test_growing_returns_only_the_new_blocks",
    ),
    "5 used and free blocks are all blocks": (BLOCKS, WORLD),
    "6 queue and states agree": (WORLD, ARRIVALS),
    "7 no step is larger than its limits": (WORLD, ARRIVALS),
    "8 decode comes before prefill": (
        WORLD,
        "control_plane/core/test_scheduler_order_and_limits.py::"
        "test_decode_rows_come_before_prefill_rows",
    ),
    "9 states change only as they may": (WORLD,),
    "10 every request comes to its end": (WORLD, BOTH_PLANES),
    "11 sequences of any lengths run side by side": (
        BOTH_PLANES,
        "properties/test_cpu_results_do_not_depend_on_the_batch.py::"
        "test_logits_are_the_same_bits_in_any_company",
    ),
    "12 statistics tell the truth": (BLOCKS, WORLD),
    "13 memory pressure loses nothing": (
        ARRIVALS,
        "properties/test_scheduler_keeps_every_promise.py::"
        "test_two_requests_that_fit_only_one_at_a_time_both_get_what_they_get_alone",
    ),
    "14 a configuration is checked, and layered": (
        CONFIG + "test_every_numeric_key_of_a_file_refuses_every_kind_of_bad_value",
        CONFIG + "test_flag_beats_environment_beats_file_beats_default",
    ),
    "15 text comes back from its tokens": (
        TOKENIZERS + "test_the_simple_tokenizer_round_trips_every_text",
        TOKENIZERS + "test_a_byte_level_tokenizer_round_trips_every_text",
    ),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_has_its_tests(name):
    for test in PROPERTIES[name]:
        path, _, function = test.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE), test


def test_there_are_fifteen():
    assert [int(name.split()[0]) for name in PROPERTIES] == list(range(1, 16))
