"""known_hosts, against what ssh-keygen itself finds in the same file."""

from __future__ import annotations

import base64
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.transport.ssh.known_hosts import accept, fingerprint, host_name, known_keys, verdict

KEYGEN = shutil.which("ssh-keygen")
needs_keygen = pytest.mark.skipif(KEYGEN is None, reason="ssh-keygen is not installed")

ED = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKoX/XjP/1wndUe+JJyaqI1g1StZuSmcj4Sr/2AOEHZn"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIF9TmoK2X9tZ4LjM0Yj8oBbvIpmF3uJxv8X0rYJmNn1Q"
FILE = f"""\
# a comment

plain.lab {ED}
several.lab,10.0.0.7 {ED}
[ported.lab]:2222 {ED}
*.farm,!bad.farm {ED}
node?.rack {ED} and a comment
Upper.Lab {ED}
@cert-authority *.signed.lab {ED}
@revoked revoked.lab {ED}
broken.lab ssh-ed25519 not!base64
short.lab ssh-ed25519
"""
NAMES = [
    "plain.lab", "several.lab", "10.0.0.7", "ported.lab", "[ported.lab]:2222", "a.farm", "a.b.farm", "bad.farm", "node1.rack",
    "node12.rack", "upper.lab", "unknown.lab", "hashed.lab", "[hashed.lab]:2200", "short.lab", "10.0.0.70",
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "known_hosts"
    path.write_text(FILE)
    if KEYGEN is not None:
        hashed = tmp_path / "hashed"
        hashed.write_text(f"hashed.lab {ED}\n[hashed.lab]:2200 {ED}\n")
        subprocess.run((KEYGEN, "-q", "-H", "-f", str(hashed)), check=True, capture_output=True)
        assert "hashed.lab" not in hashed.read_text()
        path.write_text(FILE + hashed.read_text())
    return str(path)


@needs_keygen
@pytest.mark.parametrize("name", NAMES)
def test_the_lines_of_a_host_are_those_that_ssh_keygen_finds(file: str, name: str) -> None:
    answer = subprocess.run((KEYGEN or "", "-F", name, "-f", file), capture_output=True, text=True, check=False)
    wanted = [line for line in answer.stdout.splitlines() if line and not line.startswith(("#", "@cert-authority"))]
    assert len(known_keys([file], name)) == len(wanted), answer.stdout


def test_a_key_is_known_unknown_changed_or_revoked(file: str) -> None:
    ed, other = _blob(ED), _blob(OTHER)
    assert verdict(known_keys([file], "plain.lab"), ed) == "known"
    assert verdict(known_keys([file], "plain.lab"), other) == "changed"
    assert verdict(known_keys([file], "new.lab"), ed) == "unknown"
    assert verdict(known_keys([file], "revoked.lab"), ed) == "revoked"
    assert verdict(known_keys([file], "x.signed.lab"), ed) == "unknown"  # an authority's line is no host's key
    assert verdict(known_keys([file + ".absent"], "plain.lab"), ed) == "unknown"


def test_a_line_says_where_it_stands(file: str) -> None:
    assert known_keys([file], "plain.lab")[0].where == f"{file}:3"


def test_many_nodes_accepted_at_once_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "ssh/known_hosts"
    names = [host_name(f"Node{number}", 22 if number % 2 else 2222) for number in range(64)]
    with ThreadPoolExecutor(32) as pool:
        said = list(pool.map(lambda name: accept(str(file), name, "ssh-ed25519", _blob(ED)), names * 2))
    assert set(said) == {"known"}
    assert len(file.read_text().splitlines()) == 64
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert accept(str(file), names[0], "ssh-ed25519", _blob(OTHER)) == "changed"
    assert all(verdict(known_keys([str(file)], name), _blob(ED)) == "known" for name in names)


def test_a_new_key_starts_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"plain.lab {ED}")  # without a line end
    accept(str(file), "new.lab", "ssh-ed25519", _blob(OTHER))
    assert [len(known_keys([str(file)], name)) for name in ("plain.lab", "new.lab")] == [1, 1]


@needs_keygen
def test_the_fingerprint_is_the_one_of_ssh_keygen(tmp_path: Path) -> None:
    path = tmp_path / "key.pub"
    path.write_text(ED + "\n")
    shown = subprocess.run((KEYGEN or "", "-l", "-f", str(path)), capture_output=True, text=True, check=True).stdout
    assert fingerprint(_blob(ED)) in shown


def _blob(line: str) -> bytes:
    return base64.b64decode(line.split()[1])
