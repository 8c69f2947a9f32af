"""Every client that people use, unchanged, against one running deployment and one table of cases.

README.md tells how to add a case or a client, and how to point this at another deployment.
"""

from __future__ import annotations

import pytest

from tests.integration.clients.asked import Clients
from tests.integration.clients.case_table import REFERENCES, Table
from tests.integration.clients.checks import differences, problems_of
from tests.integration.clients.conftest import Served
from tests.integration.clients.driver_process import DriverFault
from tests.integration.clients.watcher import Watcher

pytestmark = pytest.mark.model

TABLE = Table()
ROWS = [
    pytest.param(
        client,
        case_id,
        way,
        id=f"{client}-{case_id}-{way}",
        marks=[pytest.mark.slow] if way in TABLE.case_of[case_id].slow else [],
    )
    for client, case_id, way in TABLE.rows()
]


@pytest.mark.parametrize(("client", "case_id", "way"), ROWS)
def test_a_client_sees_what_the_table_says(
    clients: Clients, served: Served, watcher: Watcher, client: str, case_id: str, way: str
) -> None:
    case = TABLE.case_of[case_id]
    if "token" in case.ask and served.token is None:
        pytest.skip("the deployment asks for no token")
    known = watcher.requests() if case.is_watched else {}
    answer = clients.answer(client, case_id, way)
    problems = problems_of(
        answer, clients.request(case_id), case, TABLE.clients[client],
        lambda other: clients.text(client, other),
    )  # fmt: skip
    reference = TABLE.reference(client, case)
    if way == "streamed" and "whole" in case.ways:
        whole = clients.answer(client, case_id, "whole")
        problems += [f"unlike the whole answer: {what}" for what in differences(answer, whole)]
    elif reference is not None and not case.is_watched:
        other = clients.answer(reference, case_id, way)
        problems += [f"unlike {reference}: {what}" for what in differences(answer, other)]
    assert not problems, "\n".join(problems)
    if case.is_watched:
        watcher.wait_for(case.see["request_is"], known)


@pytest.mark.parametrize(
    ("client", "case_id", "way"),
    [pytest.param(*row, id="-".join(row)) for row in TABLE.left_out()],
)
def test_a_client_cannot_do_what_it_is_said_it_cannot(
    clients: Clients, served: Served, client: str, case_id: str, way: str
) -> None:
    case, surface = TABLE.case_of[case_id], TABLE.clients[client].surface
    if "token" in case.ask and served.token is None:
        pytest.skip("the deployment asks for no token")
    try:
        answer = clients.answer(client, case_id, way)
    except DriverFault:
        return  # there is no way to ask
    reason = TABLE.why_not(client, case)
    if "error" in case.see and surface not in case.see["error"]:
        assert "error" not in answer, f"it is refused: {answer}; so it is no reason: {reason}"
        return
    problems = problems_of(
        answer, clients.request(case_id), case, TABLE.clients[client],
        lambda other: clients.text(client, other),
    )  # fmt: skip
    reference = TABLE.reference(client, case)
    if not problems and reference is not None:
        problems = differences(answer, clients.answer(reference, case_id, way))
    assert problems, f"it can: {reason}"


def test_the_table_names_only_what_there_is() -> None:
    ids = [case.id for case in TABLE.cases]
    assert len(set(ids)) == len(ids)
    assert set(REFERENCES) <= TABLE.clients.keys()
    for case in TABLE.cases:
        assert set(case.slow) <= set(case.ways) <= {"whole", "streamed"}, case.id
        assert case.cannot.keys() <= {"http", "grpc", *TABLE.clients}, case.id
        assert case.see.keys() <= SEEN, case.id


def test_no_reason_for_leaving_a_case_out_is_idle() -> None:
    for name, client in TABLE.clients.items():
        own = [case for case in TABLE.cases if TABLE.why_not(name, case) is not None]
        assert len(own) < len(TABLE.cases) * 2 / 3, name
        for what in client.cannot:
            asked = [{case.ask["op"], *case.ask} for case in TABLE.cases]
            assert what == "no_token" or any(what in names for names in asked), (name, what)


SEEN = {
    "choices", "drawn_is_best", "error", "events", "finish_reason", "left", "logprobs",
    "matched_stop", "models", "num_token_ids", "pieces_at_least", "prompt_logprobs", "ready",
    "request_is", "text", "texts", "texts_differ", "token_ids", "usage",
}  # fmt: skip
