"""Words that a person reads are those that bash would take for what runs."""

from __future__ import annotations

import subprocess

from dtrain.shell_words import shell_word, shell_words, visible

NASTY = [
    "", " ", "a b", "it's", '"', "\\", "a\\nb", "$HOME", "`id`", "*", "~", "#", "!x", "<port>", "***", "größe", "日本", "-x",
    *(f"a{chr(code)}1" for code in (*range(1, 32), 127, 0x80, 0x9B, 0xA0, 0xAD, 0x200B, 0x2028, 0x202E, 0xFEFF, 0xE000, 0xE0001)),
    "\x1b]0;title\x07", "\x1b[31mred'\\\x1b[0m", "tab\tnew\nline\r", "\udcff\udc80 bytes",
]  # fmt: skip


def test_bash_reads_the_same_words_and_none_of_them_moves_the_cursor() -> None:
    text = shell_words(NASTY)
    assert text.isprintable()
    given = subprocess.run(
        ("bash", "-c", f"printf '%s\\0' {text}"), check=True, capture_output=True, timeout=60, env={"LC_ALL": "C.UTF-8"}
    ).stdout
    assert given.decode(errors="surrogateescape").split("\0")[:-1] == NASTY


def test_what_can_be_read_is_left_alone() -> None:
    assert [shell_word(word) for word in ("--lr=1e-4", "a/b.py", "größe")] == ["--lr=1e-4", "a/b.py", "'größe'"]
    assert visible("job.yaml:1:1: größe\nhint: \x1b[2J\t\udcff") == "job.yaml:1:1: größe\nhint: \\x1b[2J\\x09\\xff"
