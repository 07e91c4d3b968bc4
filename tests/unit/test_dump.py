"""A job written out as a file is the same job, wherever that file lies."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dtrain.bench.config import AllreduceConfig
from dtrain.spec import JobSpec, Overrides, benchmark_job, load_job
from dtrain.spec.dump import dump_job, job_file
from dtrain.spec.hosts import expand, folded

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (ROOT / "cluster-examples").glob("*.yaml") if "instances" not in yaml.safe_load(path.read_text()))

FULL = r"""
name: full
launcher: mpirun
workdir: code
outputs: results/run
env: {RATE: 1e-4, OCTAL: 08, SWITCH: on, VERSION: 1.10, TIME: 12:30, EMPTY: "", HOME_OF_DATA: , LINES: "a\nb", MERGE: "<<"}
secrets: [TOKEN]
setup: |
  pip install -r "requirements.txt"   # all
  echo ünï
preflight: {ignore: [clock-skew, torch-differs]}
script: train.py
args: --name 'two words' --list [1,2]
grace: 2.5
cluster:
  instances:
    - trn[01-03].lab
    - {host: 10.0.0.5, gpus: [4, 5], address: 192.168.7.5, python: /opt/py/bin/python, activate: module load p, ssh: {user: eva, port: 22}}
  gpus_per_instance: 8
  device: cuda
  python: python3.11
  activate: source /opt/conda/bin/activate train
  dir: /scratch/dtrain
  network: 192.168.7.0/24
  ports: 29500-29599
  ssh: {user: ubuntu, port: 22, identity_file: keys/lab, proxy_jump: eva@bastion, host_keys: accept-new}
"""


def again(spec: JobSpec, elsewhere: Path) -> JobSpec:
    """The job from the file that it is written to."""
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "job.yaml").write_text(dump_job(spec), encoding="utf-8")
    found = load_job(elsewhere / "job.yaml", environ=dict.fromkeys(spec.secrets, "set"))
    assert found.path == elsewhere / "job.yaml" and found.cluster.path is None
    return dataclasses.replace(found, path=spec.path, cluster=dataclasses.replace(found.cluster, path=spec.cluster.path))


def test_every_key_survives(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").touch()
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/lab").touch(mode=0o600)
    (tmp_path / "job.yaml").write_text(FULL)
    spec = load_job(tmp_path / "job.yaml", environ={"HOME_OF_DATA": "/data", "TOKEN": "s3cr3t"})
    assert again(spec, tmp_path / "elsewhere") == spec
    text = dump_job(spec)
    assert "s3cr3t" not in text and "HOME_OF_DATA: /data" in text
    assert str(tmp_path / "code") in text and str(tmp_path / "keys/lab") in text
    # a key that JobSpec gets and the file does not would be lost
    ours = {"path", "run", "places", "overrides"}  # of where the job came from, and the run, which has keys of its own
    file = job_file(dataclasses.replace(spec, sync=False)) or {}
    assert {field.name for field in dataclasses.fields(spec)} - ours == {*file, "outputs"} - {"script", "args"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_survives(example: Path, tmp_path: Path) -> None:
    spec = load_job(example, environ={})
    assert again(spec, tmp_path / "elsewhere") == spec


@pytest.mark.parametrize(
    "run",
    [
        "command: |\n  echo \"$@\"\n  exec train\nargs: [a, ' b ']",
        "command: [accelerate, launch, train.py]",
        "module: package.train\nargs: ['', '#', '-x: y']",
        "trainer: {model: gpt, data: text, iterations: 3, batch: {global: 30, micro_batches: 4}, pipeline: {stages: 2, schedule: GPipe}}",
        "trainer: {model: 'my:net', data: 'my:data', epochs: 2, batch: {per_replica: 8}, learning_rate: 1e-7, optimizer: adamw, seed: 3}",
        "sync: false\nworkdir: /shared/code\nscript: train.py",
        "script: train.py\ncluster: {instances: 3, gpus_per_instance: [5], device: cpu}",
    ],
    ids=lambda run: re.sub(r"\W+", "-", run)[:20],
)
def test_whatever_a_job_runs_survives(run: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(run)
    spec = load_job(tmp_path / "job.yaml", environ={})
    assert again(spec, tmp_path / "elsewhere") == spec


def test_outputs_at_an_absolute_path_survive_where_nothing_is_sent(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("command: x\nsync: false\nworkdir: /shared\noutputs: /scratch/runs/\n")
    spec = load_job(tmp_path / "job.yaml", environ={})
    assert spec.outputs == "/scratch/runs" and again(spec, tmp_path / "elsewhere") == spec


def test_a_benchmark_is_no_job_of_a_file() -> None:
    spec = benchmark_job(None, AllreduceConfig())
    assert job_file(spec) is None
    with pytest.raises(TypeError):
        dump_job(spec)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NAMES = st.from_regex(r"X[A-Z0-9_]{0,8}", fullmatch=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@example(env={"X": "\x85", "Y": "\u2028 \u2029\ufeff", "Z": " \r\n\t"}, args=["", " ", "\x1b", "~", "<<", "=", "!x", "- a"], grace=1e-5)
@given(env=st.dictionaries(NAMES, TEXT, max_size=4), args=st.lists(TEXT, max_size=4), grace=st.floats(0, 86400))
def test_no_text_is_changed(env: dict[str, str], args: list[str], grace: float, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("command: [run]")
    spec: Any = load_job(tmp_path / "job.yaml", environ={})
    spec = dataclasses.replace(spec, env=env, grace=grace, run=dataclasses.replace(spec.run, argv=("run", *args)))
    assert again(spec, tmp_path / "elsewhere") == spec


@pytest.mark.parametrize("text", ["--nodes node2", "--exclude node1", "--nodes node[1-2]"])
def test_instances_of_this_machine_keep_their_names(text: str, tmp_path: Path) -> None:
    """A name is the folder of a node's outputs."""
    (tmp_path / "job.yaml").write_text("command: [run]\ncluster: {instances: 3}")
    option, names = text.split()
    overrides = Overrides(nodes=names) if option == "--nodes" else Overrides(exclude=names)
    spec = load_job(tmp_path / "job.yaml", overrides, environ={})
    assert again(spec, tmp_path / "elsewhere") == spec


LONG = "x" * 80

# The clusters and keys that take the most room where each instance, variable or argument is written out.
LARGE = {
    "long names": f'cluster: {{instances: ["{LONG}[0001-4096].lab"]}}',
    "every other number": f'cluster: {{instances: ["a[{",".join(map(str, range(1, 8193, 2)))}]"]}}',
    "two ranges in a name": 'cluster: {instances: ["r[1-64]n[1-64]"]}',
    "a number behind the range": 'cluster: {instances: [{host: "trn[0001-4000].eu1.lab", ssh: {user: u, port: 2222}}, b]}',
    "an ssh of its own": 'cluster: {ssh: {user: u, proxy_jump: j}, instances: ["a[1-2000]", {host: "b[1-2000]", ssh: {port: 2}}]}',
    "ssh by ssh": "cluster:\n  ssh: {user: u, proxy_jump: j, host_keys: accept-new}\n  instances:\n"
    + "".join(f"  - {{host: {'ab'[n % 2]}{n}, address: 10.0.{n // 250}.{n % 250}, ssh: {{port: 22}}}}\n" for n in range(800)),
    "GPUs in a list": f"cluster:\n  gpus_per_instance: {list(range(60))}\n  instances:\n  - {{host: z, gpus: 1}}\n"
    + "".join(f"  - {'abc'[n % 3]}{n}\n  - {{host: {'def'[n % 3]}{n}, gpus: 1}}\n" for n in range(1000)),
    "variables from here": f"env: {{{', '.join(f'V{n}: ' for n in range(12))}}}",
    "arguments in a text": f"args: {'a ' * 120_000}",
    "lines": "setup: |\n" + '  "\n' * 30_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_job_is_written_so_that_it_can_be_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(f"script: train.py\n{LARGE[name]}\n")
    spec = load_job(tmp_path / "job.yaml", environ={f"V{n}": "é\n" * 40_000 for n in range(12)})
    assert again(spec, tmp_path / "elsewhere") == spec


@pytest.mark.parametrize(
    ("hosts", "texts"),
    [
        (["trn01.eu1", "trn02.eu1", "trn04.eu1"], ["trn[01-02,04].eu1"]),
        (["a1.b1", "a2.b1", "a2.b2", "a2.b3"], ["a[1-2].b1", "a2.b[2-3]"]),  # they go on in another place
        (["a1", "b1", "a9", "a10"], ["a1", "b1", "a[9-10]"]),
        (["10.0.0.1"], ["10.0.0.1"]),
    ],
)
def test_hosts_in_few_texts(hosts: list[str], texts: list[str]) -> None:
    assert folded(hosts) == texts
    assert [host for text in texts for host in expand(text)] == hosts
