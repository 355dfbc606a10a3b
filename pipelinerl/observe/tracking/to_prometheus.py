"""Prometheus: the latest numbers at `http://<interface>:<port>/metrics`, bound first and then told in `<run>/endpoints/metrics.json`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from pipelinerl.observe.report.samples import ShownSample
from pipelinerl.observe.tracking.names import Point


class Metrics:
    """A `follow.Destination`; every number is a gauge, `reward/all/mean` is `pipelinerl_reward_all_mean`."""

    first_line = 0

    def __init__(self, run_folder: Path, *, interface: str, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._server, _ = start_http_server(port, addr=interface, registry=self._registry)
        host = f"[{interface}]" if ":" in interface else interface
        self.address = f"http://{host}:{self._server.server_port}/metrics"
        self._published = run_folder / "endpoints" / "metrics.json"
        self._published.parent.mkdir(exist_ok=True)
        unfinished = self._published.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({"address": self.address}))
        unfinished.replace(self._published)

    def take(self, point: Point) -> None:
        for name, value in {point.axis: point.at, **point.values}.items():
            known = prometheus_name(name)
            if known not in self._gauges:
                self._gauges[known] = Gauge(known, name, registry=self._registry)
            self._gauges[known].set(value)

    def take_samples(self, line: int, samples: list[ShownSample]) -> None:
        """Prometheus holds numbers."""

    def close(self, *, has_ended: bool) -> None:
        self._published.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()


def prometheus_name(name: str) -> str:
    """A name Prometheus allows: letters, digits and underscores."""
    return "pipelinerl_" + re.sub(r"[^a-zA-Z0-9_]+", "_", name)
