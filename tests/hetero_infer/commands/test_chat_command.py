"""`hetero-infer chat` in pipes and on a terminal, real processes."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import select
import subprocess
import termios
import time

import pytest

from hetero_infer.cli import main
from hetero_infer.client import Client, Message
from hetero_infer.commands.chat_history import INTERRUPTED
from hetero_infer.generation_config import GenerationConfig
from tests.hetero_infer.commands.conftest import COMMAND, MAX_MODEL_LEN, PATIENCE_S

SAMPLING = ("--seed=3", "--ignore-eos", "--temperature=1")


def answer_to(server, messages, max_tokens):
    """What the server answers to a whole conversation."""
    params = GenerationConfig(max_tokens=max_tokens, seed=3, ignore_eos=True).params
    with Client(server) as client:
        return client.chat(messages, params).text


@pytest.fixture
def talk(capsysbinary, monkeypatch):
    """Run the command in this process with something piped in; status, answers, what was said."""

    def run(*argv, stdin):
        piped = io.TextIOWrapper(io.BytesIO(stdin if isinstance(stdin, bytes) else stdin.encode()))
        monkeypatch.setattr("sys.stdin", piped)
        status = main(["chat", *SAMPLING, *map(str, argv)])
        printed = capsysbinary.readouterr()
        return status, printed.out.decode().splitlines(), printed.err.decode().splitlines()

    return run


@pytest.mark.wide
def test_a_pipe_has_one_turn_a_line_and_the_model_is_told_all_of_them(run, server):
    done = run("chat", f"--target={server}", "--max-tokens=8", *SAMPLING, "--system=be brief",
               stdin='hello\n\nline \\\nand line\n"""\na\n\nb"""\n')  # fmt: skip
    assert done.returncode == 0, done.stderr
    messages, answers = [Message("system", "be brief")], []
    for text in ("hello", "line \nand line", "a\n\nb"):
        messages.append(Message("user", text))
        answers.append(answer_to(server, messages, 8))
        messages.append(Message("assistant", answers[-1]))
    assert done.stdout.splitlines() == answers
    assert done.stderr.splitlines() == [
        "hetero-infer: cut off after 8 tokens (--max-tokens)"
    ] * 3  # fmt: skip


def test_bytes_that_are_no_text_are_named_by_line_and_place(talk, server):
    status, answers, said = talk(
        f"--target={server}",
        "--max-tokens=8",
        stdin=b'hello\ncaf\xe9 \\\nau lait\n"""\n\xff\xfe\n/exit\n"""\nhello\n',
    )
    # Neither turn was asked, in whole or in part.
    messages = [Message("user", "hello")]
    messages.append(Message("assistant", answer_to(server, messages, 8)))
    messages.append(Message("user", "hello"))
    assert answers == [messages[1].content, answer_to(server, messages, 8)]
    assert status == 1
    assert [line for line in said if "error" in line] == [
        "hetero-infer: error: line 2 of standard input is not valid UTF-8: its byte 4 is 0xe9",
        "hetero-infer: error: line 5 of standard input is not valid UTF-8: its byte 1 is 0xff",
    ]


def test_an_input_that_cannot_be_read_ends_the_chat(server, monkeypatch, capsys):
    class Broken(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, _buffer):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Broken())))
    assert main(["chat", f"--target={server}"]) == 2
    assert capsys.readouterr().err == (
        "hetero-infer: error: standard input cannot be read: Input/output error\n"
    )


COMMANDS = """\
one
/reset
/system shout
two
/reset
/system
one
/help
/nope
/reset now
/exit
three
"""


def test_commands_reset_the_conversation_and_its_system_message(talk, server):
    status, answers, said = talk(f"--target={server}", "--max-tokens=8", stdin=COMMANDS)
    shouted = answer_to(server, [Message("system", "shout"), Message("user", "two")], 8)
    plain = answer_to(server, [Message("user", "one")], 8)
    assert answers == [plain, shouted, plain]
    assert any(line.startswith("/system TEXT   set the system message") for line in said)
    assert any("there is no command /nope" in line for line in said)
    assert any("/reset takes nothing behind it" in line for line in said)
    assert status == 1  # for these two


def test_a_full_context_is_one_clear_line_and_reset_helps(talk, server):
    # Each turn leaves less room for the next; the last one has none.
    long = "x" * (MAX_MODEL_LEN - 60)
    status, answers, said = talk(
        f"--target={server}", "--max-tokens=99", stdin=f"{long}\nmore\nmore\n/reset\nmore\n"
    )
    assert status == 1
    first, second = answers
    assert 0 < len(first) < 60
    assert second == answer_to(server, [Message("user", "more")], 99)
    full = "the conversation fills the model's context: /reset begins a new one"
    assert said[0] == f"hetero-infer: cut off: {full}"
    assert said[1] == said[2]  # what was refused is not part of the conversation
    assert re.fullmatch(rf"hetero-infer: error: {full} \(\d+ tokens of {MAX_MODEL_LEN}\)", said[1])


@pytest.mark.wide
def test_it_starts_its_own_planes_where_no_server_is_named(talk, template):
    own = ("--executor=simulated", f"--chat-template={template}")
    status, answers, said = talk(*own, "--max-tokens=4", stdin="hello\n")
    assert status == 0, said
    assert len(answers[0]) == 4


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--executor=simulated"], "has no chat template"),
        (["--target=unix:/x", "--max-batch-size=2"], "--max-batch-size means nothing with"),
        (["--target=unix:/x", "--chat-template=x"], "chat_template: means nothing with"),
        (["--target=nowhere"], "expected unix:PATH or HOST:PORT"),
        (["--tls-ca=x"], "means nothing without --target"),
        (["--tls-cert=x"], "tls_key is required with tls_cert"),
        (["--temperature=9"], "temperature (from --temperature) must be at most 2"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(capsys, argv, what):
    assert main(["chat", *argv]) == 2
    printed = capsys.readouterr()
    assert what in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_a_server_that_is_not_there_is_one_line_and_status_1(capsys, tmp_path):
    assert main(["chat", f"--target=unix:{tmp_path}/none.sock"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


class Terminal:
    """A command on a terminal: what it prints, and a keyboard."""

    def __init__(self, environ, *argv):
        self._master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        # The first terminal that the leader of a session opens becomes its own: Ctrl-C is a signal.
        # (No `preexec_fn`: Python between fork and exec may wait forever for gRPC's other threads.)
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" <>"$0"', os.ttyname(slave), *COMMAND, *map(str, argv)],
            env=environ,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def press(self, keys):
        os.write(self._master, keys.encode())

    def wait_for(self, pattern):
        """Wait until a pattern has been printed; what came before its end is gone then."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            ready, _, _ = select.select([self._master], [], [], 1.0)
            if ready:
                try:
                    self.seen += os.read(self._master, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    pytest.fail(f"{pattern!r} did not come, but: {self.seen!r}")
        self.seen = self.seen[found.end() :]
        return found

    def end(self):
        """Its exit status. Nobody reads what it prints last: that is less than a terminal holds."""
        return self.process.wait(timeout=PATIENCE_S)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(environ):
    terminals = []

    def open_one(*argv):
        terminals.append(Terminal(environ, *argv))
        return terminals[-1]

    yield open_one
    for one in terminals:
        one.close()


def test_ctrl_c_cancels_the_answer_and_keeps_the_chat(terminal, server):
    chat = terminal("chat", f"--target={server}", "--max-tokens=900", *SAMPLING)
    chat.wait_for("simulated: /help shows the commands")
    chat.wait_for("> ")
    chat.press("hello\n")
    part = chat.wait_for(r"\S{5}")[0]
    chat.press("\x03")
    rest = chat.wait_for(r"(?s)(.*?)\r?\n.*cancelled; what came stays in the conversation")[1]
    chat.wait_for("> ")
    chat.press("/help\n")
    chat.wait_for("/exit")
    chat.wait_for("> ")
    chat.press('"""and\nnow"""\n')
    # The model is told what it had said, all that the screen shows, and that it was interrupted.
    said = (part + rest).strip()
    messages = [
        Message("user", "hello"),
        Message("assistant", said + INTERRUPTED),
        Message("user", "and\nnow"),
    ]
    beginning = answer_to(server, messages, 20)
    chat.wait_for(re.escape(beginning))
    chat.press("\x03")
    chat.wait_for("cancelled")
    chat.wait_for("> ")
    chat.press("\x03")
    assert chat.end() == 130
    with Client(server) as client:
        assert client.list_requests() == ()


@pytest.mark.wide
def test_ctrl_c_at_the_prompt_ends_the_chat_the_second_time_and_ctrl_d_at_once(terminal, server):
    first = terminal("chat", f"--target={server}", "--max-tokens=4", *SAMPLING)
    second = terminal("chat", f"--target={server}", "--max-tokens=4", *SAMPLING)
    first.wait_for("> ")
    first.press("half a line\x03")
    first.wait_for("Ctrl-C once more, Ctrl-D or /exit ends the chat")
    first.wait_for("> ")
    first.press("hello\n")
    first.wait_for("cut off")
    first.wait_for("> ")
    first.press("\x03")
    first.wait_for("once more")
    first.wait_for("> ")
    first.press("\x03")
    assert first.end() == 130
    second.wait_for("> ")
    second.press("\x04")
    assert second.end() == 0
