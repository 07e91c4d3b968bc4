"""Whatever a file holds: a spec or a SpecError with places and hints, within a second; and a spec written out is the spec again.

500 files of each kind; `make fuzz` tries 10,000.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from dtrain.errors import InFile, SpecError
from dtrain.spec import ClusterSpec, JobSpec, Overrides, dump_job, load_cluster, load_job

TRIES = int(os.environ.get("DTRAIN_FUZZ", "500"))
MOST_S = 1.0  # of the processor's time, for the machine may be busy with something else

JOB = """\
name: digits
cluster: {instances: [trn01, {host: 10.0.0.5, gpus: [4, 5], ssh: {user: ubuntu, port: 2222}}], gpus_per_instance: 8}
launcher: torchrun
workdir: .
sync: true
outputs: out
env: {NCCL_IB_DISABLE: 1, HF_HOME: }
secrets: [WANDB_API_KEY]
grace: 30
trainer:
  model: digits_cnn
  data: &d digits
  batch: {global: 256, micro_batches: 4}
  epochs: 3
  learning_rate: 1e-3
  pipeline: {stages: 2, schedule: 1F1B}
"""
SCRIPT = """\
script: train.py
args: [--lr, 1e-4]
cluster: lab.yaml
"""
CLUSTER = """\
instances:
  - "trn[01-16].lab"
  - {host: 10.0.0.5, gpus: [4, 5, 6, 7], address: 192.168.7.5, python: /opt/conda/bin/python, ssh: {user: ubuntu, port: 2222}}
gpus_per_instance: 8
device: auto
dir: /scratch/me
network: 10.0.0.0/8
ports: 29500-29599
ssh: {user: ubuntu, port: 22, identity_file: key, proxy_jump: gate, host_keys: strict}
"""
FILES = [JOB, SCRIPT, CLUSTER]
ENVIRON = {"HF_HOME": "/data", "WANDB_API_KEY": "x"}

PIECES = (
    *("[", "]", "{", "}", ":", ": ", "- ", "&a ", "*a", "\t", "\n", "\n  ", "'", '"', "\\", "on", "08", "1e999", "~", "!!int ", "<<: "),
    *("\0", "😀", "\ufeff", "\x85", "[1-9999999999]", "[1-4000]", "../..", "-", "%", '"\\ud800"', '"\\x00"', "null", "instances"),
    *("trainer", "?", "|\n", "---", "%YAML 1.1\n", "# ", "1" * 5000, "x" * 5000),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**30, 1.5, float("inf"), float("nan"), "", " ", "on", "08", "12:30", "1e3", "~/x", "/", "a/../..", "\0"),
    *("a[1-4096]", "a[1-4000][1-4000]", "x" * 5000, "[" * 50, [], {}, [[]], [{}], [None], {"": None}, {"host": "a"}, {"stages": 0}),
)

quickly = settings(
    max_examples=TRIES,
    deadline=None,  # MOST_S is checked here, by the processor's time
    database=None,
    derandomize="DTRAIN_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("key").touch(mode=0o600)
    Path("lab.yaml").write_text(CLUSTER)


def answer(load: Callable[[], JobSpec | ClusterSpec]) -> None:
    """Load, and hold the answer to what every answer must be, and its time: of two, where Python's collector of garbage, which
    has all that hypothesis remembers to go through, takes part in the first.
    """
    if _answered(load) >= MOST_S:
        assert _answered(load) < MOST_S


def _answered(load: Callable[[], JobSpec | ClusterSpec]) -> float:
    begin_s = time.process_time()
    try:
        spec = load()
    except SpecError as error:
        assert error.problems and str(error)
        for problem in error.problems:
            assert problem.message and problem.hint and "\n" not in problem.message
            assert not isinstance(problem.place, InFile) or problem.place.line is None or problem.place.line >= 1
    else:
        assert isinstance(spec, JobSpec | ClusterSpec)
    return time.process_time() - begin_s


def answer_both(data: bytes) -> None:
    Path("job.yaml").write_bytes(data)
    answer(lambda: load_job(Path("job.yaml"), environ=ENVIRON))
    answer(lambda: load_cluster(Path("job.yaml")))


def test_the_files_that_are_mutated_are_right_themselves() -> None:
    for number, text in enumerate((JOB, SCRIPT)):
        Path("job.yaml").write_text(text)
        spec = load_job(Path("job.yaml"), environ=ENVIRON)
        assert len(spec.cluster.instances) == (2, 17)[number]


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from(FILES)).encode()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 12))
        piece = draw(st.one_of(st.sampled_from(PIECES).map(str.encode), st.binary(max_size=3), st.text(max_size=3).map(_utf8)))
        data = data[:at] + piece + data[at + length :]
    return data


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


@given(data=mutated_bytes())
@quickly
def test_any_bytes_are_answered(data: bytes) -> None:
    answer_both(data)


anything = st.recursive(
    st.one_of(st.sampled_from(ODD_VALUES), st.text(max_size=8), st.integers(), st.floats()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in inner for place in _places(each, (*at, key)))]


def _at(value: Any, at: tuple[Any, ...]) -> Any:
    for part in at:
        value = value[part]
    return value


@st.composite
def mutated_structure(draw: st.DrawFn) -> bytes:
    """A key or an item is left out, doubled, renamed, wrapped, or taken somewhere else, or its value is another one."""
    values = yaml.safe_load(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(1, 4))):
        places = _places(values)[1:]
        if not places:
            break
        at = draw(st.sampled_from(places))
        holder, key, found = _at(values, at[:-1]), at[-1], _at(values, at)
        match draw(st.sampled_from(("leave out", "wrap", "rename", "move", "value", "value", "repeat"))):
            case "leave out":
                del holder[key]
            case "wrap":
                holder[key] = draw(st.sampled_from(([found], {"a": found}, [found, found])))
            case "rename" if isinstance(holder, dict):
                holder[draw(st.one_of(st.text(max_size=8), st.sampled_from(sorted({str(place[-1]) for place in places}))))] = holder.pop(
                    key
                )
            case "move":
                other = _at(values, draw(st.sampled_from(places)))
                if isinstance(other, dict):
                    other[str(key)] = copy.deepcopy(found)
            case "repeat" if isinstance(holder, list):
                holder *= draw(st.integers(2, 50))
            case _:
                holder[key] = copy.deepcopy(draw(anything))  # which a later step may change
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=draw(st.sampled_from((None, True))))
    return text.encode(errors="surrogatepass")


@given(data=mutated_structure())
@quickly
def test_any_structure_and_any_value_is_answered(data: bytes) -> None:
    answer_both(data)


KEYS = sorted({".".join(map(str, at)) for at in _places(yaml.safe_load(JOB))[1:]} | {"cluster.instances.1.gpus", "script", "a..b", "", "x"})


@given(
    chosen=st.lists(
        st.tuples(
            st.one_of(st.sampled_from(KEYS), st.text(max_size=8)),
            st.one_of(
                st.sampled_from(PIECES), st.text(max_size=8), anything.map(lambda value: yaml.safe_dump(value, default_flow_style=True))
            ),
        ),
        max_size=3,
    ),
    nodes=st.one_of(st.none(), st.text(max_size=8), st.sampled_from(("trn01", "trn[1-9]", "trn01,10.0.0.5"))),
    text=st.sampled_from((JOB, SCRIPT)),
)
@quickly
def test_any_setting_is_answered(chosen: list[tuple[str, str]], nodes: str | None, text: str) -> None:
    Path("job.yaml").write_text(text)
    overrides = Overrides(nodes=nodes, settings=tuple(f"{key}={value}" for key, value in chosen))
    answer(lambda: load_job(Path("job.yaml"), overrides, environ=ENVIRON))


some_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in ("RANK", "LC_ALL"))
gpus = st.one_of(st.just("auto"), st.integers(1, 64), st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True))
ssh = st.fixed_dictionaries(
    {},
    optional={
        "user": st.just("ana"),
        "port": st.integers(1, 65535),
        "identity_file": st.just("key"),
        "proxy_jump": st.just("eva@gate"),
        "host_keys": st.sampled_from(("strict", "accept-new")),
    },
)
instances = st.lists(
    st.fixed_dictionaries(
        {"host": st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)},
        optional={
            "gpus": gpus,
            "address": st.sampled_from(("10.0.0.5", "10.0.0.6", "fd00::5")),
            "python": st.just("/opt/py/bin/python"),
            "ssh": ssh,
        },
    ),
    min_size=1,
    max_size=4,
    unique_by=(lambda item: str(item["host"]), lambda item: str(item.get("address", item["host"]))),
)
common = {
    "device": st.sampled_from(("auto", "cuda", "cpu")),
    "python": st.just("python3.12"),
    "dir": st.just("/scratch/me"),
    "network": st.sampled_from(("auto", "eth0", "10.0.0.0/8")),
    "ports": st.sampled_from(("auto", "29500-29599")),
    "ssh": ssh,
}
clusters = st.one_of(
    st.fixed_dictionaries({"instances": instances}, optional={**common, "gpus_per_instance": gpus}),
    st.fixed_dictionaries({"instances": st.integers(1, 8)}, optional={**common, "gpus_per_instance": st.integers(1, 8)}),
)
batches = st.one_of(
    st.fixed_dictionaries({"global": st.integers(1, 4096)}, optional={"micro_batches": st.integers(4, 64)}),
    st.fixed_dictionaries({"per_replica": st.integers(1, 4096), "micro_batches": st.integers(4, 64)}),
)
trainers = st.fixed_dictionaries(
    {"model": st.sampled_from(("digits_cnn", "my.nets:build")), "data": st.sampled_from(("digits", "my.sets:load"))},
    optional={
        "learning_rate": st.floats(1e-12, 1e12),
        "optimizer": st.sampled_from(("sgd", "adamw")),
        "seed": st.integers(0, 2**40),
        "batch": batches,
    },
).flatmap(
    lambda values: st.one_of(
        st.integers(1, 100).map(lambda epochs: {**values, "epochs": epochs}),
        st.integers(1, 100).map(
            lambda iterations: {
                **values,
                "iterations": iterations,
                "batch": {"global": 64, "micro_batches": 4},
                "pipeline": {"stages": 1 + iterations % 4, "schedule": ("1F1B", "GPipe", "simple")[iterations % 3]},
            }
        ),
    )
)
args = st.lists(some_text, max_size=3)
runs = st.one_of(
    st.fixed_dictionaries({"script": st.sampled_from(("train.py", "-c.py", "sub/my train.py")), "args": args}),
    st.fixed_dictionaries({"module": st.just("pkg.train"), "args": args}),
    st.fixed_dictionaries({"command": args.map(lambda rest: ["prog", *rest]), "launcher": st.just("none")}),
    st.fixed_dictionaries({"command": st.just('exec prog "$@"'), "args": args}),
    st.fixed_dictionaries({"trainer": trainers}),
)
jobs = st.fixed_dictionaries(
    {"cluster": clusters, "run": runs},
    optional={
        "name": st.just("digits"),
        "grace": st.floats(0, 86400),
        "outputs": st.sampled_from(("out", "a/b", "/scratch/out")),
        "env": st.dictionaries(names, some_text, max_size=3),
        "secrets": st.just(["WANDB_API_KEY"]),
    },
)


@given(chosen=jobs)
@quickly
def test_a_spec_that_is_written_out_is_the_spec_again(chosen: dict[str, Any]) -> None:
    """In a folder of its own, without the cluster's file or the variables that were taken from here."""
    Path("sub").mkdir(exist_ok=True)
    for script in ("-c.py", "sub/my train.py"):
        Path(script).touch()
    run = chosen.pop("run")
    Path("job.yaml").write_text(yaml.safe_dump(chosen | run))
    try:
        spec = load_job(Path("job.yaml"), environ=ENVIRON)
    except SpecError as error:  # a batch or pipeline that does not fit the cluster
        assert "trainer" in run and all(re.search("replica|batch", problem.message) for problem in error.problems), error
        reject()
    Path("elsewhere").mkdir(exist_ok=True)
    Path("elsewhere/again.yaml").write_text(dump_job(spec))
    again = load_job(Path("elsewhere/again.yaml"), environ={"WANDB_API_KEY": "x"})
    assert replace(again, path=spec.path) == spec


def test_a_cluster_of_another_file_is_written_into_the_job(tmp_path: Path) -> None:
    Path("job.yaml").write_text("script: train.py\ncluster: lab.yaml\nenv: {HF_HOME: }\n")
    spec = load_job(Path("job.yaml"), Overrides(nodes="trn[03-04].lab,10.0.0.5", settings=("grace=3",)), environ=ENVIRON)
    (tmp_path / "again.yaml").write_text(dump_job(spec))
    Path("lab.yaml").unlink()
    again = load_job(tmp_path / "again.yaml", environ={})
    assert replace(again, path=spec.path, cluster=replace(again.cluster, path=spec.cluster.path)) == spec
    assert (again.env, again.grace, [instance.name for instance in again.cluster.instances]) == (
        {"HF_HOME": "/data"},
        3.0,
        ["trn03.lab", "trn04.lab", "10.0.0.5"],
    )
