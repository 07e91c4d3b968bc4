"""Print docs/preflight.md, made from what dtrain says of each finding: `make docs`."""

from __future__ import annotations

from dtrain.findings import KINDS, WARNABLE

_HEAD = """\
# What a check finds

Made by `make docs` from `dtrain/findings.py`.

`dtrain check` proves a cluster before a worker starts, and `dtrain launch` does the same each time: it logs in to every node,
asks what it is and has, and lets the nodes dial each other at the ports where they would meet, with small and with larger
packets. Up to 32 nodes every one dials every other; of more, each dials the next 15 and the first, and the first one all.
What is found has one of these names. An error stops a launch; a warning is shown. Those marked with a star can be passed over:
`dtrain check --ignore NAME`, or `preflight: {ignore: [NAME]}` in the job file.
"""


def main() -> None:
    print(_HEAD)
    print("| name | level | cause | cure |\n|---|---|---|---|")
    for name, kind in KINDS.items():
        star = " *" if name in WARNABLE else ""
        print(f"| `{name}`{star} | {'error' if kind.is_error else 'warning'} | {kind.cause} | {kind.cure} |")


if __name__ == "__main__":
    main()
