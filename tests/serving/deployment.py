"""What the Dockerfile and the Kubernetes example say about ports and probes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Stage:
    """One image of the Dockerfile: its ports, and what its health check asks."""

    ports: tuple[int, ...]
    asked_port: int
    asked_path: str


def stage(name: str) -> Stage:
    text = (ROOT / "Dockerfile").read_text()
    (body,) = re.findall(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM|\Z)", text, re.M | re.S)
    (exposed,) = re.findall(r"^EXPOSE (.*)$", body, re.M)
    ((port, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]*)", body)
    return Stage(tuple(map(int, exposed.split())), int(port), path)


def documents() -> dict[str, Any]:
    """The Kubernetes example's objects by their kind."""
    text = (ROOT / "examples/serving/kubernetes.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def container() -> dict[str, Any]:
    (only,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def ports() -> dict[str, int]:
    """The container's ports by name."""
    return {port["name"]: port["containerPort"] for port in container()["ports"]}
