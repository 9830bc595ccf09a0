"""A node of a cluster, for tests: an image of the printed Containerfile over Debian, and pods of
the printed manifests, run by crun.

What a kubelet does is done here and is a double: directories of the node, propagation, host PIDs,
settings, environment, probes, memory limits (control groups v1 or v2, whichever has the
controller), SIGTERM and then SIGKILL. Containers, name spaces and mounts are real.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.rig.mounts import REPOSITORY
from tests.rig.storage.servers import until

WAIT_S = float(os.environ.get("ACPFS_NODE_WAIT_S", "300"))
_HIDDEN = (
    "mount --make-rprivate /sys/fs/cgroup && { umount /sys/fs/cgroup/unified 2>/dev/null; exec "
    'crun --cgroup-manager=disabled "$@"; }'
)
CRUN = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", _HIDDEN, "crun"]
"""crun 1.8 refuses a machine that has control groups of both versions; it is given a sight of the
first only, and the rig makes groups.
"""
PROGRAMS = ("crun", "debootstrap", "podman", "buildah")
BASE = REPOSITORY / ".venv/debian"
"""The base image, made once: a directory that nobody writes to."""
PACKAGES = "python3,python3-venv,ca-certificates"
MEMORY_GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


def missing() -> str:
    """Why there can be no node here; "": there can."""
    if os.getuid() != 0 or not os.path.exists("/dev/fuse"):
        return "needs root and /dev/fuse"
    if not any((one / "cgroup.procs").exists() for one in MEMORY_GROUPS):
        return "no memory control groups are mounted where they usually are"
    return ", ".join(
        f"{program} is not installed" for program in PROGRAMS if not shutil.which(program)
    )


def wait_for(what: str, condition: Callable[[], object]) -> None:
    until(lambda: bool(condition()), what, WAIT_S)


def run(*words: str | Path, timeout_s: float = 1200, **more: Any) -> str:
    """A command that must end well; what it prints."""
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **more,
    )
    assert done.returncode == 0, (
        f"{words} → {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    said: str = done.stdout
    return said


def deploy(what: str, *words: str) -> str:
    """What `acpfs deploy` of this checkout prints."""
    return run(
        sys.executable,
        "-m",
        "acpfs.cli.main",
        "deploy",
        what,
        *words,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


def base_image() -> Path:
    """Debian with Python, from the machine's own package sources."""
    BASE.parent.mkdir(exist_ok=True)
    with open(BASE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (BASE / "etc/debian_version").exists():
            new = BASE.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", new)
            for package in (new / "var/cache/apt/archives").glob("*.deb"):
                package.unlink()
            new.rename(BASE)
    return BASE


@contextmanager
def image(scratch: Path, checkout: Path = REPOSITORY) -> Iterator[Path]:
    """The root file system of an image of a checkout, built as OPERATIONS says; the base comes from
    Debian, not from a registry.
    """
    runroot = tempfile.mkdtemp(prefix="acpfs-", dir="/tmp")  # podman takes 50 characters at most
    stored = ["--storage-driver", "vfs", "--root", str(scratch / "storage"), "--runroot", runroot]
    (scratch / "Containerfile").write_text(deploy("containerfile"))
    with subprocess.Popen(
        ["tar", "-C", base_image(), "-cf", "-", "."], stdout=subprocess.PIPE
    ) as packed:
        run("podman", *stored, "import", "-", "acpfs-base:bookworm", stdin=packed.stdout)
    built = [
        "buildah",
        *stored,
        "bud",
        "--isolation",
        "chroot",
        "--network",
        "host",
        "--build-arg",
        "BASE=localhost/acpfs-base:bookworm",
    ]
    for path in (
        "/etc/ssl/certs",
        "/etc/pip.conf",
        *os.environ.get("PIP_FIND_LINKS", "").split(),
    ):  # as this machine reaches a registry
        if os.path.exists(path):
            built += ["--volume", f"{path}:{path}:ro"]
    try:
        run(*built, "-f", scratch / "Containerfile", "-t", "acpfs:test", ".", cwd=checkout)
        yield Path(run("podman", *stored, "image", "mount", "acpfs:test").strip())
    finally:
        subprocess.run(
            ["podman", *stored, "image", "umount", "--all", "--force"],
            check=False,
            capture_output=True,
            timeout=300,
        )
        shutil.rmtree(runroot, ignore_errors=True)


class Node:
    """Directories of the node, and the pods that run there."""

    def __init__(self, scratch: Path, root: Path) -> None:
        self.scratch = scratch
        self.root = root
        self.host = scratch / "host"
        self.claims: dict[str, Path] = {}
        self.pods: list[Container] = []

    def directory(self, path: str) -> Path:
        """A `hostPath`: below a directory that is shared, as `/` is on a node."""
        found = self.host / path.lstrip("/")
        found.mkdir(parents=True, exist_ok=True)
        return found

    def claim(self, name: str) -> Path:
        """What a persistent volume claim names."""
        path = self.claims.setdefault(name, self.scratch / f"claim-{name}")
        path.mkdir(exist_ok=True)
        return path

    def start(
        self,
        pod: dict[str, Any],
        documents: list[dict[str, Any]],
        uid: str,
        *,
        init: bool = False,
        root: Path | None = None,
    ) -> Container:
        """The first container of a pod template. `root`: of another image."""
        one = Container(
            self,
            pod,
            pod["initContainers" if init else "containers"][0],
            documents,
            uid,
            root or self.root,
        )
        self.pods.append(one)
        return one

    def end(self) -> None:
        for pod in self.pods:
            pod.remove()
        subprocess.run(["umount", "-R", "-l", self.host], check=False)


@contextmanager
def node(scratch: Path, root: Path) -> Iterator[Node]:
    """With a directory whose mounts propagate."""
    made = Node(scratch, root)
    made.host.mkdir()
    run("mount", "--bind", made.host, made.host)
    run("mount", "--make-shared", made.host)
    try:
        yield made
    finally:
        made.end()


class Container:
    """One container, from its start to its removal."""

    _number = 0

    def __init__(
        self,
        node: Node,
        pod: dict[str, Any],
        spec: dict[str, Any],
        documents: list[dict[str, Any]],
        uid: str,
        image_root: Path,
    ) -> None:
        Container._number += 1
        self.name = f"acpfs-test-{os.getpid()}-{Container._number}"
        self.node = node
        self.pod = pod
        self.spec = spec
        self._image_root = image_root
        self._documents = documents
        self._uid = uid
        self._bundle = node.scratch / self.name
        self._bundle.mkdir()
        self.log = self._bundle / "log"
        self._first = 0
        self._variables = self._environment()
        self.group = self._control_group()
        self._root()
        (self._bundle / "config.json").write_text(json.dumps(self._config()))
        words = [*CRUN, "run", "--bundle", str(self._bundle), self.name]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs; exec "$@"', "sh", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    # -- its life

    @property
    def pid(self) -> int:
        """The first process, as the node numbers it; 0: it does not run."""
        done = subprocess.run(
            [*CRUN, "state", self.name], capture_output=True, text=True, check=False, timeout=300
        )
        state = json.loads(done.stdout) if done.returncode == 0 else {}
        return int(state["pid"]) if state.get("status") == "running" else 0

    def exec(self, *words: str) -> subprocess.CompletedProcess[str]:
        """As a probe or `kubectl exec` does it."""
        return subprocess.run(
            [*CRUN, "exec", self.name, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def wait_ready(self) -> None:
        """By its own probe."""
        probe = [self._filled(word) for word in self.spec["readinessProbe"]["exec"]["command"]]
        wait_for(
            f"{self.spec['name']} is ready",
            lambda: self.ended() is not None or self.exec(*probe).returncode == 0,
        )
        assert self.ended() is None, self.said()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def ended(self) -> int | None:
        """Its exit code: the container ends with its first process, and whatever is left of it is
        killed, as a runtime does.
        """
        if not self._first:
            self._first = self.pid
        elif self._first not in self._processes():
            self._signal(signal.SIGKILL)
        return self._process.poll()

    def wait(self) -> int:
        wait_for(f"{self.spec['name']} ends", lambda: self.ended() is not None)
        return int(self._process.wait())

    def _processes(self) -> list[int]:
        """All that are in its control group, without crun, which waits for the last of them."""
        return [
            int(pid)
            for pid in (self.group / "cgroup.procs").read_text().split()
            if int(pid) != self._process.pid
        ]

    def _signal(self, number: int) -> None:
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> int:
        """SIGKILL of all its processes at once, as the end of its control group is; its exit code
        is nobody's.
        """
        self.ended()
        self._signal(signal.SIGSTOP)  # so that few of them replace another
        wait_for("all its processes are killed", self._is_killed)
        # crun itself waits for the last one, which may wait for the next daemon; shims wait for the
        # first
        self._process.kill()
        return int(self._process.wait(WAIT_S))

    def _is_killed(self) -> bool:
        """Whether nothing of it will ever run again: what is left waits in the kernel."""
        self._signal(signal.SIGKILL)
        states = []
        for pid in self._processes():
            with contextlib.suppress(OSError):
                states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        return set(states) <= {"D"} and self._first not in self._processes()

    def terminate(self) -> int:
        """`preStop`, SIGTERM, and the exit code."""
        stop = self.spec.get("lifecycle", {}).get("preStop")
        if stop:
            self.exec(*[self._filled(word) for word in stop["exec"]["command"]])
        assert self.ended() is None, self.said()
        os.kill(self._first, signal.SIGTERM)
        return self.wait()

    def remove(self) -> None:
        if self._process.poll() is None:
            self.kill()
        subprocess.run(
            [*CRUN, "delete", "--force", self.name], check=False, capture_output=True, timeout=300
        )
        subprocess.run(
            ["umount", "-R", "-l", self._bundle / "rootfs"], check=False, capture_output=True
        )
        wait_for(
            "its control group is empty",
            lambda: not (self.group / "cgroup.procs").read_text().strip(),
        )
        self.group.rmdir()

    # -- what it is made from

    def _control_group(self) -> Path:
        """With the limit of its memory."""
        made = next(one for one in MEMORY_GROUPS if (one / "cgroup.procs").exists()) / self.name
        made.mkdir()
        limit = self.spec.get("resources", {}).get("limits", {}).get("memory")
        for name in ("memory.limit_in_bytes", "memory.max"):
            if limit and (made / name).exists():
                (made / name).write_text(str(_bytes(limit)))
        return made

    def _root(self) -> None:
        """The image, with a layer of its own over it."""
        for name in ("rootfs", "upper", "work"):
            (self._bundle / name).mkdir()
        layers = (
            f"lowerdir={self._image_root},upperdir={self._bundle}/upper,workdir={self._bundle}/work"
        )
        run("mount", "-t", "overlay", "overlay", "-o", layers, self._bundle / "rootfs")

    def _environment(self) -> dict[str, str]:
        number = (
            os.getpid() * 251 + Container._number
        )  # containers share the node's network here: each gets an address of the loopback
        address = f"127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        fields = {
            "spec.nodeName": "node-1",
            "metadata.uid": self._uid,
            "status.podIP": address,
            "metadata.name": self.name,
        }
        found = {
            "PATH": "/opt/acpfs/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        }
        for one in self.spec.get("env", []):
            found[one["name"]] = (
                one["value"]
                if "value" in one
                else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        return found

    def _filled(self, word: str) -> str:
        for name, value in self._variables.items():
            word = word.replace(f"$({name})", value)
        return word

    def _source(self, name: str) -> Path:
        volume = next(one for one in self.pod["volumes"] if one["name"] == name)
        if "hostPath" in volume:
            return self.node.directory(volume["hostPath"]["path"])
        if "emptyDir" in volume:
            own = self._bundle / name
            own.mkdir(exist_ok=True)
            return own
        if "persistentVolumeClaim" in volume:
            return self.node.claim(volume["persistentVolumeClaim"]["claimName"])
        settings = next(
            one
            for one in self._documents
            if one["kind"] == "ConfigMap" and one["metadata"]["name"] == volume["configMap"]["name"]
        )
        directory = self._bundle / name
        directory.mkdir(exist_ok=True)
        for file, text in settings["data"].items():
            (directory / file).write_text(text)
        return directory

    def _mounts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "mode=755", "size=65536k"],
            },
            {
                "destination": "/sys",
                "type": "bind",
                "source": "/sys",
                "options": ["rbind", "ro", "rslave"],
            },
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
        ]
        spread = {"Bidirectional": "rshared", "HostToContainer": "rslave"}
        for one in self.spec.get("volumeMounts", []):
            options = [
                "rbind",
                spread.get(one.get("mountPropagation", ""), "rprivate"),
                "ro" if one.get("readOnly") else "rw",
            ]
            found.append(
                {
                    "destination": one["mountPath"],
                    "type": "bind",
                    "source": str(self._source(one["name"])),
                    "options": options,
                }
            )
        return found

    def _config(self) -> dict[str, Any]:
        context = self.spec.get("securityContext", {})
        privileged = context.get("privileged", False)
        capabilities = _capabilities(privileged) + [
            f"CAP_{name}" for name in context.get("capabilities", {}).get("add", ())
        ]
        has_fuse = privileged or any(
            name.endswith("/fuse") for name in self.spec.get("resources", {}).get("limits", {})
        )
        spaces = ["mount", "ipc", "uts"] + ([] if self.pod.get("hostPID") else ["pid"])
        spread = {one.get("mountPropagation") for one in self.spec.get("volumeMounts", [])}
        process = {
            "user": {"uid": 0, "gid": 0},
            "args": [self._filled(word) for word in self.spec["command"]],
            "env": [f"{name}={value}" for name, value in self._variables.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        }
        linux = {
            "namespaces": [{"type": name} for name in spaces],
            "devices": [
                {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o666}
            ]
            if has_fuse
            else [],
            "rootfsPropagation": "rshared" if "Bidirectional" in spread else "rslave",
        }
        return {
            "ociVersion": "1.0.2",
            "process": process,
            "root": {"path": "rootfs"},
            "hostname": "node-1",
            "mounts": self._mounts(),
            "linux": linux,
        }


def _bytes(quantity: str) -> int:
    for unit, factor in {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}.items():
        if quantity.endswith(unit):
            return int(quantity[:-2]) * factor
    return int(quantity)


def _capabilities(privileged: bool) -> list[str]:
    """More than the daemon may use, or those that an ordinary container gets."""
    usual = (
        "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP "
        "NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE"
    )
    names = usual.split()
    if privileged:
        names += "SYS_ADMIN SYS_PTRACE SYS_NICE DAC_READ_SEARCH NET_ADMIN IPC_LOCK".split()
    return [f"CAP_{name}" for name in names]


def manifests(*options: str) -> list[dict[str, Any]]:
    """What `acpfs deploy kubernetes` prints."""
    return [document for document in yaml.safe_load_all(deploy("kubernetes", *options)) if document]


def pod_of(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The pod template of one of them."""
    found = next(
        one for one in documents if one["kind"] == kind and one["metadata"]["name"] == name
    )
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod
