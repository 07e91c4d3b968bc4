"""One table of what people do wrong in a job or cluster file: the place, the cause and the next step of each, at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dtrain.errors import SpecError
from dtrain.spec import load_job

S = "script: train.py\n"
T = "trainer: {model: digits_cnn, data: digits, epochs: 1"  # one brace open
C = S + "cluster:\n  "
HUGE_BYTES = 2**30

# (the text of job.yaml, or a file given instead, where the mistake is, a part of the cause, a part of the hint)
Given = str | bytes | Path
ANSWERS: list[tuple[Given, str, str, str]] = [
    # unknown keys, near ones, at another level, and of a later release
    (S + "zzz: x", "job.yaml:2:1", "unknown key 'zzz'", "known here: name, cluster"),
    (S + "adress: x", "job.yaml:2:1", "unknown key 'adress'", "did you mean 'address'? it is a key of `cluster.instances`"),
    (S + "sceipt: x", "job.yaml:2:1", "unknown key 'sceipt'", "did you mean 'script'?"),
    (S + "Env: {A: 1}", "job.yaml:2:1", "unknown key 'Env'", "did you mean 'env'?"),
    (C + "instances: [{host: a, adress: 10.0.0.1}]", "job.yaml:3:25", "unknown key 'adress'", "did you mean 'address'?"),
    (S + "nodes: [a]", "job.yaml:2:1", "unknown key 'nodes'", "did you mean 'instances'? it is a key of `cluster`"),
    (C + "hosts: [a]\n  instances: [b]", "job.yaml:3:3", "unknown key 'hosts'", "did you mean 'instances'?"),
    (T + "}\nlearning_rate: 0.1", "job.yaml:2:1", "unknown key 'learning_rate'", "it is a key of `trainer`: write it there"),
    (T + ", stages: 2}", "job.yaml:1:55", "unknown key 'stages'", "it is a key of `trainer.pipeline`"),
    (T + ", batch: {per_replica: 8, epochs: 3}}", "job.yaml:1:79", "unknown key 'epochs'", "it is a key of `trainer`"),
    (
        C + "instances: [{host: a, address: 'fd00::1'}]\nlauncher: mpirun",
        "job.yaml:4:11",
        "launcher: mpirun needs IPv4 addresses, and that of a is fd00::1",
        "use torchrun",
    ),
    (T + ", lr: 0.1}", "job.yaml:1:55", "unknown key 'lr'", "did you mean 'learning_rate'?"),
    (C + "instances: [a, {host: b, hosts: c}]", "job.yaml:3:28", "unknown key 'hosts'", "did you mean 'host'?"),
    (C + "instances: [a, {host: b, gpu: 1}]", "job.yaml:3:28", "unknown key 'gpu'", "did you mean 'gpus'?"),
    (S + "device: cpu", "job.yaml:2:1", "unknown key 'device'", "write it under `cluster:`"),
    (C + "instances: [a]\n  gpus: 2", "job.yaml:4:3", "unknown key 'gpus'", "did you mean 'gpus_per_instance'?"),
    (C + "instances: [a]\n  port: 22", "job.yaml:4:3", "unknown key 'port'", "it is a key of `cluster.ssh`"),
    (C + "instances: [{host: a, user: b}]", "job.yaml:3:25", "unknown key 'user'", "it is a key of `cluster.instances[0].ssh`"),
    (S + "gpus: 2", "job.yaml:2:1", "unknown key 'gpus'", "did you mean 'gpus_per_instance'? it is a key of `cluster`"),
    (C + "instances: [a]\n  env: {A: 1}", "job.yaml:4:3", "unknown key 'env'", "at the top level"),
    (S + "setup: ''", "job.yaml:2:8", "setup is empty", "pip install"),
    (S + "preflight: {ignore: [clock-skw]}", "job.yaml:2:22", "no finding 'clock-skw' can be passed over", "did you mean 'clock-skew'?"),
    (S + "preflight: {ignore: [all-of-them]}", "job.yaml:2:22", "no finding 'all-of-them' can be", "one of clock-skew, cuda"),
    (S + "preflight: {ignore: [gpu-busy]}", "job.yaml:2:22", "gpu-busy cannot be passed over: with it no job can run", "launch --wait"),
    (S + "preflight: {min_fraction: 0.8}", "job.yaml:2:13", "min_fraction is not supported yet", "leave it out"),
    (S + "mpi: {path: /opt/mpirun}", "job.yaml:2:1", "mpi is not supported yet", "PATH"),
    (C + "instances: [a]\n  activate: ' '", "job.yaml:4:13", "cluster.activate is empty", "bin/activate"),
    (C + "instances: [{host: a, activate: ''}]", "job.yaml:3:35", "cluster.instances[0].activate is empty", "bin/activate"),
    (T + ", checkpoint: {every: 5}}", "job.yaml:1:55", "checkpoint is not supported yet", "script of your own"),
    (T + ", data_parallel: fsdp}", "job.yaml:1:70", "trainer.data_parallel: fsdp is not supported yet", "ddp"),
    (T + ", data_parallel: {mode: ddp}}", "job.yaml:1:70", "trainer.data_parallel: a mapping is not supported yet", "`data_parallel: ddp`"),
    (
        "trainer: {model: {target: 'a:b', args: {n: 1}}, data: digits, epochs: 1}",
        "job.yaml:1:18",
        "trainer.model: a mapping is not supported yet",
        "`model: my_models:build`",
    ),
    # missing, doubled and exclusive keys
    ("name: x", "job.yaml:1:1", "nothing says what to run", "script: train.py"),
    ("trainer: {model: digits_cnn, epochs: 1}", "job.yaml:1:1", "trainer lacks the key 'data'", "add it"),
    (C + "device: cpu", "job.yaml:2:1", "cluster lacks the key 'instances'", "add it"),
    (C + "instances: [{host: }]", "job.yaml:3:16", "host must be text, but nothing is there", "give it a value"),
    (C + "instances: [{host: [a]}]", "job.yaml:3:22", "host must be text, not a list", "quotes around a text"),
    (C + "instances: [{gpus: 2}]", "job.yaml:3:15", "cluster.instances[0] lacks the key 'host'", "add it"),
    (S + "name: a\nname: b", "job.yaml:3:1", "the key 'name' stands here a second time", "line 2: remove one"),
    (C + "instances: [a, b, a]", "job.yaml:3:21", "the host 'a' stands here a second time", "remove one"),
    (C + "instances:\n  - host: &h a\n  - b\n  - *h", "job.yaml:6:5", "the host 'a' stands here a second time", "remove one"),
    (S + "name: &n zzz\n*n : x", "job.yaml:3:1", "unknown key 'zzz'", "known here"),
    (S + "command: [a]", "job.yaml:2:1", "script and command stand here", "keep one"),
    ("trainer: {model: digits_cnn, data: digits, iterations: 5, epochs: 1}", "job.yaml:1:59", "both epochs and iterations", "keep one"),
    # the place is that of the key or of the value, whichever is wrong
    (S + "launchr: slurm", "job.yaml:2:1", "unknown key 'launchr'", "did you mean 'launcher'?"),
    (S + "launcher: slurm", "job.yaml:2:11", "not 'slurm'", "write one of these"),
    (S + "launcher: &l slurm", "job.yaml:2:11", "not 'slurm'", "write one of these"),
    (S + "launcher:\n  slurm", "job.yaml:3:3", "not 'slurm'", "write one of these"),
    (S + "launcher:", "job.yaml:2:1", "but nothing is there", "give it a value"),
    (S + "launcher: ''", "job.yaml:2:11", "not ''", "write one of these"),
    (S + "env: {A: &a slurm}\nlauncher: *a", "job.yaml:3:11", "not 'slurm'", "write one of these"),
    (S + "launcher: {torchrun: }", "job.yaml:2:11", "not a mapping", "write one of these"),
    (S + "launcher:\n  {torchrun: 1}", "job.yaml:3:3", "not a mapping", "write one of these"),
    (S + "launcher:\n  torchrun: 1", "job.yaml:2:1", "not a mapping", "write one of these"),
    (S + "launcher:\n- torchrun", "job.yaml:2:1", "not a list", "write one of these"),
    (T + ", batch: {}}", "job.yaml:1:55", "trainer.batch lacks one of global and per_replica", "add one of them"),
    # types, and what YAML 1.1 would make of a text
    (S + "sync: on", "job.yaml:2:7", "sync must be true or false, not 'on'", "write true"),
    (S + "sync: no", "job.yaml:2:7", "sync must be true or false, not 'no'", "write false"),
    (T + ", seed: 08}", "job.yaml:1:61", "trainer.seed must be a whole number, not '08'", "write 8"),
    (T + ", batch: {global: 1e3}}", "job.yaml:1:71", "trainer.batch.global must be a whole number, not '1e3'", "write 1000"),
    (S + "grace: 12:30", "job.yaml:2:8", "grace must be a number, not '12:30'", "such as 30"),
    (S + "grace: '30'", "job.yaml:2:8", "grace must be a number, not '30'", "remove the quotes"),
    (T + ", learning_rate: fast}", "job.yaml:1:70", "must be a number, not 'fast'", "such as 30, 0.5 or 1e-3"),
    (T + ", pipeline: 2}", "job.yaml:1:65", "trainer.pipeline must be a mapping, not '2'", "write `pipeline: {stages: 2}`"),
    ("trainer: gpt", "job.yaml:1:10", "trainer must be a mapping, not 'gpt'", "write `trainer: {model: gpt, data: text, epochs: 3}`"),
    (C + "instances: 1\n  ssh: eva", "job.yaml:4:8", "cluster.ssh must be a mapping, not 'eva'", "write `ssh: {user: eva}`"),
    ("script: [train.py, --lr, 1]", "job.yaml:1:9", "script must be text, not a list", "`script: train.py` and what follows it under args"),
    (S + "args: {epochs: 3, fast: }", "job.yaml:2:7", "not a mapping", "write `args: --epochs 3 --fast`, or a list of them"),
    (S + "args: {--epochs: 3, -v: }", "job.yaml:2:7", "not a mapping", "write `args: --epochs 3 -v`, or a list of them"),
    (S + "grace: |-\n  3", "job.yaml:2:8", "grace must be a number, not '3'", "or the '|' or '>' before it"),
    (S + "env: {A:1}", "job.yaml:2:7", "'A:1' cannot be a variable's name", "put a space after ':', as in A: 1"),
    (S + "env: A=1", "job.yaml:2:6", "env must be a mapping, not 'A=1'", "write 'A: 1' below it"),
    (S + "env:\n  A:1", "job.yaml:3:3", "env must be a mapping, not 'A:1'", "write 'A: 1' below it"),
    (S + "grace: 08", "job.yaml:2:8", "grace must be a number, not '08'", "write 8"),
    (S + "workdir:", "job.yaml:2:1", "workdir must be text, but nothing is there", "or remove the key"),
    (S + "secrets: TOKEN", "job.yaml:2:10", "secrets must be a list, not 'TOKEN'", "write [TOKEN]"),
    (S + "cluster: [n1, n2]", "job.yaml:2:10", "cluster must be text or a mapping, not a list", "write cluster: {instances: [n1, n2]}"),
    (S + "launcher: mpiexec", "job.yaml:2:11", "launcher must be 'torchrun', 'mpirun' or 'none'", "did you mean 'mpirun'?"),
    (S + "launcher: torchrn", "job.yaml:2:11", "not 'torchrn'", "did you mean 'torchrun'?"),
    (C + "instances: 1\n  device: gpu", "job.yaml:4:11", "device must be 'auto', 'cuda' or 'cpu', not 'gpu'", "did you mean 'cuda'?"),
    ("trainer: {model: digits_cn, data: digits, epochs: 1}", "job.yaml:1:18", "no built-in 'digits_cn'", "did you mean 'digits_cnn'?"),
    (C + "instances: two", "job.yaml:3:14", "a whole number or a list, not 'two'", "write [two], or a number in digits"),
    (C + "instances: a,b", "job.yaml:3:14", "a whole number or a list, not 'a,b'", "write [a, b], or"),
    (C + "instances: a[1-2] b", "job.yaml:3:14", "not 'a[1-2] b'", 'write ["a[1-2]", b], or'),
    (C + "instances: {host: a}", "job.yaml:3:14", "a whole number or a list, not a mapping", "one item a line"),
    (C + "instances: 1\n  gpus_per_instance: 0-3", "job.yaml:4:22", "or 'auto', not '0-3'", "write [0, 1, 2, 3]"),
    (C + "instances: 1\n  gpus_per_instance: 0,1", "job.yaml:4:22", "or 'auto', not '0,1'", "write [0, 1]"),
    (C + "instances: 1\n  gpus_per_instance: 1000000", "job.yaml:4:22", "must be from 1 to 1024, not 1000000", "leave it out"),
    (C + "instances: 1\n  gpus_per_instance: all", "job.yaml:4:22", "or 'auto', not 'all'", "did you mean 'auto'?"),
    (C + 'instances: ["a[1-4096]"]\n  gpus_per_instance: 33', "job.yaml:3:14", "instances come to 135,168 workers", "at most 131,072"),
    (T + ", seed: 1000000000000000000}", "job.yaml:1:61", "trainer.seed is a number of 19 digits", "at most 18 digits"),
    # what cannot be trained
    ("trainer: {model: 'my/nets.py:f', data: digits, epochs: 1}", "job.yaml:1:18", "names a file, and a module is wanted", "my.nets:f"),
    (S + r'env: {"\n": []}', "job.yaml:2:13", r"env.'\n' must be text", "put quotes around"),
    (r'trainer: {model: "\n", data: digits, epochs: 1}', "job.yaml:1:18", r"no built-in '\n'", "built in: digits_cnn"),
    ("trainer: {model: DIGITS_CNN, data: digits, epochs: 1}", "job.yaml:1:18", "no built-in 'DIGITS_CNN'", "did you mean 'digits_cnn'?"),
    ("trainer: {model: gpt, data: digits, epochs: 1}", "job.yaml:1:29", "gpt reads text, and cannot train on digits", "`data: text`"),
    ("trainer: {data: text, model: digits_cnn, epochs: 1}", "job.yaml:1:30", "reads digits, and cannot train on text", "`model: gpt`"),
    (
        "trainer: {model: 'pkg.nest:f', data: digits, epochs: 1}",
        "job.yaml:1:18",
        "there is no pkg.nest in workdir",
        "did you mean 'pkg.nets'?",
    ),
    ("trainer: {model: 'train.x:f', data: digits, epochs: 1}", "job.yaml:1:18", "train is a file, not a package", "train.py"),
    (
        "trainer: {model: gpt, data: text, epochs: 1, batch: {global: 64, micro_batches: 8}, pipeline: {stages: 7}}\n"
        "cluster: {instances: 7, gpus_per_instance: 1}",
        "job.yaml:1:104",
        "stages is 7, and gpt has 6 layers to make stages of",
        "stages that fit: 1",
    ),
    (
        T + ", pipeline: {stages: 4}, batch: {per_replica: 6}}\ncluster: {instances: 1, gpus_per_instance: 6}",
        "job.yaml:1:74",
        "replicas = cluster size 6 / stages 4 is no whole number",
        "stages that fit: 1; with more micro_batches 2, 3, 6",
    ),
    (T + ", batch: {global: 9}}\ncluster: {instances: 2, device: cpu}", "job.yaml:1:71", "= replicas 4 x per-replica 2.25", "8, 12"),
    ("module: pkg.nest", "job.yaml:1:9", "there is no pkg.nest in workdir", "did you mean 'pkg.nets'?"),
    (C + "instances: [a]\ngpus_per_instance: 2", "job.yaml:4:1", "unknown key 'gpus_per_instance'", "write it under `cluster:`"),
    (S + "cluster: lab.yaml\ngpus_per_instance: 2", "job.yaml:3:1", "unknown key 'gpus_per_instance'", "write it into lab.yaml"),
    (
        S + "cluster:\n- trn[01-16].lab\n- 08\n- {host: b, gpus: 2}\n- 'x: y'",
        "job.yaml:2:1",
        "cluster must be text or a mapping, not a list",
        'write cluster: {instances: ["trn[01-16].lab", 08, {host: b, gpus: 2}, ...]}',
    ),
    ("module: pkg.x.y", "job.yaml:1:9", "there is no pkg.x in workdir", "looked for as pkg/x.py"),
    ("module: pkg", "job.yaml:1:9", "pkg is a package without a __main__.py", "one of the modules in it"),
    # ranges and numbers
    (C + "instances: []", "job.yaml:3:14", "cluster.instances is empty", "list the hosts"),
    (C + "instances: 0", "job.yaml:3:14", "cluster.instances must be from 1 to 4096, not 0", "this machine"),
    (C + "instances: [trn[01-16].lab]", "job.yaml:3:18", "expected ',' or ']'", '["trn[01-16].lab"]'),
    (C + "instances: ['a[9-1]']", "job.yaml:3:15", "the range 9-1, which counts down", "write 1-9"),
    (C + "instances: ['a[1-016]']", "job.yaml:3:15", "padded to two widths", "write 001-016"),
    (C + "instances: ['a[1-3']", "job.yaml:3:15", "a bracket without its partner", "trn[01-16].lab"),
    (C + "instances: ['a,b']", "job.yaml:3:15", "'a,b' is no host name", "an item of its own: a, b"),
    (C + f"instances: ['a{'[1]' * 300_000}']", "job.yaml:3:15", "is too long for a host's name", "at most 100 letters"),
    (
        C + "instances: ['a[1-4096]']\n  only: [" + "'a[1-4096]', " * 3000 + "a1]",
        "job.yaml:4:23",
        "with this item cluster.only has more than 4096 names",
        "write each once",
    ),
    (S + "grace: -1", "job.yaml:2:8", "grace must be from 0 to 86400 seconds, not -1", "30 is usual"),
    (
        C + "instances: [{host: a, gpus: 0}]\n  gpus_per_instance: 4",
        "job.yaml:3:31",
        "gpus must be from 1 to 1024, not 0",
        "write auto to use",
    ),
    (C + "instances: 1\n  ports: 70000-70001", "job.yaml:4:10", "no range of ports", "at most 65535"),
    (C + "instances: [a]\n  ssh: {proxy_jump: 'a,,b'}", "job.yaml:4:21", "'a,,b' is no bastion", "or several as a,b"),
    (C + "instances: [a]\n  ssh: {user: a b}", "job.yaml:4:15", "ssh.user 'a b' is no user's name", "the name alone"),
    (C + "instances: [{host: a, address: 0.0.0.0}]", "job.yaml:3:34", "the address '0.0.0.0' is no machine's", "own"),
    (C + "instances: [a]\n  ssh: {proxy_jump: 'a:99999'}", "job.yaml:4:21", "proxy_jump 'a:99999' is no bastion", "user@host:port"),
    (C + "instances: [a]\n  ssh: {proxy_jump: 'a:x'}", "job.yaml:4:21", "proxy_jump 'a:x' is no bastion", "user@host:port"),
    (
        C + "instances: [{host: a, address: 'FD00:0::1'}, {host: b, address: 'fd00::1'}]",
        "job.yaml:3:67",
        "the address 'fd00::1' stands here a second time",
        "correct one",
    ),
    (C + "instances: 1\n  ssh: {port: 0}", "job.yaml:4:15", "ssh.port must be from 1 to 65535, not 0", "22"),
    (C + "instances: 2\n  gpus_per_instance: 0", "job.yaml:4:22", "gpus_per_instance must be from 1 to 1024, not 0", "device: cpu"),
    (
        T + ", pipeline: {stages: 3}}",
        "job.yaml:1:1",
        "1F1B with 3 stages wants as many micro-batches or more, not 1",
        "write `batch: {per_replica: 64, micro_batches: 12}`: then a worker waits 14%",
    ),
    (
        T + ", batch: {global: 16}, pipeline: {stages: 4}}\ncluster: {instances: 4, gpus_per_instance: 3}",
        "job.yaml:1:55",
        "1F1B with 4 stages wants as many micro-batches or more, not 1",
        "write `batch: {global: 16, micro_batches: 4}`: then a worker waits 43%",
    ),
    (
        T + ", batch: {global: 8}, pipeline: {stages: 4}}\ncluster: {instances: 4, gpus_per_instance: 3}",
        "job.yaml:1:55",
        "1F1B with 4 stages wants as many micro-batches or more, not 1",
        "write `batch: {per_replica: 16, micro_batches: 16}`",
    ),
    (T + ", pipeline: {stages: 2, schedule: gpipe}}", "job.yaml:1:87", "schedule must be '1F1B', 'GPipe'", "did you mean 'GPipe'?"),
    (T + ", pipeline: {stages: 2, micro_batch: 8}}", "job.yaml:1:77", "unknown key 'micro_batch'", "it is a key of `trainer.batch`"),
    # variables, secrets and keys
    (S + "env: {NCCL-DEBUG: INFO}", "job.yaml:2:7", "'NCCL-DEBUG' cannot be a variable's name", "NCCL_DEBUG"),
    (S + "env: {1A: x}", "job.yaml:2:7", "'1A' cannot be a variable's name", "no digit first"),
    (S + f"env: {{LONG: {'x' * 200_000}}}", "job.yaml:2:13", "LONG has 200,006 bytes", "put it in a file"),
    (S + f"args: [a, {'x' * 140_000}]", "job.yaml:2:11", "has 140,001 bytes, and Linux gives no process one of more", "in a file"),
    (S + f"args: {'x' * 140_000}", "job.yaml:2:7", "has 140,001 bytes", "put it in a file"),
    (f"command: [a, {'é' * 70_000}]", "job.yaml:1:14", "has 140,001 bytes", "put it in a file"),
    (f"command: {'x' * 140_000}", "job.yaml:1:10", "has 140,001 bytes", "put it in a file"),
    (S + f"setup: {'x' * 140_000}", "job.yaml:2:8", "has 140,001 bytes", "put it in a file"),
    (S + "env: {NOT_SET: }", "job.yaml:2:7", "NOT_SET is not set here", "export NOT_SET"),
    (S + "secrets: [NOT_SET]", "job.yaml:2:11", "the secret NOT_SET is not set here", "export NOT_SET"),
    (S + "env: {RANK: 0}", "job.yaml:2:7", "RANK is set by dtrain in every worker", "every worker its own $RANK"),
    (S + "env: {WORLD_SIZE: 8}", "job.yaml:2:7", "WORLD_SIZE is set by dtrain", "instances and gpus_per_instance"),
    (S + "env: {LOCAL_RANK: 0}", "job.yaml:2:7", "LOCAL_RANK is set by dtrain", "leave it out"),
    (S + "env: {NODE_RANK: 0}", "job.yaml:2:7", "NODE_RANK is set by dtrain", "place in instances"),
    (S + "env: {MASTER_ADDR: 10.0.0.1}", "job.yaml:2:7", "MASTER_ADDR is set by dtrain", "`network`"),
    (S + "env: {MASTER_PORT: 29500}", "job.yaml:2:7", "MASTER_PORT is set by dtrain", "`ports`"),
    (S + "env: {CUDA_VISIBLE_DEVICES: 0}", "job.yaml:2:7", "CUDA_VISIBLE_DEVICES is set by dtrain", "gpus_per_instance: [0, 1]"),
    (S + "env: {DTRAIN_OUTPUT_DIR: /out}", "job.yaml:2:7", "DTRAIN_OUTPUT_DIR is set by dtrain", "choose another"),
    (S + "secrets: [DTRAIN_TOKEN]", "job.yaml:2:11", "DTRAIN_TOKEN is set by dtrain", "choose another"),
    ("command: [x]\nlauncher: none\nenv: {NNODES: 2}", "job.yaml:3:7", "NNODES is set by dtrain", "instances"),
    (C + "instances: [a]\n  ssh: {identity_file: kye}", "job.yaml:4:24", "the identity file 'kye' is not there", "did you mean 'key'?"),
    (C + "instances: [a]\n  ssh: {identity_file: open}", "job.yaml:4:24", "is open to others, and ssh refuses such a key", "chmod 600 "),
    (C + "instances: [{host: a, ssh: {identity_file: folder}}]", "job.yaml:3:46", "'folder' is not a file", "private key"),
    # paths
    (S + f"outputs: {'a/' * 5000}", "job.yaml:2:10", "has 10,000 bytes, too long for a path", "Linux takes 4,095 at most"),
    (f"script: {'a/' * 500_000}", "job.yaml:1:9", "has 1,000,000 bytes, too long for a path", "Linux takes"),
    (S + f"workdir: {'a/' * 500_000}", "job.yaml:2:10", "has 1,000,000 bytes, too long for a path", "Linux takes"),
    (S + f"cluster: {'a/' * 500_000}", "job.yaml:2:10", "has 1,000,000 bytes, too long for a path", "Linux takes"),
    (C + f"instances: [a]\n  ssh: {{identity_file: {'a/' * 5000}}}", "job.yaml:4:24", "too long for a path", "Linux takes"),
    ("script: trian.py", "job.yaml:1:9", "script 'trian.py' is not there", "did you mean 'train.py'?"),
    ("script: jbo.yaml", "job.yaml:1:9", "script 'jbo.yaml' is not there", "it is looked for in"),
    ("script: job.yaml", "job.yaml:1:9", "script 'job.yaml' is this job file", "Python file"),
    ("script: loop", "job.yaml:1:9", "script 'loop' is a link to 'loop', which is not there", "it is looked for in"),
    ("script: |\n  train.py\n", "job.yaml:1:9", r"script 'train.py\n' is not there", "write `script: train.py`"),
    (S + "outputs: ~/out", "job.yaml:2:10", "outputs '~/out' is neither a folder inside workdir nor", "such as out"),
    ("script: ../train.py", "job.yaml:1:9", "lies outside of workdir", "let workdir name a folder"),
    ("script: python train.py --lr 1", "job.yaml:1:9", "is not there", "write `script: train.py` and what follows it under args"),
    (
        "command: [python train.py --lr 1]",
        "job.yaml:1:11",
        "no program is called 'python train.py --lr 1'",
        'write `command: ["python", "train.py", "--lr", "1"]`, or `command: python train.py --lr 1` as a line for bash',
    ),
    ("command: [./pkg/nets.py a, b]", "job.yaml:1:11", "no program is called './pkg/nets.py a'", '`command: ["./pkg/nets.py", "a", "b"]`'),
    ("script: folder", "job.yaml:1:9", "script 'folder' is not a file", "Python file"),
    (S + f"outputs: {'x' * 300}", "job.yaml:2:10", "is longer than a file's name may be", "such as out"),
    (S + "workdir: floder", "job.yaml:2:10", "workdir 'floder' is not there", "did you mean 'folder'?"),
    (S + "workdir: /rpoc/", "job.yaml:2:10", "workdir '/rpoc/' is not there", "did you mean '/proc'?"),
    ("script: pkg/nest.py", "job.yaml:1:9", "script 'pkg/nest.py' is not there", "did you mean 'pkg/nets.py'?"),
    (S + "cluster: lba.yaml", "job.yaml:2:10", "the cluster file 'lba.yaml' is not there", "did you mean 'lab.yaml'?"),
    (S + "cluster: other.yaml", "job.yaml:2:10", "the cluster 'other.yaml' is a job file", "instances: [node1, node2]"),
    (S + "cluster: job.yaml", "job.yaml:2:10", "the cluster 'job.yaml' is a job file", "instances: [node1, node2]"),
    (S + "cluster: jbo.yaml", "job.yaml:2:10", "the cluster file 'jbo.yaml' is not there", "it is looked for in"),
    (S + "cluster: nope.yaml", "job.yaml:2:10", "the cluster file 'nope.yaml' is not there", "it is looked for in"),
    (S + "cluster: gpu1.lab", "job.yaml:2:10", "the cluster file 'gpu1.lab' is not there", "write `cluster: {instances: [gpu1.lab]}`"),
    (Path("lab.yaml"), "lab.yaml:1:1", "this is a cluster file; a job file is wanted", "--cluster lab.yaml"),
    # what is no good YAML
    ("env:\n\tA: 1", "job.yaml:2:1", "a tab stands where YAML wants spaces", "indent with spaces"),
    (S + "env:\n   A: 1\n  B: 2", "job.yaml:4:3", "not YAML", "check the indentation"),
    (S + "---\n" + S, "job.yaml:2:1", "a second document begins here", "keep one job or cluster a file"),
    ("\ufeff" + S + "zzz: x", "job.yaml:2:1", "unknown key 'zzz'", "known here"),  # a byte order mark moves no column
    ("\ufeffnaem: x\n" + S, "job.yaml:1:1", "unknown key 'naem'", "did you mean 'name'?"),
    (S.encode("utf-16"), "job.yaml:1:1", "byte 0xff is not UTF-8", "save the file as UTF-8"),
    ("name: ü\n".encode("latin-1"), "job.yaml:1:7", "byte 0xfc is not UTF-8", "save the file as UTF-8"),
    (S + 'args: "--a" --b', "job.yaml:2:13", "a text goes on behind its quotes", "one pair of quotes"),
    (S + "args: a: b", "job.yaml:2:8", "mapping values are not allowed", "quotes"),
    (
        "\n".join(["a: &a0 [x, x]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 9))]),
        "job.yaml:5:1",
        "with a4 the file has more than 16000 values, when its aliases",
        "write the values out",
    ),
    (
        "\n".join(["a: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 30))]),
        "job.yaml:20:1",
        "a19 is nested more than 20 levels deep when its aliases",
        "write the values out",
    ),
    (S + "env: &e {A: *e}", "job.yaml:2:6", "grows without end", "write the values out"),
    (S + "env: {<<: {A: 1}}", "job.yaml:2:7", "merge keys (<<) are not read", "write the keys out"),
    (S + "grace: !!float 3", "job.yaml:2:8", "YAML tags", "remove it"),
    ("", "job.yaml:1:1", "the file is empty", "script: train.py"),
    ("---\n", "job.yaml:1:1", "the file is empty", "script: train.py"),
    (b"# a\rname: \xff\r", "job.yaml:2:7", "byte 0xff is not UTF-8", "save the file as UTF-8"),
    ("- train.py", "job.yaml:1:1", "the file holds a list", "script: train.py"),
    # what is no such file at all
    (Path("jbo.yaml"), "jbo.yaml", "there is no such file", "did you mean 'job.yaml'?"),
    (Path("folder"), "folder", "is a folder, not a file", "name a file in it"),
    (Path("pipe"), "pipe", "is no ordinary file but a pipe", "name a file on a disk"),
    (Path("/dev/zero"), "/dev/zero", "is no ordinary file but a pipe, a socket or a device", "name a file on a disk"),
    (Path("huge.yaml"), "huge.yaml", "is larger than 4 MiB", "the file that you meant"),
    (Path("train.py"), "train.py:1:1", "not keys", "write `script: train.py` into a file job.yaml"),
    (S + "cluster: pipe", "pipe", "is no ordinary file but a pipe", "name a file on a disk"),
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").touch()
    Path("train.py").write_text("print\n")
    Path("lab.yaml").write_text("instances: [a, b]\n")
    Path("other.yaml").write_text("name: other\nscript: train.py\n")
    Path("folder").mkdir()
    Path("pkg").mkdir()
    Path("pkg/__init__.py").touch()
    Path("pkg/nets.py").touch()
    Path("loop").symlink_to("loop")
    Path("key").touch(mode=0o600)
    Path("open").touch()
    Path("open").chmod(0o644)
    os.mkfifo("pipe")
    Path("huge.yaml").touch()
    os.truncate("huge.yaml", HUGE_BYTES)


@pytest.mark.parametrize(("given", "where", "cause", "hint"), ANSWERS, ids=[f"{number} {row[2]}" for number, row in enumerate(ANSWERS)])
def test_a_mistake_is_answered_with_its_place_its_cause_and_a_hint(given: Given, where: str, cause: str, hint: str) -> None:
    path = given if isinstance(given, Path) else Path("job.yaml")
    if not isinstance(given, Path):
        path.write_bytes(given if isinstance(given, bytes) else given.encode())
    begin_s = time.process_time()
    with pytest.raises(SpecError) as caught:
        load_job(path, environ={"DTRAIN_TOKEN": "x"})
    assert time.process_time() - begin_s < 1.0
    (problem,) = caught.value.problems
    assert problem.where == where
    assert cause in problem.message and "\n" not in problem.message
    assert problem.hint is not None and hint in problem.hint


def test_of_many_mistakes_the_first_twenty_are_told_and_how_many_more_there_are() -> None:
    Path("job.yaml").write_text(S + "".join(f"key{number}: x\n" for number in range(21)))
    with pytest.raises(SpecError) as caught:
        load_job(Path("job.yaml"), environ={})
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == 21
    assert [line for line in lines if line.startswith("job.yaml:21:")] and not [line for line in lines if line.startswith("job.yaml:22:")]
    assert lines[-1] == "and 1 more mistake"
