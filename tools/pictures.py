"""Makes the pictures of OPERATIONS anew: a real mount over a slow storage that freezes once, a job
that saves, and a real Prometheus.

    python tools/pictures.py as root; needs the extras `top` and `plot`, Debian's prometheus, and
    chromium for the report

`top.svg` is the screen of `acpfs-ctl top` as Textual exports it. `report.png` is the page of
`acpfs-ctl history --html` as chromium shows it. `dashboard.png` has the panels of `acpfs deploy
dashboard` with what their own queries give, drawn by matplotlib: Grafana is not among the packages
of Debian or Python, so how it looks there is not shown. Two minutes.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from acpfs.cli.deployment.dashboard import ROWS, Panel
from acpfs.cli.top_screen import Mount, TopScreen
from tests.deploy.prometheus_rig import Prometheus, prometheus
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount
from tests.rig.ports import free_port

REPOSITORY = Path(__file__).parents[1]
PICTURES = REPOSITORY / "docs/pictures"
STEPS = 12
FROZEN_AT = 8
STEP_S = 6.0
FREEZE_S = 9.0
MIB = 1 << 20


def save(mount: AcpfsMount, step: int) -> None:
    """A checkpoint of two files."""
    directory = mount.path / f"run1/step-{step}00"
    directory.mkdir(parents=True)
    for name, mib in (("model.pt", 32), ("optim.pt", 2)):
        with open(directory / name, "wb", buffering=0) as file:
            file.writelines(os.urandom(MIB) for _ in range(mib))


def train(mount: AcpfsMount, storage: FaultFs) -> None:
    """Saves, loads now and then, and a storage that stands still for a while."""
    for step in range(1, STEPS + 1):
        begun = time.monotonic()
        save(mount, step)
        if step == FROZEN_AT:
            storage.freeze(["write"])
            time.sleep(FREEZE_S)
            storage.thaw()
        if step % 4 == 0:
            (mount.path / f"run1/step-{step}00/model.pt").read_bytes()
        time.sleep(max(0.0, STEP_S - (time.monotonic() - begun)))


def screen(mount: AcpfsMount) -> str:
    """`acpfs-ctl top`, while the last save is on its way to the storage."""
    app = TopScreen([Mount(str(mount.path), lambda verb, args: mount.ask(verb, **args))], 0.5)

    async def look() -> str:
        async with app.run_test(size=(130, 30)) as pilot:
            save_now = threading.Thread(target=save, args=(mount, STEPS + 1))
            save_now.start()
            while save_now.is_alive() or not mount.status()["queue"]:
                await pilot.pause(0.1)
            await pilot.pause(1.5)
            save_now.join()
            return app.export_screenshot(title="acpfs-ctl top")

    # Textual names a font of somebody else's server; a document is to load nothing
    return re.sub(r"@font-face \{.*?\}", "", asyncio.run(look()), flags=re.DOTALL)


def series_of(
    watching: Prometheus, panel: Panel, since: float, until: float
) -> dict[str, list[tuple[float, float]]]:
    """Lines of a panel, by their own queries."""
    found: dict[str, list[tuple[float, float]]] = {}
    for expression, legend in panel.queries:
        query = expression.replace("@", 'mount=~".*",node=~".*"').replace("$__rate_interval", "5s")
        for line in watching.get(
            "/api/v1/query_range", query=query, start=str(since), end=str(until), step="1"
        )["result"]:
            name = legend
            for label, value in line["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            points = [
                (float(at) - since, float(value))
                for at, value in line["values"]
                if value not in ("NaN", "+Inf")
            ]
            found[name.replace(line["metric"].get("mount", "?"), "").strip() or panel.title] = (
                points
            )
    return found


def draw_dashboard(watching: Prometheus, since: float, until: float, file: Path) -> None:
    """All panels, row by row."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["font.size"] = 7
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(15, 2.1 * len(ROWS)), layout="constrained")
    figure.suptitle(
        "panels of `acpfs deploy dashboard`: their queries, from a real Prometheus; drawn by "
        "matplotlib, not by Grafana"
    )
    parts: Any = figure.subfigures(len(ROWS), 1)
    for part, (heading, panels) in zip(parts, ROWS, strict=True):
        part.suptitle(heading, x=0.01, ha="left", weight="bold")
        for axis, panel in zip(
            part.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            draw_panel(axis, panel, series_of(watching, panel, since, until))
    figure.savefig(file, dpi=75)
    plt.close(figure)


def draw_panel(axis: Any, panel: Panel, lines: dict[str, list[tuple[float, float]]]) -> None:
    scale, unit = (
        (MIB, panel.unit.replace("bytes", "MiB").replace("Bps", "MiB/s"))
        if panel.unit in ("bytes", "Bps")
        else (1, panel.unit)
    )
    axis.set_title(panel.title + (f" ({unit})" if unit != "none" else ""), fontsize=8)
    for name, points in lines.items():
        axis.plot(
            [at for at, _ in points],
            [value / scale for _, value in points],
            label=name,
            linewidth=1,
            clip_on=False,
        )
    axis.set_ylim(bottom=0)
    if panel.red_above is not None and panel.red_above <= axis.get_ylim()[1]:
        axis.axhline(panel.red_above, color="red", linewidth=0.8)
    if len(lines) > 1:
        axis.legend(fontsize=6)


def draw_report(mount: AcpfsMount, scratch: Path, file: Path) -> None:
    """Chromium is a program for the picture only."""
    page = scratch / "report.html"
    mount.run("acpfs-ctl", str(mount.path), "history", "--html", str(page))
    if (chromium := shutil.which("chromium")) is None:
        sys.exit("chromium is not installed: no picture of the report")
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={scratch / 'chromium'}",
    ]
    words += ["--window-size=1000,1650", f"--screenshot={file}", page.as_uri()]
    subprocess.run([chromium, *words], check=True, timeout=300, stderr=subprocess.DEVNULL)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="acpfs-", dir="/tmp") as scratch:
        top = Path(scratch)
        (top / "below").mkdir()
        port = free_port()
        begun = time.time()
        with FaultFs(top / "below", top / "storage", bandwidth=12 * MIB) as storage:
            mount = AcpfsMount(
                storage.path,
                top / "mnt",
                "native",
                runtime_dir=top / "run",
                ram="256M",
                metrics_port=port,
            )
            (top / "prometheus").mkdir()
            with mount, prometheus(top / "prometheus", port) as watching:
                train(mount, storage)
                draw_dashboard(watching, begun, time.time(), PICTURES / "dashboard.png")
                (PICTURES / "top.svg").write_text(screen(mount))
                mount.flush()
                time.sleep(6)  # the history looks every five seconds
                draw_report(mount, top, PICTURES / "report.png")
    for file in sorted(PICTURES.iterdir()):
        print(f"{file.relative_to(REPOSITORY)}: {file.stat().st_size >> 10} kB")


if __name__ == "__main__":
    main()
