from __future__ import annotations

import threading

from control_plane.engine.compute_stream import ExecuteStream, Mailbox
from tests.waiting import PATIENCE_S


def test_a_stream_that_has_ended_keeps_no_thread_waiting_for_batches():
    """gRPC reads the batches on a thread of its own, which nothing else would wake."""

    class Stub:
        def Execute(self, batches):  # noqa: N802 - the name of the RPC
            self.reader = threading.Thread(target=list, args=(batches,), daemon=True)
            self.reader.start()
            return iter(())

    stub, mailbox = Stub(), Mailbox()
    stream = ExecuteStream(stub, (), mailbox)
    arrival = mailbox.get(PATIENCE_S)
    assert (arrival.stream, arrival.reply) == (stream, None)
    stub.reader.join(PATIENCE_S)
    assert not stub.reader.is_alive()
