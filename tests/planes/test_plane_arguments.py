"""The command line of a plane's own process: what is wrong with it is one line and status 2."""

from __future__ import annotations

import pytest

import compute_plane.config
import control_plane.config


@pytest.mark.parametrize("config", [compute_plane.config, control_plane.config])
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--liste", "x"], "there is no option --liste: did you mean '--listen'?"),
        (["--zzz=1"], "there is no option --zzz"),
        (["serve"], "there is no option serve"),
        (["--listen"], "argument --listen: expected one argument"),
    ],
)
def test_what_is_no_option_is_one_line(config, argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        config.load_config(argv)
    printed = capsys.readouterr()
    assert ended.value.code == 2
    name = config.__name__.partition(".")[0]
    assert (printed.out, printed.err) == ("", f"{name}: {said}\n")
