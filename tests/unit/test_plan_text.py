"""What a person reads of a plan before anything runs, in a terminal of 80 columns."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from dtrain.launchers import node_commands
from dtrain.plan import make_plan
from dtrain.render.commands import print_commands
from dtrain.render.plan import print_plan
from dtrain.render.ranges import collapsed
from dtrain.render.shell import print_words
from dtrain.spec import load_job

THREE = "{instances: [n1, n2, n3], gpus_per_instance: 2, device: cpu, python: /opt/py/bin/python}"


def text_of(folder: Path, rest: str, cluster: str = THREE, environ: dict[str, str] | None = None) -> str:
    """The whole dry run."""
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(f"name: digits\n{rest}\ncluster: {cluster}\n")
    spec = load_job(folder / "job.yaml", environ=environ or {})
    plan = make_plan(spec, lease_s=900.0)
    out = io.StringIO()
    console = Console(file=out, width=80, highlight=False, markup=False, emoji=False)
    print_plan(console, plan, None)
    print_commands(console, node_commands(spec, plan, "<job>"), spec.env)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_the_first_node_in_full_and_the_others_by_what_differs(tmp_path: Path) -> None:
    rest = "script: train.py\nargs: [--name, two words]\nenv: {LR: 1e-4}\nsecrets: [TOKEN]"
    assert (
        text_of(tmp_path, rest, environ={"TOKEN": "s3cr3t"})
        == """\
plan digits  torchrun
  train.py --name 'two words'
  node    address      ranks    workers
  n1      <address>    0-1      2 CPU workers
  n2      <address>    2-3      2 CPU workers
  n3      <address>    4-5      2 CPU workers
  cluster size 6 = 3 instances x 2 GPUs per instance
  python /opt/py/bin/python, to be found by the probe
  rendezvous <address>:<port>   grace 30 s   lease 900 s

n1 runs:
  OMP_NUM_THREADS=<threads>
  /opt/py/bin/python -m torch.distributed.run --nnodes=3 --node-rank=0
    --nproc-per-node=2 --master-addr=<address> --master-port=<port>
    --local-addr=<address> --max-restarts=0 --log-dir=<job folder>/torchrun
    <bundle> worker <job folder> torchrun
each worker:
  CUDA_VISIBLE_DEVICES=
  DTRAIN_JOB_ID=<job>
  DTRAIN_JOB_NAME=digits
  DTRAIN_OUTPUT_DIR=<output folder>
  GLOO_SOCKET_IFNAME=<interface>
  LR=1e-4
  NCCL_SOCKET_IFNAME==<interface>
  NODE_RANK=0
  OMP_NUM_THREADS=<threads>
  PYTHONUNBUFFERED=1
  TOKEN=***
  /opt/py/bin/python train.py --name 'two words'

n[2-3] run the same as n1, but:
  --node-rank=[1-2]
  NODE_RANK=[1-2]
"""
    )


PIPELINE = "{model: gpt, data: text, iterations: 60, batch: {global: 48, micro_batches: 8}, pipeline: {stages: 3}}"


def test_a_pipeline_with_its_stages_and_its_bubble(tmp_path: Path) -> None:
    text = text_of(tmp_path, f"trainer: {PIPELINE}")
    assert (
        text[text.index("  cluster size") : text.index("\n\n")]
        == """\
  cluster size 6 = 3 instances x 2 GPUs per instance
  2 replicas = cluster size 6 / 3 stages   schedule 1F1B
    stage 0   ranks 0-1   embed, block0   70,464 parameters
    stage 1   ranks 2-3   block1, block2   99,968 parameters
    stage 2   ranks 4-5   block3, head   66,752 parameters
  predicted bubble 20.0% = (3 - 1) / (8 + 3 - 1): stages 3, micro-batches 8
  global batch 48 = 2 replicas x per-replica batch 24
  micro-batch 3 = per-replica batch 24 / micro-batches 8
  341 iterations per epoch = 16,384 examples / global batch 48
  60 iterations in all
  python /opt/py/bin/python, to be found by the probe
  rendezvous <address>:<port>   grace 30 s   lease 900 s"""
    )
    # the trainer's keys, broken only where JSON may be
    assert (
        """\
  /opt/py/bin/python <bundle> trainer '{"model": "gpt", "data": "text",
    "batch": {"global": 48, "micro_batches": 8}, "iterations": 60,
"""
        in text
    )


def test_mpirun_has_a_section_a_node_and_daemons_on_the_others(tmp_path: Path) -> None:
    text = text_of(
        tmp_path,
        "script: train.py\nlauncher: mpirun",
        "{instances: [{host: a, address: 10.0.0.1}, {host: b, address: 10.0.0.2}, {host: c, address: 10.0.0.3}], "
        "gpus_per_instance: 2, device: cpu, python: /opt/py/bin/python}",
    )
    assert (
        """\
  <mpirun> --noprefix --bind-to none --map-by slot --host 10.0.0.1:2 -np 2
    --wdir / /opt/py/bin/python <bundle> worker <job folder> mpirun
  : --host 10.0.0.[2-3]:2 -np 2 --wdir / /opt/py/bin/python <bundle> worker
    <job folder> mpirun
each worker:
"""
        in text
    )
    assert (
        text[text.index("\nb, c run") :]
        == """
b, c run the same as a, but:
  mpirun's daemon, which dtrain's agent starts
  OMPI_MCA_btl_tcp_if_include=10.0.0.[2-3]/31
  OMPI_MCA_oob_tcp_if_include=10.0.0.[2-3]/31
  NODE_RANK=[1-2]
"""
    )


def test_a_commands_text_is_shown_as_it_was_written(tmp_path: Path) -> None:
    command = 'command: |\n  set -e\n  exec accelerate launch --num_machines "$NNODES" train.py "$@"\nargs: [a b]\nlauncher: none'
    text = text_of(tmp_path, command)
    written = """
  set -e
  exec accelerate launch --num_machines "$NNODES" train.py "$@"
  with 'a b' as "$@"
"""
    assert text.startswith(f"plan digits  no launcher{written}  node ")
    assert (
        f"""
  PYTHONUNBUFFERED=1{written}
n[2-3] run the same as n1, but:
  NODE_RANK=[1-2]
"""
        in text
    )
    assert "bash" not in text


def test_a_long_line_of_several_is_told_from_the_next_one(tmp_path: Path) -> None:
    """Blank lines and the author's own indentation stay, and quotes are not broken."""
    long = "    echo one two three four five six seven eight nine ten 'eleven  twelve' thirteen"
    text = text_of(tmp_path, f'command: |\n  if true; then\n  {long}\n\n  \techo "a  b"   # c\n  fi')
    written = """
  if true; then
      echo one two three four five six seven eight nine ten 'eleven  twelve' \\
    thirteen

          echo "a  b"   # c
  fi
"""
    assert text.count(written) == 2  # in the plan, and below the node


def test_what_cannot_be_seen_is_shown_as_an_escape(tmp_path: Path) -> None:
    args = r'["", "a\e[31mred", "x\ty\nz", "<port>", "***", "{a, b}", "\u202e"]'
    env = r'{EMPTY: "", CLEAR: "\e[2J", LINES_: "a\nb"}'
    words = r"""'' $'a\x1b[31mred' $'x\ty\nz' '<port>' '***'"""
    text = text_of(tmp_path, f"script: train.py\nargs: {args}\nenv: {env}")
    assert text.startswith(f"plan digits  torchrun\n  train.py {words} '{{a, b}}' $'\\u202e'\n  node ")
    assert f"\n  /opt/py/bin/python train.py {words}\n    '{{a, b}}' $'\\u202e'\n" in text
    assert "\n  EMPTY=\n" in text and "\n  CLEAR=$'\\x1b[2J'\n" in text and "\n  LINES_=$'a\\nb'\n" in text
    assert text.replace("\n", "").isprintable()


def test_a_commands_text_with_escapes_is_shown_as_what_bash_gets(tmp_path: Path) -> None:
    text = text_of(tmp_path, r'command: "echo \e[31m\necho \"$1\""' + "\nargs: [a b]\nlauncher: none")
    assert text.count("""\n  bash -c $'echo \\x1b[31m\\necho "$1"' bash 'a b'\n""") == 2


def test_nodes_with_other_gpus_say_so(tmp_path: Path) -> None:
    cluster = "{instances: [a, {host: b, gpus: [4, 5], python: /opt/b/python}], gpus_per_instance: 2, device: cuda}"
    text = text_of(tmp_path, "script: train.py", cluster)
    assert "  CUDA_VISIBLE_DEVICES=<GPUs>\n" in text
    assert (
        text[text.index("\nb runs") :]
        == """
b runs the same as a, but:
  /opt/b/python
  --node-rank=1
  CUDA_VISIBLE_DEVICES=4,5
  NODE_RANK=1
  CUDA_DEVICE_ORDER=PCI_BUS_ID
"""
    )


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "none"])
def test_a_thousand_instances_print_as_ranges(tmp_path: Path, launcher: str) -> None:
    cluster = "{instances: ['trn[0001-1000].lab'], gpus_per_instance: 8, device: cuda, python: /opt/py/bin/python}"
    text = text_of(tmp_path, f"script: train.py\nlauncher: {launcher}", cluster)
    ranks = "0-7999" if launcher != "none" else "0-999"
    assert [line.split() for line in text.splitlines() if line.startswith("  trn")] == [
        ["trn[0001-1000].lab", "<address>", ranks, "8", "workers", "on", "cuda", "each"]
    ]
    assert "  cluster size 8000 = 1000 instances x 8 GPUs per instance\n" in text
    assert "\ntrn[0002-1000].lab run the same as trn0001.lab, but:\n" in text and "  NODE_RANK=[1-999]\n" in text
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) <= 80


def test_a_thousand_unlike_instances_are_counted(tmp_path: Path) -> None:
    hosts = ", ".join(f"{{host: {'xyz'[index % 3]}{index * 7}.lab, gpus: {4 + index % 2 * 4}}}" for index in range(1000))
    text = text_of(tmp_path, "script: train.py", f"{{instances: [{hosts}], device: cuda}}")
    assert "  cluster size 6000 = 500 x 4 + 500 x 8 GPUs\n" in text
    assert "  and 980 more nodes" in text and "\nand 979 more nodes: --json shows them all\n" in text
    assert len(text.splitlines()) < 160


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([], ""),
        (["a"], "a"),
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n1", "n3", "n4"], "n1, n[3-4]"),
        (["trn08.lab", "trn09.lab", "trn10.lab", "box"], "trn[08-10].lab, box"),
        (["n9", "n10"], "n[9-10]"),
        (["n09", "n010"], "n09, n010"),  # not one range: its numbers would be padded alike
        (["10.0.0.254", "10.0.0.255", "10.0.1.0"], "10.0.0.[254-255], 10.0.1.0"),
        (["r1n1", "r1n2", "r2n2"], "r1n[1-2], r2n2"),
        (["a", "b", "c", "d"], "a, b, and 2 more"),
        (["n1", "n1"], "n1, n1"),
    ],
)
def test_names_that_count_upwards_are_one(texts: list[str], shown: str) -> None:
    assert collapsed(texts, at_most=2) == shown


def test_the_interpreter_and_the_lines_for_bash_of_each_node(tmp_path: Path) -> None:
    cluster = "{instances: [n1, n2, {host: n3, python: /opt/py/bin/python, activate: module load py}], activate: 'source a\nsource b'}"
    text = text_of(tmp_path, "script: train.py\nsetup: |\n  pip install x\n  pip list", cluster.replace("\n", "\\n").replace("'", '"'))
    assert (
        text[text.index("  activate") : text.index("  rendezvous")]
        == """\
  activate source a
    source b   on n[1-2]
  activate module load py   on n3
  python python3, to be found by the probe   on n[1-2]
  python /opt/py/bin/python, to be found by the probe   on n3
  setup pip install x
    pip list
"""
    )


def test_a_text_of_the_user_is_none_of_ours(tmp_path: Path) -> None:
    assert "\n  A='<port>'\n" in text_of(tmp_path, "script: train.py\nenv: {A: <port>}")


def test_a_million_words_are_printed_in_seconds() -> None:
    console = Console(file=io.StringIO(), width=100)
    begin_s = time.process_time()
    print_words(console, ["a"] * 1_000_000)
    assert time.process_time() - begin_s < 10  # asked for its width at each word, the console takes a minute
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "  a" + " a" * 48 and lines[1] == "    a" + " a" * 47 and sum(line.count("a") for line in lines) == 1_000_000
