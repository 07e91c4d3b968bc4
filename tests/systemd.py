"""A machine for a test whose process 1 is systemd, with logind, a user's own manager and an sshd that opens sessions by PAM.

It is a node of tests/lan.py. Its file system is this machine's, read-only but for the node's own folders.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import lan
from tests.lan import Lan, Node
from tests.ssh import SSHD

USER, UID = "eva", 54321  # not a system user's: logind removes what those leave in /dev/shm
HOME = "/run/eva"
_SYSTEMD = "/lib/systemd/systemd"
_NEEDED = (
    ("systemd", _SYSTEMD),
    ("libpam-systemd", "/usr/share/pam-configs/systemd"),
    ("dbus", "/lib/systemd/system/dbus.service"),
    ("dbus-user-session", "/lib/systemd/user/dbus.service"),
    ("polkitd", "/lib/systemd/system/polkit.service"),
)
# What would touch the hardware, the kernel or the disk of the machine below.
_MASKED = """
dev-hugepages.mount dev-mqueue.mount getty.target kmod-static-nodes.service proc-sys-fs-binfmt_misc.automount sys-fs-fuse-connections.mount
sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount systemd-binfmt.service systemd-boot-system-token.service
systemd-firstboot.service systemd-hwdb-update.service systemd-machine-id-commit.service systemd-modules-load.service
systemd-random-seed.service systemd-remount-fs.service systemd-sysctl.service systemd-sysusers.service systemd-tmpfiles-clean.timer
systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup.service systemd-udev-trigger.service systemd-udevd-control.socket
systemd-udevd-kernel.socket systemd-udevd.service systemd-update-utmp.service ssh.service ssh.socket
"""
_SSHD_UNIT = f"""
[Service]
ExecStart={SSHD} -D -e -f /run/etc/sshd_config
KillMode=process
StandardError=file:/run/etc/sshd.log
"""
_TARGET = """
[Unit]
Wants=dbus.socket systemd-logind.service test-sshd.service
"""
# Becomes systemd. Its cgroups are below one of its own, which is all that it sees of them.
_BOOT = rf"""
set -e
mount --make-rprivate /
mkdir /run/cgroup; mount -t cgroup2 cgroup2 /run/cgroup
mkdir -p "/run/cgroup/$1"; echo 0 > "/run/cgroup/$1/cgroup.procs"; umount /run/cgroup; rmdir /run/cgroup
mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system
for unit in {" ".join(_MASKED.split())}; do ln -s /dev/null "/etc/systemd/system/$unit"; done
cp /run/etc/test-sshd.service /etc/systemd/system; cp /run/etc/test.target /etc/systemd/system/default.target
for own in /var/lib/systemd /var/log; do mount -t tmpfs -o mode=755 tmpfs "$own"; done
mount --bind /run/etc/logind.conf /etc/systemd/logind.conf
mount --bind /run/etc/empty /etc/fstab
mount --bind /run/etc/pam-sshd /etc/pam.d/sshd
mkdir -m 755 /run/dev; mount -t tmpfs -o mode=755 tmpfs /run/dev; cd /run/dev
mkdir pts shm; mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts pts; mount --move /dev/shm shm
for name in null zero full random urandom tty; do touch $name; mount --bind "/dev/$name" $name; done
ln -s pts/ptmx ptmx; ln -s /proc/self/fd fd; ln -s fd/0 stdin; ln -s fd/1 stdout; ln -s fd/2 stderr
cd /; mount --move /run/dev /dev
exec unshare --cgroup sh -c '
    mount -t cgroup2 cgroup2 /sys/fs/cgroup && mount -o remount,bind,ro / && container=test exec {_SYSTEMD} --system --log-target=console
' >/run/etc/systemd.log 2>&1 </dev/null
"""


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot play one under systemd; None where it can."""
    missing = [name for name, path in _NEEDED if not Path(path).exists()]
    return lan.why_not() or (f"not installed: {', '.join(missing)}" if missing else None)


@contextmanager
def machine(folder: Path, logind: str) -> Iterator[Lan]:
    """One node n1, to which USER can log in.

    Args:
        logind: of its logind.conf.
    """
    made = Lan(folder, num_nodes=1, boot=functools.partial(_boot, logind=logind))
    try:
        yield made
    finally:
        made.close()
        _remove_cgroups(made.nodes[0].link, folder)


def _remove_cgroups(name: str, folder: Path) -> None:
    script = 'mount -t cgroup2 cgroup2 "$1" && find "$1/$2" -depth -type d -delete'
    subprocess.run(("unshare", "--mount", "sh", "-c", script, "sh", str(folder), name), check=True)


def _boot(node: Node, *, logind: str) -> None:
    etc = node.path("/run/etc")
    (etc / "logind.conf").write_text(f"[Login]\nUserStopDelaySec=0\n{logind}")
    (etc / "empty").write_text("")
    (etc / "test-sshd.service").write_text(_SSHD_UNIT)
    (etc / "test.target").write_text(_TARGET)
    (etc / "pam-sshd").write_text("account required pam_permit.so\nsession required pam_unix.so\nsession required pam_systemd.so\n")
    (etc / "boot").write_text(_BOOT)
    with (etc / "passwd").open("a") as passwd:
        passwd.write(
            f"messagebus:x:101:101::/nonexistent:/usr/sbin/nologin\npolkitd:x:102:102::/nonexistent:/usr/sbin/nologin\n{USER}:x:{UID}:{UID}::{HOME}:/bin/bash\n"
        )
    with (etc / "shadow").open("a") as shadow:
        shadow.write(f"{USER}:*:20000:0:99999:7:::\n")
    config = etc / "sshd_config"
    config.write_text(config.read_text().replace("UsePAM no", "UsePAM yes").replace("/run/root", HOME))
    node.path(HOME).mkdir(mode=0o700)
    os.chown(node.path(HOME), UID, UID)
    node.log = etc / "sshd.log"
    node.log.touch()
    node.become(f"/bin/sh /run/etc/boot {node.link}")
