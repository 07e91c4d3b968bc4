"""What becomes of what a user leaves running, by what systemd says."""

from __future__ import annotations

import pytest

from dtrain.node.logout import ENDS, SCOPE, STAYS, UNKNOWN, ends, fate_of, login_unit, shall_kill


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("b true\nas 0\nas 0\n", True),  # as Debian 12 says it, with KillUserProcesses=yes alone in its file
        ('b true\nas 0\nas 1 "root"\n', True),
        ('b true\nas 0\nas 2 "root" "ana"\n', False),
        ('b true\nas 1 "bob"\nas 0\n', False),
        ('b false\nas 0\nas 1 "root"\n', False),
        ('b false\nas 2 "bob" "ana"\nas 0\n', True),
        ("", None),
        ("s maybe\n", None),
    ],
)
def test_what_logind_does_with_those_who_leave(said: str, ends: bool | None) -> None:
    """As busctl prints KillUserProcesses, KillOnlyUsers and KillExcludeUsers, and what comes of a bus without logind."""
    assert shall_kill(said, "ana") is ends


@pytest.mark.parametrize(
    ("cgroups", "kind"),
    [
        ("0::/user.slice/user-1000.slice/session-5.scope\n", "session"),
        ("12:cpu,cpuacct:/\n1:name=systemd:/user.slice/user-1000.slice/session-c2.scope\n0::/user.slice\n", "session"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.gnome.Terminal.slice/vte-spawn-1.scope\n", "manager"),
        ("0::/system.slice/ssh.service\n", ""),  # UsePAM no
        ("0::/\n", ""),  # a container
        ("", ""),
    ],
)
def test_what_a_login_is_to_systemd(cgroups: str, kind: str) -> None:
    """Version 2, version 1 with the unified hierarchy beside it, a terminal of a desktop."""
    assert login_unit(cgroups) == kind


def test_root_is_spared_unless_a_list_is_there_without_it() -> None:
    assert shall_kill("b true\nas 0\nas 0\n", "root") is False
    assert shall_kill('b true\nas 0\nas 1 "ana"\n', "root") is True


@pytest.mark.parametrize(
    ("kind", "kills", "lingers", "has_manager", "fate"),
    [
        ("session", False, False, True, STAYS),
        ("session", False, True, True, STAYS),
        ("session", True, True, True, SCOPE),
        ("session", True, True, False, ENDS),
        ("session", True, False, True, ENDS),
        ("session", None, True, True, SCOPE),
        ("session", None, False, True, UNKNOWN),
        ("manager", None, True, True, STAYS),
        ("manager", None, False, True, ENDS),
        ("", None, False, False, STAYS),
    ],
)
def test_what_becomes_of_a_job(kind: str, kills: bool | None, lingers: bool, has_manager: bool, fate: str) -> None:
    """The rows of a session were measured with systemd 252: tests/net/test_logout.py."""
    assert fate_of(kind, kills, lingers=lingers, has_manager=has_manager) == fate


def test_what_a_check_tells_of_it() -> None:
    assert [ends(fate) for fate in (STAYS, SCOPE, ENDS, UNKNOWN)] == [False, False, True, None]
